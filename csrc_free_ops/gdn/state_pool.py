"""Copies the states of sequences out of a pool and into it: a kernel and the plans of its launches.

For a prefill that takes dense states. Bound by bytes: each state is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, PoolIndices, TensorFacts
from csrc_free_ops.launch import Launch, LaunchesPlan

# 64 x 64 elements: whichever axis of the pool is dense, a warp moves runs of 64.
_TILE = 64


@triton.jit(do_not_specialize=["places"])
def pool_kernel(
    pool,  # [places, H, X, Y]
    indices,  # [N]
    states,  # [N, H, X, Y], dense
    places, pool_stride_p, pool_stride_h, pool_stride_x, pool_stride_y,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """``pool[indices] = states`` with WRITE, else the other way round, zero where there is none.

    Grid: ``N * H * (X / BLOCK) * (Y / BLOCK)`` programs; all offsets have 64 bits.
    """
    X_TILES: tl.constexpr = X // BLOCK
    Y_TILES: tl.constexpr = Y // BLOCK
    program = tl.program_id(0)
    y = (program % Y_TILES * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    x = (program // Y_TILES % X_TILES * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    row = (program // (Y_TILES * X_TILES)).to(tl.int64)  # a head of a sequence
    place = tl.load(indices + row // H).to(tl.int64)
    known = (place >= 0) & (place < places)
    in_pool = pool + place * pool_stride_p + row % H * pool_stride_h
    in_pool += x * pool_stride_x + y * pool_stride_y
    dense = states + row * (X * Y) + x * Y + y
    if WRITE:
        if known:
            tl.store(in_pool, tl.load(dense).to(pool.dtype.element_ty))
    else:
        state = tl.zeros((BLOCK, BLOCK), pool.dtype.element_ty)
        if known:
            state = tl.load(in_pool)
        tl.store(dense, state)


class StatePoolPlan(LaunchesPlan):
    """Both copies for pools and indices of one kind."""

    def __init__(
        self, pool: TensorFacts, indices: PoolIndices, sequences: int, device: DeviceFacts
    ) -> None:
        """``pool`` is ``[P,H,X,Y]`` with any strides; X and Y are multiples of 64."""
        _, H, X, Y = pool.shape
        self._shape = (sequences, H, X, Y)

        def launch(dtype: torch.dtype, states: torch.dtype, write: bool) -> Launch:
            return Launch(
                pool_kernel,
                grid=sequences * H * (X // _TILE) * (Y // _TILE),
                pointers=dict(
                    pool=(pool.dtype, pool.aligned), indices=(dtype, False), states=(states, True)
                ),
                scalars=dict(
                    places=pool.shape[0],
                    **{f"pool_stride_{dim}": s for dim, s in zip("phxy", pool.stride)},
                ),
                constants=dict(H=H, X=X, Y=Y, BLOCK=_TILE, WRITE=write),
                options=dict(num_warps=4),
            )

        self._read = launch(indices.read, pool.dtype, False)
        self._write = launch(indices.write, torch.float32, True)
        super().__init__(device, (self._read, self._write))

    def read(self, pool: Tensor, indices: Tensor) -> Tensor:
        """The states ``[N,H,X,Y]``, dense, in the pool's dtype; zero for an index of no state."""
        states = pool.new_empty(self._shape)
        self._read(self.device.index, pool, indices, states)
        return states

    def write(self, pool: Tensor, indices: Tensor, states: Tensor) -> None:
        """Puts float32 states ``[N,H,X,Y]``, dense, where they belong; drops those of no place."""
        self._write(self.device.index, pool, indices, states)
