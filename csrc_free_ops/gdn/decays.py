"""Kernel 2: sums of the gates of each chunk, and the decays that follow from them.

A program is one chunk of BH value heads. In g and beta the heads of a token lie side by side, so
that it reads whole rows; it writes the tokens of a head side by side, as the kernels after it read
them. What these would do for every head and, in the scan, for every tile of V is done once.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import (
    let_next_kernel_start,
    tokens_of_chunk,
    wait_for_earlier_kernels,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def decays_kernel(
    g, beta, cu_seqlens, chunk_starts,
    gates,  # out, float32 [chunks, HV, 2, C]: the sum of the gates after a token; beta
    rests,  # out, float32 [chunks, HV, C]: what rounding those sums left, with EXACT
    vectors,  # out, float32 [chunks, HV, 3, C]: see the prepare kernel; it writes the third
    tokens, sequences,
    g_stride_b, g_stride_t, g_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    HV: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, HAS_CU: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    TILES: tl.constexpr = (HV + BH - 1) // BH
    chunk = tl.program_id(0).to(tl.int64) // TILES
    row, first, end = tokens_of_chunk(chunk, cu_seqlens, chunk_starts, tokens, sequences, C, HAS_CU)
    count = tl.minimum(end - first, C)
    if count <= 0:
        return
    t = tl.arange(0, C).to(tl.int64)[:, None]
    h = tl.program_id(0) % TILES * BH + tl.arange(0, BH).to(tl.int64)[None, :]
    is_head = h < HV
    inside = (t < count) & is_head
    g += row * g_stride_b + first * g_stride_t
    beta += row * beta_stride_b + first * beta_stride_t
    gate = tl.load(g + t * g_stride_t + h * g_stride_h, mask=inside, other=0.0)
    strength = tl.load(beta + t * beta_stride_t + h * beta_stride_h, mask=inside, other=0.0)
    strength = strength.to(tl.float32)
    # In float64: decays are differences of these sums, and small gates follow large ones.
    gate = gate.to(tl.float64) * LOG2E
    upto = tl.cumsum(gate, 0)
    after = tl.sum(gate, 0)[None, :] - upto
    rounded = after.to(tl.float32)
    at = (chunk * HV + h) * C + t
    head_at = (chunk * HV + h) * (2 * C) + t
    tl.store(gates + head_at, rounded, mask=is_head)
    tl.store(gates + head_at + C, strength, mask=is_head)
    if EXACT:
        tl.store(rests + at, (after - rounded.to(tl.float64)).to(tl.float32), mask=is_head)
    head_at = (chunk * HV + h) * (3 * C) + t
    tl.store(vectors + head_at, tl.exp2(upto.to(tl.float32)), mask=is_head)
    tl.store(vectors + head_at + C, tl.exp2(rounded) * strength, mask=is_head)
