"""The tiers `cudnn` and `xqa` with their libraries, on a GPU that they run on.

Build the kernels of `xqa` first, or each test that needs one waits for nvcc:
`python -m tests.gpu.prebuild_xqa`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import device_facts
from tests.conformance.calls import Call, Maker, poisoned_memory, require, same_bits
from tests.gpu.capturing import capture
from tests.library_cases import Arrangement, cudnn_arrangements, xqa_arrangements
from tests.tolerances import assert_close
from torch_attn_tiers import ColdCaptureError
from torch_attn_tiers.tiers.decode import cudnn, xqa

MakeMaker = Callable[..., Maker]
Must = frozenset[str]
both = pytest.mark.parametrize("tier", ["cudnn", "xqa"])
#: Whatever was measured on this device, the libraries are asked before `flash`.
in_the_cascades_order = pytest.mark.usefixtures("tables")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


def _step(
    m: Maker, lengths: list[int] | None = None, *, B: int = 4, T: int = 1024, **sizes: Any
) -> dict[str, torch.Tensor | None]:
    """A decode step that both tiers take: 8 heads on 2."""
    heads = {"Hq": 8, "Hkv": 2, **sizes}
    tensors: dict[str, torch.Tensor | None] = dict(m.qkv(B=B, T=T, **heads))
    tensors["nonpad_kv_seqlen"] = m.lengths([T] * B if lengths is None else lengths)
    return tensors


# ------------------------------------------------------------------------------- right answers

CUDNN = [dataclasses.replace(one, T=1096) for one in cudnn_arrangements()]
XQA = [dataclasses.replace(one, T=1024, past=1021) for one in xqa_arrangements()]


@pytest.mark.parametrize("tier", ["cudnn"])
@pytest.mark.parametrize("arrangement", CUDNN, ids=str)
def test_cudnn_agrees_with_the_oracle(
    arrangement: Arrangement, tier: str, maker: MakeMaker, must_run: Must
) -> None:
    call = arrangement.make(maker(HALVES[CUDNN.index(arrangement) % 2]))
    require(call, tier, must_run)
    call.check(tier)


@pytest.mark.parametrize("tier", ["xqa"])
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("arrangement", XQA, ids=str)
def test_xqa_agrees_with_the_oracle(
    arrangement: Arrangement, dtype: torch.dtype, tier: str, maker: MakeMaker, must_run: Must
) -> None:
    call = arrangement.make(maker(dtype))
    if dtype == torch.bfloat16 and arrangement.D == 64:
        assert any("6.6e-3" in reason for reason in call.reasons_against(tier))
        return
    require(call, tier, must_run)
    call.check(tier)


@both
@pytest.mark.parametrize(
    "sizes", [(64, 64, 8, 4096), (1, 32, 8, 32768), (3, 96, 8, 208), (130, 32, 8, 512)], ids=str
)
def test_sizes_of_models(
    sizes: tuple[int, ...], tier: str, maker: MakeMaker, must_run: Must
) -> None:
    """Many rows or few, long or short; groups that xqa does not take are skipped."""
    B, Hq, Hkv, T = sizes
    m = maker(torch.bfloat16)
    lengths = [(37 * b * T // 64) % (T + 1) for b in range(B)]
    call = Call(_step(m, lengths, B=B, T=T, Hq=Hq, Hkv=Hkv))
    require(call, tier, must_run if Hq // Hkv in (4, 8) else frozenset())
    call.check(tier)


@both
@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_nothing_past_the_length_reaches_the_result(
    where: str, junk: float, tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    lengths = [1000, 0, 5, 64]
    tensors = _step(m, lengths)
    clean = Call(dict(tensors))
    require(clean, tier, must_run)
    for name in ("key", "value"):
        if where in (name, "both"):
            spoiled = tensors[name].clone()  # type: ignore[union-attr]
            for b, n in enumerate(lengths):
                spoiled[b, :, n:] = junk
            tensors[name] = spoiled
    with poisoned_memory():
        assert same_bits(Call(tensors).run(tier), clean.run(tier))


@both
def test_empty_rows_are_zero_in_memory_that_held_nan(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    for lengths in ([0, 5, 0, 1], [0, 0, 0, 0], [-7, 2000, 1, 0]):
        for dtype in (torch.int32, torch.int64):
            tensors = {**_step(m), "nonpad_kv_seqlen": m.lengths(lengths, dtype)}
            require(Call(tensors), tier, must_run)
            Call(tensors).check(tier)


@both
def test_layouts_by_strides(tier: str, maker: MakeMaker, must_run: Must) -> None:
    """Views of larger things, none of which is copied."""
    m = maker(torch.bfloat16)
    lengths = m.lengths([512, 3, 0, 77])
    packed = m.normal(4, 1, 12 * 128)[:, :, : 8 * 128].view(4, 1, 8, 128).transpose(1, 2)
    one_token = m.normal(3 * 128 + 1024).as_strided((4, 8, 1, 128), (128, 128, 128, 1))
    interleaved = m.normal(4, 512, 2, 2, 128)
    longer = m.normal(2, 4, 2, 700, 128)
    plain = m.normal(4, 8, 1, 128)
    for query, key, value in (
        (packed, longer[0, :, :, :512], longer[1, :, :, :512]),
        (one_token, longer[0, :, :, :512], longer[1, :, :, :512]),
        (plain, interleaved[:, :, 0].transpose(1, 2), interleaved[:, :, 1].transpose(1, 2)),
        (plain, longer[0, ::2].repeat(2, 1, 1, 1)[:, :, 64:576], longer[1][:, :, 64:576]),
    ):
        call = Call({"query": query, "key": key, "value": value, "nonpad_kv_seqlen": lengths})
        if call.reasons_against(tier) and tier == "xqa":
            continue  # key and value with other strides
        require(call, tier, must_run)
        call.check(tier)


@both
def test_calls_that_differ_in_one_fact_do_not_share_a_plan(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    base = _step(m, [900, 5, 0, 64])
    half = {n: t.half() if t.is_floating_point() else t for n, t in base.items()}  # type: ignore
    calls = [
        Call(base),
        Call(half),
        Call(base, {"scale": 3 * 128**-0.5}),
        Call({**base, "nonpad_kv_seqlen": None}),
        Call({n: t[:, :, :512] if n in ("key", "value") else t for n, t in base.items()}),
        Call({n: t[:2] for n, t in base.items()}),  # type: ignore[index]
    ]
    for call in (*calls, *calls):
        require(call, tier, must_run)
        call.check(tier)


@pytest.mark.parametrize("tier", ["cudnn"])
@pytest.mark.parametrize("heads", [(8, 2), (8, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("left", [0, 1, 63, 255, 1300])
def test_cudnn_windows(
    left: int, heads: tuple[int, int], tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    for T, lengths in ((512, [512, 1, 0, 300]), (2048, [2048, 256, 1301, 64])):
        for size in (64, 128, 256):
            tensors = _step(m, lengths, T=T, D=size, Hq=heads[0], Hkv=heads[1])
            call = Call(tensors, {"left_window_size": left})
            require(call, tier, must_run)
            call.check(tier)


@pytest.mark.parametrize("tier", ["xqa"])
@pytest.mark.parametrize("sinks", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("left", [-1, 0, 1, 63, 255, 300])
def test_xqa_windows_and_sinks(
    left: int, sinks: torch.dtype | None, tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    for lengths in ([1024, 1, 0, 300], [257, 256, 255, 64]):
        tensors = _step(m, lengths)
        if sinks is not None:
            tensors["sinks"] = m.normal(8, dtype=sinks) * 3
        call = Call(tensors, {"left_window_size": left})
        require(call, tier, must_run)
        call.check(tier)


@pytest.mark.parametrize("tier", ["xqa"])
@pytest.mark.parametrize("capacity", [16, 48, 96, 320, 1040])
def test_xqa_pages_of_every_size(
    capacity: int, tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    call = Call(_step(m, [capacity, 1, 0, capacity - 1], T=capacity))
    require(call, tier, must_run)
    call.check(tier)


@pytest.mark.parametrize("tier", ["xqa"])
def test_xqa_reads_no_scratch_that_it_has_not_written(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    """Captured calls are given scratch of the graph's pool, which nobody has zeroed."""
    m = maker(torch.bfloat16)
    call = Call(_step(m, [1024, 1, 0, 700]))
    require(call, tier, must_run)
    expected = call.run(tier)
    memory = xqa.working_memory(device_facts("cuda"))
    for pattern in (0xFF, 0x7F, 0x3C):
        for _, scratch in memory._by_stream.values():
            scratch.fill_(pattern)
        assert same_bits(call.run(tier), expected)
    assert all(not bool(s.view(torch.int32).any()) for s, _ in memory._by_stream.values())


# ------------------------------------------------------------------------------------ captures


@both
def test_replays_follow_lengths_that_grow_shrink_and_vanish(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    m = maker(torch.bfloat16)
    tensors = _step(m)
    call = Call(tensors, {"tier": tier})
    require(call, tier, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)  # and never run before
    graph, y = capture(call.run)
    for lengths in ([1024, 1, 600, 64], [3, 700, 0, 1024], [0] * 4, [1100, -5, 64, 65], [9] * 4):
        tensors["nonpad_kv_seqlen"].copy_(m.lengths(lengths))  # type: ignore[union-attr]
        y.fill_(math.nan)
        graph.replay()
        assert_close(y, call.expected().y, tier=tier)


@both
def test_internal_cache_is_captured(tier: str, maker: MakeMaker, must_run: Must) -> None:
    arrangement = Arrangement(4, 128, 128, (8, 2), 2, "past_causal", past=1021)
    call = arrangement.make(maker(torch.bfloat16))
    call = Call(call.tensors, {**call.scalars, "tier": tier}, call.overload)
    require(call, tier, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)
    graph, (y, _, _) = capture(call.run)
    for _ in range(2):
        for tensor in call.tensors.values():
            tensor.normal_()  # type: ignore[union-attr]
        y.fill_(math.nan)
        graph.replay()
        assert_close(y, call.expected().y, tier=tier)


@in_the_cascades_order
def test_cold_capture_is_flash_if_that_is_ready_and_an_error_if_nothing_is(
    maker: MakeMaker,
) -> None:
    m = maker(torch.bfloat16)
    warm = Call(_step(m, T=944))
    require(warm, "cudnn")
    torch_attn_tiers.prepare(warm.op(), *warm.args(), tier="flash")
    with torch_attn_tiers.record_dispatch() as records:
        graph, y = capture(warm.run)
    assert [(r.tier, r.cold) for r in records] == [("flash", True)]
    graph.replay()
    assert_close(y, warm.expected().y)
    cold = Call(_step(m, T=944, D=152))  # a head size that no other test compiles flash for
    torch_attn_tiers.prepare(cold.op(), *cold.args(), tier="unfused")
    with pytest.raises(ColdCaptureError, match=r"prepare\("):
        capture(cold.run)
    torch.cuda.synchronize()
    cold.check("cudnn")


@both
def test_an_eager_call_makes_a_capture_warm(tier: str, maker: MakeMaker, must_run: Must) -> None:
    call = Call(_step(maker(torch.bfloat16), [800, 3, 0, 1], T=896), {"tier": tier})
    require(call, tier, must_run)
    call.run()
    graph, y = capture(call.run)
    y.fill_(math.nan)
    graph.replay()
    assert_close(y, call.expected().y, tier=tier)


@both
def test_plan_of_a_captured_graph_outlives_many_other_plans(
    tier: str, maker: MakeMaker, must_run: Must, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = maker(torch.bfloat16)
    call = Call(_step(m, [800, 3, 0, 1]), {"tier": tier})
    require(call, tier, must_run)
    call.run()
    graph, y = capture(call.run)
    graph.replay()
    expected = y.clone()
    monkeypatch.setattr("torch_attn_tiers.dispatch.MAX_PLANS", 3)
    for B in range(1, 12):
        Call(_step(m, B=B)).run(tier)
    torch.cuda.synchronize()
    y.fill_(math.nan)
    graph.replay()
    assert same_bits(y, expected)


@both
def test_a_call_reads_nothing_from_the_device(
    tier: str, maker: MakeMaker, must_run: Must, request: pytest.FixtureRequest
) -> None:
    call = Call(_step(maker(torch.bfloat16), [800, 3, 0, 1]), {"tier": tier})
    require(call, tier, must_run)
    call.run()
    request.getfixturevalue("no_host_sync")
    call.run()


# -------------------------------------------------------------------------------- side by side


def _long(m: Maker, tier: str) -> Call:
    """A call that is split into many parts, so that two of them overlap in time."""
    return Call(_step(m, [16384, 16384 - 77], B=2, T=16384), {"tier": tier})


@both
def test_two_streams(tier: str, maker: MakeMaker, must_run: Must) -> None:
    calls = [_long(maker(torch.bfloat16, seed=seed), tier) for seed in (1, 2)]
    require(calls[0], tier, must_run)
    expected = [call.run() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(calls[i].run())
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        for y in got:
            assert_close(y, wanted.cpu().double(), tier=tier)


@both
def test_threads_with_streams_of_their_own(tier: str, maker: MakeMaker, must_run: Must) -> None:
    calls = [
        Call(_step(maker(torch.bfloat16, seed=T), [T, 9], B=2, T=T), {"tier": tier})
        for T in range(2048, 6144, 1024)
    ]
    require(calls[0], tier, must_run)
    expected = [call.run().cpu().double() for call in calls]
    torch.cuda.synchronize()

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            order = [(first + i) % len(calls) for i in range(5 * len(calls))]
            results = [(i, calls[i].op()(*calls[i].args(), tier=tier)) for i in order]
            torch.cuda.current_stream().synchronize()
            for i, y in results:
                assert_close(y, expected[i], tier=tier)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@both
def test_two_graphs_replayed_at_once_with_eager_calls_between(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    calls = [_long(maker(torch.bfloat16, seed=seed), tier) for seed in (1, 2, 3)]
    require(calls[0], tier, must_run)
    expected = [call.run().cpu().double() for call in calls]
    torch.cuda.synchronize()
    graphs = [capture(call.run) for call in calls[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = calls[2].run()
    torch.cuda.synchronize()
    for y, wanted in zip((graphs[0][1], graphs[1][1], eager), expected, strict=True):
        assert_close(y, wanted, tier=tier)


@both
def test_one_graph_with_two_calls_on_forked_streams(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    calls = [_long(maker(torch.bfloat16, seed=seed), tier) for seed in (1, 2)]
    require(calls[0], tier, must_run)
    expected = [call.run().cpu().double() for call in calls]
    side = torch.cuda.Stream()

    def branches() -> list[torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = calls[1].run()
        first = calls[0].run()
        torch.cuda.current_stream().wait_stream(side)
        return [first, second]

    graph, results = capture(branches)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for y, wanted in zip(results, expected, strict=True):
        assert_close(y, wanted, tier=tier)


@pytest.mark.parametrize("tier", ["cudnn"])
def test_capture_in_a_thread_that_has_no_handle_yet(
    tier: str, maker: MakeMaker, must_run: Must
) -> None:
    call = Call(_step(maker(torch.bfloat16), [800, 3, 0, 1]), {"tier": tier})
    require(call, tier, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)
    cudnn.HANDLES.keep_a_spare(torch_attn_tiers.explain(call.op(), *call.args()).problem)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        graph, y = pool.submit(capture, call.run).result()
    y.fill_(math.nan)
    graph.replay()
    assert_close(y, call.expected().y, tier=tier)


# ------------------------------------------------------------------------------------- choosing


@in_the_cascades_order
def test_order_and_what_each_says(maker: MakeMaker) -> None:
    call = Call(_step(maker(torch.bfloat16), [800, 3, 0, 1], T=1152))
    for tier in ("cudnn", "xqa"):
        require(call, tier)

    def ran() -> tuple[str, list[str]]:
        """The tier, and those that it was asked after."""
        with torch_attn_tiers.record_dispatch() as records:
            call.run()
        (record,) = records
        for reasons in record.passed_over.values():
            assert "disabled" in reasons[0]
        return record.tier, list(record.passed_over)

    torch_attn_tiers.prepare(call.op(), *call.args())
    assert ran() == ("xqa", [])
    with torch_attn_tiers.options(disable="decode:xqa"):
        assert ran() == ("cudnn", ["xqa"])
    with torch_attn_tiers.options(disable="decode:xqa,decode:cudnn"):
        assert ran() == ("flash", ["xqa", "cudnn"])


@in_the_cascades_order
def test_a_query_off_by_two_bytes_goes_elsewhere(maker: MakeMaker) -> None:
    tensors = _step(maker(torch.bfloat16), [800, 3, 0, 1])
    query = tensors["query"]
    assert query is not None
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype, device="cuda")[1:]
    tensors["query"] = shifted.view(query.shape).copy_(query)
    call = Call(tensors)
    with torch_attn_tiers.record_dispatch() as records:
        y = call.run()
    assert records[0].tier == "flash"
    for tier in ("xqa", "cudnn"):
        reasons = records[0].passed_over[tier]
        assert "query does not begin at a multiple of 16 bytes" in reasons
    assert_close(y, call.expected().y)
