"""Captured CUDA graphs: values that change between replays, cold captures, graphs side by side."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import oracle
from tests.conformance.calls import Call, Maker, require, same_bits
from tests.conformance.tiers import DECODE_TIERS
from tests.gpu.capturing import capture
from tests.tolerances import assert_close

MakeMaker = Callable[..., Maker]
every_tier = pytest.mark.parametrize("tier", DECODE_TIERS)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


def _served(m: Maker, tier: str, rows: int = 1, **scalars: Any) -> Call:
    """A decode step over four slots, made ready for a capture."""
    tensors = {**m.qkv(B=4, Hq=8, Hkv=2, Sq=rows), "nonpad_kv_seqlen": m.lengths([1] * 4)}
    call = Call(tensors, {"is_causal": rows > 1, "tier": tier, **scalars})
    require(call, tier)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)
    return call


@every_tier
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_follow_lengths_that_grow_shrink_and_vanish(
    tier: str, rows: int, batch_invariant: bool, maker: MakeMaker
) -> None:
    m = maker()
    T = m.T
    call = _served(m, tier, rows, batch_invariant=batch_invariant)
    graph, y = capture(call.run)
    lengths = call.tensors["nonpad_kv_seqlen"]
    assert lengths is not None
    for values in (
        [T, 1, 600, rows],
        [3, 700, 0, T],
        [0, 0, 0, 0],
        [T + 9, -5, 64, 65],
        [T, T, T, T],
        [1, 2, 3, 4],
    ):
        lengths.copy_(m.lengths(values))
        y.fill_(math.nan)
        graph.replay()
        assert_close(y, call.expected().y, tier=tier)


@every_tier
def test_replays_see_new_contents_of_query_cache_mask_and_sinks(
    tier: str, maker: MakeMaker
) -> None:
    m = maker()
    tensors = {**m.qkv(), "attn_mask": m.normal(2, 1, 1, m.T), "sinks": m.normal(4)}
    call = Call(tensors, {"tier": tier})
    if call.reasons_against(tier):
        del tensors["sinks"]
    require(call, tier)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)
    graph, y = capture(call.run)
    for _ in range(3):
        for tensor in tensors.values():
            tensor.copy_(m.normal(*tensor.shape))
        graph.replay()
        assert_close(y, call.expected().y, tier=tier)


@every_tier
def test_an_eager_call_makes_a_capture_warm(tier: str, maker: MakeMaker) -> None:
    m = maker()
    call = Call({**m.qkv(D=80), "nonpad_kv_seqlen": m.lengths([m.T, 3])}, {"tier": tier})
    require(call, tier)
    call.run()
    graph, y = capture(call.run)
    graph.replay()
    assert_close(y, call.expected().y, tier=tier)


def test_cold_capture_is_an_error_that_names_prepare(maker: MakeMaker) -> None:
    m = maker()
    call = Call({**m.qkv(D=56, Dv=104), "nonpad_kv_seqlen": m.lengths([m.T, 3])})
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match=r"prepare\("):
        capture(call.run)
    torch.cuda.synchronize()  # the failed capture left the device usable
    prepared = torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars).chosen
    with torch_attn_tiers.record_dispatch() as records:
        graph, y = capture(call.run)
    assert [(r.tier, r.cold) for r in records] == [(prepared, False)]
    graph.replay()
    assert_close(y, call.expected().y)


def test_cold_capture_is_an_error_for_a_forced_tier(maker: MakeMaker) -> None:
    m = maker()
    tensors = {**m.qkv(D=56, Dv=88), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    with pytest.raises((torch_attn_tiers.ColdCaptureError, ValueError), match="prepare"):
        capture(Call(tensors, {"tier": "flash"}).run)
    unfused = Call(tensors, {"tier": "unfused"})  # asked for, it is captured all the same
    torch_attn_tiers.prepare(unfused.op(), *unfused.args(), **unfused.scalars)
    graph, y = capture(unfused.run)
    graph.replay()
    assert_close(y, Call(tensors).expected().y)


def test_a_problem_that_no_kernel_takes_is_captured_without_one(maker: MakeMaker) -> None:
    """`unfused` does not stand in for a cold kernel, but here there is none that could run."""
    m = maker(torch.float64)
    call = Call({**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 3])})
    torch_attn_tiers.prepare(call.op(), *call.args())
    graph, y = capture(call.run)
    graph.replay()
    assert_close(y, call.expected().y)


def test_prepare_takes_meta_tensors(maker: MakeMaker) -> None:
    m = maker()
    call = Call({**m.qkv(D=88), "nonpad_kv_seqlen": m.lengths([m.T, 3])})
    meta = [None if t is None else t.to("meta") for t in call.args()]
    torch_attn_tiers.prepare(call.op(), *meta, device="cuda")
    graph, y = capture(call.run)
    graph.replay()
    assert_close(y, call.expected().y)


@every_tier
def test_plan_of_a_captured_graph_outlives_many_other_plans(tier: str, maker: MakeMaker) -> None:
    m = maker()
    call = _served(m, tier)
    call.tensors["nonpad_kv_seqlen"].copy_(m.lengths([m.T, 5, 0, 9]))  # type: ignore[union-attr]
    graph, y = capture(call.run)
    graph.replay()
    expected = y.clone()
    for T in range(16, 16 + 3000):
        small = torch.empty(1, 1, T, 16, dtype=torch.float16, device="cuda")
        torch.ops.attn_tiers.decode(small[:, :, :1], small, small, tier="flash")
    y.fill_(math.nan)
    graph.replay()
    assert same_bits(y, expected)


def test_captured_plans_are_counted_and_released(maker: MakeMaker) -> None:
    call = _served(maker(), "flash")
    text = str(torch_attn_tiers.explain(call.op(), *call.args(), **call.scalars))
    graph, _ = capture(call.run)
    with_graph = str(torch_attn_tiers.explain(call.op(), *call.args(), **call.scalars))
    assert text != with_graph, "explain counts the pinned plan"
    del graph
    torch_attn_tiers.release_captured_plans()
    assert str(torch_attn_tiers.explain(call.op(), *call.args(), **call.scalars)) == text


@pytest.mark.parametrize("name", ["tensor_scatter_", "kv_scatter_"])
def test_cache_writes_are_captured_when_they_are_prepared(name: str, maker: MakeMaker) -> None:
    m = maker()
    pairs = 1 if name == "tensor_scatter_" else 2
    caches = [m.normal(3, 2, 9, 72) for _ in range(pairs)]  # a head size that no other test writes
    updates = [m.normal(3, 2, 2, 72) for _ in range(pairs)]
    args = (*caches, *updates, m.integers([0, 8, -1]))
    write = getattr(torch.ops.attn_tiers, name)
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match=r"prepare\("):
        capture(lambda: write(*args))
    torch.cuda.synchronize()
    meta = [t.to("meta") for t in args]
    explanation = torch_attn_tiers.prepare(name, *meta, device="cuda")
    assert explanation.chosen == "triton" and explanation.verdicts[0].ready
    expected = [t.clone() for t in caches]
    for cache, update in zip(expected, updates, strict=True):
        cache[0, :, :2], cache[1, :, 8] = update[0], update[1, :, 0]
    graph, _ = capture(lambda: write(*args))
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_over_float8_caches_follows_scales_that_change(
    dtype: torch.dtype, maker: MakeMaker
) -> None:
    m = maker(dtype)
    ops = torch.ops.attn_tiers
    caches = [m.float8(4, 2, m.T, 128) for _ in range(2)]
    shadow = [cache.clone() for cache in caches]
    query, key, value = m.normal(4, 8, 1, 128), m.normal(4, 2, 1, 128), m.normal(4, 2, 1, 128)
    lengths, scales = m.lengths([0] * 4), (m.scales(1.0, 1.0), m.scales(1.0))

    def step() -> torch.Tensor:
        ops.kv_scatter_(*caches, key, value, lengths, *scales)
        return ops.decode(query, *caches, lengths + 1, None, None, *scales, tier="flash")

    step()
    graph, y = capture(step)
    for cache, before in zip(caches, shadow, strict=True):
        cache.copy_(before)
    for values, k_numbers, v_number in (
        ([0, 5, 600, -1], (0.02, 0.1), 0.03),
        ([1, 6, 601, 0], (3.0, 0.5), 9.0),
    ):
        lengths.copy_(m.lengths(values))
        scales[0].copy_(m.scales(*k_numbers))
        scales[1].copy_(m.scales(v_number))
        for tensor in (query, key, value):
            tensor.copy_(m.normal(*tensor.shape))
        shadow = [
            oracle.tensor_scatter(cache, oracle.quantised(update, scale, 1), lengths)
            for cache, update, scale in zip(shadow, (key, value), scales, strict=True)
        ]
        y.fill_(math.nan)
        graph.replay()
        assert all(same_bits(c, s) for c, s in zip(caches, shadow, strict=True))
        given = dict(nonpad_kv_seqlen=lengths + 1, k_scale=scales[0], v_scale=scales[1])
        assert_close(y, oracle.decode(query, *shadow, **given).y, tier="flash")


# ------------------------------------------------------------------------------- side by side


def _long(m: Maker) -> Call:
    """A call that takes many splits, so that two of them overlap in time."""
    T = 16384
    tensors = {**m.qkv(B=2, Hq=8, Hkv=2, T=T), "nonpad_kv_seqlen": m.lengths([T, T - 77])}
    call = Call(tensors, {"tier": "flash"})
    require(call, "flash")
    return call


def test_two_streams_do_not_share_scratch(maker: MakeMaker) -> None:
    calls = [_long(maker(seed=seed)) for seed in (1, 2)]
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
        assert all(same_bits(y, wanted) for y in got)


def test_two_graphs_replayed_at_once_with_eager_calls_between(maker: MakeMaker) -> None:
    calls = [_long(maker(seed=seed)) for seed in (1, 2, 3)]
    expected = [call.run() for call in calls]
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
    assert same_bits(graphs[0][1], expected[0])
    assert same_bits(graphs[1][1], expected[1])
    assert same_bits(eager, expected[2])


def test_one_graph_with_two_calls_on_forked_streams(maker: MakeMaker) -> None:
    """Inside one capture two branches run at once: they may not share counters."""
    calls = [_long(maker(seed=seed)) for seed in (1, 2)]
    expected = [call.run() for call in calls]
    side = torch.cuda.Stream()

    def both() -> list[torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = calls[1].run()
        first = calls[0].run()
        torch.cuda.current_stream().wait_stream(side)
        return [first, second]

    graph, results = capture(both)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(y, e) for y, e in zip(results, expected, strict=True))


def test_a_graph_replays_after_larger_eager_calls_on_its_stream(maker: MakeMaker) -> None:
    """Scratch that grows may not free what the graph uses."""
    small, large = _served(maker(), "flash"), _long(maker(seed=1))
    small.tensors["nonpad_kv_seqlen"].fill_(500)  # type: ignore[union-attr]
    expected = small.run()
    graph, y = capture(small.run)
    large.run()
    tensors = maker(seed=2).qkv(B=32, Hq=32, Hkv=8, T=700)
    Call(tensors, {"tier": "flash"}).run()
    junk = [torch.full((1 << 20,), math.nan, device="cuda") for _ in range(32)]
    y.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    del junk
    assert same_bits(y, expected)


def test_threads_share_plans_and_not_scratch(maker: MakeMaker) -> None:
    """Each thread has a stream of its own and goes through the same problems in another order."""
    calls = [
        Call(
            {
                **maker(seed=T).qkv(B=2, Hq=8, Hkv=2, T=T),
                "nonpad_kv_seqlen": maker().lengths([T, 9]),
            },
            {"tier": "flash"},
        )
        for T in range(2000, 10000, 1000)
    ]
    require(calls[0], "flash")
    expected = [call.run() for call in calls]
    torch.cuda.synchronize()

    def work(first: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            order = [(first + i) % len(calls) for i in range(5 * len(calls))]
            results = [(i, calls[i].run()) for i in order]
            torch.cuda.current_stream().synchronize()
            return all(same_bits(y, expected[i]) for i, y in results)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# -------------------------------------------------------------------------------------- the tail


def test_capacity_past_the_length_costs_little(maker: MakeMaker) -> None:
    """Splits sized by the capacity made 8192 with 2048 valid 2.5 times slower than 2560."""
    replays, calls = [], []  # a graph holds addresses, not tensors
    for capacity in (2560, 8192):
        m = maker()
        tensors = m.qkv(B=8, Hq=32, Hkv=8, T=capacity)
        tensors["nonpad_kv_seqlen"] = m.lengths([2048] * 8)
        call = Call(tensors, {"tier": "flash"})
        require(call, "flash")
        call.run()
        calls.append(call)
        replays.append(capture(lambda call=call: [call.run() for _ in range(20)])[0])

    def microseconds(graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 50 * begin.elapsed_time(end)

    times = [[microseconds(graph) for graph in replays] for _ in range(15)]
    tight, roomy = (min(column) for column in zip(*times, strict=True))
    assert roomy < 1.3 * tight, f"{tight:.1f} and {roomy:.1f} microseconds a call"


# ------------------------------------------------------------------------------------ host reads


@every_tier
def test_a_call_reads_nothing_from_the_device(
    tier: str, maker: MakeMaker, request: pytest.FixtureRequest
) -> None:
    m = maker()
    full = Call(
        {
            **m.qkv(Sq=2),
            "nonpad_kv_seqlen": m.lengths([m.T, 3]),
            "attn_mask": m.flags(2, 1, 2, m.T),
            "sinks": m.normal(4),
        },
        {"is_causal": True, "left_window_size": 99, "softcap": 3.0, "tier": tier},
    )
    call = full if not full.reasons_against(tier) else Call(m.qkv(), {"tier": tier})
    require(call, tier)
    call.run()
    request.getfixturevalue("no_host_sync")
    call.run()


def test_scatters_read_nothing_from_the_device(
    maker: MakeMaker, request: pytest.FixtureRequest
) -> None:
    m = maker()
    caches = [m.normal(2, 2, 9, 16) for _ in range(2)]
    updates = [m.normal(2, 2, 2, 16) for _ in range(2)]
    indices = m.integers([8, -1])

    def write() -> None:
        for mode in ("linear", "circular"):
            torch.ops.attn_tiers.kv_scatter_(*caches, *updates, indices, write_mode=mode)
            torch.ops.attn_tiers.tensor_scatter_(caches[0], updates[0], indices, write_mode=mode)
            torch.ops.attn_tiers.tensor_scatter_(caches[0], updates[0], write_mode=mode)

    write()
    request.getfixturevalue("no_host_sync")
    write()


# ------------------------------------------------------------------------------ write, then decode


def test_a_captured_step_writes_and_attends_as_slots_come_and_go(maker: MakeMaker) -> None:
    m = maker()
    B, Hq, Hkv, T = 4, 8, 2, 300
    keys, values = (torch.full((B, Hkv, T, m.D), math.nan, dtype=m.dtype, device="cuda")
                    for _ in range(2))  # fmt: skip
    query = m.normal(B, Hq, 1, m.D)
    key, value = m.normal(B, Hkv, 1, m.D), m.normal(B, Hkv, 1, m.D)
    lengths, positions = m.lengths([0] * B), m.integers([-1] * B)

    def step() -> torch.Tensor:
        torch.ops.attn_tiers.kv_scatter_(keys, values, key, value, positions)
        return torch.ops.attn_tiers.decode(query, keys, values, lengths)

    step()  # warm; every row is skipped and every length zero
    assert bool(keys.isnan().all())
    graph, y = capture(step)
    host = [0] * B
    active = [True, False, True, False]
    shadow = [(torch.zeros(0), torch.zeros(0))] * B  # what each slot holds, grown by cat
    for i in range(40):
        if i == 10:
            active[1] = True
        if i == 20:  # slot 0 is freed and taken again from position 0
            host[0], shadow[0] = 0, (torch.zeros(0), torch.zeros(0))
        if i == 25:
            active[2] = False
        for tensor in (query, key, value):
            tensor.copy_(m.normal(*tensor.shape))
        positions.copy_(m.integers([n if on else -1 for n, on in zip(host, active, strict=True)]))
        for b in range(B):
            if active[b]:
                host[b] += 1
                shadow[b] = tuple(  # type: ignore[assignment]
                    new[b : b + 1].cpu()
                    if not old.numel()
                    else torch.cat([old, new[b : b + 1].cpu()], 2)
                    for old, new in zip(shadow[b], (key, value), strict=True)
                )
        lengths.copy_(m.lengths([n if on else 0 for n, on in zip(host, active, strict=True)]))
        graph.replay()
        for b in range(B):
            if active[b]:
                expected = oracle.decode(query[b : b + 1], *shadow[b]).y
                assert_close(y[b : b + 1], expected)
            else:
                assert not bool(y[b].any())
