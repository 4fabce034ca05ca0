"""Cases of `gdn_decode`, in every form and tier, against the oracle (contract, section 5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conformance.calls import Maker, of_dtype, same_bits
from tests.conformance.gdn_calls import prompts
from tests.conformance.gdn_decode_calls import (
    STEP_TIERS,
    StepCall,
    check_or_skip,
    copy_with_storage,
    step,
)
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]
Case = Callable[[Make], StepCall]
CASES: dict[str, Case] = {}
every_tier = pytest.mark.parametrize("tier", STEP_TIERS)
#: Of the cases that ask for none. tests/gpu runs them in float16 too.
DTYPES = (torch.float32, torch.bfloat16)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------- rows and tokens


@case
def one_token(make: Make) -> StepCall:
    m = make()
    return step(m, m.pick(2, 33))


@case
def several_tokens(make: Make) -> StepCall:
    return step(make(), Sq=3)


@case
def sixteen_tokens(make: Make) -> StepCall:
    return step(make(), 1, 16)


@case
def no_rows(make: Make) -> StepCall:
    return step(make(), 0)


@case
def no_rows_of_a_pool(make: Make) -> StepCall:
    return step(make(), 0, pool=3, reads=[], writes=[])


# -------------------------------------------------------------------------------- heads and sizes


@case
def as_many_heads_of_q_as_of_v(make: Make) -> StepCall:
    return step(make(), Hq=2, Hv=2)


@case
def three_value_heads_for_each_head_of_q(make: Make) -> StepCall:
    return step(make(), Hq=2, Hv=6)


@case
def key_size_below_value_size(make: Make) -> StepCall:
    return step(make(), Sq=2, K=16, V=72)


@case
def key_size_above_value_size(make: Make) -> StepCall:
    return step(make(), Sq=2, K=96, V=16)


@case
def sizes_that_are_no_powers_of_two(make: Make) -> StepCall:
    return step(make(), Sq=2, K=40, V=24)


@case
def sizes_of_one(make: Make) -> StepCall:
    return step(make(), Sq=2, K=1, V=1)


@case
def heads_of_a_model(make: Make) -> StepCall:
    m = make()
    return step(m, 2, Hq=m.pick(1, 16), Hv=m.pick(2, 32), K=128, V=128, qk_l2norm=True)


@case
def widest_heads(make: Make) -> StepCall:
    return step(make(), 1, Sq=2, K=256, V=256)


# ----------------------------------------------------------------------------------------- states


@case
def states_in_float16(make: Make) -> StepCall:
    return step(make(), Sq=2, state=torch.float16)


@case
def states_in_bfloat16(make: Make) -> StepCall:
    return step(make(), Sq=2, state=torch.bfloat16)


@case
def states_with_v_first(make: Make) -> StepCall:
    return step(make(), Sq=2, K=16, V=32, state_v_first=True)


@case
def states_that_are_k_first_in_memory(make: Make) -> StepCall:
    call = step(make(), Sq=2, K=48, V=32)
    return call.with_(state=call.state.contiguous())


@case
def states_that_are_k_first_in_memory_and_v_first_to_the_caller(make: Make) -> StepCall:
    m = make()
    state = m.normal(2, 2, 16, 32, dtype=torch.float32).mT
    return step(m, K=16, V=32, state_v_first=True).with_(state=state)


@case
def states_with_an_inner_stride(make: Make) -> StepCall:
    m = make()
    state = m.normal(2, 2, 16, 2, 40, dtype=torch.float32)[:, :, :, 1, 3:35]
    return step(m, K=16, V=32).with_(state=state)


@case
def states_with_heads_last_in_memory(make: Make) -> StepCall:
    m = make()
    state = m.normal(2, 16, 24, 2, dtype=torch.float32).permute(0, 3, 1, 2)
    return step(m, K=16, V=24).with_(state=state)


@case
def states_that_do_not_begin_on_16_bytes(make: Make) -> StepCall:
    m = make(torch.float16)
    memory = m.normal(2 * 2 * 16 * 16 + 1)
    return step(m).with_(state=memory[1:].view(2, 2, 16, 16))


# ------------------------------------------------------------------------------------------ pools


@case
def places_of_a_pool(make: Make) -> StepCall:
    return step(make(), 3, Sq=2, pool=7, reads=[5, 0, 3])


@case
def places_in_int64(make: Make) -> StepCall:
    return step(make(), 3, pool=7, reads=[5, 0, 3], index_dtype=torch.int64)


@case
def places_written_that_are_not_those_read(make: Make) -> StepCall:
    return step(make(), 3, Sq=2, pool=7, reads=[5, 0, 3], writes=[1, 0, 2])


@case
def places_by_every_second_index(make: Make) -> StepCall:
    m = make()
    both = m.integers([[5, 6], [0, 2], [3, 3]], torch.int64)
    call = step(m, 3, pool=7, reads=[0, 0, 0])
    return call.with_(read_indices=both[:, 0], write_indices=both[:, 1].int())


@case
def rows_that_start_from_zero(make: Make) -> StepCall:
    call = step(make(), 3, Sq=2, pool=4, reads=[-1, 2, -7], writes=[0, 2, 1])
    call.state[[0, 1, 3]] = float("nan")  # never read
    return call


@case
def rows_that_write_nothing(make: Make) -> StepCall:
    return step(make(), 3, Sq=2, pool=4, reads=[0, 2, 3], writes=[-1, 2, -100])


@case
def rows_of_padding(make: Make) -> StepCall:
    call = step(make(), 4, Sq=2, pool=3, reads=[-1, 2, -1, -2])
    for name in ("q", "k", "v", "g", "beta", "a", "b"):
        tensor = call.tensors[name]
        assert tensor is not None
        tensor[[0, 2, 3]] = float("nan")
    return call


@case
def only_padding(make: Make) -> StepCall:
    return step(make(), 2, Sq=2, pool=3, reads=[-1, -1])


@case
def places_past_the_end_of_the_pool(make: Make) -> StepCall:
    """They count as negative: nothing beside the pool is touched."""
    return step(make(), 3, pool=3, reads=[3, 1, 1 << 30], writes=[0, 3, 1 << 30])


@case
def pool_without_a_place(make: Make) -> StepCall:
    return step(make(), 2, pool=0, reads=[-1, 0])


@case
def state_after_each_token(make: Make) -> StepCall:
    return step(make(), 2, Sq=3, pool=9, reads=[4, 1], writes=[[0, 2, 4], [1, 7, 8]])


@case
def state_after_some_tokens(make: Make) -> StepCall:
    places = [[-1, 2, -1], [-1, -1, -1], [3, -1, 5], [-1, -1, -1]]
    return step(make(), 4, Sq=3, pool=9, reads=[4, 1, -1, -1], writes=places)


@case
def place_that_two_tokens_of_a_row_write(make: Make) -> StepCall:
    return step(make(), 2, Sq=3, pool=4, reads=[0, 1], writes=[[3, 0, 3], [1, 1, 1]])


@case
def state_after_the_only_token(make: Make) -> StepCall:
    return step(make(), 2, pool=4, reads=[0, 1], writes=[[3], [-1]])


@case
def state_after_each_token_in_bfloat16(make: Make) -> StepCall:
    writes = [[0, 2, 4], [1, 7, 8]]
    return step(make(), 2, 3, state=torch.bfloat16, pool=9, reads=[4, 1], writes=writes)


@case
def pool_with_gaps(make: Make) -> StepCall:
    """One layer of a pool of three, its states V-first with rows that are longer than K."""
    m = make()
    pool = m.normal(7, 3, 2, 32, 20, dtype=torch.float32)[:, 1, :, :, :16]
    call = step(m, 3, Sq=2, K=16, V=32, pool=7, reads=[5, 0, 3], writes=[[1, 5], [2, -1], [-1, 3]])
    return call.with_(state=pool.mT)


# ------------------------------------------------------------------------------------------ gates


@case
def no_forgetting(make: Make) -> StepCall:
    call = step(make(), Sq=3)
    return call.with_(g=torch.zeros_like(call.tensors["g"]))


@case
def forgetting_at_once(make: Make) -> StepCall:
    call = step(make(), Sq=3)
    return call.with_(
        g=torch.full_like(call.tensors["g"], -30.0), a=torch.full_like(call.tensors["a"], 80.0)
    )


@case
def gates_slightly_positive(make: Make) -> StepCall:
    call = step(make(), Sq=3)
    return call.with_(g=call.tensors["g"].abs() / 100)  # type: ignore[union-attr]


@case
def projections_far_from_zero(make: Make) -> StepCall:
    call = step(make(), 3, Sq=2)
    far = torch.tensor([-90.0, -20.0, 90.0])[:, None, None].to(call.state.device)
    return call.with_(
        a=(call.tensors["a"] + far).to(call.tensors["a"].dtype),  # type: ignore[operator,union-attr]
        b=(call.tensors["b"] - far).to(call.tensors["b"].dtype),  # type: ignore[operator,union-attr]
    )


@case
def gates_in_the_dtype_of_the_inputs(make: Make) -> StepCall:
    m = make(torch.float16)
    call = step(m, Sq=2)
    heads = {n: call.tensors[n].half() for n in ("A_log", "dt_bias")}  # type: ignore[union-attr]
    return call.with_(g=call.tensors["g"].half(), beta=call.tensors["beta"].half(), **heads)  # type: ignore[union-attr]


@case
def projections_in_float32(make: Make) -> StepCall:
    m = make(torch.float16)
    call = step(m, Sq=2)
    return call.with_(a=call.tensors["a"].float(), b=call.tensors["b"].float())  # type: ignore[union-attr]


# --------------------------------------------------------------------------- keys, norms, scales


@case
def unnormalised_keys(make: Make) -> StepCall:
    m = make()
    call = step(m, Sq=3, K=32)
    k = 8 * m.normal(2, 3, 1, 32, dtype=torch.float32) / 32**0.5
    strength = 2 * call.tensors["beta"] / k.square().sum(-1)  # type: ignore[operator]
    b = -m.normal(2, 3, 2).abs() - 4
    return call.with_(k=k.to(m.dtype), beta=strength * 0.99, b=b)


@case
def norms_taken_inside(make: Make) -> StepCall:
    m = make()
    return step(m, Sq=2, Hq=2, Hv=2, K=40, qk_l2norm=True).with_(k=3 * m.normal(2, 2, 2, 40))


@case
def norms_of_tiny_and_zero_vectors(make: Make) -> StepCall:
    call = step(make(), 3, Sq=2, qk_l2norm=True)
    q, k = call.tensors["q"], call.tensors["k"]
    assert q is not None and k is not None
    q[0], k[0] = 0, 0
    k[1] *= 1e-3
    return call


@case
def scale_of_zero(make: Make) -> StepCall:
    return step(make(), scale=0.0)


@case
def scale_of_minus_two(make: Make) -> StepCall:
    return step(make(), scale=-2.0)


# ---------------------------------------------------------------------------------- dtypes, layout


@case
def inputs_in_bfloat16(make: Make) -> StepCall:
    return step(make(torch.bfloat16), Sq=2, K=32, qk_l2norm=True)


@case
def inputs_in_float16(make: Make) -> StepCall:
    return step(make(torch.float16), Sq=2, K=32, qk_l2norm=True)


@case
def slices_of_a_packed_projection(make: Make) -> StepCall:
    m = make()
    B, Sq, Hq, Hv, K, V = 3, 2, 2, 4, 16, 8
    packed = m.normal(B, Sq, 2 * Hq * K + Hv * V + 6)
    gates = m.normal(B, Sq, 4 * Hv + 1, dtype=torch.float32)
    at = Hq * K
    return step(m, B, Sq, Hq=Hq, Hv=Hv, K=K, V=V).with_(
        q=packed[..., :at].view(B, Sq, Hq, K),
        k=packed[..., at : 2 * at].view(B, Sq, Hq, K) / 8,
        v=packed[..., 2 * at : 2 * at + Hv * V].view(B, Sq, Hv, V),
        g=-gates[..., :Hv].abs(),
        beta=gates[..., Hv : 2 * Hv].sigmoid(),
        a=gates[..., 2 * Hv : 3 * Hv],
        b=gates[..., 3 * Hv : 4 * Hv],
    )


@case
def tokens_whose_last_stride_is_not_one(make: Make) -> StepCall:
    m = make()
    q, k = m.normal(2, 2, 16, 1, 3).permute(0, 1, 4, 3, 2)
    v = m.normal(2, 16, 2, 3).permute(0, 3, 2, 1)
    return step(m, Sq=3).with_(q=q, k=k / 8, v=v)


@case
def expanded_gates_and_heads(make: Make) -> StepCall:
    m = make()
    call = step(m, Sq=2, Hv=4)
    g = -m.normal(2, 1, 1, dtype=torch.float32).abs()
    one = m.normal(1, dtype=torch.float32)
    return call.with_(
        g=g.expand(2, 2, 4), beta=g.exp().expand(2, 2, 4), a=g.expand(2, 2, 4),
        A_log=one.expand(4), dt_bias=m.normal(8, dtype=torch.float32)[::2],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- run


@every_tier
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str, dtype: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    check_or_skip(CASES[name](of_dtype(maker, dtype)), tier, must_run)


# ------------------------------------------------------------------------- several calls together


@every_tier
def test_tokens_one_by_one_equal_one_call(tier: str, maker: Make, must_run: frozenset[str]) -> None:
    call = step(maker(), 3, Sq=5, K=32)
    call.require(tier, must_run)
    out, state = call.with_(state=copy_with_storage(call.state)).run(tier)
    one = call.with_(state=copy_with_storage(call.state))
    outs = []
    for t in range(5):
        cut = {n: call.tensors[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
        outs.append(one.with_(**cut).run(tier)[0])
    assert_gdn_close(torch.cat(outs, 1), out, inputs=out.dtype, what="out")
    assert_gdn_close(one.state, state, inputs=out.dtype, what="state")


@every_tier
def test_decode_goes_on_where_prefill_ended(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker()
    whole = prompts(m, None, B=2, T=72, Hq=1, Hv=2, K=16, V=32)
    names = ("q", "k", "v", "g", "beta")

    def cut(begin: int, end: int) -> dict[str, torch.Tensor]:
        return {n: whole.tensors[n][:, begin:end] for n in names}  # type: ignore[index]

    out, final_state = whole.run("reference")
    _, state = whole.with_(**cut(0, 67)).run("reference")
    call = step(m, 2, 5, K=16, V=32).with_("gdn_decode", **cut(67, 72), state=state)
    call.require(tier, must_run)
    step_out, new_state = call.run(tier)
    assert_gdn_close(step_out, out[:, 67:], inputs=out.dtype, what="out")
    assert_gdn_close(new_state, final_state, inputs=out.dtype, what="state")


@every_tier
def test_rejected_tokens_are_taken_back(tier: str, maker: Make, must_run: frozenset[str]) -> None:
    """Speculative decoding: of four tokens, two of one row and none of the other are kept."""
    call = step(maker(), 2, Sq=4, pool=10, reads=[0, 5], writes=[[1, 2, 3, 4], [6, 7, 8, 9]])
    call.require(tier, must_run)
    call = call.with_(state=copy_with_storage(call.state))
    first = copy_with_storage(call.state)
    call.run(tier)
    kept = {n: call.tensors[n][:, :2] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    plain = call.with_(
        **kept, state=first, read_indices=call.tensors["read_indices"], write_indices=None
    )
    plain.run(tier)
    assert_gdn_close(call.state[2], first[0], inputs=torch.float32, what="state after two tokens")
    assert same_bits(call.state[5], step(maker(), 2, Sq=4, pool=10).state[5])


@every_tier
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_is_float32_between_the_tokens_of_a_call(
    tier: str, state_dtype: torch.dtype, maker: Make, must_run: frozenset[str]
) -> None:
    """Increments far below the rounding of the state add up within one call."""
    call = step(maker(torch.float32), 1, Sq=16, Hv=1, state=state_dtype)
    ones = torch.ones_like(call.tensors["k"])  # type: ignore[arg-type]
    state = torch.full_like(call.state, 100.0)
    call = call.with_(
        q=ones / 4, k=ones / 4, v=torch.full_like(call.tensors["v"], 400.05),  # type: ignore[arg-type]
        g=torch.zeros_like(call.tensors["g"]), beta=torch.full_like(call.tensors["beta"], 0.5),  # type: ignore[arg-type]
        state=state, scale=1.0,
    )  # fmt: skip
    call.require(tier, must_run)
    out, _ = call.run(tier)
    assert abs(float(out[0, -1, 0, 0]) - 400.05) < 1e-3
