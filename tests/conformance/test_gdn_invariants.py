"""What `gdn_chunk_prefill` promises of several calls together: chains, batches, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import CHUNK, GDN_TIERS, GdnCall, prompts
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]
every_tier = pytest.mark.parametrize("tier", GDN_TIERS)
LENGTHS = [1, 63, 0, 64, 129, 200]
BOUNDS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


def piece(call: GdnCall, first: int, end: int, state: torch.Tensor | None) -> GdnCall:
    """Tokens `first` to `end` as one sequence without `cu_seqlens`."""
    cut = {n: call.tensors[n][:, first:end] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    return call.with_(**cut, initial_state=state, cu_seqlens=None)


def one(call: GdnCall, i: int) -> GdnCall:
    """Sequence `i` by itself."""
    state = call.tensors["initial_state"]
    return piece(call, BOUNDS[i], BOUNDS[i + 1], None if state is None else state[i : i + 1])


@every_tier
@pytest.mark.parametrize(
    ("batch_invariant", "dtypes"), [(True, ()), (True, (torch.bfloat16,)), (False, ())]
)
def test_batch_of_sequences_equals_one_by_one(
    tier: str,
    batch_invariant: bool,
    dtypes: tuple[torch.dtype, ...],
    maker: Make,
    must_run: frozenset[str],
) -> None:
    call = prompts(maker(*dtypes), LENGTHS, T=BOUNDS[-1] + 9, batch_invariant=batch_invariant)
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    for i, (first, end) in enumerate(zip(BOUNDS, BOUNDS[1:], strict=False)):
        alone_out, alone_state = one(call, i).run(tier)
        if batch_invariant:
            assert same_bits(out[:, first:end], alone_out)
            assert same_bits(final_state[i : i + 1], alone_state)
        else:
            assert_gdn_close(out[:, first:end], alone_out, inputs=out.dtype, what="out")
            assert_gdn_close(final_state[i : i + 1], alone_state, inputs=out.dtype, what="state")


@every_tier
def test_bits_do_not_depend_on_how_full_the_gpu_is(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    """More programs than multiprocessors, of which an H200 has 132, have plans of their own."""
    lengths = [2 * CHUNK + 5, *[CHUNK + 1] * 15, 3 * CHUNK]
    call = prompts(maker(torch.bfloat16), lengths, Hv=4, K=32, V=64, batch_invariant=True)
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    states = call.tensors["initial_state"]
    for i in (0, 5, 16):
        first, end = sum(lengths[:i]), sum(lengths[: i + 1])
        state = None if states is None else states[i : i + 1]
        alone_out, alone_state = piece(call, first, end, state).run(tier)
        assert same_bits(out[:, first:end], alone_out)
        assert same_bits(final_state[i : i + 1], alone_state)


@every_tier
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 199])
def test_calls_chained_through_the_state_equal_one_call(
    tier: str, cut: int, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), [200], K=16, V=32)
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    out_1, state = piece(call, 0, cut, call.tensors["initial_state"]).run(tier)
    out_2, state = piece(call, cut, 200, state).run(tier)
    assert_gdn_close(torch.cat([out_1, out_2], 1), out, inputs=out.dtype, what="out")
    assert_gdn_close(state, final_state, inputs=out.dtype, what="final_state")


@every_tier
def test_checkpoints_equal_the_states_of_prefix_runs(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), LENGTHS)
    call.require(tier, must_run)
    fla = call.with_("h_fla").run(tier)[2][0]
    _, _, compact, starts = call.with_("h_compact").run(tier)
    row = 0
    for i, length in enumerate(LENGTHS):
        for m in range(-(-length // CHUNK)):
            prefix = one(call, i)
            state = prefix.tensors["initial_state"]
            run = piece(prefix, 0, m * CHUNK, state).run(tier)[1]
            assert_gdn_close(fla[row][None], run, inputs=run.dtype, what=f"h_fla {i}, {m}")
            row += 1
        for j in range(length // CHUNK):
            prefix = one(call, i)
            state = prefix.tensors["initial_state"]
            run = piece(prefix, 0, (j + 1) * CHUNK, state).run(tier)[1]
            got = compact[int(starts[i]) + j][None]
            assert_gdn_close(got, run, inputs=run.dtype, what=f"h_compact {i}, {j}")


@every_tier
def test_layouts_of_checkpoints_hold_the_same_states(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), LENGTHS)
    call.require(tier, must_run)
    fla = call.with_("h_fla").run(tier)[2][0]
    _, final_state, compact, starts = call.with_("h_compact").run(tier)
    offset = 0
    for i, length in enumerate(LENGTHS):
        start = int(starts[i])
        for j in range(length // CHUNK):
            if j + 1 < -(-length // CHUNK):
                assert same_bits(compact[start + j], fla[offset + j + 1])
        if length and length % CHUNK == 0:
            assert same_bits(compact[start + length // CHUNK - 1], final_state[i])
        offset += -(-length // CHUNK)
    assert int(starts[-1]) == sum(length // CHUNK for length in LENGTHS)


@every_tier
def test_checkpoints_change_no_other_result(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), LENGTHS)
    call.require(tier, must_run)
    plain = call.run(tier)
    for overload in ("h_fla", "h_compact"):
        for got, wanted in zip(call.with_(overload).run(tier), plain, strict=False):
            assert same_bits(got, wanted)


@every_tier
def test_rows_of_a_batch_equal_sequences(tier: str, maker: Make, must_run: frozenset[str]) -> None:
    m = maker()
    call = prompts(m, None, B=3, T=70)
    call.require(tier, must_run)
    flat = {n: call.tensors[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[union-attr]
    packed = call.with_(**flat, cu_seqlens=m.integers([0, 70, 140, 210]))
    out, final_state = call.run(tier)
    packed_out, packed_state = packed.run(tier)
    assert_gdn_close(packed_out.view_as(out), out, inputs=out.dtype, what="out")
    assert_gdn_close(packed_state, final_state, inputs=out.dtype, what="final_state")


@every_tier
def test_sequence_of_length_zero_keeps_its_state_bit_for_bit(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), [0, 3, 0])
    call.require(tier, must_run)
    state = call.tensors["initial_state"]
    assert state is not None
    final_state = call.run(tier)[1]
    assert same_bits(final_state[0], state[0]) and same_bits(final_state[2], state[2])


@every_tier
def test_inputs_are_left_as_they_are(tier: str, maker: Make, must_run: frozenset[str]) -> None:
    call = prompts(maker(), [70, 5], qk_l2norm=True)
    call.require(tier, must_run)
    before = [None if t is None else t.clone() for t in call.args()]
    call.run(tier)
    for tensor, copy in zip(call.args(), before, strict=True):
        assert tensor is None or (copy is not None and same_bits(tensor, copy))


@every_tier
def test_lengths_changed_in_place_are_seen(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker()
    call = prompts(m, [70, 60])
    call.require(tier, must_run)
    call.check(tier)
    lengths = call.tensors["cu_seqlens"]
    assert lengths is not None
    lengths.copy_(m.integers([0, 3, 130]))
    call.check(tier)


@every_tier
@pytest.mark.parametrize("overload", ["h_fla", "h_compact"])
@pytest.mark.parametrize(
    "bounds", [[0, 9, 5], [0, 5, 200], [-7, 5, 9], [0, 150, 0, 150, 0, 150], [150, 0], [10**6, -5]]
)
def test_bounds_that_break_the_rules_touch_no_other_memory(
    bounds: list[int], overload: str, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    """What comes out has no meaning; a neighbour of the outputs in memory, or a crash, would."""
    m = maker()
    call = prompts(m, None, T=150, Hv=1, state=None).with_(overload)
    call = call.with_(cu_seqlens=m.integers(bounds))
    call.require(tier, must_run)
    assert call.run(tier)[0].shape == (1, 150, 1, 16)
