"""Cases of `gdn_chunk_prefill.pool_`, each in every tier, against the oracle (contract, 3.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.calls import Maker, of_dtype, same_bits
from tests.conformance.gdn_calls import GDN_TIERS
from tests.conformance.gdn_decode_calls import copy_with_storage
from tests.conformance.gdn_pool_calls import PoolCall, check_or_skip, pooled
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]
Case = Callable[[Make], PoolCall]
CASES: dict[str, Case] = {}
every_tier = pytest.mark.parametrize("tier", GDN_TIERS)
#: Of the cases that ask for none. tests/gpu runs them in float16 too.
DTYPES = (torch.float32, torch.bfloat16)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------ read and write


@case
def states_go_back_to_where_they_came_from(make: Make) -> PoolCall:
    return pooled(make(), [70, 5, 130], [4, 0, 2])


@case
def states_go_to_other_places(make: Make) -> PoolCall:
    return pooled(make(), [70, 5, 130], [4, 4, 2], [0, 1, 5])


@case
def negative_read_starts_from_zero(make: Make) -> PoolCall:
    return pooled(make(), [70, 5, 64], [-1, 3, -9], [0, 3, 4])


@case
def negative_write_drops_the_last_state(make: Make) -> PoolCall:
    return pooled(make(), [70, 5, 64], [1, 3, 2], [-1, 3, -9])


@case
def neither_read_nor_written(make: Make) -> PoolCall:
    return pooled(make(), [70, 5], [-1, -1])


@case
def places_that_the_pool_does_not_have(make: Make) -> PoolCall:
    return pooled(make(), [70, 5, 9], [6, 3, 2**40], [0, 6, 2**40])


@case
def places_at_the_limits_of_int32(make: Make) -> PoolCall:
    least, most = -(2**31), 2**31 - 1
    return pooled(make(), [7, 65], [least, most], [most, least], index=torch.int32)


@case
def empty_sequences_copy_their_state(make: Make) -> PoolCall:
    return pooled(make(), [0, 65, 0, 0], [4, 1, -1, 3], [0, 1, 2, 3])


@case
def no_sequences(make: Make) -> PoolCall:
    return pooled(make(), [], [], T=70)


@case
def no_tokens(make: Make) -> PoolCall:
    return pooled(make(), None, [3, -1], [5, 4], B=2, T=0)


@case
def no_states(make: Make) -> PoolCall:
    return pooled(make(), [70, 3], [0, -1], [0, 1], [(64, 0), (0, 0)], P=0)


@case
def rows_of_a_batch_without_cu_seqlens(make: Make) -> PoolCall:
    return pooled(make(), None, [5, -1], [1, 2], [(64, 0), (70, 3)], B=2, T=70)


@case
def what_no_sequence_reads_is_not_read(make: Make) -> PoolCall:
    call = pooled(make(), [65, 10], [4, -1], [1, 2], [(64, 3), (0, 0)], T=130)
    call.pool[torch.tensor([0, 1, 2, 3, 5])] = float("nan")
    for name in ("q", "k", "v", "g", "beta"):
        tensor = call.tensors[name]
        assert tensor is not None
        tensor[:, 75:] = float("nan")
    return call


# ------------------------------------------------------------------------------------- tracked


@case
def state_inside_a_sequence_is_kept(make: Make) -> PoolCall:
    return pooled(make(), [200, 130, 64], [0, 1, -1], None, [(128, 3), (64, 4), (64, 5)])


@case
def zero_keeps_none(make: Make) -> PoolCall:
    return pooled(make(), [200, 64, 0], [0, 1, 2], None, [(0, 3), (64, 4), (0, 5)])


@case
def state_at_the_end_is_kept_too(make: Make) -> PoolCall:
    return pooled(make(), [128, 23, 1], [0, 1, -1], None, [(128, 3), (23, 4), (1, 5)])


@case
def negative_place_keeps_none(make: Make) -> PoolCall:
    return pooled(make(), [200, 65], [0, 1], None, [(128, -1), (64, -7)])


@case
def place_past_the_pool_keeps_none(make: Make) -> PoolCall:
    return pooled(make(), [200, 65], [0, 1], None, [(128, 6), (64, 2**40)])


@case
def counts_that_are_not_reached_or_no_chunk_ends_with_keep_none(make: Make) -> PoolCall:
    track = [(256, 3), (63, 4), (-64, 5)]
    return pooled(make(), [200, 130, 70], [0, 1, 2], None, track)


@case
def kept_while_the_last_state_is_dropped(make: Make) -> PoolCall:
    return pooled(make(), [200, 65], [2, 2], [-1, -1], [(128, 3), (64, 4)])


@case
def of_two_states_in_one_place_the_last_stays(make: Make) -> PoolCall:
    return pooled(make(), [200, 64], [2, 3], [0, 1], [(128, 0), (64, 1)])


@case
def kept_where_the_sequence_started_from(make: Make) -> PoolCall:
    return pooled(make(), [200], [2], [4], [(64, 2)])


# ------------------------------------------------------------------------------ dtypes, layouts


@case
def pool_in_bfloat16(make: Make) -> PoolCall:
    return pooled(make(), [70, 5], [4, -1], [0, 1], [(64, 3), (0, 0)], pool=torch.bfloat16)


@case
def pool_in_float16(make: Make) -> PoolCall:
    return pooled(make(), [70, 5], [4, -1], [0, 1], [(64, 3), (0, 0)], pool=torch.float16)


@case
def inputs_in_float16(make: Make) -> PoolCall:
    m = make(torch.float16)
    return pooled(m, [70, 65], [4, 1], None, [(64, 3), (64, 2)], qk_l2norm=True)


@case
def inputs_in_bfloat16(make: Make) -> PoolCall:
    m = make(torch.bfloat16)
    return pooled(m, [70, 65], [4, 1], None, [(64, 3), (64, 2)], pool=torch.bfloat16)


@case
def states_with_v_first(make: Make) -> PoolCall:
    track = [(64, 3), (0, 0)]
    return pooled(make(), [70, 5], [4, -1], [0, 1], track, K=16, V=32, state_v_first=True)


@case
def indices_in_int32(make: Make) -> PoolCall:
    return pooled(make(), [70, 65], [4, -1], [0, 1], [(64, 3), (64, 2)], index=torch.int32)


@case
def indices_that_are_strided_and_of_two_dtypes(make: Make) -> PoolCall:
    call = pooled(make(), [70, 65], [4, -1], [0, 1], [(64, 3), (64, 2)])
    columns = torch.stack([call.tensors[n] for n in ("read_indices", "track_lens")], 1)  # type: ignore[misc]
    return call.with_(
        read_indices=columns[:, 0], track_lens=columns[:, 1],
        write_indices=call.tensors["write_indices"].int(),  # type: ignore[union-attr]
        track_indices=call.tensors["track_indices"].int(),  # type: ignore[union-attr]
    )  # fmt: skip


def _layer(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    """A layer's slice of a larger pool, V-first."""
    return m.normal(P, 3, Hv, V, K, dtype=torch.float32)[:, 1].mT


def _k_first(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, Hv, K, V, dtype=torch.float32)


def _inner_strides(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, V, Hv, 2, K, 3, dtype=torch.float32)[:, :, :, 1, :, 2].permute(0, 2, 3, 1)


def _not_aligned(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, Hv, V, K + 1, dtype=torch.float32)[..., 1:].mT


#: Ways in which states lie in memory.
POOLS = {
    "layer": _layer,
    "k_first": _k_first,
    "inner_strides": _inner_strides,
    "not_aligned": _not_aligned,
}


@case
def pool_that_is_a_layer_of_a_larger_one(make: Make) -> PoolCall:
    return pooled(make(), [70, 5], [4, -1], [0, 1], [(64, 3), (0, 0)], K=32, V=16, pool=_layer)


@case
def pool_in_k_first_memory(make: Make) -> PoolCall:
    return pooled(make(), [70, 5], [4, -1], [0, 1], [(64, 3), (0, 0)], K=32, V=16, pool=_k_first)


@case
def pool_with_inner_strides(make: Make) -> PoolCall:
    track = [(64, 3), (0, 0)]
    return pooled(make(), [70, 5], [4, -1], [0, 1], track, K=32, V=16, pool=_inner_strides)


@case
def pool_that_is_not_aligned(make: Make) -> PoolCall:
    track = [(64, 3), (0, 0)]
    return pooled(make(), [70, 5], [4, -1], [0, 1], track, K=32, V=16, pool=_not_aligned)


@case
def sizes_that_are_no_powers_of_two(make: Make) -> PoolCall:
    return pooled(make(), [70], [1], [2], [(64, 3)], K=40, V=24)


@case
def three_tiles_of_keys(make: Make) -> PoolCall:
    return pooled(make(), [70], [1], [2], [(64, 3)], Hv=1, K=136, V=16)


@case
def widest_heads(make: Make) -> PoolCall:
    return pooled(make(), [70], [1], [2], [(64, 3)], Hv=1, K=256, V=256)


@case
def heads_in_groups_with_a_scale(make: Make) -> PoolCall:
    return pooled(make(), [70, 3], [1, -1], [2, 4], [(64, 3), (3, 5)], Hq=2, Hv=6, scale=-2.0)


@every_tier
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str, dtype: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    check_or_skip(CASES[name](of_dtype(maker, dtype)), tier, must_run)


# ------------------------------------------------------------------------- several calls together

LENGTHS = [130, 0, 64, 5, 200]


@every_tier
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bits_are_those_of_the_default_overload(
    batch_invariant: bool, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = pooled(
        maker(), LENGTHS, [0, 3, -1, 5, 1], [4, 2, 6, -1, 1], P=8, batch_invariant=batch_invariant
    )
    call.require(tier, must_run)
    out, final_state = call.gathered().run(tier)
    got = call.with_(pool=copy_with_storage(call.pool))
    assert same_bits(got.run(tier), out)
    for i, place in enumerate([4, 2, 6, -1, 1]):
        assert place < 0 or same_bits(got.pool[place], final_state[i])


@every_tier
def test_kept_states_are_bits_of_the_checkpoints(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    track = [(128, 0), (0, 1), (64, 2), (5, 3), (64, 4)]
    call = pooled(maker(), LENGTHS, [-1] * 5, [-1] * 5, track, pool=torch.bfloat16)
    call.require(tier, must_run)
    compact = call.gathered().with_("h_compact", h_dtype=torch.bfloat16)
    _, final_state, h, starts = compact.run(tier)
    call.run(tier)
    for i, (count, place) in enumerate(track):
        if count % 64 == 0 and count:
            assert same_bits(call.pool[place], h[int(starts[i]) + count // 64 - 1])
    assert same_bits(call.pool[3], final_state[3].bfloat16())


@every_tier
def test_kept_state_is_that_of_a_run_of_the_prefix(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = pooled(maker(), [200], [5], [0], [(128, 1)], K=16, V=32)
    call.require(tier, must_run)
    call = call.with_(pool=copy_with_storage(call.pool))
    cut = {n: call.tensors[n][:, :128] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    prefix = call.with_(
        **cut, cu_seqlens=None, track_lens=None, track_indices=None, write_indices=_like(call, [2])
    )
    call.run(tier)
    prefix.run(tier)
    assert_gdn_close(call.pool[1], call.pool[2], inputs=torch.float32, what="state")


@every_tier
@pytest.mark.parametrize("cut", [1, 63, 64, 128, 199])
def test_calls_chained_through_the_pool_equal_one_call(
    cut: int, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = pooled(maker(), [200], [5], [0], K=16, V=32)
    call.require(tier, must_run)
    call = call.with_(pool=copy_with_storage(call.pool))

    def piece(first: int, end: int, read: int, write: int) -> torch.Tensor:
        names = ("q", "k", "v", "g", "beta")
        tokens: dict[str, Any] = {n: call.tensors[n][:, first:end] for n in names}  # type: ignore[index]
        places = {"read_indices": _like(call, [read]), "write_indices": _like(call, [write])}
        return call.with_(**tokens, **places, cu_seqlens=None).run(tier)

    out = call.run(tier)
    outs = [piece(0, cut, 5, 1), piece(cut, 200, 1, 1)]
    assert_gdn_close(torch.cat(outs, 1), out, inputs=out.dtype, what="out")
    assert_gdn_close(call.pool[1], call.pool[0], inputs=out.dtype, what="state")


def _like(call: PoolCall, values: list[int]) -> torch.Tensor:
    reads = call.tensors["read_indices"]
    assert reads is not None
    return torch.tensor(values, device=reads.device)


@every_tier
def test_indices_changed_in_place_are_seen(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = pooled(maker(), [70, 130], [0, 1], [2, 3], [(64, 4), (128, 5)])
    check_or_skip(call, tier, must_run)
    for name, values in (
        ("read_indices", [5, -1]),
        ("write_indices", [-1, 0]),
        ("track_lens", [0, 64]),
        ("track_indices", [1, 3]),
        ("cu_seqlens", [0, 100, 200]),
    ):
        tensor = call.tensors[name]
        assert tensor is not None
        tensor.copy_(torch.tensor(values))
    check_or_skip(call, tier, must_run)


@every_tier
@pytest.mark.parametrize("bounds", [[0, 9, 5], [0, 5, 200], [-7, 5, 9], [150, 0, 64]])
def test_bounds_that_break_the_rules_touch_no_other_memory(
    bounds: list[int], tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    """What comes out has no meaning; a state that no sequence names must stay."""
    m = maker()
    call = pooled(m, [64, 86], [0, -1], [2, 3], [(64, 4), (64, -1)])
    call = call.with_(cu_seqlens=m.integers(bounds), pool=copy_with_storage(call.pool))
    call.require(tier, must_run)
    before = call.pool.clone()
    call.run(tier)
    for place in (0, 1, 5):
        assert same_bits(call.pool[place], before[place])
