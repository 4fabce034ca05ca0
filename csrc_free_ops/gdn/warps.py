"""Matrices as four dimensions, such that each warp loads and stores rows that it computes with.

On Hopper each warp has 16 rows of an accumulator. Memory is read and written in pieces of 16 bytes,
which Triton deals out to lanes and warps in the order of the dimensions, so that a warp gets rows
of others, through shared memory and barriers. Of a tensor of four dimensions it deals out the last
one to lanes, then the first one, and the second one to warps. So what is loaded and stored is given
these: what a warp takes at once, warps, what else a thread has, and what lies side by side.

Elsewhere it is as right, and not faster.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_by_warps(BV: tl.constexpr, C: tl.constexpr):
    """Of [BV, C], columns of V and tokens: which of both are where in these four dimensions."""
    tokens = tl.arange(0, 16)[:, None, None, None] + 16 * tl.arange(0, C // 16)[None, None, :, None]
    columns = 16 * tl.arange(0, BV // 16)[None, :, None, None]
    return tokens, columns + tl.arange(0, 16)[None, None, None, :]


@triton.jit
def to_tokens_by_warps(x):
    """[BV, C] in these dimensions."""
    x = tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1] // 16, 16])
    return tl.permute(x, [3, 0, 2, 1])


@triton.jit
def from_tokens_by_warps(x, BV: tl.constexpr, C: tl.constexpr):
    """[BV, C] from these dimensions."""
    return tl.reshape(tl.permute(x, [1, 3, 2, 0]), [BV, C])


@triton.jit
def rows_by_warps(BV: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """Of [BV, N], rows and columns: which of both are where in four dimensions."""
    PIECES: tl.constexpr = N * dtype.primitive_bitwidth // 128
    ROWS: tl.constexpr = 32 // PIECES if PIECES < 32 else 1
    rows = tl.arange(0, ROWS)[:, None, None, None]
    rows += 16 * tl.arange(0, BV // 16)[None, :, None, None]
    rows += ROWS * tl.arange(0, 16 // ROWS)[None, None, :, None]
    return rows, tl.arange(0, N)[None, None, None, :]


@triton.jit
def to_rows_by_warps(x, at):
    """[BV, N] in these dimensions, which ``at`` has."""
    x = tl.reshape(x, [at.shape[1], at.shape[2], at.shape[0], at.shape[3]])
    return tl.permute(x, [2, 0, 1, 3])


@triton.jit
def from_rows_by_warps(x, BV: tl.constexpr, N: tl.constexpr):
    """[BV, N] from these dimensions."""
    return tl.reshape(tl.permute(x, [1, 2, 0, 3]), [BV, N])


@triton.jit
def spread_offsets(r, stride_r, d, stride_d, WIDE: tl.constexpr):
    """As offsets in prepare.py, of rows and columns that have been given dimensions already."""
    if WIDE:
        r = r.to(tl.int64)
        d = d.to(tl.int64)
    return r * stride_r + d * stride_d
