"""Memory that a plan keeps beyond a call, and the stream that a call runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts


def current_stream(device: DeviceFacts) -> int:
    """The handle of the current stream of ``device``; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    # Without the Stream object that torch.cuda.current_stream makes, as Inductor and Triton do.
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing(device: DeviceFacts) -> bool:
    """Whether the current stream is being captured; the device is the current one in a plan."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
            stream = torch.cuda.Stream(device.index)
            with torch.cuda.device(device.index), torch.cuda.stream(stream), torch.no_grad():
                made.extend(make())
                stream.synchronize()
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="attn_tiers-plan")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return tuple(made)


class PlanTensors:
    """Tensors that a plan owns and that its runs read on any stream."""

    def __init__(self, device: DeviceFacts, make: Callable[[], Sequence[Tensor]]) -> None:
        self.device = device
        self.tensors = outside_pools(device, make)
        self._streams: set[int] = set()

    def used_on(self, stream: int) -> None:
        """Keep the memory until what ``stream`` has been given by then is done.

        Said once for each stream: the allocator waits for all of its work when the plan goes. A
        graph needs nothing of it, since its plan stays.
        """
        if stream in self._streams or self.device.type != "cuda" or is_capturing(self.device):
            return
        self._streams.add(stream)
        for tensor in self.tensors:
            tensor.record_stream(torch.cuda.current_stream(self.device.index))
