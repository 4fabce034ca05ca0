"""Calls on a device that is not the current one. Skipped with a single GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import torch_attn_tiers
from tests.conformance.calls import Call, Maker, same_bits
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def _first_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0, "a call left another device current"
        for device in range(2):
            torch.cuda.synchronize(device)
    torch_attn_tiers.release_captured_plans()


def _maker(device: int) -> Maker:
    return Maker(torch.float16, f"cuda:{device}", real_sizes=True)


def _call(device: int, D: int, tier: str = "flash") -> Call:
    m = _maker(device)
    tensors = {**m.qkv(B=4, Hq=8, D=D), "nonpad_kv_seqlen": m.lengths([m.T, 3, 0, 700])}
    return Call(tensors, {"tier": tier})


@pytest.mark.parametrize("tier", ["flash", "unfused"])
@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_decode_of_the_same_shapes_on_both(tier: str, order: tuple[int, int]) -> None:
    calls = {device: _call(device, 40 + 8 * order[0], tier) for device in order}
    for _ in range(2):
        for device in order:
            y = calls[device].run(tier)
            assert y.device.index == device
            assert_close(y, calls[device].expected().y, tier=tier)


def test_plans_are_of_one_device() -> None:
    call = _call(1, 72)
    call.run()
    problems = [
        torch_attn_tiers.explain(c.op(), *c.args(), tier="flash").problem
        for c in (call, _call(0, 72))
    ]
    assert problems[0] != problems[1] and problems[0].device.index == 1


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_cache_writes_of_the_same_shapes_on_both(order: tuple[int, int]) -> None:
    for device in order:
        m = _maker(device)
        size = 24 + 8 * order[0]
        caches = [m.normal(3, 2, 9, size) for _ in range(2)]
        updates = [m.normal(3, 2, 2, size) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        for cache, update in zip(expected, updates, strict=True):
            cache[0, :, 4:6], cache[1, :, 8] = update[0], update[1, :, 0]
        indices = m.integers([4, 8, -1])
        torch.ops.attn_tiers.kv_scatter_(*caches, *updates, indices)
        assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))


def test_step_prepared_and_captured_on_the_second() -> None:
    """`prepare` with device=, from the first device; then a capture on the second."""
    call, m = _call(1, 56), _maker(1)
    key, value = (m.normal(4, 2, 1, 56) for _ in range(2))
    query, keys, values, lengths = (call.tensors[n] for n in (
        "query", "key", "value", "nonpad_kv_seqlen"))  # fmt: skip
    assert keys is not None and values is not None and lengths is not None and query is not None
    write_args = (keys, values, key, value, lengths)

    def step() -> torch.Tensor:
        torch.ops.attn_tiers.kv_scatter_(*write_args)
        return call.run()

    meta = [None if t is None else t.to("meta") for t in call.args()]
    torch_attn_tiers.prepare("decode", *meta, device="cuda:1", tier="flash")
    torch_attn_tiers.prepare("kv_scatter_", *(t.to("meta") for t in write_args), device="cuda:1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        y = step()
    for values_now in ([3, 0, 9, 700], [m.T - 1, 5, 1, 0]):
        lengths.copy_(m.lengths(values_now))
        y.fill_(math.nan)
        with torch.cuda.device(1):
            graph.replay()
        torch.cuda.synchronize(1)
        for b, n in enumerate(values_now):
            assert same_bits(keys[b, :, n], key[b, :, 0])
        assert_close(y, call.expected().y)


def test_capture_on_the_second_is_seen_while_the_first_is_current() -> None:
    """A call asks the stream of its tensors' device, not of the current one."""
    call, m = _call(1, 104), _maker(1)
    cache, update = m.normal(3, 2, 9, 104), m.normal(3, 2, 1, 104)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            torch.cuda.set_device(0)
            with pytest.raises(torch_attn_tiers.ColdCaptureError):
                call.run()
            with pytest.raises(torch_attn_tiers.ColdCaptureError):
                torch.ops.attn_tiers.tensor_scatter_(cache, update)
        finally:
            torch.cuda.set_device(1)
            graph.capture_end()
    torch.cuda.set_device(0)
