"""Cache writes by the Triton kernel and by the reference, without the operators around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from csrc_free_ops import reference
from csrc_free_ops.cache import plan_scatter
from csrc_free_ops.facts import device_facts, tensor_facts

_Optional = torch.Tensor | None


def tensor_scatter(
    cache: torch.Tensor,
    update: torch.Tensor,
    indices: _Optional = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """By the kernel, into one cache."""
    _write((cache,), (update,), indices, (None, None), axis, circular)


def kv_scatter(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: _Optional = None,
    k_scale: _Optional = None,
    v_scale: _Optional = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """By the kernel, into two caches."""
    scales = (k_scale, v_scale)
    _write((key_cache, value_cache), (key, value), indices, scales, axis, circular)


def reference_kv_scatter(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: _Optional = None,
    k_scale: _Optional = None,
    v_scale: _Optional = None,
    *,
    axis: int = -2,
    circular: bool = False,
) -> None:
    """By the reference, into one cache after the other."""
    for cache, update, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        reference.tensor_scatter(cache, update, indices, scale, axis=axis, circular=circular)


def _write(
    caches: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor],
    indices: _Optional,
    scales: tuple[_Optional, _Optional],
    axis: int,
    circular: bool,
) -> None:
    write = plan_scatter(
        tuple(map(tensor_facts, caches)),
        tuple(map(tensor_facts, updates)),
        None if indices is None else tensor_facts(indices),
        device_facts(caches[0].device),
        axis=axis,
        circular=circular,
        scales=tuple(None if scale is None else tensor_facts(scale) for scale in scales),
    )
    write.run(caches, updates, indices, scales)
