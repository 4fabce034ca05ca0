"""Reading and writing states of a pool ``[P,..]`` by indices on the device, in plain PyTorch.

An index that is none of the pool's, a negative one above all, means no state. The host reads no
index, so all of it can be captured into a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_pool(indices: Tensor, P: int) -> Tensor:
    """Which indices name a state of the pool."""
    return (indices >= 0) & (indices < P)


def read_states(pool: Tensor, indices: Tensor) -> Tensor:
    """The states ``[B,..]`` in float32; zero where the index names none."""
    P = pool.shape[0]
    if P == 0:
        return pool.new_zeros(indices.shape[0], *pool.shape[1:], dtype=torch.float32)
    known = in_pool(indices, P)
    rows = pool.index_select(0, torch.where(known, indices, 0)).float()
    return torch.where(_column(known, rows), rows, 0.0)


def write_states(pool: Tensor, indices: Tensor, states: Tensor) -> None:
    """``pool[indices[b]] = states[b]`` for the rows whose index names a state of the pool.

    The other rows repeat what one of them writes, or if there is none, what the pool holds: which
    rows there are is not known on the host.
    """
    P, B = pool.shape[0], states.shape[0]
    if P == 0 or B == 0:
        return
    known = in_pool(indices, P)
    one = known.long().argmax().view(1)
    none = ~known.any()
    indices = torch.where(known, indices, torch.where(none, 0, indices.index_select(0, one)))
    held = torch.where(none, pool[:1], states.index_select(0, one).to(pool.dtype))
    rows = torch.where(_column(known, states), states.to(pool.dtype), held)
    pool.index_copy_(0, indices.long(), rows)


def _column(flags: Tensor, states: Tensor) -> Tensor:
    """``[B]`` as a view that broadcasts over states."""
    return flags.view(-1, *[1] * (states.dim() - 1))
