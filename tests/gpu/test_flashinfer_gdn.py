"""The tier `flashinfer` of `gdn_chunk_prefill` with its library, on a GPU that it runs on.

All prompts have head sizes of 128. Where `2 * N * Hv` is below the number of multiprocessors the
library may split sequences, which takes other kernels: what matters there is tested both ways.
Each variant is compiled in memory, in some ten seconds, by the first test that needs it: run this
file in one process (`-n 0`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import CHUNK, GdnCall, check_or_skip, prompts
from tests.gdn_library_cases import CASES, state_layouts
from tests.gpu.capturing import capture
from tests.gpu.gdn_graphs import check_replays, ready
from tests.tolerances import assert_gdn_close
from torch_attn_tiers import ColdCaptureError
from torch_attn_tiers.tiers.gdn import flashinfer

Make = Callable[..., Maker]
Must = frozenset[str]
the_tier = pytest.mark.parametrize("tier", ["flashinfer"])
each_overload = pytest.mark.parametrize("overload", ["default", "h_compact"])
#: Heads of q and v: those of a shard of a model, which may be split, and those of Qwen3-Next.
each_size = pytest.mark.parametrize("heads", [(2, 4), (16, 32)], ids=["split", "whole"])
HALVES = (torch.float16, torch.bfloat16)
LENGTHS = [1, 63, 0, 64, 129, 200]
BOUNDS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


def _prompts(
    m: Maker, lengths: list[int] | None, heads: tuple[int, int] = (2, 4), **options: Any
) -> GdnCall:
    return prompts(m, lengths, Hq=heads[0], Hv=heads[1], K=128, V=128, **options)


def _piece(call: GdnCall, first: int, end: int, state: torch.Tensor | None) -> GdnCall:
    """Tokens `first` to `end` as one sequence without `cu_seqlens`."""
    cut = {n: call.tensors[n][:, first:end] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    return call.with_(**cut, initial_state=state, cu_seqlens=None)


def _same(result: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(result, expected, strict=True))


# --------------------------------------------------------------------------------- right answers


@the_tier
@each_overload
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, overload: str, tier: str, maker: Make, must_run: Must
) -> None:
    check_or_skip(CASES[name](maker(dtype)).with_(overload), tier, must_run)


@the_tier
@each_overload
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [(2, 8), (4, 16), (16, 48)], ids=str)
def test_one_long_sequence(
    heads: tuple[int, int], batch_invariant: bool, overload: str, tier: str, maker: Make,
    must_run: Must,
) -> None:  # fmt: skip
    """Split, where the library joins the pieces by a kernel for up to 8, 16 or more heads."""
    call = _prompts(
        maker(torch.bfloat16), [700], heads, qk_l2norm=True, batch_invariant=batch_invariant
    )
    check_or_skip(call.with_(overload), tier, must_run)


@the_tier
@each_overload
@each_size
def test_initial_state_of_any_layout(
    heads: tuple[int, int], overload: str, tier: str, maker: Make, must_run: Must
) -> None:
    call = _prompts(maker(torch.float16), [70, 0, 5], heads).with_(overload)
    for view, is_v_first, _ in state_layouts(call):
        check_or_skip(call.with_(initial_state=view, state_v_first=is_v_first), tier, must_run)


@the_tier
@each_size
@pytest.mark.parametrize("total_chunks", [0, 1, 3, 9])
def test_states_beyond_the_rows_of_h_are_dropped(
    total_chunks: int, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    call = _prompts(maker(torch.float16), [130, 64, 5], heads)
    call = call.with_("h_compact", total_chunks=total_chunks)
    check_or_skip(call, tier, must_run)
    assert call.run(tier)[2].shape[0] == total_chunks


@the_tier
@each_size
@pytest.mark.parametrize("h_dtype", [torch.float32, *HALVES])
def test_checkpoints_have_the_dtype_asked_for(
    h_dtype: torch.dtype, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    call = _prompts(maker(torch.float16), [130, 64], heads).with_("h_compact", h_dtype=h_dtype)
    check_or_skip(call, tier, must_run)


@the_tier
@each_size
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_sequence_that_is_not_finite_spoils_no_other(
    name: str, bad: float, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    """Its first tokens lie in the last tile of the sequence before it."""
    call = _prompts(maker(torch.float16), [70, 30, 65], heads)
    call.require(tier, must_run)
    clean = call.run(tier)
    x = call.tensors[name].clone()  # type: ignore[union-attr]
    if name == "initial_state":
        x[1] = bad
    else:
        x[:, 70:80] = bad
    out, final = call.with_(**{name: x}).run(tier)
    assert same_bits(out[:, :70], clean[0][:, :70]) and same_bits(out[:, 100:], clean[0][:, 100:])
    assert same_bits(final[[0, 2]], clean[1][[0, 2]])
    assert not bool(out[:, 70:100].isfinite().all())


# ------------------------------------------------------------------------- several calls together


@the_tier
@each_size
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_batch_of_sequences_equals_one_by_one(
    batch_invariant: bool, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    """Alone a sequence of few heads may be split, in the batch it may not or elsewhere."""
    call = _prompts(
        maker(torch.float16), LENGTHS, heads, T=BOUNDS[-1] + 9, batch_invariant=batch_invariant
    )
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    state = call.tensors["initial_state"]
    assert state is not None
    for i, (first, end) in enumerate(zip(BOUNDS, BOUNDS[1:], strict=False)):
        if first == end:
            assert same_bits(final_state[i], state[i])
            continue
        one_out, one_state = _piece(call, first, end, state[i : i + 1]).run(tier)
        if batch_invariant:
            assert same_bits(out[:, first:end], one_out)
            assert same_bits(final_state[i : i + 1], one_state)
        else:
            assert_gdn_close(out[:, first:end], one_out, inputs=out.dtype, what="out")
            assert_gdn_close(final_state[i : i + 1], one_state, inputs=out.dtype, what="state")


@the_tier
@each_size
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 199])
def test_calls_chained_through_the_state_equal_one_call(
    cut: int, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    call = _prompts(maker(torch.float16), [200], heads)
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    out_1, state = _piece(call, 0, cut, call.tensors["initial_state"]).run(tier)
    out_2, state = _piece(call, cut, 200, state).run(tier)
    assert_gdn_close(torch.cat([out_1, out_2], 1), out, inputs=out.dtype, what="out")
    assert_gdn_close(state, final_state, inputs=out.dtype, what="final_state")


@the_tier
@each_size
def test_checkpoints_equal_the_states_of_prefix_runs(
    heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    call = _prompts(maker(torch.float16), LENGTHS, heads)
    call.require(tier, must_run)
    out, final_state = call.run(tier)
    with_h = call.with_("h_compact").run(tier)
    assert_gdn_close(with_h[0], out, inputs=out.dtype, what="out")
    assert_gdn_close(with_h[1], final_state, inputs=out.dtype, what="final_state")
    h, starts, state = with_h[2], with_h[3].tolist(), call.tensors["initial_state"]
    assert state is not None
    for i, length in enumerate(LENGTHS):
        for j in range(length // CHUNK):
            end = BOUNDS[i] + (j + 1) * CHUNK
            run = _piece(call, BOUNDS[i], end, state[i : i + 1]).run(tier)[1]
            assert_gdn_close(h[starts[i] + j][None], run, inputs=out.dtype, what=f"h {i}, {j}")
        if length and length % CHUNK == 0:
            assert same_bits(h[starts[i] + length // CHUNK - 1], with_h[1][i])


@the_tier
def test_is_chosen_once_it_is_prepared(tier: str, maker: Make, must_run: Must) -> None:
    call = _prompts(maker(torch.bfloat16), [72, 7])  # lengths that no other test has
    call.require(tier, must_run)
    flashinfer.VARIANTS.forget()
    args = (call.op(), *call.args())
    with torch_attn_tiers.options(disable="gdn_chunk_prefill:triton"):
        (verdict,) = [v for v in torch_attn_tiers.explain(*args).verdicts if v.name == tier]
        assert "not prepared" in verdict.reasons[0]
        assert torch_attn_tiers.prepare(*args).chosen == tier
        with torch_attn_tiers.record_dispatch() as records:
            call.op()(*call.args())
    assert [record.tier for record in records] == [tier]


# --------------------------------------------------------------------------- captures and streams


@the_tier
@each_overload
@each_size
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_follow_lengths_that_change(
    batch_invariant: bool, heads: tuple[int, int], overload: str, tier: str, maker: Make,
    must_run: Must,
) -> None:  # fmt: skip
    m = maker(torch.float16)
    call = _prompts(
        m, [70, 200, 30], heads, T=320, qk_l2norm=True, batch_invariant=batch_invariant
    ).with_(overload)
    ready(call, tier, must_run)
    check_replays(call, tier, m)


@the_tier
@each_size
def test_eager_calls_on_two_streams(
    heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    """They share the library's scratch, and wait for each other."""
    calls = [_prompts(maker(torch.float16, seed=i), [1500, 5, 700], heads) for i in range(2)]
    for call in calls:
        ready(call, tier, must_run)
    wanted = [call.run(tier) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[tuple[int, tuple[torch.Tensor, ...]]] = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, calls[i].run(tier)))
    torch.cuda.synchronize()
    for i, result in got:
        assert _same(result, wanted[i])


@the_tier
@each_size
def test_graphs_one_after_the_other_between_eager_calls(
    heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    """Replays on one device must not overlap: here each waits for the one before."""
    calls = [_prompts(maker(torch.float16, seed=i), [300, 5, 700], heads) for i in range(3)]
    for call in calls:
        ready(call, tier, must_run)
    wanted = [call.run(tier) for call in calls]
    graphs = [capture(lambda call=call: call.run(tier)) for call in calls[:2]]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(5):
        for (graph, result), stream, expected in zip(graphs, streams, wanted, strict=False):
            for tensor in result:
                tensor.fill_(math.nan)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            eager = calls[2].run(tier)
            assert _same(result, expected) and _same(eager, wanted[2])


@the_tier
def test_cold_capture_names_the_call_to_make(tier: str, maker: Make, must_run: Must) -> None:
    call = _prompts(maker(torch.float16), [72, 7])
    call.require(tier, must_run)
    flashinfer.VARIANTS.forget()
    with pytest.raises(ColdCaptureError, match="prepare"):
        capture(lambda: call.run(tier))
    ready(call, tier, must_run)
    graph, _ = capture(lambda: call.run(tier))
    graph.replay()
    torch.cuda.synchronize()


@the_tier
def test_scratch_does_not_grow_in_a_capture(tier: str, maker: Make, must_run: Must) -> None:
    """Of 32 heads 1024 tokens are split into more pieces than 1536."""
    m = maker(torch.bfloat16)
    most = _prompts(m, [1536], (16, 32))
    most.require(tier, must_run)
    buffers = getattr(pytest.importorskip("flashinfer.utils"), "_cache_buf", None)
    if buffers is None:
        pytest.skip("the library keeps its scratch elsewhere")
    before = [buffers.pop(key) for key in list(buffers) if str(key[0]).startswith("gdn")]
    flashinfer.VARIANTS.forget()
    ready(most, tier, must_run)
    sizes = {key: buffer.numel() for key, buffer in buffers.items()}
    for tokens in (1, 64, 500, 1000, 1024, 1025, 1536):
        call = _prompts(m, [tokens], (16, 32))
        graph, _ = capture(lambda call=call: call.run(tier))
        graph.replay()
    torch.cuda.synchronize()
    assert {key: buffer.numel() for key, buffer in buffers.items()} == sizes
    del before  # what is still in use elsewhere was kept until here


@the_tier
@each_size
@each_overload
def test_the_host_does_not_wait(
    overload: str, heads: tuple[int, int], tier: str, maker: Make, must_run: Must,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    call = _prompts(maker(torch.float16), [70, 200, 30], heads, qk_l2norm=True).with_(overload)
    ready(call, tier, must_run)
    call.run(tier)
    request.getfixturevalue("no_host_sync")
    call.run(tier)
