"""`gdn_chunk_prefill` on the GPU: all cases in all dtypes, graphs, streams, memory, large sizes.

Most of the cases have heads that the tier `flashinfer` does not take: `test_flashinfer_gdn.py` has
those that it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops import reference
from csrc_free_ops.reference.gdn import l2norm
from tests.conformance.calls import Maker, poisoned_memory, same_bits
from tests.conformance.gdn_calls import GDN_TIERS, GdnCall, check_or_skip, prompts
from tests.conformance.test_gdn import CASES, OVERLOADS, WITH_CHECKPOINTS
from tests.conformance.test_gdn_invariants import *  # noqa: F403  (collects them again, here)
from tests.gpu.capturing import capture
from tests.gpu.gdn_graphs import SCRATCH, SEGMENT_SCRATCH, check_replays, ready
from tests.tolerances import assert_gdn_close
from torch_attn_tiers.problem import GdnProblem
from torch_attn_tiers.tiers.gdn.triton import _plan

Make = Callable[..., Maker]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_tier = pytest.mark.parametrize("tier", GDN_TIERS)
#: What their graphs use is their own. FlashInfer's replays share scratch and must not overlap.
OVERLAPPING = [tier for tier in GDN_TIERS if tier != "flashinfer"]


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


@every_tier
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_case_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, tier: str, must_run: frozenset[str]
) -> None:
    def make(dtype: torch.dtype = dtype, seed: int = 0) -> Maker:
        return Maker(dtype, "cuda", real_sizes=True, seed=seed)

    call = CASES[name](make)
    for overload in OVERLOADS if name in WITH_CHECKPOINTS else OVERLOADS[:1]:
        check_or_skip(call.with_(overload), tier, must_run)


def _model(
    m: Maker, lengths: list[int], T: int | None = None, Hq: int = 16, Hv: int = 32, **scalars: Any
) -> GdnCall:
    """Sequences with the heads of Qwen3-Next."""
    return prompts(m, lengths, T=T, Hq=Hq, Hv=Hv, K=128, V=128, qk_l2norm=True, **scalars)


@every_tier
@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_model_agree_with_the_oracle(
    dtype: torch.dtype, overload: str, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = _model(maker(dtype), [1000, 17, 63, 64, 65, 300, 1], T=1600)
    check_or_skip(call.with_(overload), tier, must_run)


@every_tier
@pytest.mark.parametrize("overload", OVERLOADS)
def test_replays_follow_lengths_that_change(
    tier: str, overload: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker(torch.float16)
    call = _model(m, [70, 200, 30], T=320, Hq=2, Hv=4).with_(overload)
    ready(call, tier, must_run)
    call.run(tier)  # warms up what belongs to the thread, cuBLAS handles above all
    check_replays(call, tier, m)


def _exact(call: GdnCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, last states and FLA's or compact checkpoints, K-first, in float64, on the GPU."""
    q, k, v, g, beta, state, bounds = call.args()
    assert q is not None and k is not None and v is not None and g is not None
    assert beta is not None and bounds is not None
    (_, T, Hv, V), K, N = v.shape, q.shape[3], bounds.shape[0] - 1
    out = torch.empty_like(v, dtype=torch.float64)
    last = out.new_empty(N, Hv, V, K)
    h = out.new_full((T // 64 + N, Hv, V, K), math.nan)
    reference.gdn_chunk_prefill(
        l2norm(q).double(), l2norm(k).double(), v.double(), g.double(), beta.double(),
        None if state is None else state.mT, bounds, out, last, h, None, scale=K**-0.5,
        h_layout="compact" if call.overload == "h_compact" else "fla",
    )  # fmt: skip
    return out, last.mT, h.mT


def _assert_close_to(
    exact: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, ...], overload: str
) -> None:
    inputs = result[0].dtype
    assert_gdn_close(result[0], exact[0], inputs=inputs, what="out")
    assert_gdn_close(result[1], exact[1], inputs=inputs, what="final_state")
    if overload != "default":
        h = result[2][0] if overload == "h_fla" else result[2]
        rows = int((~exact[2].isnan().flatten(1).any(1)).sum())
        assert_gdn_close(h[:rows], exact[2][:rows], inputs=inputs, what="h")
        assert bool(h[rows:].isnan().all()), "a row past the last chunk was written"


def _require_split(call: GdnCall, must_run: frozenset[str]) -> None:
    call.require("triton", must_run)
    if torch.cuda.get_device_properties().multi_processor_count < 96:
        pytest.skip("a smaller GPU does not split this")
    problem = torch_attn_tiers.explain(call.op(), *call.args(), **call.scalars).problem
    assert isinstance(problem, GdnProblem) and _plan(problem).split is not None


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sequence_of_few_heads_which_is_split(
    dtype: torch.dtype, overload: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = _model(maker(dtype), [32768], Hq=2, Hv=8).with_(overload)
    _require_split(call, must_run)
    with poisoned_memory():
        result = call.run("triton")
    _assert_close_to(_exact(call), result, overload)


@pytest.mark.parametrize("overload", OVERLOADS)
def test_replays_follow_lengths_that_change_where_sequences_are_split(
    overload: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker(torch.float16)
    T = 16000
    call = _model(m, [T, 0, 0], Hq=1, Hv=2).with_(overload)
    _require_split(call, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars, tier="triton")
    call.run("triton")
    graph, result = capture(lambda: call.run("triton"))
    bounds = call.tensors["cu_seqlens"]
    assert bounds is not None
    for values in (
        [0, T, T, T],
        [0, 0, 0, T],
        [0, 1024, 2049, T - 77],
        [0, 1023, 8000, 9000],
        [0, 1, 2, 3],
        [0, 0, 0, 0],
        [0, 5000, 5000, T],
    ):
        bounds.copy_(m.integers(values))
        for tensor in result:
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        graph.replay()
        _assert_close_to(_exact(call), result, overload)


@every_tier
@pytest.mark.parametrize("overload", OVERLOADS)
def test_the_host_does_not_wait(
    tier: str, overload: str, maker: Make, must_run: frozenset[str], request: pytest.FixtureRequest
) -> None:
    call = _model(maker(torch.float16), [70, 200, 30], Hq=2, Hv=4).with_(overload)
    ready(call, tier, must_run)
    call.run(tier)
    request.getfixturevalue("no_host_sync")
    call.run(tier)


@pytest.mark.parametrize("tier", OVERLAPPING)
def test_graphs_on_two_streams_beside_eager_calls(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    calls = [_model(maker(torch.float16, seed=i), [300, 5, 700], Hq=4, Hv=8) for i in range(3)]
    for call in calls:
        call.require(tier, must_run)
        torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars, tier=tier)
    wanted = [call.run(tier) for call in calls]
    graphs = [capture(lambda call=call: call.run(tier)) for call in calls[:2]]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager.append(calls[2].run(tier))
    torch.cuda.synchronize()
    for (_, result), expected in zip(graphs, wanted, strict=False):
        for got, one in zip(result, expected, strict=True):
            assert same_bits(got, one)
    for result in eager:
        for got, one in zip(result, wanted[2], strict=True):
            assert same_bits(got, one)


def test_without_checkpoints_there_is_no_memory_for_them(
    maker: Make, must_run: frozenset[str]
) -> None:
    call = _model(maker(torch.bfloat16), [8192])
    call.require("triton", must_run)
    call.run("triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call.run("triton")
    taken = torch.cuda.max_memory_allocated() - before
    kept = sum(t.numel() * t.element_size() for t in result)
    two_segments = 2 * SEGMENT_SCRATCH * 32
    assert taken - kept <= 1.01 * (SCRATCH * 8192 * 32 + two_segments)
    checkpoints = 128 * 32 * 128 * 128 * 4
    assert taken < checkpoints


@pytest.mark.parametrize("overload", OVERLOADS[1:])
def test_checkpoints_beyond_2_to_the_31_elements(
    overload: str, maker: Make, must_run: frozenset[str]
) -> None:
    """131072 tokens of 64 heads: 2048 chunks x 64 x 128 x 128 = 2^31 elements of h."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free device memory")
    T = 131072 + 64
    call = _model(maker(torch.bfloat16), [T], Hq=16, Hv=64, state=None)
    call = call.with_(overload, h_dtype=torch.bfloat16)
    call.require("triton", must_run)
    out, final_state, h = call.run("triton")[:3]
    last = h[0][-1] if overload == "h_fla" else h[-1]
    # The last chunk from its checkpoint, and the last checkpoint from the end.
    if overload == "h_compact":
        assert_gdn_close(last, final_state[0], inputs=torch.bfloat16, what="h")
        return
    tail = {n: call.tensors[n][:, -64:] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    again = GdnCall({**tail, "initial_state": last[None]}, {"qk_l2norm": True})
    tail_out, tail_state = again.run("triton")
    assert_gdn_close(out[:, -64:], tail_out, inputs=torch.bfloat16, what="out")
    assert_gdn_close(final_state, tail_state, inputs=torch.bfloat16, what="final_state")


def _keys(kind: str, T: int, Hq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys float32 [1,T,Hq,128], and for each the most that beta may be."""
    own = torch.randn(1, T, Hq, 128, device="cuda")
    shared = torch.randn(1, 1, Hq, 128, device="cuda")
    keys = {"apart": own, "alike": shared + 0.1 * own, "long": own, "long and alike": shared + own}
    if not kind.startswith("long"):
        return keys[kind], torch.ones(1, T, Hq, device="cuda")
    long = 8 * torch.nn.functional.normalize(keys[kind], dim=-1)
    return long, 1.98 / long.square().sum(-1)


@pytest.mark.parametrize("kind", ["apart", "alike", "long", "long and alike"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_no_less_accurate_than_fla(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch, must_run: frozenset[str]
) -> None:
    """At most 1.1 times its error on the same input, against the rule in float64."""
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    torch.manual_seed(0)
    T, Hq, Hv = 2048, 4, 8
    keys, most = _keys(kind, T, Hq)
    k = keys.to(dtype)
    q = torch.randn_like(keys).to(dtype)
    v = torch.randn(1, T, Hv, 128, device="cuda").to(dtype)
    g = -0.1 * torch.rand(1, T, Hv, device="cuda")
    beta = torch.rand(1, T, Hv, device="cuda") * most.repeat_interleave(2, 2)
    state = 0.1 * torch.randn(1, Hv, 128, 128, device="cuda")
    norm = not kind.startswith("long")
    call = GdnCall(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state},
        {"qk_l2norm": norm},
    )
    call.require("triton", must_run)

    wanted_out = torch.empty(1, T, Hv, 128, device="cuda", dtype=torch.float64)
    wanted_state = torch.empty(1, Hv, 128, 128, device="cuda", dtype=torch.float64)
    exact_q, exact_k = (l2norm(x) if norm else x for x in (q, k))
    reference.gdn_chunk_prefill(
        exact_q.double(), exact_k.double(), v.double(), g.double(), beta.double(), state.mT, None,
        wanted_out, wanted_state, None, None, scale=128**-0.5,
    )  # fmt: skip

    def errors(result: tuple[torch.Tensor, ...]) -> list[float]:
        pairs = ((result[0], wanted_out), (result[1], wanted_state.mT))
        return [((got.double() - x).norm() / x.norm()).item() for got, x in pairs]

    ours = errors(call.run("triton"))
    with torch.no_grad():
        theirs = errors(
            fla.chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                scale=128**-0.5,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=norm,
            )  # fmt: skip
        )
    for name, mine, other in zip(("out", "final_state"), ours, theirs, strict=True):
        assert mine <= 1.1 * other, f"{name}: error {mine:.3g}, FLA's {other:.3g}"
