"""Launches the cache-write kernel: folds any layout into `[B, M, S, D]` and picks a tile.

What is launched depends on shapes and strides alone, so a captured graph may be replayed with other
indices; the indices are read by the kernel only.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch

# One program moves about 1024 elements: a decode step (8 KV heads of 128) is one program per batch
# row with a 16-byte load per thread.
_TILE_ELEMENTS = 1024

# Copied as they are; every other dtype is viewed as an integer of its size.
_TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScatterPlan(NamedTuple):
    """What one launch needs besides the five pointers."""

    grid: tuple[int, ...]
    index_stride: int
    integers: tuple[int, ...]  # M .. value_stride_d, in the kernel's order
    rows: int
    block_d: int
    circular: bool
    has_indices: bool
    has_value: bool
    launched: set[tuple[Any, ...]]  # the dtypes, alignments and devices whose kernel is loaded


class _Folded(NamedTuple):
    """Sizes (M, S, T, D) and strides (b, m, axis, d) of a cache and of its update."""

    sizes: tuple[int, int, int, int]
    cache: tuple[int, int, int, int]
    update: tuple[int, int, int, int]


def tensor_scatter(
    past_cache: torch.Tensor,
    update: torch.Tensor,
    write_indices: torch.Tensor | None = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """Writes `past_cache[b, ..., w[b] + s, ...] = update[b, ..., s, ...]` in place, in one launch.

    Args:
        past_cache: `[B, ..., T, ...]`, any strides, an element size of 1, 2, 4 or 8 bytes.
        update: the cache's dtype and shape, but S <= T along `axis`; any strides.
        write_indices: `[B]` int32 or int64 on the same device; None writes from position 0.
        axis: the dimension that is written, any but 0.
        circular: wraps positions modulo T. Otherwise a position past the cache is dropped, and a
            negative index drops its row.

    Shapes and dtypes are taken to be right: the operator checks them.
    """
    _scatter(((past_cache, update),), write_indices, axis, circular)


def kv_scatter(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    write_indices: torch.Tensor | None = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """Writes both caches as `tensor_scatter` does, in one launch; D and Dv may differ."""
    _scatter(((key_cache, key), (value_cache, value)), write_indices, axis, circular)


def _scatter(
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    write_indices: torch.Tensor | None,
    axis: int,
    circular: bool,
) -> None:
    layouts = tuple((c.shape, c.stride(), u.shape, u.stride()) for c, u in pairs)
    index_stride = None if write_indices is None else write_indices.stride(0)
    plan = scatter_plan(layouts, index_stride, axis, circular)
    if plan is not None:
        if plan.grid[0]:
            _launch(plan, pairs, write_indices, axis)
    elif len(pairs) == 2:
        for pair in pairs:
            _scatter((pair,), write_indices, axis, circular)
    else:
        _scatter_slices(*pairs[0], write_indices, axis, circular)


def _scatter_slices(
    cache: torch.Tensor,
    update: torch.Tensor,
    write_indices: torch.Tensor | None,
    axis: int,
    circular: bool,
) -> None:
    """Launches once per index of one dimension: for layouts that do not fold into four."""
    axis %= cache.dim()
    dim = next(i for i in range(1, cache.dim()) if i != axis and update.shape[i] != 1)
    for i in range(update.shape[dim]):
        pair = (cache.select(dim, i), update.select(dim, i))
        _scatter((pair,), write_indices, axis - (dim < axis), circular)


@functools.lru_cache(maxsize=512)
def scatter_plan(
    layouts: tuple[tuple[tuple[int, ...], ...], ...],
    index_stride: int | None,
    axis: int,
    circular: bool,
) -> ScatterPlan | None:
    """The launch for one or two `(cache shape, strides, update shape, strides)`.

    None means that one launch cannot do it; a grid of 0 that there is nothing to write.
    """
    batch = layouts[0][2][0]
    folded = _fold(layouts, axis)
    if folded is None:
        return None
    key, value = folded[0], folded[-1]
    if key.sizes[:2] != value.sizes[:2] or layouts[-1][2][0] != batch:
        return None
    m, s = key.sizes[:2]
    widest = max(key.sizes[3], value.sizes[3])
    block_d = min(_next_power_of_2(widest), _TILE_ELEMENTS)
    rows = min(_next_power_of_2(m * s), _TILE_ELEMENTS // block_d)
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
        launched=set(),
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


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _launch(
    plan: ScatterPlan,
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    write_indices: torch.Tensor | None,
    axis: int,
) -> None:
    device = pairs[0][0].device
    tensors: list[torch.Tensor | None] = [_copyable(t) for pair in pairs for t in pair]
    if len(pairs) == 1:
        tensors += (None, None)
    tensors.append(write_indices)
    loaded = (device.index, *((t.dtype, t.data_ptr() % 16 == 0) for t in tensors if t is not None))
    if loaded not in plan.launched and _captures(device):
        _write_without_the_kernel(pairs, write_indices, axis, plan.circular)
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            _run(plan, tensors)
    else:
        _run(plan, tensors)
    plan.launched.add(loaded)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _write_without_the_kernel(
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    write_indices: torch.Tensor | None,
    axis: int,
    circular: bool,
) -> None:
    """Captures the reference: loading a kernel inside a capture could invalidate it."""
    from csrc_free_ops.reference import tensor_scatter as write

    warnings.warn(
        "a cache write was captured before its kernel was loaded, so that the graph holds several"
        " slower kernels: call it once with these shapes before the capture",
        stacklevel=2,
    )
    for cache, update in pairs:
        write(cache, update, write_indices, axis=axis, circular=circular)


def _run(plan: ScatterPlan, tensors: list[torch.Tensor | None]) -> None:
    _kernel()[plan.grid](
        *tensors,
        plan.index_stride,
        *plan.integers,
        **_constants(plan),
    )


def _constants(plan: ScatterPlan) -> dict[str, Any]:
    return {
        "ROWS": plan.rows,
        "BLOCK_D": plan.block_d,
        "CIRCULAR": plan.circular,
        "HAS_INDICES": plan.has_indices,
        "HAS_VALUE": plan.has_value,
    }


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _TRITON_TYPES:
        return tensor
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


@functools.cache
def _kernel() -> Any:
    from csrc_free_ops.cache.kernels import scatter_kernel

    return scatter_kernel


def compile_for(plan: ScatterPlan, dtype: torch.dtype, target: Any) -> Any:
    """The kernel of `plan`, compiled for a Triton `GPUTarget`; the GPU need not be there.

    Tensors are of `dtype` and 16-byte aligned, indices int32.
    """
    import triton

    kernel = _kernel()
    values: dict[str, Any] = dict(
        key_cache=dtype,
        key=dtype,
        value_cache=dtype if plan.has_value else None,
        value=dtype if plan.has_value else None,
        write_indices=torch.int32 if plan.has_indices else None,
        index_stride=plan.index_stride,
    )
    values.update(zip(kernel.arg_names[len(values) :], plan.integers, strict=False))
    fixed = _constants(plan)
    values.update(fixed)
    unspecialized = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, (name, value) in enumerate(values.items()):
        specialized = name not in unspecialized
        if isinstance(value, torch.dtype):
            signature[name] = "*" + _TRITON_TYPES[value]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif name in fixed or value is None or (specialized and value == 1):
            signature[name] = "constexpr"
            constants[(position,)] = value
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if specialized and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target)
