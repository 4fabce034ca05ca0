"""Memory that a plan keeps beyond a call, and the stream that a call runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, is_capturing
from csrc_free_ops.pools import outside_pools


def current_stream(device: DeviceFacts) -> int:
    """The handle of the current stream of ``device``; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    # Without the Stream object that torch.cuda.current_stream makes, as Inductor and Triton do.
    return torch._C._cuda_getCurrentRawStream(device.index)


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
