"""Kernel 3: what a chunk needs that does not depend on the state, all chunks at once.

For each chunk of 64 tokens and each value head, with ``decay[t,s] = exp(g[s+1] + .. + g[t])``,
``A[t,s] = beta[t] decay[t,s] (k[t] . k[s])`` below the diagonal and ``T = (I + A)^-1 diag(beta)``
(derived in docs/gdn.md), it stores

    W = diag(decay to the end) T        what the chunk writes into the state
    U = scale (decay * (Q K^T)) T       what its own tokens read of each other's values

The diagonal of T is beta: W is stored without its own, which is a factor of each token in float32,
so that what a token writes of its own value is rounded once. Two more factors are the decay since
the start of the chunk and what Q S has in the outputs: scale, decay and, with ``qk_l2norm``, the
norm of q. All three of a token are stored side by side, where the decays kernel left rows of its
own. The normalised keys are stored as well: to make them again for each tile of V took the scan
half of its instructions. Others are copied where the scan takes whole tiles of them.

A program is one chunk of HEADS value heads, which share the tiles of a head of q and k. With four
warps each has 16 rows of every matrix, and the steps of the inverse that concern rows of one warp
alone exchange nothing with the others.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import (
    tokens_of_chunk,
    wait_for_earlier_kernels,
)
from csrc_free_ops.prefetch import prefetch_rows


@triton.jit
def _product_16(x, y, PRECISION: tl.constexpr):
    """x Y of blocks [4, 16, 16], where y is the transpose of Y.

    With y so, what a product has left in registers is an operand of the next where it lies, once
    Triton gives operands two columns side by side (see ``_interleave``).
    """
    return tl.dot(x, tl.permute(y, [0, 2, 1]), input_precision=PRECISION)


@triton.jit
def _double_within_16(X, XT, A, n: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses X of blocks of n rows those of 2n: their bottom left is -X A X.

    XT is the transpose of X: with it all operands are where they are needed.
    """
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    is_corner = (row // (2 * n) == column // (2 * n)) & (row // n > column // n)
    right = _product_16(XT, tl.where(is_corner, A, 0.0), PRECISION)  # transposed
    corner = _product_16(X, right, PRECISION)
    return X - corner, XT - _product_16(right, X, PRECISION)


@triton.jit
def _invert_16(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of the strictly lower triangles of [4, 16, 16] and its transpose.

    Of blocks of 2 rows it is I - A.
    """
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    X = tl.where(row // 2 == column // 2, tl.where(row > column, -A, 1.0), 0.0)
    X = tl.where(row < column, 0.0, X)
    XT = tl.permute(X, [0, 2, 1])
    X, XT = _double_within_16(X, XT, A, 2, PRECISION)
    X, XT = _double_within_16(X, XT, A, 4, PRECISION)
    return _double_within_16(X, XT, A, 8, PRECISION)


@triton.jit
def _double_16(X, XT, below, PRECISION: tl.constexpr):
    """From the inverses [4, 16, 16] of blocks those of two, as the halves [64, 32] of a matrix.

    ``below`` are the blocks of A below those on the diagonal.
    """
    firsts, _ = tl.split(tl.permute(tl.reshape(XT, [2, 2, 16, 16]), [0, 2, 3, 1]))
    firsts = tl.permute(tl.join(firsts, firsts), [0, 3, 1, 2])
    right = _product_16(tl.reshape(firsts, [4, 16, 16]), below, PRECISION)
    corner = tl.reshape(_product_16(X, right, PRECISION), [64, 16])
    X = tl.reshape(X, [64, 16])
    block = tl.arange(0, 64)[:, None] // 16
    X0 = tl.where(block == 0, X, tl.where(block == 1, -corner, 0.0))
    X2 = tl.where(block == 2, X, tl.where(block == 3, -corner, 0.0))
    left = join_halves(X0, tl.where(block == 1, X, 0.0))
    return left, join_halves(X2, tl.where(block == 3, X, 0.0))


@triton.jit
def halves(x):
    """The left and the right half of the columns of a matrix."""
    n: tl.constexpr = x.shape[0]
    m: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [n, 2, m]), [0, 2, 1]))


@triton.jit
def join_halves(left, right):
    """The matrix that has these halves."""
    joined = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(joined, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _paired(x):
    """Columns of each 8 in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.reshape(tl.permute(pairs, [0, 1, 3, 2]), x.shape)


@triton.jit
def _product_64(x, y, PRECISION: tl.constexpr):
    """x y of matrices of 64 rows, of which x has been left in registers by a dot.

    In TF32 it lies there two columns side by side, where operands have them four apart. With the
    inner dimension of both in another order it is the operand as it is.
    """
    if PRECISION != "ieee":
        x = _paired(x)
        y = tl.trans(_paired(tl.trans(y)))
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _double_32(left, right, A, PRECISION: tl.constexpr):
    """From the inverses of two blocks of 32 rows, as halves [64, 32] of X, that of both."""
    # Below the first 32 rows the left half is zero still.
    X = join_halves(left, right)
    corner = _product_64(X, _product_64(A, left, PRECISION), PRECISION)
    left -= tl.where(tl.arange(0, 64)[:, None] >= 32, corner, 0.0)
    return join_halves(left, right)


@triton.jit
def invert_unit_lower_64(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of the strictly lower triangle of [64, 64], from small blocks to larger ones.

    Above the diagonal A must be zero. Powers of A, the other way to do it by products, grow far
    beyond the result where keys are long, and cancel.
    """
    left, right = halves(A)
    A0, A1 = halves(left)
    A2, A3 = halves(right)
    row = tl.arange(0, 64)[:, None]
    diagonal = tl.where(row < 32, tl.where(row < 16, A0, A1), tl.where(row < 48, A2, A3))
    X, XT = _invert_16(tl.reshape(diagonal, [4, 16, 16]), PRECISION)
    below = tl.reshape(tl.where(row < 32, A0, A2), [4, 16, 16])
    left, right = _double_16(X, XT, below, PRECISION)
    return _double_32(left, right, A, PRECISION)


@triton.jit
def offsets(r, stride_r, d, stride_d, WIDE: tl.constexpr):
    """Offsets of a tile, in 32 bits where they fit: they take half the registers."""
    if WIDE:
        r = r.to(tl.int64)
        d = d.to(tl.int64)
    return r[:, None] * stride_r + d[None, :] * stride_d


@triton.jit
def load_rows(
    x, r, d, token_ok, stride_t, stride_d, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows ``[C, BLOCK]`` from x on, zero outside of the chunk and of the size."""
    at = x + offsets(r, stride_t, d, stride_d, WIDE)
    if SIZE % BLOCK == 0:
        return tl.load(at, mask=token_ok[:, None], other=0.0)
    return tl.load(at, mask=token_ok[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit
def _normalise(x, factor):
    """Rows times their factors, rounded to their dtype."""
    return (x.to(tl.float32) * factor[:, None]).to(x.dtype)


@triton.jit
def _store_keys(keys, tile, r, d, K: tl.constexpr, BK: tl.constexpr):
    """Writes columns of a chunk's keys."""
    at = keys + r[:, None] * K + d[None, :]
    if K % BK == 0:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(d < K)[None, :])


@triton.jit
def _norm_factor(
    x, tile, r, token_ok, stride_t, stride_d, K: tl.constexpr, BK: tl.constexpr,
    NK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``1 / sqrt(sum(x^2) + 1e-6)`` of each row, of which ``tile`` holds the first columns."""
    tile = tile.to(tl.float32)
    squares = tl.sum(tile * tile, 1)
    for n in tl.static_range(1, NK):
        d = n * BK + tl.arange(0, BK)
        more = load_rows(x, r, d, token_ok, stride_t, stride_d, K, BK, WIDE).to(tl.float32)
        squares += tl.sum(more * more, 1)
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def _products(
    q, k, q_tile, k_tile, k_factor, r, token_ok, q_stride_t, q_stride_d, k_stride_t, k_stride_d,
    K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, L2NORM: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, OF_K: tl.constexpr, OF_Q: tl.constexpr,
):  # fmt: skip
    """K K^T and Q K^T of all rows, whose first columns the tiles hold; zeros for one not wanted."""
    KK = tl.zeros([k_tile.shape[0], k_tile.shape[0]], tl.float32)
    QK = KK
    for n in tl.static_range(NK):
        d = n * BK + tl.arange(0, BK)
        if n > 0:
            k_tile = load_rows(k, r, d, token_ok, k_stride_t, k_stride_d, K, BK, WIDE)
            if L2NORM:
                k_tile = _normalise(k_tile, k_factor)
        if OF_K:
            KK = tl.dot(k_tile, tl.trans(k_tile), KK, input_precision=PRECISION)
        if OF_Q:
            if n > 0:
                q_tile = load_rows(q, r, d, token_ok, q_stride_t, q_stride_d, K, BK, WIDE)
            QK = tl.dot(q_tile, tl.trans(k_tile), QK, input_precision=PRECISION)
    return KK, QK


@triton.jit
def _pairs(n: tl.constexpr):
    """0 to n - 1, joined from the even and the odd numbers.

    Triton takes operands that come from a join two columns side by side if they have 32 bits: the
    products of blocks of 16 are made for that.
    """
    even = 2 * tl.arange(0, n // 2)
    return tl.reshape(tl.join(even, even + 1), [n])


@triton.jit(do_not_specialize=["parts", "group_parts", "tokens", "sequences", "ahead"])
def prepare_kernel(
    q, k, cu_seqlens, chunk_starts,
    vectors, rests,  # in: see the decays kernel
    # out: vectors [chunks, HV, C, 4], the decay since the start, W's diagonal, the factor of Q S
    weights,  # out, dtype of k [chunks, HV, 2, C, C]: W, U
    # out with HAS_KEYS, dtype of k [chunks, HQ, C, K]: with L2NORM normalised and rounded, zero
    # where there is no token
    keys,
    parts,  # programs of a chunk: HV / HEADS
    group_parts,  # those of a head of q: HV / HQ / HEADS
    tokens, sequences,
    ahead,  # tokens from those of this program to those of one that starts about when it ends
    scale,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr,
    HAS_CU: tl.constexpr, L2NORM: tl.constexpr, HAS_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels(PDL)
    chunk = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    head = (part // group_parts).to(tl.int64)
    row, first, end = tokens_of_chunk(chunk, cu_seqlens, chunk_starts, tokens, sequences, C, HAS_CU)
    r = tl.arange(0, C)
    count = tl.minimum(end - first, C).to(tl.int32)
    token_ok = r < count
    q += row * q_stride_b + head * q_stride_h + first * q_stride_t
    k += row * k_stride_b + head * k_stride_h + first * k_stride_t

    first_h = (chunk * parts + part) * HEADS
    of_heads = first_h + tl.arange(0, HEADS)[None, :]
    rows_at = vectors + of_heads * (4 * C) + r[:, None]
    since_start = tl.load(rows_at + 2 * C)
    own = tl.load(rows_at + 3 * C)
    # The gates of all heads come to the L1 while there is other work; nobody needs these.
    touched = tl.load(rows_at).to(tl.int32, bitcast=True)
    touched |= tl.load(rows_at + C).to(tl.int32, bitcast=True)
    if NVIDIA:
        later = tl.minimum(ahead + r, tokens - 1 - first)
        prefetch_rows(q, later, q_stride_t, q_stride_d, K)
        prefetch_rows(k, later, k_stride_t, k_stride_d, K)
    d = tl.arange(0, BK)
    k_tile = load_rows(k, r, d, token_ok, k_stride_t, k_stride_d, K, BK, WIDE)
    q_tile = load_rows(q, r, d, token_ok, q_stride_t, q_stride_d, K, BK, WIDE)
    if count <= 0:
        return
    k_factor = tl.zeros([C], tl.float32)
    of_query = k_factor + scale
    if L2NORM:
        k_factor = _norm_factor(k, k_tile, r, token_ok, k_stride_t, k_stride_d, K, BK, NK, WIDE)
        # q is not rounded here, as in the scan; k is, for W and the scan have to agree in it.
        of_query *= _norm_factor(q, q_tile, r, token_ok, q_stride_t, q_stride_d, K, BK, NK, WIDE)
        k_tile = _normalise(k_tile, k_factor)
    if HAS_KEYS:
        if part % group_parts == 0:
            keys_at = keys + (chunk * (parts // group_parts) + head) * (C * K)
            _store_keys(keys_at, k_tile, r, d, K, BK)
            for n in tl.static_range(1, NK):
                more = n * BK + d
                tile = load_rows(k, r, more, token_ok, k_stride_t, k_stride_d, K, BK, WIDE)
                if L2NORM:
                    tile = _normalise(tile, k_factor)
                _store_keys(keys_at, tile, r, more, K, BK)
    # Once for all heads: they stay in registers. Of one head Q K^T is made when the inverse needs
    # none any more; in float32 that would take more than there is of sm_100's tensor memory.
    LATE: tl.constexpr = HEADS == 1 and not EXACT
    KK, QK = _products(
        q, k, q_tile, k_tile, k_factor, r, token_ok, q_stride_t, q_stride_d, k_stride_t,
        k_stride_d, K, BK, NK, L2NORM, PRECISION, WIDE, True, not LATE,
    )  # fmt: skip
    # tokens has no sign: what is added to the bits is zero, which the compiler does not know.
    since_start = since_start.to(tl.int32, bitcast=True) | (touched & (tokens >> 31))
    since_start = since_start.to(tl.float32, bitcast=True)
    of_state = of_query[:, None] * since_start  # the factor of Q S
    column = _pairs(C)
    for j in range(HEADS):
        h = first_h + j
        after_at = vectors + h * (4 * C)
        after_t = tl.load(after_at + r)[:, None]
        after = tl.load(after_at + r)[None, :]
        strength = tl.load(after_at + C + r)
        exponent = after - after_t
        if EXACT:
            rest = tl.load(rests + h * C + r)
            exponent += rest[None, :] - rest[:, None]
        decay = tl.exp2(tl.where(r[:, None] >= column[None, :], exponent, float("-inf")))

        T = invert_unit_lower_64(strength[:, None] * decay * KK, SOLVE_PRECISION)
        T *= strength[None, :]
        W_at = weights + h * (2 * C * C) + r[:, None] * C + r[None, :]
        W = tl.where(r[:, None] == r[None, :], 0.0, tl.exp2(after_t) * T)
        tl.store(W_at, W.to(weights.dtype.element_ty))
        if LATE:
            _, QK = _products(
                q, k, q_tile, k_tile, k_factor, r, token_ok, q_stride_t, q_stride_d, k_stride_t,
                k_stride_d, K, BK, NK, L2NORM, PRECISION, WIDE, False, True,
            )  # fmt: skip
        U = _product_64(of_query[:, None] * decay * QK, T, SOLVE_PRECISION)
        tl.store(W_at + C * C, U.to(weights.dtype.element_ty))

    # Side by side for each token, in one store: of memory that is written in part the rest is read.
    fours = tl.join(tl.join(since_start, of_state), tl.join(own, tl.zeros_like(own)))
    at = vectors + (of_heads * (4 * C) + 4 * r[:, None])[:, :, None, None]
    at += tl.arange(0, 2)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    tl.debug_barrier()  # all warps have read the rows
    tl.store(at, fours)
