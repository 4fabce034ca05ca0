"""Cases of `gdn_chunk_prefill`, each in every tier, against the oracle (contract, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.calls import Maker, of_dtype
from tests.conformance.gdn_calls import GDN_TIERS, GdnCall, check_or_skip, prompts

Make = Callable[..., Maker]
Case = Callable[[Make], GdnCall]
CASES: dict[str, Case] = {}
OVERLOADS = ("default", "h_fla", "h_compact")
#: Of the cases that ask for none. tests/gpu runs them in float16 too.
DTYPES = (torch.float32, torch.bfloat16)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------- lengths


@case
def one_sequence(make: Make) -> GdnCall:
    return prompts(make(), [150])


@case
def rows_of_a_batch_without_cu_seqlens(make: Make) -> GdnCall:
    return prompts(make(), None, B=2, T=70)


@case
def lengths_around_the_chunk(make: Make) -> GdnCall:
    return prompts(make(), [1, 63, 64, 65, 127, 128, 129], Hv=1)


@case
def lengths_in_int64(make: Make) -> GdnCall:
    return prompts(make(), [3, 66], cu_dtype=torch.int64)


@case
def many_short_sequences(make: Make) -> GdnCall:
    m = make()
    heads = m.pick(1, 32)
    return prompts(m, [m.pick(3, 16)] * m.pick(40, 2050), Hv=heads, K=16, V=16)


@case
def empty_sequences_first_between_and_last(make: Make) -> GdnCall:
    return prompts(make(), [0, 65, 0, 0, 64, 3, 0])


@case
def only_empty_sequences(make: Make) -> GdnCall:
    return prompts(make(), [0, 0, 0])


@case
def empty_sequences_in_front_of_tokens_of_none(make: Make) -> GdnCall:
    return prompts(make(), [0, 0], T=130)


@case
def no_sequences(make: Make) -> GdnCall:
    return prompts(make(), [], T=70)


@case
def no_tokens(make: Make) -> GdnCall:
    return prompts(make(), None, B=2, T=0)


@case
def tokens_past_the_last_sequence_are_zero_and_not_read(make: Make) -> GdnCall:
    call = prompts(make(), [65, 10], T=160)
    for name in ("q", "k", "v", "g", "beta"):
        tensor = call.tensors[name]
        assert tensor is not None
        tensor[:, 75:] = float("nan")
    return call


# -------------------------------------------------------------------------------- heads and sizes


@case
def as_many_heads_of_q_as_of_v(make: Make) -> GdnCall:
    return prompts(make(), [70], Hq=2, Hv=2)


@case
def three_value_heads_for_each_head_of_q(make: Make) -> GdnCall:
    return prompts(make(), [70], Hq=2, Hv=6)


@case
def key_size_below_value_size(make: Make) -> GdnCall:
    return prompts(make(), [70, 5], K=16, V=48)


@case
def key_size_above_value_size(make: Make) -> GdnCall:
    return prompts(make(), [70, 5], K=96, V=16)


@case
def sizes_that_are_no_powers_of_two(make: Make) -> GdnCall:
    return prompts(make(), [70], K=40, V=24)


@case
def widest_heads(make: Make) -> GdnCall:
    return prompts(make(), [70], Hv=1, K=256, V=256)


# ----------------------------------------------------------------------------------------- states


@case
def no_initial_state(make: Make) -> GdnCall:
    return prompts(make(), [70, 0, 5], state=None)


@case
def initial_state_in_bfloat16(make: Make) -> GdnCall:
    return prompts(make(), [70, 5], state=torch.bfloat16)


@case
def initial_state_in_float16(make: Make) -> GdnCall:
    return prompts(make(), [70, 5], state=torch.float16)


@case
def states_with_v_first(make: Make) -> GdnCall:
    call = prompts(make(), [70, 5], K=16, V=32, state_v_first=True)
    state = call.tensors["initial_state"]
    assert state is not None
    return call.with_(initial_state=state.transpose(-1, -2).contiguous())


@case
def initial_state_taken_out_of_a_pool(make: Make) -> GdnCall:
    m = make()
    call = prompts(m, [70, 5, 0], K=16, V=32)
    pool = m.normal(7, 2, 16, 2, 40, dtype=torch.float32)
    return call.with_(initial_state=pool[1::2, :, :, 1, 3:35])


@case
def without_final_state(make: Make) -> GdnCall:
    return prompts(make(), [70, 5], output_final_state=False)


# ------------------------------------------------------------------------------------------ gates


@case
def no_forgetting(make: Make) -> GdnCall:
    call = prompts(make(), [130])
    return call.with_(g=torch.zeros_like(call.tensors["g"]))


@case
def forgetting_at_once(make: Make) -> GdnCall:
    call = prompts(make(), [130])
    return call.with_(g=torch.full_like(call.tensors["g"], -30.0))


@case
def forgetting_at_once_then_slowly(make: Make) -> GdnCall:
    """A small sum of gates right after a large one, which a difference of running sums loses."""
    call = prompts(make(), [130])
    g = call.tensors["g"]
    assert g is not None
    sudden = (torch.arange(130, device=g.device) % 64 < 20)[None, :, None]
    return call.with_(g=torch.where(sudden, -30.0, g / 100))


@case
def forgetting_all(make: Make) -> GdnCall:
    """Gates whose exponential is zero, as of a runtime that begins anew within a sequence."""
    call = prompts(make(), [130])
    g = call.tensors["g"]
    assert g is not None
    t = torch.arange(130, device=g.device)[None, :, None]
    g = torch.where(t % 64 == 20, -1e9, g)  # -inf in float16
    return call.with_(g=torch.where(t % 64 == 40, -torch.inf, g))


@case
def gates_slightly_positive(make: Make) -> GdnCall:
    call = prompts(make(), [130])
    return call.with_(g=call.tensors["g"].abs() / 100)  # type: ignore[union-attr]


@case
def slow_decay_over_one_chunk_of_one_head(make: Make) -> GdnCall:
    m = make()
    call = prompts(m, [64], Hv=1)
    alpha = 0.99 + 0.01 * m.normal(1, 64, 1, dtype=torch.float32).sigmoid()
    return call.with_(g=alpha.log())


@case
def gates_in_the_dtype_of_the_inputs(make: Make) -> GdnCall:
    m = make(torch.float16)
    call = prompts(m, [70])
    return call.with_(g=call.tensors["g"].half(), beta=call.tensors["beta"].half())  # type: ignore[union-attr]


# --------------------------------------------------------------------------- keys, norms, scales


def _unnormalised(m: Maker) -> GdnCall:
    call = prompts(m, [130], K=32)
    k = 8 * m.normal(1, 130, 1, 32, dtype=torch.float32) / 32**0.5
    strength = 2 * call.tensors["beta"] / k.square().sum(-1)  # type: ignore[operator]
    return call.with_(k=k.to(m.dtype), beta=strength * 0.99)


@case
def unnormalised_keys(make: Make) -> GdnCall:
    return _unnormalised(make())


@case
def unnormalised_keys_in_float16(make: Make) -> GdnCall:
    return _unnormalised(make(torch.float16))


@case
def unnormalised_keys_in_bfloat16(make: Make) -> GdnCall:
    return _unnormalised(make(torch.bfloat16))


@case
def norms_taken_inside(make: Make) -> GdnCall:
    m = make()
    call = prompts(m, [70], Hq=2, Hv=2, qk_l2norm=True)
    return call.with_(k=3 * m.normal(1, 70, 2, 16))


@case
def norms_of_tiny_and_zero_vectors(make: Make) -> GdnCall:
    call = prompts(make(), [70], qk_l2norm=True)
    q, k = call.tensors["q"], call.tensors["k"]
    assert q is not None and k is not None
    q[:, 10:20], k[:, 10:20] = 0, 0
    k[:, 20:30] *= 1e-3
    return call


@case
def scale_of_zero(make: Make) -> GdnCall:
    return prompts(make(), [70], scale=0.0)


@case
def scale_of_minus_two(make: Make) -> GdnCall:
    return prompts(make(), [70], scale=-2.0)


# ---------------------------------------------------------------------------------- dtypes, layout


@case
def inputs_in_bfloat16(make: Make) -> GdnCall:
    return prompts(make(torch.bfloat16), [70, 65], qk_l2norm=True)


@case
def inputs_in_float16(make: Make) -> GdnCall:
    return prompts(make(torch.float16), [70, 65], qk_l2norm=True)


@case
def slices_of_a_packed_projection(make: Make) -> GdnCall:
    m = make()
    Hq, Hv, K, V = 2, 4, 16, 8
    packed = m.normal(1, 70, 2 * Hq * K + Hv * V + 6)
    gates = -m.normal(1, 70, 2 * Hv + 1, dtype=torch.float32).abs()
    at = Hq * K
    return prompts(m, [60, 10], Hq=Hq, Hv=Hv, K=K, V=V).with_(
        q=packed[..., :at].view(1, 70, Hq, K),
        k=packed[..., at : 2 * at].view(1, 70, Hq, K) / 8,
        v=packed[..., 2 * at : 2 * at + Hv * V].view(1, 70, Hv, V),
        g=gates[..., :Hv],
        beta=gates[..., Hv : 2 * Hv].exp(),
    )


@case
def heads_before_tokens_in_memory(make: Make) -> GdnCall:
    m = make()
    call = prompts(m, [60, 10], Hq=2, Hv=4)
    return call.with_(
        **{n: _heads_before_tokens(call.tensors[n]) for n in ("q", "k", "v", "g", "beta")}
    )


@case
def values_whose_last_stride_is_not_one(make: Make) -> GdnCall:
    m = make()
    return prompts(m, [60, 10]).with_(v=m.normal(1, 16, 2, 70).permute(0, 3, 2, 1))


@case
def keys_and_queries_whose_last_stride_is_not_one(make: Make) -> GdnCall:
    m = make()
    q, k = m.normal(2, 1, 1, 70, 16, 2)[..., 0].transpose(2, 3)
    return prompts(m, [60, 10]).with_(q=q, k=k / 8)


@case
def expanded_gates(make: Make) -> GdnCall:
    m = make()
    g = -m.normal(1, 70, 1, dtype=torch.float32).abs()
    return prompts(m, [60, 10]).with_(g=g.expand(1, 70, 2), beta=g.exp().expand(1, 70, 2))


def _heads_before_tokens(tensor: Any) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


# ------------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("tier", GDN_TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str, dtype: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    check_or_skip(CASES[name](of_dtype(maker, dtype)), tier, must_run)


WITH_CHECKPOINTS = (
    "one_sequence",
    "rows_of_a_batch_without_cu_seqlens",
    "lengths_around_the_chunk",
    "empty_sequences_first_between_and_last",
    "empty_sequences_in_front_of_tokens_of_none",
    "no_sequences",
    "no_tokens",
    "tokens_past_the_last_sequence_are_zero_and_not_read",
    "many_short_sequences",
    "key_size_below_value_size",
    "key_size_above_value_size",
    "states_with_v_first",
    "without_final_state",
    "inputs_in_bfloat16",
)


@pytest.mark.parametrize("tier", GDN_TIERS)
@pytest.mark.parametrize(
    ("overload", "dtype"),
    [("h_fla", torch.float32), ("h_compact", torch.float32), ("h_compact", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", WITH_CHECKPOINTS)
def test_case_with_checkpoints(
    name: str,
    overload: str,
    dtype: torch.dtype,
    tier: str,
    maker: Make,
    must_run: frozenset[str],
) -> None:
    call = CASES[name](of_dtype(maker, dtype)).with_(overload)
    check_or_skip(call, tier, must_run)


@pytest.mark.parametrize("tier", GDN_TIERS)
@pytest.mark.parametrize("h_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overload", OVERLOADS[1:])
def test_checkpoints_have_the_dtype_asked_for(
    overload: str, h_dtype: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), [130, 64]).with_(overload, h_dtype=h_dtype)
    check_or_skip(call, tier, must_run)
    assert call.run(tier)[2].dtype is h_dtype


@pytest.mark.parametrize("tier", GDN_TIERS)
@pytest.mark.parametrize("overload", OVERLOADS[1:])
@pytest.mark.parametrize("total_chunks", [0, 1, 2, 5, 9])
def test_states_beyond_the_rows_of_h_are_dropped(
    total_chunks: int, overload: str, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = prompts(maker(), [130, 64, 5]).with_(overload, total_chunks=total_chunks)
    check_or_skip(call, tier, must_run)
    h = call.run(tier)[2]
    assert h.shape[-4] == total_chunks
