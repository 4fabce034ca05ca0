"""Copies one state of each sequence into a pool: a kernel and the plan of its launch.

The bound is the bytes of the states that are copied, each read once and written once. Programs of
sequences that keep nothing stop after three loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts
from csrc_free_ops.launch import Launch, LaunchPlan
from csrc_free_ops.sizes import next_power_of_2

# 64 x 64 elements: whichever axis is dense, a warp moves runs of 64.
_TILE = 64


@triton.jit(do_not_specialize=["places", "rows"])
def checkpoint_kernel(
    pool,  # out [places, H, X, Y]
    dst, h, h_src, track_mask, final_state, final_mask,
    places, rows, dst_stride, src_stride, track_stride, final_stride,
    pool_stride_p, pool_stride_h, pool_stride_x, pool_stride_y,
    h_stride_r, h_stride_h, h_stride_x, h_stride_y, f_stride_n, f_stride_h, f_stride_x, f_stride_y,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
    HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """Grid: ``N * H * cdiv(X, BX) * cdiv(Y, BY)`` programs; all offsets have 64 bits."""
    X_TILES: tl.constexpr = (X + BX - 1) // BX
    Y_TILES: tl.constexpr = (Y + BY - 1) // BY
    program = tl.program_id(0)
    y = program % Y_TILES * BY + tl.arange(0, BY)
    x = program // Y_TILES % X_TILES * BX + tl.arange(0, BX)
    head = (program // (Y_TILES * X_TILES) % H).to(tl.int64)
    i = (program // (Y_TILES * X_TILES * H)).to(tl.int64)

    place = tl.load(dst + i * dst_stride).to(tl.int64)
    source = tl.load(h_src + i * src_stride).to(tl.int64)
    from_h = (tl.load(track_mask + i * track_stride) != 0) & (source >= 0) & (source < rows)
    is_final = tl.zeros((), tl.int1)
    if HAS_FINAL:
        is_final = tl.load(final_mask + i * final_stride) != 0
    if (place >= 0) & (place < places) & (is_final | from_h):
        x64 = x.to(tl.int64)[:, None]
        y64 = y.to(tl.int64)[None, :]
        inside = (x64 < X) & (y64 < Y)
        if is_final:
            last = final_state + i * f_stride_n + head * f_stride_h
            state = tl.load(last + x64 * f_stride_x + y64 * f_stride_y, mask=inside).to(tl.float32)
        else:
            row = h + source * h_stride_r + head * h_stride_h
            state = tl.load(row + x64 * h_stride_x + y64 * h_stride_y, mask=inside).to(tl.float32)
        to = pool + place * pool_stride_p + head * pool_stride_h
        to += x64 * pool_stride_x + y64 * pool_stride_y
        tl.store(to, state.to(pool.dtype.element_ty), mask=inside)


def unsupported(pool: TensorFacts, sequences: int) -> str | None:
    """Why the kernel cannot take a legal problem, in words; None if it can."""
    if sequences * _programs(pool) >= 2**31:
        return "more than 2^31 sequences, heads and tiles"
    return None


def plan_checkpoints(
    pool: TensorFacts,
    dst: TensorFacts,
    h: TensorFacts,
    h_src: TensorFacts,
    track_mask: TensorFacts,
    final_state: TensorFacts | None,
    final_mask: TensorFacts | None,
    device: DeviceFacts,
) -> CheckpointPlan:
    """A plan over a pool ``[P,H,X,Y]``, h ``[R,H,X,Y]``, final states ``[N,H,X,Y]``, rest ``[N]``.

    All states have their axes in one order; the masks are bool.
    """
    has_final = final_state is not None and final_mask is not None
    final, final_flags = (final_state or h), (final_mask or track_mask)
    _, H, X, Y = pool.shape

    def flags(facts: TensorFacts) -> tuple[torch.dtype, bool]:
        return torch.uint8, facts.aligned

    launch = Launch(
        checkpoint_kernel,
        grid=dst.shape[0] * _programs(pool),
        pointers=dict(
            pool=(pool.dtype, pool.aligned), dst=(dst.dtype, dst.aligned), h=(h.dtype, h.aligned),
            h_src=(h_src.dtype, h_src.aligned), track_mask=flags(track_mask),
            final_state=(final.dtype, final.aligned), final_mask=flags(final_flags),
        ),
        scalars=dict(
            places=pool.shape[0], rows=h.shape[0], dst_stride=dst.stride[0],
            src_stride=h_src.stride[0], track_stride=track_mask.stride[0],
            final_stride=final_flags.stride[0], **_strides("pool", "phxy", pool),
            **_strides("h", "rhxy", h), **_strides("f", "nhxy", final),
        ),
        constants=dict(H=H, X=X, Y=Y, BX=_block(X), BY=_block(Y), HAS_FINAL=has_final),
        options=dict(num_warps=4),
    )  # fmt: skip
    return CheckpointPlan(device, launch)


class CheckpointPlan(LaunchPlan):
    """A launch of the copy."""

    def run(
        self,
        pool: Tensor,
        dst: Tensor,
        h: Tensor,
        h_src: Tensor,
        track_mask: Tensor,
        final_state: Tensor | None,
        final_mask: Tensor | None,
    ) -> None:
        """Writes into the pool, from tensors like those that were planned for."""
        if self.launch.grid[0] == 0:
            return
        # An argument that the kernel does not use is stood in for by one that it has.
        final_state = h if final_state is None else final_state
        final_mask = track_mask if final_mask is None else final_mask
        track, final = track_mask.view(torch.uint8), final_mask.view(torch.uint8)
        self.launch(self.device.index, pool, dst, h, h_src, track, final_state, final)


def _programs(pool: TensorFacts) -> int:
    """Programs for each sequence."""
    _, H, X, Y = pool.shape
    return H * -(-X // _block(X)) * -(-Y // _block(Y))


def _block(size: int) -> int:
    """The least power of two that holds the axis, or the width of a tile."""
    return min(_TILE, next_power_of_2(size))


def _strides(name: str, dims: str, facts: TensorFacts) -> dict[str, int]:
    return {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, facts.stride)}
