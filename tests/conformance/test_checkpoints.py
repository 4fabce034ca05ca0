"""`scatter_checkpoints_` in every tier: against a loop, and end to end against runs of prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import GdnCall, prompts
from tests.conformance.gdn_decode_calls import copy_with_storage
from tests.tolerances import assert_gdn_close
from torch_attn_tiers.checkpoints import CheckpointMetadata, scatter_checkpoints_

Make = Callable[..., Maker]
TIERS = ("triton", "reference")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
every_tier = pytest.mark.parametrize("tier", TIERS)
scatter = torch.ops.attn_tiers.scatter_checkpoints_

P, N, R, HV, K, V = 7, 5, 4, 3, 20, 72


def arguments(
    m: Maker,
    *,
    pool: torch.dtype = torch.float32,
    h: torch.dtype = torch.float32,
    dst: tuple[int, ...] = (3, -1, 0, 6, 5),
    h_src: tuple[int, ...] = (2, 0, 3, 1, 0),
    track: tuple[int, ...] = (1, 1, 0, 0, 1),
    final: tuple[int, ...] | None = (0, 0, 1, 0, 1),
    index: torch.dtype = torch.int64,
) -> list[torch.Tensor | None]:
    """Sequences that keep a row of h, have no place, keep the last state, keep nothing, and both.

    States are `[.., K, V]` in V-first memory, but the pool's, which are K-first.
    """
    return [
        m.normal(P, HV, K, V, dtype=pool),
        m.integers(dst, index),
        m.normal(R, HV, V, K, dtype=h).mT,
        m.integers(h_src, index),
        m.integers(track) > 0,
        None if final is None else m.normal(N, HV, V, K, dtype=torch.float32).mT,
        None if final is None else m.integers(final) > 0,
    ]


def loop(args: list[torch.Tensor | None]) -> tuple[torch.Tensor, list[int]]:
    """The pool afterwards and the places written, from the operator's definition."""
    given = [None if t is None else t.cpu() for t in args]
    pool, dst, h, h_src, track, final_state, final = given
    assert pool is not None and dst is not None and h is not None
    assert h_src is not None and track is not None
    pool, written = pool.clone(), []
    for i, place in enumerate(dst.tolist()):
        is_final = final is not None and bool(final[i])
        row = int(h_src[i])
        if not 0 <= place < pool.shape[0]:
            continue
        if is_final:
            pool[place] = final_state[i].to(pool.dtype)  # type: ignore[index]
        elif bool(track[i]) and 0 <= row < h.shape[0]:
            pool[place] = h[row].to(pool.dtype)
        else:
            continue
        written.append(place)
    return pool, written


def require(tier: str, args: list[torch.Tensor | None], must_run: frozenset[str]) -> None:
    """Skips the test if the tier is not eligible, or fails it if it has to be."""
    explanation = torch_attn_tiers.explain("scatter_checkpoints_", *args, tier=tier)
    (verdict,) = [v for v in explanation.verdicts if v.name == tier]
    if not verdict.eligible:
        text = f"{tier}: {'; '.join(verdict.reasons)}"
        if tier in must_run:
            pytest.fail(f"required tier not eligible: {text}")
        pytest.skip(text)


def check(tier: str, args: list[torch.Tensor | None], must_run: frozenset[str]) -> list[int]:
    """Runs the call in this tier and compares every bit of the pool; returns the places written."""
    require(tier, args, must_run)
    pool = args[0]
    assert pool is not None
    expected, written = loop(args)
    copy = copy_with_storage(pool)
    with torch_attn_tiers.record_dispatch() as records:
        assert scatter(copy, *args[1:], tier=tier) is None
    assert [(record.op, record.tier) for record in records] == [("scatter_checkpoints_", tier)]
    assert same_bits(copy.cpu(), expected)
    for tensor in (pool, copy):  # what lies between the states of the pool
        tensor[:] = 0
    assert same_bits(_storage(pool), _storage(copy)), "another place was written"
    return written


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


@every_tier
def test_each_sequence_writes_its_state_or_nothing(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    assert check(tier, arguments(maker()), must_run) == [3, 0, 5]


@every_tier
def test_without_last_states(tier: str, maker: Make, must_run: frozenset[str]) -> None:
    assert check(tier, arguments(maker(), final=None), must_run) == [3, 5]


@every_tier
@pytest.mark.parametrize("pool", FLOATS)
@pytest.mark.parametrize("h", FLOATS)
def test_every_dtype_of_pool_and_checkpoints(
    h: torch.dtype, pool: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    check(tier, arguments(maker(), pool=pool, h=h), must_run)


@every_tier
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_places_and_rows_that_do_not_exist_write_nothing(
    index: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    least, most = torch.iinfo(index).min, torch.iinfo(index).max
    args = arguments(
        maker(), dst=(7, -1, least, most, 2), h_src=(0, 0, 0, 0, 3), track=(1,) * 5, index=index
    )
    assert check(tier, args, must_run) == [2]
    args = arguments(
        maker(), dst=(0, 1, 2, 3, 4), h_src=(4, -1, least, most, 3), track=(1,) * 5, final=None,
        index=index,
    )  # fmt: skip
    assert check(tier, args, must_run) == [4]


@every_tier
@pytest.mark.parametrize("final", [None, (0,) * 5])
def test_nothing_to_keep_leaves_the_pool_as_it_is(
    final: tuple[int, ...] | None, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    assert check(tier, arguments(maker(), track=(0,) * 5, final=final), must_run) == []


@every_tier
@pytest.mark.parametrize("count", ["places", "rows", "sequences"])
def test_none_at_all(count: str, tier: str, maker: Make, must_run: frozenset[str]) -> None:
    args = arguments(maker())
    for i in {"places": [0], "rows": [2], "sequences": [1, 3, 4, 5, 6]}[count]:
        args[i] = args[i][:0]  # type: ignore[index]
    written = check(tier, args, must_run)
    assert written == ([0, 5] if count == "rows" else [])


def _k_first(m: Maker) -> torch.Tensor:
    return m.normal(P, HV, K, V, dtype=torch.float32)


POOLS: dict[str, Callable[[Maker], torch.Tensor]] = {
    "v first": lambda m: m.normal(P, HV, V, K, dtype=torch.float32).mT,
    "a layer of a larger pool": lambda m: m.normal(P, 3, HV, V, K, dtype=torch.float32)[:, 1].mT,
    "inner strides": lambda m: m.normal(P, HV, 2 * K, 3 * V, dtype=torch.float32)[:, :, 1::2, 2::3],
    "heads last": lambda m: m.normal(P, K, V, HV, dtype=torch.float32).permute(0, 3, 1, 2),
    "not aligned": lambda m: m.normal(P, HV, K, V + 1, dtype=torch.float32)[..., 1:],
}


@every_tier
@pytest.mark.parametrize("name", POOLS)
def test_pools_of_any_strides(name: str, tier: str, maker: Make, must_run: frozenset[str]) -> None:
    m = maker()
    args = arguments(m)
    args[0] = POOLS[name](m)
    check(tier, args, must_run)


@every_tier
def test_checkpoints_and_indices_of_any_strides(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker()
    args = arguments(m)
    args[2] = m.normal(R, K, 2 * HV, 2 * V, dtype=torch.float32)[:, :, 1::2, ::2].transpose(1, 2)
    args[5] = m.normal(HV, N, K, V, dtype=torch.float32).transpose(0, 1)
    for i in (1, 3, 4, 6):
        apart = torch.stack([args[i], args[i]], 1)  # type: ignore[list-item]
        args[i] = apart[:, 0]
    check(tier, args, must_run)
    args = arguments(m, track=(1,) * 5, final=None)
    args[4] = args[4][:1].expand(N)  # type: ignore[index]
    check(tier, args, must_run)


@every_tier
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 130), (1, 129, 3), (2, 64, 64)])
def test_sizes_of_states(
    shape: tuple[int, ...], tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker()
    args = arguments(m)
    for i, rows in ((0, P), (2, R), (5, N)):
        args[i] = m.normal(rows, *shape, dtype=torch.float32)
    check(tier, args, must_run)


# --------------------------------------------------------------------------------- end to end

#: Tokens before the call and after it: kept are the last state, a row of h (four times), nothing.
PREFIXES = [192, 192, 0, 192, 256, 41, 0, 64]
LENGTHS = [320, 319, 0, 350, 350, 66, 130, 64]


@every_tier
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("h_layout", ["fla", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_place_in_the_pool_equals_the_state_of_a_run_of_the_prefix(
    dtype: torch.dtype,
    h_layout: str,
    state_v_first: bool,
    tier: str,
    maker: Make,
    must_run: frozenset[str],
) -> None:
    m = maker(torch.float32)
    call = prompts(m, [end - begin for end, begin in zip(LENGTHS, PREFIXES)], K=16, V=24)
    initial = call.tensors["initial_state"]
    assert initial is not None
    given = initial.mT.contiguous() if state_v_first else initial
    slots = m.integers([7, 0, 3, 12, 1, 4, 9, 2])
    pool = m.normal(14, 2, *given.shape[2:], dtype=dtype)
    before = pool.clone()
    named: dict[str, Any] = {n: call.tensors[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    result = torch_attn_tiers.gdn_chunk_prefill(
        **named, scale=None, initial_state=given, output_h=True, h_layout=h_layout,
        state_v_first=state_v_first, solution="reference",
    )  # fmt: skip
    metadata = CheckpointMetadata.build(m.integers(LENGTHS), m.integers(PREFIXES), 64, slots)
    require(tier, [pool, metadata.dst, *_operands(result, metadata)], must_run)
    with torch_attn_tiers.options(force=f"scatter_checkpoints_:{tier}"):
        scatter_checkpoints_(pool, metadata.dst, result, metadata)

    bounds = call.tensors["cu_seqlens"].tolist()  # type: ignore[union-attr]
    kept = {}
    for i, (end, begin) in enumerate(zip(LENGTHS, PREFIXES)):
        track = end // 64 * 64 - begin
        if track > 0 and (track == end - begin or track % 64 == 0):
            kept[int(slots[i])] = _state_after(call, i, bounds[i], track)
    assert sorted(kept) == [0, 1, 7, 9, 12]
    for place in range(14):
        got = pool[place]
        if place in kept:
            got = got.mT if state_v_first else got
            assert_gdn_close(got, kept[place], inputs=torch.float32, what=f"place {place}")
        else:
            assert same_bits(got, before[place])


def _operands(result: Any, metadata: CheckpointMetadata) -> list[torch.Tensor]:
    h = result.h[0] if result.h.dim() == 5 else result.h
    src, mask = metadata.track_ssm_h_src, metadata.track_mask
    return [h, src, mask, result.final_state, metadata.final_mask]


def _state_after(call: GdnCall, i: int, first: int, tokens: int) -> torch.Tensor:
    """The state `[Hv,K,V]` of sequence `i` after so many of its tokens, by a run of its own."""
    names = ("q", "k", "v", "g", "beta")
    cut = {n: call.tensors[n][:, first : first + tokens] for n in names}  # type: ignore[index]
    state = call.tensors["initial_state"][i : i + 1]  # type: ignore[index]
    return call.with_(**cut, initial_state=state, cu_seqlens=None).run("reference")[1][0]
