"""Kernel 2: what a chunk needs that does not depend on the state, all chunks at once.

For each chunk of 64 tokens and each value head ``T = (I + A)^-1 diag(beta)``, where
``A[t,s] = beta[t] exp(g[s+1] + .. + g[t]) (k[t] . k[s])`` below the diagonal (derived in
docs/gdn.md). Besides T it stores running sums of gates and, with ``qk_l2norm``, the factors that
normalise q and k: what the scan would otherwise compute again for each tile of V.

A program is one chunk of one head of q and k: its value heads share the product of keys.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import sequence_bounds, sequence_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _quarters(x, n: tl.constexpr):
    """Top left, bottom left and bottom right of a matrix [2n, 2n]."""
    x = tl.permute(tl.reshape(x, [2, n, 2, n]), [1, 3, 2, 0])  # .., half of columns, half of rows
    top, bottom = tl.split(x)
    a, _ = tl.split(top)
    c, d = tl.split(bottom)
    return a, c, d


@triton.jit
def _from_quarters(a, c, d, n: tl.constexpr):
    """The matrix [2n, 2n] of these quarters, zero in the top right."""
    x = tl.join(tl.join(a, tl.zeros_like(a)), tl.join(c, d))
    return tl.reshape(tl.permute(x, [3, 0, 2, 1]), [2 * n, 2 * n])


@triton.jit
def _invert_16(A):
    """(I + A)^-1 of four strictly lower triangular matrices [16, 16, 4], row by row."""
    row = tl.arange(0, 16)[:, None, None]
    column = tl.arange(0, 16)[None, :, None]
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(A)
    for i in range(1, 16):
        # Row i of X is e_i minus the rows above it, each times its entry of row i of A.
        entries = tl.sum(tl.where(row == i, A, 0.0), 0)
        found = tl.sum(entries[:, None, :] * X, 0)
        X = tl.where(row == i, X - found[None, :, :], X)
    return X


@triton.jit
def _merge(a, C, d, PRECISION: tl.constexpr):
    """Bottom left of the inverse of [[a^-1, 0], [C, d^-1]], which is -d C a."""
    return -tl.dot(d, tl.dot(C, a, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def invert_unit_lower_64(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular matrix [64, 64] in float32.

    By substitution within blocks of 16, then by products of blocks. Powers of A, the other way to
    do it by products, grow far beyond the result where keys are long, and cancel.
    """
    A0, A10, A1 = _quarters(A, 32)
    a0, a10, a1 = _quarters(A0, 16)
    a2, a32, a3 = _quarters(A1, 16)
    X = _invert_16(tl.join(tl.join(a0, a1), tl.join(a2, a3)).reshape([16, 16, 4]))
    even, odd = tl.split(X.reshape([16, 16, 2, 2]))
    x0, x1 = tl.split(even)
    x2, x3 = tl.split(odd)
    X0 = _from_quarters(x0, _merge(x0, a10, x1, PRECISION), x1, 16)
    X1 = _from_quarters(x2, _merge(x2, a32, x3, PRECISION), x3, 16)
    return _from_quarters(X0, _merge(X0, A10, X1, PRECISION), X1, 32)


@triton.jit
def load_rows(
    x, first, r, d, token_ok, stride_t, stride_d, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows ``[C, BLOCK]`` from token ``first`` on, zero outside of the chunk and of the size."""
    at = x + (first + r)[:, None] * stride_t + d[None, :].to(tl.int64) * stride_d
    if SIZE % BLOCK == 0:
        return tl.load(at, mask=token_ok[:, None], other=0.0)
    return tl.load(at, mask=token_ok[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit
def normalise(x, factor):
    """Rows times their factors, rounded to their dtype."""
    return (x.to(tl.float32) * factor[:, None]).to(x.dtype)


@triton.jit
def _norm_factor(
    x, first, r, token_ok, stride_t, stride_d, K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr
):
    """``1 / sqrt(sum(x^2) + 1e-6)`` of each row."""
    squares = tl.zeros([r.shape[0]], tl.float32)
    for n in tl.static_range(NK):
        d = n * BK + tl.arange(0, BK)
        tile = load_rows(x, first, r, d, token_ok, stride_t, stride_d, K, BK).to(tl.float32)
        squares += tl.sum(tile * tile, 1)
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def prepare_kernel(
    q, k, g, beta, cu_seqlens, chunk_starts,
    inverses,  # out, dtype of k [chunks, HV, C, C]: T
    gates,  # out, float32 [chunks, HV, PARTS, C]: log2 of the decay since the start of the chunk
    norms,  # out, float32 [chunks, HQ, 2, C]: factors of q and of k
    out,  # tokens of no sequence are set to zero
    tokens, sequences,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    g_stride_b, g_stride_t, g_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    HQ: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
    HAS_CU: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64) // HQ
    head = tl.program_id(0) % HQ
    HV: tl.constexpr = HQ * GROUP
    r = tl.arange(0, C)
    if HAS_CU:
        # There are at least as many programs as chunks of tokens behind the last sequence.
        _, last = sequence_bounds(cu_seqlens, sequences - 1, tokens, True)
        padding = last + chunk * C + r
        vd = tl.arange(0, BLOCK_V)
        is_padding = (padding < tokens)[:, None] & (vd < V)[None, :]
        for j in range(GROUP):
            out_at = out + (padding[:, None] * HV + head * GROUP + j) * V + vd[None, :]
            tl.store(out_at, tl.zeros([C, BLOCK_V], out.dtype.element_ty), mask=is_padding)
        row = tl.zeros((), tl.int64)
        i = sequence_of(chunk_starts, chunk, sequences)
        if i >= sequences:
            return
        first, end = sequence_bounds(cu_seqlens, i, tokens, True)
        first += (chunk - tl.load(chunk_starts + i)) * C
    else:
        chunks_each = tl.cdiv(tokens, C)
        row = chunk // chunks_each
        first = chunk % chunks_each * C
        end = tl.zeros((), tl.int64) + tokens
    token_ok = first + r < end
    q += row * q_stride_b + head.to(tl.int64) * q_stride_h
    k += row * k_stride_b + head.to(tl.int64) * k_stride_h

    k_factor = tl.zeros([C], tl.float32)
    if L2NORM:
        norms_at = norms + (chunk * HQ + head) * 2 * C + r
        tl.store(norms_at, _norm_factor(q, first, r, token_ok, q_stride_t, q_stride_d, K, BK, NK))
        k_factor = _norm_factor(k, first, r, token_ok, k_stride_t, k_stride_d, K, BK, NK)
        tl.store(norms_at + C, k_factor)
    keys = tl.zeros([C, C], tl.float32)
    for n in tl.static_range(NK):
        d = n * BK + tl.arange(0, BK)
        tile = load_rows(k, first, r, d, token_ok, k_stride_t, k_stride_d, K, BK)
        if L2NORM:
            tile = normalise(tile, k_factor)
        keys = tl.dot(tile, tl.trans(tile), keys, input_precision=PRECISION)

    for j in range(GROUP):
        h = head * GROUP + j
        g_at = g + row * g_stride_b + (first + r) * g_stride_t + h.to(tl.int64) * g_stride_h
        gate = tl.load(g_at, mask=token_ok, other=0.0)
        # In float64: decays are differences of these sums, and small gates follow large ones.
        total = tl.cumsum(gate.to(tl.float64) * LOG2E, 0)
        G = total.to(tl.float32)
        rest = (total - G.to(tl.float64)).to(tl.float32)
        gates_at = gates + (chunk * HV + h) * PARTS * C + r
        tl.store(gates_at, G)
        if PARTS == 2:
            tl.store(gates_at + C, rest)

        b_at = beta + row * beta_stride_b + (first + r) * beta_stride_t
        strength = tl.load(b_at + h.to(tl.int64) * beta_stride_h, mask=token_ok, other=0.0)
        strength = strength.to(tl.float32)
        below = r[:, None] > r[None, :]
        exponent = (G[:, None] - G[None, :]) + (rest[:, None] - rest[None, :])
        decay = tl.exp2(tl.where(below, exponent, float("-inf")))
        T = invert_unit_lower_64(strength[:, None] * decay * keys, INVERSE_PRECISION)
        T *= strength[None, :]
        T_at = inverses + (chunk * HV + h) * C * C + r[:, None] * C + r[None, :]
        tl.store(T_at, T.to(inverses.dtype.element_ty))
