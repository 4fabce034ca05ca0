"""Kernel 2: sums of the gates of each chunk, and the decays that follow from them.

A program is one chunk of BH value heads. In g and beta the heads of a token lie side by side, so
that it reads whole rows; it writes the tokens of a head side by side, as the kernels after it read
them. What these would do for every head and, in the scan, for every tile of V is done once.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import (
    let_next_kernel_start,
    sequence_bounds,
    tokens_of_chunk,
    wait_for_earlier_kernels,
)

LOG2E = tl.constexpr(1.4426950408889634)
# Gates below this count as this. Where the others do not overflow, with no more than exp(88) before
# and after it, the decay over such a token is zero in float32 either way. In sums from a chunk's
# start a larger one would lose the gates beside it, and -inf would leave NaN in their differences.
LOWEST_GATE = tl.constexpr(-300.0)


@triton.jit
def _zero_padding(
    out, cu_seqlens, chunk, tile, tiles, tokens, sequences, row_size, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets to zero what is this program's part of the tokens behind the last sequence.

    There are at least as many chunks as there are chunks of such tokens.
    """
    last = sequence_bounds(cu_seqlens, sequences - 1, tokens, True)[1] + chunk * C
    begin = tl.minimum(last + C * tile // tiles, tokens) * row_size
    end = tl.minimum(last + C * (tile + 1) // tiles, tokens) * row_size
    n = tl.arange(0, BLOCK)
    while begin < end:
        zeros = tl.zeros([BLOCK], out.dtype.element_ty)
        tl.store(out + begin + n, zeros, mask=n < end - begin)
        begin += BLOCK


@triton.jit(do_not_specialize=["heads", "row_size", "tokens", "sequences"])
def decays_kernel(
    g, beta, cu_seqlens, chunk_starts,
    vectors,  # out, float32 [chunks, HV, 4, C]: of each token the sum of the gates after it; beta;
    # the decay since the start of the chunk; the one to its end times beta
    rests,  # out, float32 [chunks, HV, C]: what rounding those sums left, with EXACT
    out,  # dtype of v [B, tokens, HV, V]: tokens of no sequence are set to zero
    heads,  # HV
    row_size,  # HV V
    tokens, sequences,
    g_stride_b, g_stride_t, g_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    BH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, HAS_CU: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    tiles = tl.cdiv(heads, BH)
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0).to(tl.int64) // tiles
    if HAS_CU:
        _zero_padding(
            out, cu_seqlens, chunk, tile, tiles, tokens, sequences, row_size, C, BLOCK
        )  # fmt: skip
    row, first, end = tokens_of_chunk(chunk, cu_seqlens, chunk_starts, tokens, sequences, C, HAS_CU)
    count = tl.minimum(end - first, C)
    if count <= 0:
        return
    t = tl.arange(0, C).to(tl.int64)[:, None]
    h = tile * BH + tl.arange(0, BH).to(tl.int64)[None, :]
    is_head = h < heads
    inside = (t < count) & is_head
    g += row * g_stride_b + first * g_stride_t
    beta += row * beta_stride_b + first * beta_stride_t
    gate = tl.load(g + t * g_stride_t + h * g_stride_h, mask=inside, other=0.0)
    strength = tl.load(beta + t * beta_stride_t + h * beta_stride_h, mask=inside, other=0.0)
    strength = strength.to(tl.float32)
    gate = gate.to(tl.float32)
    gate = tl.where(gate < LOWEST_GATE, LOWEST_GATE, gate)  # unlike a maximum it keeps NaN
    # In float64: decays are differences of these sums, and small gates follow large ones.
    gate = gate.to(tl.float64) * LOG2E
    upto = tl.cumsum(gate, 0)
    after = tl.sum(gate, 0)[None, :] - upto
    rounded = after.to(tl.float32)
    at = (chunk * heads + h) * C + t
    if EXACT:
        tl.store(rests + at, (after - rounded.to(tl.float64)).to(tl.float32), mask=is_head)
    vectors += (chunk * heads + h) * (4 * C) + t
    tl.store(vectors, rounded, mask=is_head)
    tl.store(vectors + C, strength, mask=is_head)
    tl.store(vectors + 2 * C, tl.exp2(upto.to(tl.float32)), mask=is_head)
    tl.store(vectors + 3 * C, tl.exp2(rounded) * strength, mask=is_head)
