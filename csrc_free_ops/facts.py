"""What a launch may depend on, as plain values: facts of a tensor and facts of a device."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: As ``torch.cuda.current_device``, which looks at every call whether CUDA is initialized: for
#: where it is, since a CUDA tensor is at hand.
current_cuda_device: Callable[[], int] = getattr(
    torch._C, "_cuda_getDevice", torch.cuda.current_device
)


class TensorFacts(NamedTuple):
    """Layout of a tensor without the tensor. Strides are in elements."""

    shape: tuple[int, ...]
    #: Strides of dimensions of size 1 are those of a contiguous tensor (PyTorch leaves them open).
    stride: tuple[int, ...]
    dtype: torch.dtype
    #: The first element lies on a 16-byte boundary.
    aligned: bool


class PoolIndices(NamedTuple):
    """Dtypes of the dense tensors that say where in a pool states are read and written.

    Each is int32 or int64.
    """

    read: torch.dtype
    write: torch.dtype
    #: After how many tokens one more state is written, and where; None if none is.
    track_lens: torch.dtype | None = None
    track_indices: torch.dtype | None = None


class DeviceFacts(NamedTuple):
    """What kernels and tiers need to know of a device, which may be an invented one."""

    type: str  # "cpu", "cuda", ...
    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    capability: tuple[int, int] | None  # (9, 0); None where the notion does not exist
    arch: str  # "sm_90", "gfx942", "cpu"
    multiprocessors: int
    shared_memory: int  # bytes that one block may opt in to
    l2_bytes: int
    interpret: bool  # Triton's interpreter is on and this is the CPU
    name: str = ""  # "NVIDIA H200", as its driver says; empty for an invented device

    @property
    def is_nvidia(self) -> bool:
        """Whether it is one of NVIDIA's GPUs: AMD's are of the type "cuda" as well."""
        return self.arch.startswith("sm_")

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may be launched before the one it depends on has ended (since Hopper).

        Such a kernel (Triton's option ``launch_pdl``) waits by itself, by ``gdc_wait``, before it
        touches memory.
        """
        return self.is_nvidia and self.capability is not None and self.capability >= (9, 0)

    @classmethod
    def of(cls, arch: str, index: int = 0) -> DeviceFacts:
        """Facts of a usual GPU of an architecture, which need not be here.

        Args:
            arch: ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90"``, ``"sm_100"``, ``"sm_120"`` or
                ``"gfx942"``.
            index: the index that it is to have.

        Raises:
            ValueError: another architecture. Make its facts field by field.
        """
        if arch not in _USUAL:
            raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(_USUAL)}")
        capability, multiprocessors, kib, l2_mib = _USUAL[arch]
        return cls("cuda", index, capability, arch, multiprocessors, kib << 10, l2_mib << 20, False)

    def __str__(self) -> str:
        return self.type if self.type == self.arch else f"{self.type}:{self.index} ({self.arch})"


#: Capability, multiprocessors, KiB of shared memory of one block, MiB of L2: of an A100, A40, L40S,
#: H200, B200, RTX 5090 and MI300X.
_USUAL = {
    "sm_80": ((8, 0), 108, 163, 40),
    "sm_86": ((8, 6), 84, 99, 6),
    "sm_89": ((8, 9), 142, 99, 96),
    "sm_90": ((9, 0), 132, 227, 50),
    "sm_100": ((10, 0), 148, 227, 126),
    "sm_120": ((12, 0), 170, 99, 96),
    "gfx942": ((9, 4), 304, 64, 4),
}


def canonical_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of size-1 dimensions replaced by what a contiguous tensor has there.

    PyTorch leaves the stride of a size-1 dimension arbitrary, so two equal layouts may differ
    there, and a value such as 1 would fail every alignment rule for no reason.
    """
    result = list(stride)
    contiguous = 1
    for dim in reversed(range(len(result))):
        if shape[dim] == 1:
            result[dim] = contiguous
        contiguous *= max(shape[dim], 1)
    return tuple(result)


def is_aligned(tensor: Tensor) -> bool:
    """Whether the first element lies on a 16-byte boundary (meta tensors: by storage offset)."""
    if tensor.device.type == "meta":
        return tensor.storage_offset() * tensor.element_size() % 16 == 0
    return tensor.data_ptr() % 16 == 0


def tensor_facts(tensor: Tensor) -> TensorFacts:
    """Facts of ``tensor`` as it is."""
    shape = tuple(tensor.shape)
    stride = canonical_stride(shape, tensor.stride())
    return TensorFacts(shape, stride, tensor.dtype, is_aligned(tensor))


def contiguous_facts(shape: Sequence[int], dtype: torch.dtype) -> TensorFacts:
    """Facts of a newly allocated contiguous tensor."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return TensorFacts(tuple(shape), tuple(reversed(stride)), dtype, aligned=True)


def heads_first_facts(tensor: Tensor, heads: int) -> TensorFacts:
    """Facts of the view ``[B,heads,S,D]`` of a tensor ``[B,heads,S,D]`` or ``[B,S,heads*D]``."""
    if tensor.dim() == 4:
        return tensor_facts(tensor)
    batch, length, width = tensor.shape
    stride_b, stride_s, stride_d = tensor.stride()
    size = width // heads
    shape = (batch, heads, length, size)
    stride = canonical_stride(shape, (stride_b, size * stride_d, stride_s, stride_d))
    return TensorFacts(shape, stride, tensor.dtype, is_aligned(tensor))


def broadcast_facts(tensor: Tensor, leading: Sequence[int]) -> TensorFacts:
    """Facts of ``tensor`` with its dimensions but the last broadcast to ``leading``."""
    missing = len(leading) + 1 - tensor.dim()
    shape = (*leading, tensor.shape[-1])
    own_shape = (1,) * missing + tuple(tensor.shape)
    own_stride = (0,) * missing + tuple(tensor.stride())
    stride = [0 if own == 1 != size else s for own, s, size in zip(own_shape, own_stride, shape)]
    return TensorFacts(shape, canonical_stride(shape, stride), tensor.dtype, is_aligned(tensor))


@functools.cache
def has_triton() -> bool:
    """Whether the package is installed. Imports nothing: that would take a second."""
    return importlib.util.find_spec("triton") is not None


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Facts of ``device`` (without an index: the current one). Asked once for each device.

    Raises:
        ValueError: a CUDA device that is not here.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_facts(os.environ.get("TRITON_INTERPRET", "0") == "1")
    if device.type == "cuda":
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= here:
            raise ValueError(
                f"device is {str(device)!r} and there are {here} CUDA devices here; for one that "
                "is not, give its facts, as DeviceFacts.of('sm_90')"
            )
        return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)
    return DeviceFacts(device.type, device.index or 0, None, device.type, 1, 0, 0, False)


def is_capturing(device: DeviceFacts) -> bool:
    """Whether the current stream of ``device`` is being captured into a CUDA graph."""
    # Asked at calls: is_available() takes longer than the rest, and CUDA that nobody has used yet
    # captures nothing.
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    if device.index == current_cuda_device():
        return torch.cuda.is_current_stream_capturing()
    if device.index >= torch.cuda.device_count():  # invented
        return False
    with torch.cuda.device(device.index):  # the question is about the current device's stream
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _cpu_facts(interpret: bool) -> DeviceFacts:
    # Triton's interpreter plans as if for a small GPU. The figures are fixed, so that a test takes
    # the same path on every machine; 99 KiB is the smallest shared memory among current GPUs.
    return DeviceFacts("cpu", 0, None, "cpu", 8, 99 * 1024, 0, interpret)


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", 64 * 1024
    )
    return DeviceFacts(
        "cuda",
        index,
        capability,
        arch,
        properties.multi_processor_count,
        shared_memory,
        getattr(properties, "L2_cache_size", 0),
        False,
        properties.name,
    )
