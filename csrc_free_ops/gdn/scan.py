"""Kernel 3: the states, one chunk after the other, and the outputs in the same loop.

With T of the prepare kernel, S the state before the chunk and ``decay`` between two of its tokens:

    D   = T (V - since_start * (K S))
    O   = scale (since_start * (Q S) + (decay * (Q K^T)) D)
    S  <- decay_of_chunk S + K^T (decay_to_end * D)

A program is one sequence, one value head and BV columns of V: the columns of S do not depend on
each other. S stays in registers from the first chunk to the last, as tiles of BK rows (up to four).
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import sequence_bounds
from csrc_free_ops.gdn.prepare import load_rows, normalise


@triton.jit
def _load_tile(state, kd, vd, stride_k, stride_v, K: tl.constexpr, V: tl.constexpr):
    """A tile [BK, BV] of a state, in float32."""
    inside = (kd < K)[:, None] & (vd < V)[None, :]
    at = state + kd[:, None].to(tl.int64) * stride_k + vd[None, :].to(tl.int64) * stride_v
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(state, S, kd, vd, wanted, K: tl.constexpr, V: tl.constexpr):
    """Writes a tile [BK, BV] of a state that lies [V, K] in memory."""
    inside = (kd < K)[:, None] & (vd < V)[None, :] & wanted
    at = state + kd[:, None] + vd[None, :] * K
    tl.store(at, S.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _store_state(
    state, S0, S1, S2, S3, vd, wanted, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    NK: tl.constexpr,
):  # fmt: skip
    """Writes the columns vd of a state."""
    kd = tl.arange(0, BK)
    _store_tile(state, S0, kd, vd, wanted, K, V)
    if NK > 1:
        _store_tile(state, S1, BK + kd, vd, wanted, K, V)
    if NK > 2:
        _store_tile(state, S2, 2 * BK + kd, vd, wanted, K, V)
    if NK > 3:
        _store_tile(state, S3, 3 * BK + kd, vd, wanted, K, V)


@triton.jit
def _read_tile(
    q, k, S, KS, QS, QK, first, r, d, token_ok, q_stride_t, q_stride_d, k_stride_t, k_stride_d,
    q_factor, k_factor, K: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of BK rows of S to K S, Q S and Q K^T; returns them and the tile of k."""
    k_tile = load_rows(k, first, r, d, token_ok, k_stride_t, k_stride_d, K, BK)
    q_tile = load_rows(q, first, r, d, token_ok, q_stride_t, q_stride_d, K, BK)
    if L2NORM:
        k_tile = normalise(k_tile, k_factor)
        q_tile = normalise(q_tile, q_factor)
    S = S.to(k_tile.dtype)
    KS = tl.dot(k_tile, S, KS, input_precision=PRECISION)
    QS = tl.dot(q_tile, S, QS, input_precision=PRECISION)
    QK = tl.dot(q_tile, tl.trans(k_tile), QK, input_precision=PRECISION)
    return KS, QS, QK, k_tile


@triton.jit(do_not_specialize=["tokens", "chunks", "rows"])
def scan_kernel(
    q, k, v, initial_state, cu_seqlens, chunk_starts, inverses, gates, norms,
    out,  # dtype of v [B, tokens, HV, V]
    final_state,  # float32 [sequences, HV, V, K]
    h,  # [rows, HV, V, K]
    h_cu_starts,
    tokens, chunks, rows, scale,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d, s_stride_n, s_stride_h, s_stride_v, s_stride_k,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, HAS_CU: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_FINAL: tl.constexpr, L2NORM: tl.constexpr, PRECISION: tl.constexpr,
    H_LAYOUT: tl.constexpr,  # 0: none, 1: fla, 2: compact
):  # fmt: skip
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    HQ: tl.constexpr = HV // GROUP
    head = tl.program_id(0) // V_TILES % HV
    i = tl.program_id(0).to(tl.int64) // (V_TILES * HV)
    q_head = (head // GROUP).to(tl.int64)
    v_head = head.to(tl.int64)
    vd = tl.program_id(0) % V_TILES * BV + tl.arange(0, BV)
    kd = tl.arange(0, BK)
    r = tl.arange(0, C)

    if HAS_CU:
        row = tl.zeros((), tl.int64)
        begin, end = sequence_bounds(cu_seqlens, i, tokens, True)
        first_chunk = tl.load(chunk_starts + i).to(tl.int64)
    else:
        row = i
        begin = tl.zeros((), tl.int64)
        end = begin + tokens
        first_chunk = i * tl.cdiv(tokens, C)
    # More than there is scratch for only if cu_seqlens breaks its rules.
    count = tl.minimum(tl.cdiv(end - begin, C), chunks - first_chunk)
    h_row = first_chunk
    if H_LAYOUT == 2:
        h_row = tl.load(h_cu_starts + i)

    q += row * q_stride_b + q_head * q_stride_h
    k += row * k_stride_b + q_head * k_stride_h
    v += row * v_stride_b + v_head * v_stride_h
    out += (row * tokens * HV + v_head) * V
    h += v_head * V * K

    S0 = tl.zeros([BK, BV], tl.float32)
    S1 = S0
    S2 = S0
    S3 = S0
    if HAS_STATE:
        given = initial_state + i * s_stride_n + v_head * s_stride_h
        S0 = _load_tile(given, kd, vd, s_stride_k, s_stride_v, K, V)
        if NK > 1:
            S1 = _load_tile(given, BK + kd, vd, s_stride_k, s_stride_v, K, V)
        if NK > 2:
            S2 = _load_tile(given, 2 * BK + kd, vd, s_stride_k, s_stride_v, K, V)
        if NK > 3:
            S3 = _load_tile(given, 3 * BK + kd, vd, s_stride_k, s_stride_v, K, V)

    for m in range(count):
        chunk = first_chunk + m
        first = begin + m * C
        token_ok = first + r < end
        if H_LAYOUT == 1:
            _store_state(h + chunk * HV * V * K, S0, S1, S2, S3, vd, chunk < rows, K, V, BK, NK)

        # What does not depend on S.
        q_factor = tl.zeros([C], tl.float32)
        k_factor = q_factor
        if L2NORM:
            norms_at = norms + (chunk * HQ + q_head) * 2 * C + r
            q_factor = tl.load(norms_at)
            k_factor = tl.load(norms_at + C)
        gates_at = gates + (chunk * HV + v_head) * PARTS * C + r
        G = tl.load(gates_at)
        exponent = G[:, None] - G[None, :]
        if PARTS == 2:
            rest = tl.load(gates_at + C)
            exponent += rest[:, None] - rest[None, :]
        not_above = r[:, None] >= r[None, :]
        decay = tl.exp2(tl.where(not_above, exponent, float("-inf")))
        since_start = tl.exp2(G)
        of_chunk = tl.sum(tl.where(r == C - 1, since_start, 0.0), 0)
        to_end = tl.sum(tl.where((r == C - 1)[:, None], decay, 0.0), 0)
        T = tl.load(inverses + (chunk * HV + v_head) * C * C + r[:, None] * C + r[None, :])
        values = load_rows(v, first, r, vd, token_ok, v_stride_t, v_stride_d, V, BV)

        KS = tl.zeros([C, BV], tl.float32)
        QS = tl.zeros([C, BV], tl.float32)
        QK = tl.zeros([C, C], tl.float32)
        KS, QS, QK, k0 = _read_tile(
            q, k, S0, KS, QS, QK, first, r, kd, token_ok, q_stride_t, q_stride_d, k_stride_t,
            k_stride_d, q_factor, k_factor, K, BK, L2NORM, PRECISION,
        )  # fmt: skip
        k1 = k0
        k2 = k0
        k3 = k0
        if NK > 1:
            KS, QS, QK, k1 = _read_tile(
                q, k, S1, KS, QS, QK, first, r, BK + kd, token_ok, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, q_factor, k_factor, K, BK, L2NORM, PRECISION,
            )  # fmt: skip
        if NK > 2:
            KS, QS, QK, k2 = _read_tile(
                q, k, S2, KS, QS, QK, first, r, 2 * BK + kd, token_ok, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, q_factor, k_factor, K, BK, L2NORM, PRECISION,
            )  # fmt: skip
        if NK > 3:
            KS, QS, QK, k3 = _read_tile(
                q, k, S3, KS, QS, QK, first, r, 3 * BK + kd, token_ok, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, q_factor, k_factor, K, BK, L2NORM, PRECISION,
            )  # fmt: skip

        right = values.to(tl.float32) - since_start[:, None] * KS
        D = tl.dot(T, right.to(T.dtype), input_precision=PRECISION)

        O = since_start[:, None] * QS
        O = tl.dot((decay * QK).to(T.dtype), D.to(T.dtype), O, input_precision=PRECISION) * scale
        out_at = out + (first + r)[:, None] * (HV * V) + vd[None, :]
        tl.store(out_at, O.to(out.dtype.element_ty), mask=token_ok[:, None] & (vd < V)[None, :])

        writes = (to_end[:, None] * D).to(T.dtype)
        S0 = tl.dot(tl.trans(k0), writes, of_chunk * S0, input_precision=PRECISION)
        if NK > 1:
            S1 = tl.dot(tl.trans(k1), writes, of_chunk * S1, input_precision=PRECISION)
        if NK > 2:
            S2 = tl.dot(tl.trans(k2), writes, of_chunk * S2, input_precision=PRECISION)
        if NK > 3:
            S3 = tl.dot(tl.trans(k3), writes, of_chunk * S3, input_precision=PRECISION)

        if H_LAYOUT == 2:
            wanted = (first + C <= end) & (h_row + m < rows)
            _store_state(h + (h_row + m) * HV * V * K, S0, S1, S2, S3, vd, wanted, K, V, BK, NK)

    if HAS_FINAL:
        _store_state(
            final_state + (i * HV + v_head) * V * K, S0, S1, S2, S3, vd, True, K, V, BK, NK
        )
