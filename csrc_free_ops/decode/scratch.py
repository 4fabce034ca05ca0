"""Counters that are zero between launches, one piece of memory per stream and per captured call.

A task's counter is zero before a launch and set back to zero by the program that merges the task,
so nobody has to clear it again. Two launches that may run at the same time must not share counters:
outside captures launches on one stream follow each other, so a stream owns a piece; a graph may be
replayed on any stream beside any other graph, so every captured call owns a piece.
"""

from __future__ import annotations

import threading

import torch

from csrc_free_ops.facts import device_facts, is_capturing
from csrc_free_ops.pools import outside_pools

COUNTERS_PER_CHUNK = 1 << 20  # 4 MiB
_COUNTERS_PER_LINE = 32  # 128 bytes
COUNTERS_PER_STREAM = 1024  # at least, so that a stream seldom has to be given a larger piece


class CounterArena:
    """The zeroed counters of one device, handed out in pieces that never overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._rest: torch.Tensor | None = None
        self._by_stream: dict[int, torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []
        self._released: list[torch.Tensor] = []
        # Never freed: a launch or a graph may still use what nobody holds a piece of any more.
        self._chunks: list[torch.Tensor] = []

    def reserve(self, count: int) -> None:
        """Makes sure that the next ``count`` counters, as one piece, need no allocation.

        Inside a capture it does nothing: `for_captured_call` manages without.
        """
        count = _piece_size(count)
        if is_capturing(device_facts(self._device)):
            return
        with self._lock:
            if self._rest is None or self._rest.numel() < count:
                self._rest = _zeros_outside_pools(max(2 * count, COUNTERS_PER_CHUNK), self._device)
                self._chunks.append(self._rest)

    def for_stream(self, stream: int, count: int) -> torch.Tensor:
        """At least ``count`` zero counters that belong to ``stream``."""
        counters = self._by_stream.get(stream)
        while counters is None or counters.numel() < count:
            self.reserve(max(count, COUNTERS_PER_STREAM))
            with self._lock:
                counters = self._carve(max(count, COUNTERS_PER_STREAM))
                if counters is not None:
                    self._by_stream[stream] = counters
        return counters

    def for_captured_call(self, count: int) -> torch.Tensor:
        """At least ``count`` zero counters for one call in the capture under way."""
        with self._lock:
            for index, counters in enumerate(self._released):
                if counters.numel() >= count:
                    self._captured.append(self._released.pop(index))
                    return counters
            carved = self._carve(count)
            if carved is not None:
                self._captured.append(carved)
                return carved
        # The arena is used up, and a capture is no place to allocate outside the graph's pool: the
        # graph itself zeroes these.
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def release_captured(self) -> None:
        """Lets later captures have the counters of earlier ones.

        The graphs of those must have finished and not run again; their counters are zero then.
        """
        with self._lock:
            self._released += self._captured
            self._captured.clear()

    def _carve(self, count: int) -> torch.Tensor | None:
        """``count`` counters from the rest of the chunk; None if it has no more. Under the lock."""
        count = _piece_size(count)
        if self._rest is None or self._rest.numel() < count:
            return None
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece


def _piece_size(count: int) -> int:
    """The size of a piece of at least ``count`` counters.

    Pieces are whole cache lines, so that they do not contend.
    """
    return -(-count // _COUNTERS_PER_LINE) * _COUNTERS_PER_LINE


def _zeros_outside_pools(count: int, device: torch.device) -> torch.Tensor:
    """Zeros that belong to no CUDA graph's memory pool, complete when this returns."""

    def make() -> list[torch.Tensor]:
        return [torch.zeros(count, dtype=torch.int32, device=device)]

    return outside_pools(device_facts(device), make)[0]


_ARENAS: dict[int, CounterArena] = {}
_ARENAS_LOCK = threading.Lock()


def counter_arena(device_index: int) -> CounterArena:
    """The counters of CUDA device ``device_index``."""
    arena = _ARENAS.get(device_index)
    if arena is None:
        with _ARENAS_LOCK:
            arena = _ARENAS.setdefault(
                device_index, CounterArena(torch.device("cuda", device_index))
            )
    return arena


def release_captured_counters() -> None:
    """Lets later captures have the counters of earlier ones, on every device.

    The graphs of those must have finished and not run again.
    """
    for arena in list(_ARENAS.values()):
        arena.release_captured()
