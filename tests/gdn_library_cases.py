"""Prompts that the tier `flashinfer` is meant to take: head sizes of 128, in every arrangement.

The same table serves a stand-in on a CPU and the library on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.calls import Maker
from tests.conformance.gdn_calls import GdnCall, prompts
from tests.conformance.gdn_pool_calls import PoolCall, pooled

Build = Callable[[Maker], GdnCall]
CASES: dict[str, Build] = {}


def case(function: Build) -> Build:
    CASES[function.__name__] = function
    return function


def wide(m: Maker, lengths: list[int] | None, **changes: Any) -> GdnCall:
    """Prompts with head sizes of 128; on a GPU with some heads more."""
    sizes = {"Hq": m.pick(1, 4), "Hv": m.pick(2, 8), "K": 128, "V": 128}
    return prompts(m, lengths, **{**sizes, **changes})


@case
def one_sequence(m: Maker) -> GdnCall:
    return wide(m, [150])


@case
def lengths_around_the_chunk(m: Maker) -> GdnCall:
    return wide(m, [1, 63, 64, 65, 127, 128, 129] if m.real_sizes else [1, 63, 64, 65])


@case
def empty_sequences_first_between_and_last(m: Maker) -> GdnCall:
    return wide(m, [0, 65, 0, 0, 64, 3, 0])


@case
def only_empty_sequences(m: Maker) -> GdnCall:
    return wide(m, [0, 0, 0], T=70)


@case
def lengths_in_int64(m: Maker) -> GdnCall:
    return wide(m, [3, 66], cu_dtype=torch.int64)


@case
def tokens_of_no_sequence_are_not_read(m: Maker) -> GdnCall:
    call = wide(m, [65, 10], T=160)
    for name in ("q", "k", "v", "g", "beta"):
        call.tensors[name][:, 75:] = math.nan  # type: ignore[index]
    return call


@case
def rows_of_a_batch(m: Maker) -> GdnCall:
    return wide(m, None, B=2, T=70)


@case
def one_row(m: Maker) -> GdnCall:
    return wide(m, None, T=70)


@case
def one_row_with_norms(m: Maker) -> GdnCall:
    return wide(m, None, T=70, qk_l2norm=True)


@case
def one_token(m: Maker) -> GdnCall:
    return wide(m, [1])


@case
def no_initial_state(m: Maker) -> GdnCall:
    return wide(m, [70, 0, 5], state=None)


@case
def initial_state_in_bfloat16(m: Maker) -> GdnCall:
    return wide(m, [70, 0, 5], state=torch.bfloat16)


@case
def without_final_state(m: Maker) -> GdnCall:
    return wide(m, [70, 0, 5], output_final_state=False)


@case
def three_value_heads_for_each_head_of_q(m: Maker) -> GdnCall:
    return wide(m, [70, 5], Hq=2, Hv=6)


@case
def as_many_heads_with_norms(m: Maker) -> GdnCall:
    call = wide(m, [70, 5], Hq=2, Hv=2, qk_l2norm=True)
    return call.with_(k=3 * call.tensors["k"])  # type: ignore[operator]


@case
def negative_scale(m: Maker) -> GdnCall:
    return wide(m, [70], scale=-2.0)


@case
def batch_invariant(m: Maker) -> GdnCall:
    return wide(m, [130, 9], batch_invariant=True)


@case
def no_forgetting(m: Maker) -> GdnCall:
    call = wide(m, [130])
    return call.with_(g=torch.zeros_like(call.tensors["g"]))  # type: ignore[arg-type]


@case
def forgetting_at_once(m: Maker) -> GdnCall:
    """The library's floor lets 1e-10 of the state through."""
    call = wide(m, [130])
    return call.with_(g=torch.full_like(call.tensors["g"], -30.0))  # type: ignore[arg-type]


@case
def slow_decay_over_one_chunk_of_one_head(m: Maker) -> GdnCall:
    call = wide(m, [64], Hq=1, Hv=1)
    alpha = 0.99 + 0.01 * m.normal(1, 64, 1, dtype=torch.float32).sigmoid()
    return call.with_(g=alpha.log())


@case
def gates_in_the_dtype_of_the_inputs(m: Maker) -> GdnCall:
    call = wide(m, [70])
    gates = {n: call.tensors[n].to(m.dtype) for n in ("g", "beta")}  # type: ignore[union-attr]
    return call.with_(**gates)


@case
def unnormalised_keys_at_the_limit(m: Maker) -> GdnCall:
    """`beta |k|²` of 2, keys of length 8: the library inverts in float16."""
    call = wide(m, [130])
    k = call.tensors["k"]
    assert k is not None
    k = (8 * k.float()).to(m.dtype)
    group = call.tensors["v"].shape[2] // k.shape[2]  # type: ignore[union-attr]
    limit = 2 / k.float().square().sum(-1)
    return call.with_(k=k, beta=0.999 * limit.repeat_interleave(group, -1))


@case
def slices_of_a_packed_projection(m: Maker) -> GdnCall:
    packed, gates = m.normal(1, 70, 2 + 2 + 4, 128), m.normal(1, 70, 9, dtype=torch.float32)
    return prompts(m, [60, 10], Hq=2, Hv=4, K=128, V=128).with_(
        q=packed[:, :, :2],
        k=packed[:, :, 2:4] / 24,
        v=packed[:, :, 4:],
        g=-gates[..., :4].abs(),
        beta=gates[..., 4:8].sigmoid(),
    )


@case
def values_whose_last_stride_is_not_one(m: Maker) -> GdnCall:
    call = wide(m, [60, 10])
    heads = call.tensors["v"].shape[2]  # type: ignore[union-attr]
    return call.with_(v=m.normal(1, 128, heads, 70).permute(0, 3, 2, 1))


@case
def initial_state_taken_out_of_a_pool(m: Maker) -> GdnCall:
    call = wide(m, [70, 5, 0])
    heads = call.tensors["v"].shape[2]  # type: ignore[union-attr]
    pool = m.normal(7, 128, 2, heads, 160, dtype=torch.float32)
    return call.with_(initial_state=pool[1::2, :, 1, :, 3:131].transpose(1, 2))


def state_layouts(call: GdnCall) -> list[tuple[torch.Tensor, bool, bool]]:
    """The call's initial state in other layouts; whether it is V-first; whether it is copied."""
    state = call.tensors["initial_state"]
    assert state is not None
    v_first = state.transpose(-1, -2).contiguous()
    shifted = state.new_empty(state.numel() + 1)[1:].view(v_first.shape).copy_(v_first)
    return [
        (state, False, True),
        (v_first.transpose(-1, -2), False, False),
        (v_first, True, False),
        (shifted, True, True),
    ]


# ------------------------------------------------------------------------------- states in a pool

BuildPool = Callable[[Maker], PoolCall]
POOL_CASES: dict[str, BuildPool] = {}


def pool_case(function: BuildPool) -> BuildPool:
    POOL_CASES[function.__name__] = function
    return function


def wide_pool(m: Maker, lengths: list[int] | None, *args: Any, **changes: Any) -> PoolCall:
    """Prompts with head sizes of 128 over a pool of 6 states."""
    sizes = {"Hq": m.pick(1, 4), "Hv": m.pick(2, 8), "K": 128, "V": 128}
    return pooled(m, lengths, *args, **{**sizes, **changes})


@pool_case
def states_go_back_to_where_they_came_from(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5, 130], [4, 0, 2])


@pool_case
def states_go_to_other_places(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5, 130], [4, 4, 2], [0, 1, 5])


@pool_case
def negative_read_starts_from_zero(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5, 64], [-1, 3, -9], [0, 3, 4])


@pool_case
def negative_write_drops_the_last_state(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5, 64], [1, 3, 2], [-1, 3, -9])


@pool_case
def neither_read_nor_written(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [-1, -1])


@pool_case
def places_that_the_pool_does_not_have(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5, 9], [6, 3, 2**40], [0, 6, 2**40])


@pool_case
def places_in_int32_at_its_limits(m: Maker) -> PoolCall:
    least, most = -(2**31), 2**31 - 1
    return wide_pool(m, [7, 65, 3], [least, most, 2], [most, least, 1], index=torch.int32)


@pool_case
def empty_sequences_copy_their_state(m: Maker) -> PoolCall:
    return wide_pool(m, [0, 65, 0, 0], [4, 1, -1, 3], [0, 1, 2, 3])


@pool_case
def no_states(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 3], [0, -1], [0, 1], P=0)


@pool_case
def rows_of_a_batch_without_cu_seqlens(m: Maker) -> PoolCall:
    return wide_pool(m, None, [5, -1], [1, 2], B=2, T=70)


@pool_case
def what_no_sequence_reads_is_not_read(m: Maker) -> PoolCall:
    call = wide_pool(m, [65, 10], [4, -1], [1, 2], T=130)
    call.pool[torch.tensor([0, 1, 2, 3, 5])] = math.nan
    for name in ("q", "k", "v", "g", "beta"):
        call.tensors[name][:, 75:] = math.nan  # type: ignore[index]
    return call


@pool_case
def pool_in_bfloat16(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=torch.bfloat16)


@pool_case
def pool_in_float16(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=torch.float16)


@pool_case
def states_with_v_first(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], state_v_first=True, qk_l2norm=True)


@pool_case
def pool_of_which_nothing_is_split(m: Maker) -> PoolCall:
    return wide_pool(m, [130, 9], [4, 2], batch_invariant=True)


def _layer(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    """A layer's slice of a larger pool, V-first."""
    return m.normal(P, 3, Hv, V, K, dtype=torch.float32)[:, 1].mT


def _k_first(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, Hv, K, V, dtype=torch.float32)


def _inner_strides(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, V, Hv, 2, K, 2, dtype=torch.float32)[:, :, :, 1, :, 1].permute(0, 2, 3, 1)


def _not_aligned(m: Maker, P: int, Hv: int, K: int, V: int) -> torch.Tensor:
    return m.normal(P, Hv, V, K + 1, dtype=torch.float32)[..., 1:].mT


@pool_case
def pool_that_is_a_layer_of_a_larger_one(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=_layer)


@pool_case
def pool_in_k_first_memory(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=_k_first)


@pool_case
def pool_with_inner_strides(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=_inner_strides)


@pool_case
def pool_that_is_not_aligned(m: Maker) -> PoolCall:
    return wide_pool(m, [70, 5], [4, -1], [0, 1], pool=_not_aligned)
