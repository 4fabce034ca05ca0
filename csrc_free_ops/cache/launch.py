"""Plans cache writes: folds any layout into `[B, M, S, D]`, picks a tile, and launches.

What is launched depends on shapes and strides alone, so a captured graph may be replayed with other
indices; the indices are read by the kernel only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts, current_cuda_device
from csrc_free_ops.sizes import next_power_of_2

if TYPE_CHECKING:
    from csrc_free_ops.launch import Launch

# One program moves about 1024 elements: a decode step (8 KV heads of 128) is one program per batch
# row with a 16-byte load per thread.
_TILE_ELEMENTS = 1024

# Copied as they are; every other dtype is copied as an integer of its size.
_COPIED = frozenset((
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64,
))  # fmt: skip
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScatterPlan(NamedTuple):
    """One launch but for its pointers."""

    grid: tuple[int, ...]
    index_stride: int
    integers: tuple[int, ...]  # M .. value_stride_d, in the kernel's order
    rows: int
    block_d: int
    circular: bool
    has_indices: bool
    has_value: bool


class _Folded(NamedTuple):
    """Sizes (M, S, T, D) and strides (b, m, axis, d) of a cache and of its update."""

    sizes: tuple[int, int, int, int]
    cache: tuple[int, int, int, int]
    update: tuple[int, int, int, int]


class _Part(NamedTuple):
    """A launch of a write, and which slices of which caches and updates it is for."""

    launch: Launch
    pairs: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]  # (dimension, index), one after the other


class ScatterWrite:
    """A cache write, worked out. Safe to share between threads; holds no tensor."""

    def __init__(self, device: DeviceFacts, parts: Sequence[_Part]) -> None:
        self.device = device
        self.parts = tuple(parts)

    def is_compiled(self) -> bool:
        """Whether a run needs no compiler and no module load."""
        if self.device.type != "cuda":
            return True
        return all(part.launch.is_compiled(self.device.index) for part in self.parts)

    def compile(self) -> None:
        """Compiles and loads the kernels; launches nothing. Not for use inside a capture."""
        if self.device.type == "cuda":
            for part in self.parts:
                part.launch.compile(self.device.index)

    def run(
        self,
        caches: Sequence[Tensor],
        updates: Sequence[Tensor],
        write_indices: Tensor | None,
        scales: Sequence[Tensor | None] = (None, None),
    ) -> None:
        """Writes, by tensors like those that were planned for, on the current stream."""
        index = self.device.index
        if self.device.type == "cuda" and index != current_cuda_device():
            with torch.cuda.device(index):  # Triton launches on the current device
                return self.run(caches, updates, write_indices, scales)
        for launch, pairs, slices in self.parts:
            tensors = [t for pair in pairs for t in (caches[pair], updates[pair])]
            for dim, i in slices:
                tensors = [t.select(dim, i) for t in tensors]
            if len(pairs) == 1:
                tensors *= 2  # in place of a value cache that is not there
            optional = (write_indices, scales[pairs[0]], scales[pairs[-1]])
            tensors += [caches[0] if t is None else t for t in optional]
            launch(index, *map(_copyable, tensors))


def _copyable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _COPIED else tensor.view(_copied_as(tensor.dtype))


def _copied_as(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _COPIED else _INTEGER_OF_SIZE[dtype.itemsize]


@functools.lru_cache(maxsize=512)
def plan_scatter(
    caches: tuple[TensorFacts, ...],
    updates: tuple[TensorFacts, ...],
    indices: TensorFacts | None,
    device: DeviceFacts,
    *,
    axis: int,
    circular: bool,
    scales: tuple[TensorFacts | None, ...] = (None, None),
) -> ScatterWrite:
    """The write of one or two updates into their caches: one launch, where the layouts fold.

    Element sizes are 1, 2, 4 or 8 bytes. Reads no tensor and launches nothing.
    """
    pairs = tuple(map(_Pair, caches, updates, scales))
    return ScatterWrite(device, _parts(pairs, (0, 1)[: len(pairs)], (), indices, axis, circular))


class _Pair(NamedTuple):
    """A cache, what is written into it, and the scale that this is divided by."""

    cache: TensorFacts
    update: TensorFacts
    scale: TensorFacts | None

    @property
    def is_quantised(self) -> bool:
        """Whether the update is rounded to float8; otherwise it is copied."""
        float8 = torch.float8_e4m3fn
        return self.cache.dtype == float8 and self.update.dtype != float8

    @property
    def scale_stride(self) -> int:
        """From one head's scale to the next one's; 0 for one scale for all."""
        return self.scale.stride[0] if self.scale is not None and self.scale.shape else 0


_Pairs = tuple[_Pair, ...]


def _parts(
    pairs: _Pairs,
    numbers: tuple[int, ...],
    slices: tuple[tuple[int, int], ...],
    indices: TensorFacts | None,
    axis: int,
    circular: bool,
) -> list[_Part]:
    layouts = tuple((c.shape, c.stride, u.shape, u.stride) for c, u, _ in pairs)
    index_stride = None if indices is None else indices.stride[0]
    by_head = any(scale is not None and scale.shape for _, _, scale in pairs)
    plan = scatter_plan(layouts, index_stride, axis, circular, by_head)
    if plan is not None:
        return [_Part(_launch(plan, pairs, indices), numbers, slices)] if plan.grid[0] else []
    if len(pairs) == 2:
        one_by_one = zip(pairs, numbers, strict=True)
        halves = [_parts((p,), (n,), slices, indices, axis, circular) for p, n in one_by_one]
        return halves[0] + halves[1]
    # One launch for each index of one dimension.
    ((cache, update, scale),) = pairs
    axis %= len(cache.shape)
    dim = next(i for i in range(1, len(cache.shape)) if i != axis and update.shape[i] != 1)
    parts = []
    for i in range(update.shape[dim]):
        pair = _Pair(_select(cache, dim, i), _select(update, dim, i), scale)
        inner_axis = axis - (dim < axis)
        parts += _parts((pair,), numbers, (*slices, (dim, i)), indices, inner_axis, circular)
    return parts


def _select(facts: TensorFacts, dim: int, i: int) -> TensorFacts:
    """Facts of `tensor.select(dim, i)`."""

    def without(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:dim] + values[dim + 1 :]

    aligned = facts.aligned and i * facts.stride[dim] * facts.dtype.itemsize % 16 == 0
    return TensorFacts(without(facts.shape), without(facts.stride), facts.dtype, aligned)


def _launch(plan: ScatterPlan, pairs: _Pairs, indices: TensorFacts | None) -> Launch:
    from csrc_free_ops.cache.kernels import scatter_kernel
    from csrc_free_ops.launch import Launch

    key, value = pairs[0], pairs[-1]
    absent = key.cache
    optional = (indices or absent, key.scale or absent, value.scale or absent)
    tensors = (key.cache, key.update, value.cache, value.update, *optional)
    strides = (plan.index_stride, key.scale_stride, value.scale_stride)
    names = scatter_kernel.arg_names
    return Launch(
        scatter_kernel,
        grid=plan.grid[0],
        pointers={n: (_copied_as(t.dtype), t.aligned) for n, t in zip(names, tensors)},
        scalars=dict(zip(names[len(tensors) :], (*strides, *plan.integers))),
        constants=dict(
            ROWS=plan.rows,
            BLOCK_D=plan.block_d,
            CIRCULAR=plan.circular,
            HAS_INDICES=plan.has_indices,
            HAS_VALUE=plan.has_value,
            KEY_QUANTISED=key.is_quantised,
            VALUE_QUANTISED=value.is_quantised,
            HAS_KEY_SCALE=key.scale is not None,
            HAS_VALUE_SCALE=value.scale is not None,
        ),
        options=dict(num_warps=4),
    )


def scatter_plan(
    layouts: tuple[tuple[tuple[int, ...], ...], ...],
    index_stride: int | None,
    axis: int,
    circular: bool,
    by_head: bool = False,
) -> ScatterPlan | None:
    """The launch for one or two `(cache shape, strides, update shape, strides)`.

    With `by_head`, M is the heads of caches of rank 4. None means that one launch cannot do it; a
    grid of 0 that there is nothing to write.
    """
    batch = layouts[0][2][0]
    folded = _fold_by_head(layouts, axis) if by_head else _fold(layouts, axis)
    if folded is None:
        return None
    key, value = folded[0], folded[-1]
    if key.sizes[:2] != value.sizes[:2] or layouts[-1][2][0] != batch:
        return None
    m, s = key.sizes[:2]
    widest = max(key.sizes[3], value.sizes[3])
    block_d = min(next_power_of_2(widest), _TILE_ELEMENTS)
    rows = min(next_power_of_2(m * s), _TILE_ELEMENTS // block_d)
    programs = batch * -(-m * s // rows) * -(-widest // block_d)
    integers: tuple[int, ...] = (m, s, key.sizes[2], value.sizes[2], key.sizes[3], value.sizes[3])
    integers += key.cache + key.update + value.cache + value.update
    return ScatterPlan(
        grid=(programs,),
        index_stride=index_stride or 0,
        integers=integers,
        rows=rows,
        block_d=block_d,
        circular=circular,
        has_indices=index_stride is not None,
        has_value=len(layouts) == 2,
    )


def _fold(layouts: tuple[tuple[tuple[int, ...], ...], ...], axis: int) -> list[_Folded] | None:
    """Folds all dimensions but 0 and `axis` into two, alike in all tensors, or returns None."""
    rank = len(layouts[0][0])
    axis %= rank
    groups: list[list[int]] = []  # runs of dimensions that are one dimension in every tensor
    for dim in range(1, rank):
        if dim == axis or all(layout[2][dim] == 1 for layout in layouts):
            continue
        if groups and all(_merges(layout, groups[-1][-1], dim) for layout in layouts):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    if len(groups) > 2:
        return None
    inner = groups[-1] if groups else []
    outer = groups[0] if len(groups) == 2 else []
    return [_folded(layout, outer, inner, axis) for layout in layouts]


def _fold_by_head(layouts: tuple[tuple[tuple[int, ...], ...], ...], axis: int) -> list[_Folded]:
    """The same with heads, the first dimension besides 0 and `axis`, alone in M."""
    axis %= len(layouts[0][0])
    heads, inner = (dim for dim in (1, 2, 3) if dim != axis)
    return [_folded(layout, [heads], [inner], axis) for layout in layouts]


def _merges(layout: tuple[tuple[int, ...], ...], outer: int, inner: int) -> bool:
    _, cache_stride, shape, update_stride = layout
    return all(s[outer] == shape[inner] * s[inner] for s in (cache_stride, update_stride))


def _folded(
    layout: tuple[tuple[int, ...], ...], outer: list[int], inner: list[int], axis: int
) -> _Folded:
    cache_shape, cache_stride, shape, update_stride = layout
    m = math.prod(shape[i] for i in outer)
    d = math.prod(shape[i] for i in inner)

    def strides(stride: tuple[int, ...], length: int) -> tuple[int, int, int, int]:
        # The stride of a dimension of size 1 is arbitrary: 0 keeps it out of the specialisation,
        # but for D, where 1 says "dense".
        return (
            stride[0] if shape[0] > 1 else 0,
            stride[outer[-1]] if outer else 0,
            stride[axis] if length > 1 else 0,
            stride[inner[-1]] if d > 1 else 1,
        )

    return _Folded(
        sizes=(m, shape[axis], cache_shape[axis], d),
        cache=strides(cache_stride, cache_shape[axis]),
        update=strides(update_stride, shape[axis]),
    )
