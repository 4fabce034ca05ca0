"""Memory that no CUDA graph's pool hands out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts


def outside_pools(device: DeviceFacts, make: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """What ``make`` returns, complete, in memory that belongs to no CUDA graph's pool.

    A pool takes the allocations of the thread or stream that warms up or records a graph, and would
    hand the memory out again when the recording ends; a thread and a stream of our own are outside
    of it. Not for use inside a capture.
    """
    if device.type != "cuda":
        return tuple(make())
    made: list[Tensor] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            stream = _stream(device.index)
            with torch.cuda.device(device.index), torch.cuda.stream(stream), torch.no_grad():
                made.extend(make())
                stream.synchronize()
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="attn_tiers-memory")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return tuple(made)


def _stream(device_index: int) -> torch.cuda.Stream:
    """A stream that nobody captures. There are 32 that PyTorch hands out in turn, to captures as
    well."""
    for _ in range(32):
        stream = torch.cuda.Stream(device_index)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    return torch.cuda.Stream(device_index, priority=-1)  # of others
