"""``attn_tiers::tensor_scatter_`` and ``kv_scatter_``: write into caches, in place.

The meaning is that of ONNX ``TensorScatter``: ``past_cache[b,..,w[b]+s,..] = update[b,..,s,..]``
along ``axis``; ``write_mode`` is what ONNX calls ``mode``. Both return nothing.

Tensors (positional)
    past_cache, or key_cache and value_cache: ``[B, .., T, ..]``, any strides that do not overlap.
    update, or key and value: of the cache's dtype and shape, but ``[.., S, ..]`` with ``S <= T``
    along ``axis``; any strides. write_indices ``[B]`` int32 or int64, never read by the host;
    without it writing starts at 0. k_scale, v_scale: for float8 caches, not supported yet.
Scalars (keyword)
    axis: the dimension of positions, any but 0 (default -2, as in ``[B,Hkv,T,D]``). write_mode:
    ``"linear"`` drops a position past the cache, and the whole row of a negative index, which is
    how to skip a row; ``"circular"`` wraps positions modulo ``T``. After a wrap, masks and windows
    over physical positions have no meaning.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.

Keep K and V in allocations of their own: two halves of one allocation, written in a compiled graph,
make PyTorch clone the whole storage at each step.

Example:
    >>> import torch, torch_attn_tiers
    >>> cache, new = torch.zeros(2, 1, 4, 1), torch.ones(2, 1, 1, 1)
    >>> torch.ops.attn_tiers.tensor_scatter_(cache, new, torch.tensor([3, -1]))
    >>> cache.flatten(1).tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops import reference
from csrc_free_ops.facts import device_facts
from torch_attn_tiers.dispatch import is_capturing
from torch_attn_tiers.ops.checks import layout, require, require_same_device, require_type, shape_of
from torch_attn_tiers.ops.registration import define, forbid_grad, mark_written
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import dtype_name

_MODES = ("linear", "circular")

#: Flat keys of legal calls, which need not be checked again.
_legal: set[tuple[Any, ...]] = set()
_MAX_LEGAL = 4096


# ---------------------------------------------------------------------------------------------
# Checks, shared by the kernels and the fake kernels
# ---------------------------------------------------------------------------------------------


def _check(
    op: str,
    pairs: tuple[tuple[str, Tensor, str, Tensor], ...],
    write_indices: Tensor | None,
    axis: int,
    write_mode: str,
) -> None:
    """Raise unless each ``(cache name, cache, update name, update)`` and the rest are legal."""
    first_name, first = pairs[0][:2]
    named = {name: tensor for pair in pairs for name, tensor in (pair[:2], pair[2:])}
    require_same_device(op, **named, write_indices=write_indices)
    require(
        write_mode in _MODES,
        f"{op}: write_mode={write_mode!r}; it must be 'linear' or 'circular'",
    )
    for cache_name, cache, update_name, update in pairs:
        _check_pair(op, cache_name, cache, update_name, update, axis)
        require(
            cache.shape[0] == first.shape[0],
            f"{op}: {cache_name} has batch size {cache.shape[0]} and {first_name} "
            f"{first.shape[0]}; they must agree",
        )
    if write_indices is not None:
        require_type(
            write_indices.dtype in (torch.int32, torch.int64),
            f"{op}: write_indices is {dtype_name(write_indices.dtype)}; it must be int32 or int64",
        )
        require(
            write_indices.dim() == 1 and write_indices.shape[0] == first.shape[0],
            f"{op}: write_indices has shape {shape_of(write_indices)}; it must be "
            f"({first.shape[0]},), one index for each batch row",
        )


def _check_pair(
    op: str, cache_name: str, cache: Tensor, update_name: str, update: Tensor, axis: int
) -> None:
    rank = cache.dim()
    shapes = f"{update_name} has shape {shape_of(update)} and {cache_name} {shape_of(cache)}"
    require_type(
        update.dtype is cache.dtype,
        f"{op}: {update_name} is {dtype_name(update.dtype)} and {cache_name} "
        f"{dtype_name(cache.dtype)}; they must have one dtype (nothing is cast): convert one",
    )
    require(
        rank >= 2 and update.dim() == rank,
        f"{op}: {shapes}; they must have one rank of at least 2",
    )
    require(
        -rank <= axis < rank and axis % rank != 0,
        f"{op}: axis={axis} for {cache_name} of rank {rank}; it must name a dimension other than 0",
    )
    axis %= rank
    for dim in range(rank):
        if dim == axis:
            require(
                update.shape[dim] <= cache.shape[dim],
                f"{op}: {shapes}; along axis {axis} the update must not be longer than the cache",
            )
        else:
            require(
                update.shape[dim] == cache.shape[dim],
                f"{op}: {shapes}; they must agree in dimension {dim}",
            )
    for size, stride in zip(cache.shape, cache.stride()):
        require(
            not (isinstance(stride, int) and stride == 0) or size <= 1,
            f"{op}: {cache_name} is an expanded tensor (stride 0); several of its elements are one "
            "place in memory, write into a contiguous copy",
        )


def _check_scales(op: str, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(
            scale is None,
            f"{op}: {name} is given; scales go with float8 caches only, which are not supported "
            "yet: leave it out",
        )


def _check_values(
    op: str, cache: Tensor, update: Tensor, write_indices: Tensor | None, axis: int, write_mode: str
) -> None:
    """Under the ``check`` option: raise for an index that would lose part of the update."""
    if (
        write_indices is None
        or write_mode == "circular"
        or is_capturing(device_facts(cache.device))
    ):
        return
    last = cache.shape[axis] - update.shape[axis]
    if (write_indices > last).any():
        raise ValueError(
            f"{op}: write_indices is {write_indices.tolist()}; with {update.shape[axis]} new "
            f"positions in a cache of {cache.shape[axis]} an index must be at most {last} "
            "(a negative one skips its row)"
        )


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("tensor_scatter_", past_cache, update)
    tensors = (past_cache, update, write_indices)
    flat = (past_cache.device, *map(layout, tensors), axis, write_mode)
    if flat not in _legal:
        _tensor_scatter_fake(*tensors, axis=axis, write_mode=write_mode)
        _remember(flat)
    if current().check:
        _check_values("tensor_scatter_", past_cache, update, write_indices, axis, write_mode)
    scatter = _implementations(past_cache.device.type, past_cache.itemsize)[0]
    scatter(past_cache, update, write_indices, axis=axis, circular=write_mode == "circular")
    mark_written(past_cache)


def _kv_scatter(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    write_indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("kv_scatter_", key_cache, value_cache, key, value)
    caches, updates = (key_cache, value_cache), (key, value)
    tensors = (*caches, *updates, write_indices, k_scale, v_scale)
    flat = (key_cache.device, *map(layout, tensors), axis, write_mode)
    if flat not in _legal:
        _kv_scatter_fake(*tensors, axis=axis, write_mode=write_mode)
        _remember(flat)
    if current().check:
        for cache, update in zip(caches, updates):
            _check_values("kv_scatter_", cache, update, write_indices, axis, write_mode)
    scatter = _implementations(key_cache.device.type, key_cache.itemsize)[1]
    scatter(*caches, *updates, write_indices, axis=axis, circular=write_mode == "circular")
    mark_written(*caches)


def _remember(flat: tuple[Any, ...]) -> None:
    if len(_legal) >= _MAX_LEGAL:
        _legal.clear()
    _legal.add(flat)


@functools.cache
def _implementations(
    device_type: str, itemsize: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    """``tensor_scatter`` and ``kv_scatter``: in Triton on a GPU, else in plain PyTorch."""
    if device_type == "cuda" and itemsize <= 8 and importlib.util.find_spec("triton") is not None:
        from csrc_free_ops import cache

        return cache.tensor_scatter, cache.kv_scatter
    return reference.tensor_scatter, reference.kv_scatter


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _tensor_scatter_fake(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("tensor_scatter_", past_cache, update)
    pairs = (("past_cache", past_cache, "update", update),)
    _check("tensor_scatter_", pairs, write_indices, axis, write_mode)


def _kv_scatter_fake(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    write_indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("kv_scatter_", key_cache, value_cache, key, value)
    _check_scales("kv_scatter_", k_scale, v_scale)
    pairs = (("key_cache", key_cache, "key", key), ("value_cache", value_cache, "value", value))
    _check("kv_scatter_", pairs, write_indices, axis, write_mode)


define(
    "attn_tiers::tensor_scatter_",
    "(Tensor(a!) past_cache, Tensor update, Tensor? write_indices=None, *, int axis=-2, "
    'str write_mode="linear") -> ()',
    _tensor_scatter,
    _tensor_scatter_fake,
    mutates=("past_cache",),
)
define(
    "attn_tiers::kv_scatter_",
    "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, "
    "Tensor? write_indices=None, Tensor? k_scale=None, Tensor? v_scale=None, *, int axis=-2, "
    'str write_mode="linear") -> ()',
    _kv_scatter,
    _kv_scatter_fake,
    mutates=("key_cache", "value_cache"),
)
