"""`gdn_decode` on the GPU: all cases in all dtypes, chains, graphs, compiled steps, large pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import torch_attn_tiers
from tests.conformance import test_gdn_decode as conformance
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_decode_calls import (
    STEP_TIERS,
    StepCall,
    check_or_skip,
    copy_with_storage,
    step,
)
from tests.conformance.test_gdn_decode import (  # noqa: F401  (collects them again, here)
    test_decode_goes_on_where_prefill_ended,
    test_rejected_tokens_are_taken_back,
    test_state_is_float32_between_the_tokens_of_a_call,
    test_tokens_one_by_one_equal_one_call,
)
from tests.gpu.capturing import capture
from tests.gpu.compiled_pools import check_compiled
from tests.test_ops_gdn_decode import CASES as OPCHECK_CASES
from tests.test_ops_gdn_decode import FORMS, _call
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_tier = pytest.mark.parametrize("tier", STEP_TIERS)
with_states = pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


def _model(m: Maker, B: int, Sq: int = 1, **options: Any) -> StepCall:
    """Rows of Qwen3-Next."""
    return step(m, B, Sq, Hq=16, Hv=32, K=128, V=128, qk_l2norm=True, **options)


@every_tier
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", conformance.CASES)
def test_case_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, tier: str, must_run: frozenset[str]
) -> None:
    def make(dtype: torch.dtype = dtype, seed: int = 0) -> Maker:
        return Maker(dtype, "cuda", real_sizes=True, seed=seed)

    call = conformance.CASES[name](make)
    if dtype is torch.bfloat16:
        check_or_skip(call, tier, must_run)
    else:  # one form will do: each is a kernel to be compiled
        call.require(tier, must_run)
        call.with_("gdn_decode_.raw").check(tier)


@with_states
@pytest.mark.parametrize("B,Sq", [(1, 1), (9, 1), (64, 1), (3, 16)])
def test_heads_of_a_model_agree_with_the_oracle(
    B: int, Sq: int, state: torch.dtype, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker(torch.bfloat16)
    check_or_skip(_model(m, B, Sq, state=state), "triton", must_run)
    places = [[b * Sq + t for t in range(Sq)] for b in range(B)]
    reads = [b * Sq for b in range(B)]
    pooled = _model(m, B, Sq, state=state, pool=B * Sq, reads=reads, writes=places)
    check_or_skip(pooled, "triton", must_run)


@with_states
def test_steps_in_a_row_equal_steps_that_were_waited_for(
    state: torch.dtype, maker: Make, must_run: frozenset[str]
) -> None:
    """A launch begins before the one ahead has ended; it may not read what that one writes."""
    call = _model(maker(torch.bfloat16), 40, state=state).with_("gdn_decode_.raw")
    call.require("triton", must_run)
    waited, run, captured = (call.with_(state=copy_with_storage(call.state)) for _ in range(3))
    for _ in range(30):
        out, _ = waited.run("triton")
        torch.cuda.synchronize()
    for _ in range(30):
        other, _ = run.run("triton")
    assert same_bits(out, other) and same_bits(waited.state, run.state)

    def six_steps() -> torch.Tensor:
        return [captured.run("triton")[0] for _ in range(6)][-1]

    graph, third = capture(six_steps)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, third) and same_bits(waited.state, captured.state)


@every_tier
@pytest.mark.parametrize("form", ["gdn_decode_", "gdn_decode_.raw"])
def test_replays_follow_indices_that_change(
    tier: str, form: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker(torch.float16)
    call = step(m, 4, 2, K=64, V=32, pool=12, reads=[0] * 4, writes=[[0, 0]] * 4).with_(form)
    call.require(tier, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars, tier=tier)
    graph, (out, state) = capture(lambda: call.run(tier))
    first = state.clone()
    for reads, writes in (
        ([3, 1, 0, 2], [[3, 4], [-1, 1], [0, 5], [2, 2]]),
        ([-1, -1, 7, -1], [[-1, -1], [0, 1], [7, 8], [-1, 9]]),
        ([11, 10, 9, 99], [[11, -1], [-1, -1], [9, 99], [-5, -1]]),
    ):
        state.copy_(first)
        call.tensors["read_indices"].copy_(m.integers(reads))  # type: ignore[union-attr]
        call.tensors["write_indices"].copy_(m.integers(writes))  # type: ignore[union-attr]
        expected = call.expected()
        out.fill_(float("nan"))
        graph.replay()
        assert_gdn_close(out, expected.out, inputs=torch.float16, what="out")
        for place in range(12):
            if place in expected.written:
                wanted = expected.written[place]
                assert_gdn_close(state[place], wanted, inputs=torch.float16, what=f"state {place}")
            else:
                assert same_bits(state[place], first[place])


@every_tier
def test_the_host_does_not_wait(
    tier: str, maker: Make, must_run: frozenset[str], request: pytest.FixtureRequest
) -> None:
    call = _model(maker(), 4, pool=9, reads=[1, 0, -1, 5]).with_("gdn_decode_.raw")
    call.require(tier, must_run)
    call.run(tier)  # builds
    request.getfixturevalue("no_host_sync")
    call.run(tier)


def test_nothing_is_allocated_but_the_output(maker: Make, must_run: frozenset[str]) -> None:
    call = _model(maker(torch.bfloat16), 64)
    call.require("triton", must_run)
    call.run("triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = call.run("triton")
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 2 + 512


def test_cold_capture_names_the_call_to_make(must_run: frozenset[str]) -> None:
    m = Maker(torch.float16, "cuda", seed=1)
    call = step(m, 2, 3, K=24, V=56)  # sizes that no other test has
    call.require("triton", must_run)
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match="prepare\\('gdn_decode_'"):
        capture(lambda: call.op()(*call.args()))
    explanation = torch_attn_tiers.prepare(call.op(), *call.args())
    assert explanation.chosen == "triton"
    graph, _ = capture(lambda: call.run("triton"))
    graph.replay()
    torch.cuda.synchronize()


def test_place_beyond_2_to_the_31_elements(maker: Make, must_run: frozenset[str]) -> None:
    """Place 4099 of states of 32 x 128 x 128: elements from 2^31 on."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    m = maker(torch.bfloat16)
    call = _model(m, 2, 2, pool=3, reads=[2, 0], writes=[[0, 2], [1, -1]])
    call.require("triton", must_run)
    expected = call.expected()
    pool = torch.empty(4100, 32, 128, 128, device="cuda")
    places = m.integers([4098, 1, 4099], torch.int64)
    pool[places] = call.state.mT
    index = {n: call.tensors[n] for n in ("read_indices", "write_indices")}
    large = {n: torch.where(i >= 0, places[i.clamp(min=0)], -1) for n, i in index.items()}  # type: ignore[union-attr,operator]
    out, _ = call.with_(state=pool.mT, **large).run("triton")
    assert_gdn_close(out, expected.out, inputs=torch.bfloat16, what="out")
    for place, wanted in expected.written.items():
        got = pool[places[place]].mT
        assert_gdn_close(got, wanted, inputs=torch.bfloat16, what=f"state {place}")


class Layer(torch.nn.Module):
    """A step of two layers over pools that are buffers."""

    def __init__(self, m: Maker, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("pools", m.normal(2, 9, 4, 64, 32, dtype=torch.float32))
        self.register_buffer("heads", m.normal(2, 4, dtype=torch.float32))

    def forward(self, q: Any, v: Any, gate: Any, reads: Any, writes: Any) -> torch.Tensor:
        for layer in range(2):
            gates = (-gate.abs().float(), gate.float().sigmoid())
            if self.form == "gdn_decode_.raw":
                gates = (gate, gate + 1, *self.heads)
            out = FORMS[self.form](
                q * 0.5, q, v, *gates, self.pools[layer], reads, writes, qk_l2norm=True,
                state_v_first=True,
            )  # fmt: skip
            v = v + out
        return v


@pytest.mark.parametrize("form", ["gdn_decode_", "gdn_decode_.raw"])
@pytest.mark.parametrize("each", [False, True])
def test_compiled_step_is_one_graph_and_copies_no_pool(form: str, each: bool, maker: Make) -> None:
    m = maker()
    reads, writes = m.integers([0, 1, 2]), m.integers([[0, 3], [1, 4], [2, 5]])

    def arguments(i: int) -> tuple[Any, ...]:
        reads.copy_(m.integers([i, 5, -1]))
        writes.copy_(m.integers([[i, 8], [-1, 5], [-1, 7]]))
        args = (m.normal(3, 2, 2, 32), m.normal(3, 2, 4, 64), m.normal(3, 2, 4), reads)
        return (*args, writes if each else writes[:, 1])

    check_compiled(Layer(m, form), Layer(m, form), arguments)


@pytest.mark.parametrize("form,name", OPCHECK_CASES)
def test_opcheck(form: str, name: str) -> None:
    args, scalars = _call(form, name)
    opcheck(FORMS[form], tuple(copy_with_storage(a, "cuda") for a in args), scalars)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype, maker: Make) -> None:
    m = maker(dtype)
    a, b = (30 * m.normal(1, 5000, 64)).split(32, -1)
    heads = m.normal(2, 32, dtype=torch.float32)
    got = torch.ops.attn_tiers.gdn_gates(a, b, *heads, tier="triton")
    plain = torch.ops.attn_tiers.gdn_gates(a, b, *heads, tier="reference")
    for one, other in zip(got, plain):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-37)
