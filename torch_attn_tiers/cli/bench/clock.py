"""How a list of calls is timed: one captured graph on a GPU, a wall clock on a CPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Returns a tensor, or a tuple of some.
Call = Callable[[], Any]

CALLS_PER_GRAPH = 40
_WINDOW_US = 2000.0  # a timed window is at least this long: graph launches then weigh little
_MOST_REPLAYS = 50


class Recording(ABC):
    """A fixed sequence of calls that can be run again and again."""

    calls: int
    output: Any  # what the last call of the sequence writes

    @abstractmethod
    def run(self) -> None:
        """Runs the sequence once and waits for it."""

    @abstractmethod
    def measure(self) -> float:
        """Microseconds a call, over one warm window."""

    def settle(self) -> None:
        """Warms up anew: inputs have changed, and with them the time of a call."""
        self.run()


class Clock(ABC):
    """Times calls on one device."""

    name: str
    l2_bytes: int

    @abstractmethod
    def copy_rate(self) -> float:
        """Bytes read plus bytes written a second by a large copy."""

    @abstractmethod
    def record(
        self,
        calls: Sequence[Call],
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        calls_per_graph: int = CALLS_PER_GRAPH,
    ) -> Recording:
        """Warms the calls up and records them, several rounds if they are fewer than wanted."""

    @abstractmethod
    def host_us(
        self,
        call: Call,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> float:
        """Microseconds of host time of an eager call in one window, the device not waited for."""


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GraphClock(device) if device.type == "cuda" else WallClock()


class _GraphRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int, output: Any) -> None:
        self.calls = calls
        self.output = output
        self._graph = graph
        self.settle()

    def settle(self) -> None:
        super().settle()
        once = self._window(1) * self.calls
        self._replays = min(_MOST_REPLAYS, max(1, round(_WINDOW_US / once)))

    def run(self) -> None:
        self._graph.replay()
        torch.cuda.synchronize()

    def measure(self) -> float:
        self.run()
        return self._window(self._replays)

    def _window(self, replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (replays * self.calls)


class GraphClock(Clock):
    """CUDA events around replays of a captured graph."""

    name = "CUDA events around replays of one captured graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def copy_rate(self) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        size = min(1 << 32, free // 8)
        source = torch.empty(size, dtype=torch.uint8, device=self._device).random_()
        target = torch.empty_like(source)
        times = []
        for _ in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return 2 * size / statistics.median(times[5:])

    def record(
        self,
        calls: Sequence[Call],
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        calls_per_graph: int = CALLS_PER_GRAPH,
    ) -> Recording:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), context():
            for call in (*calls[:2], *calls[:2]):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        rounds = max(1, round(calls_per_graph / len(calls)))
        graph = torch.cuda.CUDAGraph()
        with context(), torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    output = call()
        return _GraphRecording(graph, rounds * len(calls), output)

    def host_us(
        self,
        call: Call,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> float:
        # 30 calls stay far below the 1024 launches after which the host would wait for the device.
        with context():
            call()
            return _host_window(call, 30, torch.cuda.synchronize)


class _WallRecording(Recording):
    def __init__(
        self,
        calls: Sequence[Call],
        context: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        self.calls = len(calls)
        self._sequence = calls
        self._context = context
        self.run()

    def run(self) -> None:
        with self._context():
            for call in self._sequence:
                self.output = call()

    def measure(self) -> float:
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) * 1e6 / self.calls


class WallClock(Clock):
    """A wall clock around eager calls; for machines without a GPU."""

    name = "wall clock around eager calls"
    l2_bytes = 1 << 20  # caches of a CPU are not reported; the sets then stay few

    def copy_rate(self) -> float:
        source = torch.zeros(1 << 26, dtype=torch.uint8)
        target = torch.empty_like(source)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        return 2 * source.numel() / statistics.median(times[2:])

    def record(
        self,
        calls: Sequence[Call],
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        calls_per_graph: int = CALLS_PER_GRAPH,
    ) -> Recording:
        return _WallRecording(calls, context)

    def host_us(
        self,
        call: Call,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> float:
        with context():
            call()
            return _host_window(call, 1, lambda: None)


def _host_window(call: Call, times: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(times):
        call()
    elapsed = time.perf_counter() - start
    wait()
    return elapsed * 1e6 / times
