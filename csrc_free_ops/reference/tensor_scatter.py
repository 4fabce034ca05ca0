"""``attn_tiers::tensor_scatter_`` and ``kv_scatter_`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

#: A dtype of each size that PyTorch can gather and scatter. Complex128 it can as it is.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """ONNX ``TensorScatter``: ``past_cache[b,..,w[b]+s,..] = update[b,..,s,..]``, in place.

    Args:
        past_cache: ``[B, .., capacity, ..]``, any strides.
        update: like ``past_cache``, but with ``S <= capacity`` positions along ``axis``. Into a
            float8_e4m3fn cache, numbers of another dtype are written by way of :func:`quantised`.
        write_indices: ``[B]`` int32 or int64; ``None`` writes from position 0.
        scale: ``[]`` or ``[Hkv]`` float32, what quantised numbers are divided by; heads are the
            first dimension besides the batch and ``axis``.
        circular: positions wrap modulo the capacity. Otherwise a position past the capacity is
            dropped, and a negative index drops its row.
    """
    axis %= past_cache.dim()
    batch, capacity, length = past_cache.shape[0], past_cache.shape[axis], update.shape[axis]
    if update.numel() == 0:
        return
    if past_cache.dtype == torch.float8_e4m3fn != update.dtype:
        update = quantised(update, scale, heads_dimension(axis))
    bits = _BITS.get(past_cache.itemsize)
    if bits is not None:  # scatter does not know all dtypes, and the bits are all that matters
        past_cache, update = past_cache.view(bits), update.view(bits)

    s = torch.arange(length, device=update.device)
    w = torch.zeros(batch, dtype=torch.int64, device=update.device)
    if write_indices is not None:
        w = write_indices.to(torch.int64)
    positions = w[:, None] + s
    inside = torch.ones_like(positions, dtype=torch.bool)
    if not circular:  # a sum beyond 64 bits is negative
        inside = (w[:, None] >= 0) & (positions >= 0) & (positions < capacity)

    # No more than `capacity` consecutive positions are distinct modulo the capacity, so a dropped
    # one has a slot of its own to which the value already there is written back: no slot is
    # written twice, and nothing depends on a value that the host would have to read.
    shape = [1] * past_cache.dim()
    shape[0], shape[axis] = batch, length
    slots = (w.remainder(capacity)[:, None] + s).remainder(capacity)
    slots = slots.view(shape).expand(update.shape)
    present = past_cache.gather(axis, slots)
    past_cache.scatter_(axis, slots, torch.where(inside.view(shape), update, present))


def heads_dimension(axis: int) -> int:
    """The first dimension besides 0 and the non-negative ``axis``: heads, in a cache of rank 4."""
    return 2 if axis == 1 else 1


def quantised(update: Tensor, scale: Tensor | None, heads_dim: int) -> Tensor:
    """``update / scale`` in float8_e4m3fn: divided in float32, rounded to nearest even.

    What lies beyond 448, infinity included, becomes 448. NaN stays NaN.
    """
    numbers = update.to(torch.float32)
    if scale is not None:
        if scale.dim() == 1:
            shape = [1] * update.dim()
            shape[heads_dim] = -1
            scale = scale.view(shape)
        numbers = numbers / scale
    # PyTorch's own conversion makes NaN of large numbers in some versions.
    most = torch.finfo(torch.float8_e4m3fn).max
    return numbers.clamp(-most, most).to(torch.float8_e4m3fn)
