"""Lengths as attention libraries want them, and the zeros that they do not write.

A library takes 32-bit counts that it trusts, and leaves the output row of an empty sequence NaN or
unwritten. `RowGuard` makes clamped counts from any lengths and zeroes those rows, without a value
being read by the host. It launches the same kernels whatever the lengths are, so that a captured
graph may be replayed with others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, has_triton

if TYPE_CHECKING:
    from csrc_free_ops.launch import Launch

_BLOCK = 2048  # elements of an output row that one program zeroes
_ROWS = 256  # lengths that one program counts


class RowGuard:
    """Counts and zero rows for outputs of one shape and dtype on one device.

    Args:
        device: facts of the device. On a CPU, Triton's interpreter runs if it is on.
        batch: rows B of the output.
        capacity: what lengths are clamped to; below 2**31.
        width: elements of an output row; rows lie one after the other.
        out_dtype: dtype of the output.
        lengths_dtype: int32 or int64.
        use_triton: False takes PyTorch's operators, which are several launches.
    """

    def __init__(
        self,
        device: DeviceFacts,
        *,
        batch: int,
        capacity: int,
        width: int,
        out_dtype: torch.dtype,
        lengths_dtype: torch.dtype,
        use_triton: bool | None = None,
    ) -> None:
        self.device = device
        self._index = device.index
        self.batch = batch
        self.capacity = capacity
        self.width = width
        if use_triton is None:
            use_triton = has_triton() and (device.type == "cuda" or device.interpret)
        self._count: Launch | None = None
        self._zero: Launch | None = None
        if use_triton and batch and width:
            self._count = _count_launch(device, batch, capacity, lengths_dtype)
            self._zero = _zero_launch(device, batch, width, out_dtype)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every kernel that a call may launch; none where PyTorch's operators do it."""
        return tuple(one for one in (self._count, self._zero) if one is not None)

    def compile(self) -> None:
        """Compile and load the kernels. Not for use inside a capture."""
        if self.device.type == "cuda":
            for launch in self.launches:
                launch.compile(self.device.index)

    def count(self, lengths: Tensor, counts: Tensor) -> None:
        """Write a count for each of the dense `lengths` `[B]`.

        Args:
            lengths: any integers; clamped to what there may be.
            counts: B dense numbers, int32 or, for libraries that ask for it, uint32: the bits are
                the same.
        """
        if self._count is not None:
            self._count(self._index, lengths, counts)
        else:
            clamped = lengths.clamp(0, self.capacity)
            counts.view(torch.int32).copy_(clamped.view(counts.shape))

    def zero(self, counts: Tensor, out: Tensor) -> None:
        """Zero the rows of the contiguous `out` without a key, whatever they held."""
        if self._zero is not None:
            self._zero(self._index, counts, out)
        else:
            empty = counts.view(torch.int32).reshape(self.batch, 1) == 0
            out.view(self.batch, self.width).masked_fill_(empty, 0.0)


def _count_launch(
    device: DeviceFacts, batch: int, capacity: int, lengths_dtype: torch.dtype
) -> Launch:
    from csrc_free_ops.cache.kernels_lengths import count_kernel
    from csrc_free_ops.launch import Launch

    return Launch(
        count_kernel,
        grid=-(-batch // _ROWS),
        pointers=dict(lengths=(lengths_dtype, False), counts=(torch.int32, True)),
        scalars=dict(batch=batch, capacity=capacity),
        constants=dict(ROWS=_ROWS, PDL=device.has_pdl),
        options=_options(device, 2),
    )


def _zero_launch(device: DeviceFacts, batch: int, width: int, out_dtype: torch.dtype) -> Launch:
    from csrc_free_ops.cache.kernels_lengths import zero_kernel
    from csrc_free_ops.launch import Launch

    return Launch(
        zero_kernel,
        grid=batch * -(-width // _BLOCK),
        pointers=dict(counts=(torch.int32, True), out=(out_dtype, True)),
        scalars=dict(width=width),
        constants=dict(BLOCK=_BLOCK, PDL=device.has_pdl),
        options=_options(device, 4),
    )


def _options(device: DeviceFacts, warps: int) -> dict[str, Any]:
    """The kernels run beside the library's: launched early, they cost less of its time."""
    return dict(num_warps=warps, launch_pdl=True) if device.has_pdl else dict(num_warps=warps)
