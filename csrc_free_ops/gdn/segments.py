"""Kernels of split sequences: the states that their segments begin with, all segments at once.

From one state to the next a chunk is an affine map, S <- (of_chunk I - K^T W diag(since_start) K) S
+ K^T W V, and so are several of them: S <- M S + B. ``segment_kernel`` makes B of each segment by
running the state's half of the scan from zero, and M by running it from the identity without
values: the same loop over other columns. ``chain_kernel`` then goes from segment to segment. What a
sequence begins with goes into the B of its first segment, which needs no M.

Scratch ``maps [segments, HV, V + K, K]`` float32, transposed as in scan.py: the state that a
segment begins with, and below it M. B of a segment is written where the next one begins.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.chunk_map import (
    let_next_kernel_start,
    segment_at,
    tokens_of_sequence,
    wait_for_earlier_kernels,
)
from csrc_free_ops.gdn.tiles import (
    as_accumulator,
    keys_of_chunks,
    load_factors,
    load_given_state,
    load_keys,
    load_state,
    load_tile,
    load_values,
    made_of,
    store_state,
    update_state,
)


@triton.jit
def _read_tile(
    k, S, KS, r, n: tl.constexpr, k_row, stride_t, stride_d, K: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Adds the share of the n-th BK columns of S^T to (K S)^T; also returns the tile of k."""
    k_tile = load_keys(k, k_row, r, n, r >= 0, stride_t, stride_d, K, BK, True, WIDE, BOXED)
    return tl.dot(S.to(k_tile.dtype), tl.trans(k_tile), KS, input_precision=PRECISION), k_tile


@triton.jit
def _identity(vd, n: tl.constexpr, BK: tl.constexpr):
    """Rows vd and the n-th BK columns of the identity."""
    return tl.where(vd[:, None] == n * BK + tl.arange(0, BK)[None, :], 1.0, 0.0)


@triton.jit(do_not_specialize=["tokens", "places"])
def segment_kernel(
    k, v, initial_state, cu_seqlens, segment_map, weights, vectors, keys,
    maps,  # out
    read_indices, tokens, places,
    k_stride_b, k_stride_t, k_stride_h, k_stride_d, v_stride_b, v_stride_t, v_stride_h, v_stride_d,
    s_stride_n, s_stride_h, s_stride_v, s_stride_k,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, HAS_CU: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_KEYS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    HAS_POOL: tl.constexpr, TWO_TERMS: tl.constexpr, BY_PRODUCT: tl.constexpr,
    BOXED: tl.constexpr,  # weights and keys are descriptors of matrices
    NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program is one segment, one value head and BV columns of B, or of M."""
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = V_TILES + (K + BV - 1) // BV
    HQ: tl.constexpr = HV // GROUP
    MAP: tl.constexpr = (V + K) * K
    tile = tl.program_id(0) % TILES
    v_head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    q_head = v_head // GROUP
    segment = tl.program_id(0).to(tl.int64) // (TILES * HV)
    i, before, first_chunk, count, is_last = segment_at(segment_map, segment)
    of_transition = tile >= V_TILES
    is_first = before == 0
    if (i < 0) | ((is_first | is_last) & of_transition):
        return

    rows = tl.where(of_transition, K, V)
    vd = tl.where(of_transition, tile - V_TILES, tile) * BV + tl.arange(0, BV)
    r = tl.arange(0, C)
    maps += (segment * HV + v_head) * MAP
    S0 = tl.zeros([BV, BK], tl.float32)
    S1 = S0
    S2 = S0
    S3 = S0
    if is_first:
        if HAS_STATE:
            S0, S1, S2, S3 = load_given_state(
                initial_state, read_indices, places, i, v_head, S0, S1, S2, S3, vd, s_stride_n,
                s_stride_h, s_stride_v, s_stride_k, V, K, BK, NK, HAS_POOL, NVIDIA,
            )  # fmt: skip
        store_state(maps, S0, S1, S2, S3, vd, K, 1, True, V, K, BK, NK, False)
    if is_last:
        return
    if of_transition:
        S0 = _identity(vd, 0, BK)
        if NK > 1:
            S1 = _identity(vd, 1, BK)
        if NK > 2:
            S2 = _identity(vd, 2, BK)
        if NK > 3:
            S3 = _identity(vd, 3, BK)

    if WIDE:  # as in the scan
        k_stride_t += tl.zeros((), tl.int64)
        v_stride_t += tl.zeros((), tl.int64)
    row, begin, _ = tokens_of_sequence(i, cu_seqlens, tokens, HAS_CU)
    begin += before * C
    k_row = ((first_chunk * HQ + q_head) * C).to(tl.int32)
    weights_row = ((first_chunk * HV + v_head) * (2 * C)).to(tl.int32)
    if BOXED:
        k = keys
    else:
        weights += (first_chunk * HV + v_head) * (2 * C * C)
        k, k_stride_t, k_stride_d, k_step = keys_of_chunks(
            k, keys, row, q_head, begin, first_chunk, k_stride_b, k_stride_t, k_stride_h,
            k_stride_d, HQ, C, K, HAS_KEYS,
        )  # fmt: skip
    v += row * v_stride_b + v_head * v_stride_h + begin * v_stride_t
    vectors += (first_chunk * HV + v_head) * (4 * C)

    # Only last segments have incomplete chunks.
    for _ in range(count):
        of_chunk = tl.load(vectors + 4 * C - 4 + tl.zeros([BV], tl.int32))
        if BOXED:
            W = weights.load([weights_row, 0])
        else:
            W = tl.load(weights + r[:, None] * C + r[None, :])
        wanted = (r < C) & (tile < V_TILES)
        values = load_values(v, vd, r, wanted, v_stride_d, v_stride_t, V, BV, WIDE, BY_PRODUCT)
        values = as_accumulator(values, BY_PRODUCT)

        KS = tl.zeros([BV, C], tl.float32)
        KS, k0 = _read_tile(
            k, S0, KS, r, 0, k_row, k_stride_t, k_stride_d, K, BK, PRECISION, WIDE, BOXED
        )
        k1 = k0
        k2 = k0
        k3 = k0
        if NK > 1:
            KS, k1 = _read_tile(
                k, S1, KS, r, 1, k_row, k_stride_t, k_stride_d, K, BK, PRECISION, WIDE, BOXED
            )
        if NK > 2:
            KS, k2 = _read_tile(
                k, S2, KS, r, 2, k_row, k_stride_t, k_stride_d, K, BK, PRECISION, WIDE, BOXED
            )
        if NK > 3:
            KS, k3 = _read_tile(
                k, S3, KS, r, 3, k_row, k_stride_t, k_stride_d, K, BK, PRECISION, WIDE, BOXED
            )
        since_start, own, _ = load_factors(vectors, r, C)
        exact = values - since_start[None, :] * KS
        exact = made_of(exact, of_chunk[:, None], NVIDIA)  # as in the scan
        D = tl.dot(exact.to(W.dtype), tl.trans(W), own[None, :] * exact, input_precision=PRECISION)
        S0, S1, S2, S3 = update_state(
            S0, S1, S2, S3, D, k0, k1, k2, k3, of_chunk[:, None], NK, TWO_TERMS, PRECISION
        )
        if BOXED:
            k_row += HQ * C
            weights_row += HV * 2 * C
        else:
            k += k_step
            weights += HV * 2 * C * C
        v += C * v_stride_t
        vectors += HV * 4 * C

    to = maps + tl.where(of_transition, V * K, HV * MAP)
    store_state(to, S0, S1, S2, S3, vd, K, 1, True, rows, K, BK, NK, False)


@triton.jit
def _add_products(S, M, m: tl.constexpr, T0, T1, T2, T3, K: tl.constexpr, BK: tl.constexpr,
    NK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the tiles of the next state the products of a state's m-th tile with rows of M."""
    kd = tl.arange(0, BK)
    T0 = tl.dot(S, load_tile(M, m * BK + kd, kd, K, 1, True, K, K), T0, input_precision=PRECISION)
    if NK > 1:
        right = load_tile(M, m * BK + kd, BK + kd, K, 1, True, K, K)
        T1 = tl.dot(S, right, T1, input_precision=PRECISION)
    if NK > 2:
        right = load_tile(M, m * BK + kd, 2 * BK + kd, K, 1, True, K, K)
        T2 = tl.dot(S, right, T2, input_precision=PRECISION)
    if NK > 3:
        right = load_tile(M, m * BK + kd, 3 * BK + kd, K, 1, True, K, K)
        T3 = tl.dot(S, right, T3, input_precision=PRECISION)
    return T0, T1, T2, T3


@triton.jit(do_not_specialize=["segments"])
def chain_kernel(
    segment_map,
    maps,  # in: M and B, out: the states that segments begin with
    segments,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    NK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program is one sequence, one value head and BV columns of V; of others' than a sequence's
    first segment there are programs too, which stop at once."""
    wait_for_earlier_kernels(PDL)
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    MAP: tl.constexpr = (V + K) * K
    segment = tl.program_id(0).to(tl.int64) // (V_TILES * HV)
    v_head = tl.program_id(0) // V_TILES % HV
    i, before, _, _, is_last = segment_at(segment_map, segment)
    if (i < 0) | (before != 0) | is_last:
        return
    steps = -2  # to the second segment there is none, and the last one's B is not made
    for at in range(segment, segments, BLOCK):
        others = at + tl.arange(0, BLOCK)
        sequence = tl.load(segment_map + others * 4, mask=others < segments, other=-1)
        steps += tl.sum((sequence == i).to(tl.int32), 0)
    vd = tl.program_id(0) % V_TILES * BV + tl.arange(0, BV)
    maps += ((segment + 1) * HV + v_head) * MAP  # the state that the second begins with is there
    S0 = tl.zeros([BV, BK], tl.float32)
    S1 = S0
    S2 = S0
    S3 = S0
    S0, S1, S2, S3 = load_state(maps, S0, S1, S2, S3, vd, K, 1, True, V, K, BK, NK, NVIDIA)
    # Not made from maps in each round: M is copied rounds ahead, and maps is then not known yet.
    M = maps + V * K
    for _ in range(steps):
        maps += HV * MAP
        B0, B1, B2, B3 = load_state(maps, S0, S1, S2, S3, vd, K, 1, True, V, K, BK, NK, NVIDIA)
        T0 = tl.zeros([BV, BK], tl.float32)
        T1 = T0
        T2 = T0
        T3 = T0
        T0, T1, T2, T3 = _add_products(S0, M, 0, T0, T1, T2, T3, K, BK, NK, PRECISION)
        if NK > 1:
            T0, T1, T2, T3 = _add_products(S1, M, 1, T0, T1, T2, T3, K, BK, NK, PRECISION)
        if NK > 2:
            T0, T1, T2, T3 = _add_products(S2, M, 2, T0, T1, T2, T3, K, BK, NK, PRECISION)
        if NK > 3:
            T0, T1, T2, T3 = _add_products(S3, M, 3, T0, T1, T2, T3, K, BK, NK, PRECISION)
        M += HV * MAP
        # Last, so that nothing waits for it.
        S0 = T0 + B0
        S1 = T1 + B1
        S2 = T2 + B2
        S3 = T3 + B3
        store_state(maps, S0, S1, S2, S3, vd, K, 1, True, V, K, BK, NK, False)
