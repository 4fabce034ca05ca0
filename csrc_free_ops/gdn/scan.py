"""Kernel 4: the states, one chunk after the other, and the outputs in the same loop.

With W and U of the prepare kernel and S the state before the chunk:

    R   = V - since_start * (K S)
    O   = scale since_start * (Q S) + U R
    S  <- decay_of_chunk S + K^T (W R)

A program is one sequence, one value head and BV columns of V: the columns of S do not depend on
each other. With SPLIT it is one segment of a sequence instead, whose first state segments.py has
made. Everything is kept transposed, with those columns as rows: then S^T, R^T and (W R)^T are
always the left operand of the next product, which tensor cores take from the registers that hold
it, and only what comes from memory goes through shared memory. S stays in registers from the first
chunk to the last, as tiles of BK columns (up to four).
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import (
    let_next_kernel_start,
    segment_at,
    tokens_of_sequence,
    wait_for_earlier_kernels,
)
from csrc_free_ops.gdn.prepare import halves, join_halves, load_rows, offsets
from csrc_free_ops.gdn.tiles import (
    as_accumulator,
    keys_of_chunks,
    load_factors,
    load_given_state,
    load_keys,
    load_state,
    load_values,
    made_of,
    store_half,
    store_state,
    update_state,
)


@triton.jit
def _read_tile(
    q, k, S, KS, QS, r, n: tl.constexpr, token_ok, q_row, q_column, k_row,
    q_stride_t, q_stride_d, k_stride_t, k_stride_d,
    K: tl.constexpr, BK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the n-th BK columns of S^T to (K S)^T and (Q S)^T; also returns the tile of
    k."""
    k_tile = load_keys(k, k_row, r, n, token_ok, k_stride_t, k_stride_d, K, BK, PADDED, WIDE, BOXED)
    if BOXED:
        # Rows behind the sequence's last token are of another one. They stay among themselves.
        q_tile = q.load([q_row, q_column + n * BK])
    else:
        d = n * BK + tl.arange(0, BK)
        q_tile = load_rows(q, r, d, token_ok, q_stride_t, q_stride_d, K, BK, WIDE)
    S = S.to(k_tile.dtype)
    KS = tl.dot(S, tl.trans(k_tile), KS, input_precision=PRECISION)
    QS = tl.dot(S, tl.trans(q_tile), QS, input_precision=PRECISION)
    return KS, QS, k_tile


@triton.jit
def _store_output(out, O, vd, r, token_ok, HV: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr):
    """Writes a chunk's outputs, of which O has columns vd as rows."""
    at = out + offsets(vd, 1, r, HV * V, WIDE)
    tl.store(at, O.to(out.dtype.element_ty), mask=token_ok[None, :] & (vd < V)[:, None])


@triton.jit
def _scan_chunks(
    S0, S1, S2, S3,
    row, begin, first_chunk, count, length,  # chunks from the token ``begin`` of a row on
    q, k, v, weights, vectors, keys, out, tokens, q_head, v_head, column,
    h, h_first, h_end,  # where the state before the first goes, and those before which are written
    kept, s_stride_v, s_stride_k, kept_after,  # with KEEPS the state after so many is written there
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d,
    HQ: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, HAS_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, H_LAYOUT: tl.constexpr, H_PAIRS: tl.constexpr,
    TWO_TERMS: tl.constexpr, BY_PRODUCT: tl.constexpr, EARLY: tl.constexpr, BOXED: tl.constexpr,
    NVIDIA: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Goes through chunks, from the state before to the one after, whose tiles are returned.

    Writes their outputs, and states between them.
    """
    NARROW: tl.constexpr = BV > 32  # or two programs would not fit into a multiprocessor
    vd = column + tl.arange(0, BV)
    r = tl.arange(0, C)

    q_row = (row * tokens + begin).to(tl.int32)
    q_column = (q_head * q_stride_h).to(tl.int32)
    k_row = ((first_chunk * HQ + q_head) * C).to(tl.int32)
    weights_row = ((first_chunk * HV + v_head) * (2 * C)).to(tl.int32)
    if BOXED:
        k = keys
    else:
        q += row * q_stride_b + q_head * q_stride_h + begin * q_stride_t
        weights += (first_chunk * HV + v_head) * (2 * C * C)
        k, k_stride_t, k_stride_d, k_step = keys_of_chunks(
            k, keys, row, q_head, begin, first_chunk, k_stride_b, k_stride_t, k_stride_h,
            k_stride_d, HQ, C, K, HAS_KEYS,
        )  # fmt: skip
    v += row * v_stride_b + v_head * v_stride_h + begin * v_stride_t
    out += ((row * tokens + begin) * HV + v_head) * V
    vectors += (first_chunk * HV + v_head) * (4 * C)
    if EARLY:
        next_values = load_values(
            v, vd, r, r < length, v_stride_d, v_stride_t, V, BV, WIDE, BY_PRODUCT
        )
    for m in range(count):
        token_ok = m * C + r < length
        wanted = (m >= h_first) & (m < h_end)
        if H_PAIRS:
            # By halves, the other one among products, which go on meanwhile. With 64 columns there
            # are registers for both there.
            if not NARROW:
                store_half(0, h, S0, S1, S2, S3, vd, wanted, V, K, BK, NK)
        elif H_LAYOUT != 0:
            store_state(h, S0, S1, S2, S3, vd, K, 1, wanted, V, K, BK, NK, False, NARROW)

        # What does not depend on S.
        of_chunk = tl.load(vectors + 4 * C - 4 + tl.zeros([BV], tl.int32))
        if BOXED:
            both = weights.load([weights_row, 0])  # W above U
        else:
            W = tl.load(weights + r[:, None] * C + r[None, :])
            U = tl.load(weights + C * C + r[:, None] * C + r[None, :])
        if EARLY:
            values = next_values
            v += C * v_stride_t
            next_values = load_values(
                v, vd, r, m * C + C + r < length, v_stride_d, v_stride_t, V, BV, WIDE, BY_PRODUCT
            )  # fmt: skip
        else:
            values = load_values(
                v, vd, r, token_ok, v_stride_d, v_stride_t, V, BV, WIDE, BY_PRODUCT
            )  # fmt: skip
            v += C * v_stride_t
        if not BY_PRODUCT:
            values = as_accumulator(values, False)

        KS = tl.zeros([BV, C], tl.float32)
        QS = tl.zeros([BV, C], tl.float32)
        KS, QS, k0 = _read_tile(
            q, k, S0, KS, QS, r, 0, token_ok, q_row, q_column, k_row, q_stride_t, q_stride_d,
            k_stride_t, k_stride_d, K, BK, HAS_KEYS, PRECISION, WIDE, BOXED,
        )  # fmt: skip
        k1 = k0
        k2 = k0
        k3 = k0
        if NK > 1:
            KS, QS, k1 = _read_tile(
                q, k, S1, KS, QS, r, 1, token_ok, q_row, q_column, k_row, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, K, BK, HAS_KEYS, PRECISION, WIDE, BOXED,
            )  # fmt: skip
        if NK > 2:
            KS, QS, k2 = _read_tile(
                q, k, S2, KS, QS, r, 2, token_ok, q_row, q_column, k_row, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, K, BK, HAS_KEYS, PRECISION, WIDE, BOXED,
            )  # fmt: skip
        if NK > 3:
            KS, QS, k3 = _read_tile(
                q, k, S3, KS, QS, r, 3, token_ok, q_row, q_column, k_row, q_stride_t, q_stride_d,
                k_stride_t, k_stride_d, K, BK, HAS_KEYS, PRECISION, WIDE, BOXED,
            )  # fmt: skip

        if H_PAIRS and NARROW:
            store_half(0, h, S0, S1, S2, S3, vd, wanted, V, K, BK, NK)
        since_start, own, of_query = load_factors(vectors, r, C)
        if BY_PRODUCT:  # late: as an accumulator it takes registers
            values = as_accumulator(values, True)
        exact = values - since_start[None, :] * KS
        # An operand of products: so that it is loaded chunks ahead, of_chunk must be part of it.
        exact = made_of(exact, of_chunk[:, None], NVIDIA)
        R = exact.to(k0.dtype)
        D = own[None, :] * exact
        O = QS * of_query[None, :]
        if H_PAIRS:
            store_half(1, h, S0, S1, S2, S3, vd, wanted, V, K, BK, NK)
        if BOXED:  # one product of twice the columns, and one wait
            D, O = halves(tl.dot(R, tl.trans(both), join_halves(D, O)))
        else:
            D = tl.dot(R, tl.trans(W), D, input_precision=PRECISION)
            O = tl.dot(R, tl.trans(U), O, input_precision=PRECISION)
        h += HV * V * K
        if BV > 32:  # the other way round programs of 32 columns are faster, those of 64 slower
            _store_output(out, O, vd, r, token_ok, HV, V, WIDE)
        S0, S1, S2, S3 = update_state(
            S0, S1, S2, S3, D, k0, k1, k2, k3, of_chunk[:, None], NK, TWO_TERMS, PRECISION
        )
        if BV <= 32:
            _store_output(out, O, vd, r, token_ok, HV, V, WIDE)

        if KEEPS:
            if m + 1 == kept_after:
                store_state(
                    kept, S0, S1, S2, S3, vd, s_stride_v, s_stride_k, True, V, K, BK, NK, True,
                    NARROW,
                )  # fmt: skip
        if BOXED:
            q_row += C
            k_row += HQ * C
            weights_row += HV * 2 * C
        else:
            q += C * q_stride_t
            k += k_step
            weights += HV * 2 * C * C
        out += C * HV * V
        vectors += HV * 4 * C
    return S0, S1, S2, S3


@triton.jit(do_not_specialize=["tokens", "chunks", "rows", "places"])
def scan_kernel(
    q, k, v,
    initial_state,  # with SPLIT the maps of segments.py
    cu_seqlens, order,
    chunk_starts,  # with SPLIT the segment map
    weights, vectors, keys,
    out,  # dtype of v [B, tokens, HV, V]
    final_state,  # float32 [sequences, HV, V, K]; with a pool this and initial_state are the pool
    h,  # [rows, HV, V, K]
    h_cu_starts, read_indices, write_indices, track_lens, track_indices,
    tokens, chunks, rows, places,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d, s_stride_n, s_stride_h, s_stride_v, s_stride_k,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, HAS_CU: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    H_LAYOUT: tl.constexpr,  # 0: none, 1: fla, 2: compact
    H_PAIRS: tl.constexpr,  # each thread writes what it has of states inside sequences
    HAS_POOL: tl.constexpr,
    TRACK: tl.constexpr,  # 0: no state is kept, 1: one between two loops, 2: one inside a loop
    TWO_TERMS: tl.constexpr,  # update S by D in two terms, twice as exact
    HAS_ORDER: tl.constexpr, SPLIT: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    EARLY: tl.constexpr,  # v comes to registers a chunk ahead, and not BY_PRODUCT
    BOXED: tl.constexpr,  # q, weights and keys are descriptors of matrices
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    HQ: tl.constexpr = HV // GROUP
    head = tl.program_id(0) // V_TILES % HV
    part = tl.program_id(0).to(tl.int64) // (V_TILES * HV)
    q_head = (head // GROUP).to(tl.int64)
    v_head = head.to(tl.int64)
    column = tl.program_id(0) % V_TILES * BV
    vd = column + tl.arange(0, BV)

    if WIDE:
        # C tokens further is more than 32 bits hold.
        q_stride_t += tl.zeros((), tl.int64)
        k_stride_t += tl.zeros((), tl.int64)
        v_stride_t += tl.zeros((), tl.int64)
    i = part
    if HAS_ORDER:
        i = tl.load(order + part).to(tl.int64)
    is_last = True
    if SPLIT:
        i, before, first_chunk, count, is_last = segment_at(chunk_starts, part)
        if i < 0:
            return
    row, begin, end = tokens_of_sequence(i, cu_seqlens, tokens, HAS_CU)
    if SPLIT:
        begin += before * C
    else:
        if HAS_CU:
            first_chunk = tl.load(chunk_starts + i).to(tl.int64)
        else:
            first_chunk = i * tl.cdiv(tokens, C)
        # More than there is scratch for only if cu_seqlens breaks its rules.
        count = tl.minimum(tl.cdiv(end - begin, C), chunks - first_chunk).to(tl.int32)
    length = (end - begin).to(tl.int32)  # with SPLIT that of the segments after this one as well
    h_row = first_chunk
    if H_LAYOUT == 2:
        h_row = tl.load(h_cu_starts + i)
        if SPLIT:
            h_row += before

    # Before chunk m the state is row m of the layout fla, and row m - 1 of compact.
    if H_LAYOUT == 2:
        h_row -= 1
    h += (h_row * HV + v_head) * (V * K)
    # Those before chunks from h_first to h_end are this program's, and there is room for them.
    h_end = tl.minimum(tl.maximum(rows - h_row, 0), 2147483647).to(tl.int32)
    h_first = 0
    if H_LAYOUT == 2:
        h_first = 1
    elif SPLIT:
        h_first = tl.where(before == 0, 0, 1)

    S0 = tl.zeros([BV, BK], tl.float32)
    S1 = S0
    S2 = S0
    S3 = S0
    if SPLIT:
        given = initial_state + (part * HV + v_head) * ((V + K) * K)
        S0, S1, S2, S3 = load_state(given, S0, S1, S2, S3, vd, K, 1, True, V, K, BK, NK, NVIDIA)
    elif HAS_STATE:
        S0, S1, S2, S3 = load_given_state(
            initial_state, read_indices, places, i, v_head, S0, S1, S2, S3, vd, s_stride_n,
            s_stride_h, s_stride_v, s_stride_k, V, K, BK, NK, HAS_POOL, NVIDIA,
        )  # fmt: skip
    last = final_state
    kept = final_state
    last_wanted = True
    kept_after = 0  # so many chunks
    if HAS_POOL:
        write = tl.load(write_indices + i).to(tl.int64)
        last = final_state + write * s_stride_n + v_head * s_stride_h
        last_wanted = (write >= 0) & (write < places) & is_last
        if TRACK != 0:
            to = tl.load(track_indices + i).to(tl.int64)
            kept = final_state + to * s_stride_n + v_head * s_stride_h
            # Where the last state goes as well, that one stays.
            kept_wanted = (to >= 0) & (to < places) & (to != write)
            track_len = tl.load(track_lens + i).to(tl.int64)
            if SPLIT:
                track_len -= before * C
            kept_wanted &= (track_len > 0) & (track_len <= length)
            kept_wanted &= (track_len % C == 0) | (track_len == length)
            kept_after = tl.where(kept_wanted, tl.cdiv(track_len, C), 0).to(tl.int32)
            kept_after = tl.where(kept_after <= count, kept_after, 0)

    # With two, up to the state that is kept, and on from there. To ask in each chunk whether it is
    # that one makes all of them slower. But to start twice is slower where chunks are few.
    LOOPS: tl.constexpr = 2 if TRACK == 1 else 1
    for n in range(LOOPS):
        some = count
        if TRACK == 1:
            some = tl.where(n == 0, kept_after, count - kept_after)
        S0, S1, S2, S3 = _scan_chunks(
            S0, S1, S2, S3, row, begin, first_chunk, some, length, q, k, v, weights, vectors, keys,
            out, tokens, q_head, v_head, column, h, h_first, h_end, kept, s_stride_v, s_stride_k,
            kept_after, q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t,
            k_stride_h, k_stride_d, v_stride_b, v_stride_t, v_stride_h, v_stride_d, HQ, HV, K, V, C,
            BK, NK, BV, HAS_KEYS, PRECISION, WIDE, H_LAYOUT, H_PAIRS, TWO_TERMS, BY_PRODUCT, EARLY,
            BOXED, NVIDIA, TRACK == 2,
        )  # fmt: skip
        if TRACK == 1:
            kept_wanted = (n == 0) & (kept_after > 0)
            store_state(
                kept, S0, S1, S2, S3, vd, s_stride_v, s_stride_k, kept_wanted, V, K, BK, NK, True
            )
            begin += some * C
            first_chunk += some
            length -= some * C
    if H_LAYOUT == 2 or (SPLIT and H_LAYOUT == 1):
        wanted = count < h_end
        if H_LAYOUT == 2:
            wanted &= (count > 0) & (count * C <= length)
        else:
            # What the next segment begins with was summed up in another order. Rows are as in
            # compact.
            wanted &= is_last == 0
        h += count.to(tl.int64) * (HV * V * K)
        store_state(h, S0, S1, S2, S3, vd, K, 1, wanted, V, K, BK, NK, False)
    if HAS_POOL:
        store_state(
            last, S0, S1, S2, S3, vd, s_stride_v, s_stride_k, last_wanted, V, K, BK, NK, True
        )
    elif HAS_FINAL:
        last = final_state + (i * HV + v_head) * V * K
        store_state(last, S0, S1, S2, S3, vd, K, 1, is_last, V, K, BK, NK, False)
