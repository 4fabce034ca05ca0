"""The recurrent step: a few tokens of each row, one after the other, with the state in registers.

With S the state ``[V,K]`` before a token, and ``a = exp(g)``:

    d  = beta (v - a S k)
    o  = scale (a S q + (k . q) d)        which is S q after the update
    S <- a S + d k^T

so that both sums over S are taken in one pass. A program is one row, one value head and BV rows of
S: these do not depend on each other. S is read once and written once (or once after each token),
and its bytes are the bound: 4.27 TB/s both ways together on an H200.

S is kept as KO tiles ``[BV, KI]`` of columns ``ko * KI`` on. The compiler hands out threads along
KI first, 16 bytes each, then along rows: with KI as wide as a few threads, a sum over K is
additions of tiles within each thread and few shuffles for all the rows of a warp together. A tile
of all K columns would need five rounds of shuffles for each row.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from csrc_free_ops.gdn.gates import forget_gate, writing_strength
from csrc_free_ops.prefetch import prefetch_lines


@triton.jit
def _load_row(x, kd, stride_d, K: tl.constexpr, KO: tl.constexpr, KI: tl.constexpr):
    """A row of q or k as KO tiles ``[1, KI]``, in its dtype, zero past K."""
    tiles = ()
    for i in tl.static_range(KO):
        at = x + (kd + i * KI) * stride_d
        if (i + 1) * KI <= K:
            tiles = tiles + (tl.load(at),)
        else:
            tiles = tiles + (tl.load(at, mask=kd + i * KI < K, other=0.0),)
    return tiles


@triton.jit
def _norm_factor(row, L2NORM: tl.constexpr, KO: tl.constexpr):
    """``1 / sqrt(sum(x^2) + 1e-6)`` of a row, or 1."""
    factor = 1.0
    if L2NORM:
        factor = 1.0 / tl.sqrt(tl.sum(_product(row, row, KO)) + 1e-6)
    return factor


@triton.jit
def _normalised(row, factor, L2NORM: tl.constexpr, KO: tl.constexpr):
    """A row times its factor, rounded to its dtype; in float32."""
    tiles = ()
    for i in tl.static_range(KO):
        wide = row[i].to(tl.float32)
        if L2NORM:
            wide = (wide * factor).to(row[i].dtype).to(tl.float32)
        tiles = tiles + (wide,)
    return tiles


@triton.jit
def _product(x, y, KO: tl.constexpr):
    """The products of two tuples of tiles, added up over the tiles."""
    total = x[0].to(tl.float32) * y[0].to(tl.float32)
    for i in tl.static_range(1, KO):
        total += x[i].to(tl.float32) * y[i].to(tl.float32)
    return total


@triton.jit
def _updated(S, decay, d, k, KO: tl.constexpr):
    """``decay S + d k^T``."""
    tiles = ()
    for i in tl.static_range(KO):
        tiles = tiles + (decay * S[i] + d[:, None] * k[i],)
    return tiles


@triton.jit
def _load_state(
    at, inside, vd, kd, K: tl.constexpr, V: tl.constexpr, STRIDE_K: tl.constexpr, KO: tl.constexpr,
    KI: tl.constexpr, MASKED: tl.constexpr, EVEN_V: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """The tiles of S in float32, zero where it does not reach, and everywhere if not inside."""
    tiles = ()
    for i in tl.static_range(KO):
        here = at + (kd + i * KI) * STRIDE_K
        mask = _mask(inside, vd, kd + i * KI, K, V, EVEN_V and (i + 1) * KI <= K)
        if MASKED or not EVEN_V or (i + 1) * KI > K:
            tile = tl.load(here, mask=mask, other=0.0, eviction_policy=POLICY)
        else:
            tile = tl.load(here, eviction_policy=POLICY)
        tiles = tiles + (tile.to(tl.float32),)
    return tiles


@triton.jit
def _store_state(
    at, S, inside, vd, kd, K: tl.constexpr, V: tl.constexpr, STRIDE_K: tl.constexpr,
    KO: tl.constexpr, KI: tl.constexpr, MASKED: tl.constexpr, EVEN_V: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of S, rounded to the dtype of memory, if inside."""
    for i in tl.static_range(KO):
        here = at + (kd + i * KI) * STRIDE_K
        tile = S[i].to(at.dtype.element_ty)
        mask = _mask(inside, vd, kd + i * KI, K, V, EVEN_V and (i + 1) * KI <= K)
        if MASKED or not EVEN_V or (i + 1) * KI > K:
            tl.store(here, tile, mask=mask, eviction_policy=POLICY)
        else:
            tl.store(here, tile, eviction_policy=POLICY)


@triton.jit
def _mask(inside, vd, kd, K: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    """Where a tile lies within S, if inside at all."""
    if EVEN:
        mask = tl.full([1, 1], 1, tl.int1) & inside
    else:
        mask = (vd < V)[:, None] & (kd < K) & inside
    return mask


@triton.jit
def _slot(indices, rows):
    """The row of the pool that is meant, and whether there is one."""
    index = tl.load(indices).to(tl.int64)
    known = (index >= 0) & (index < rows)
    return tl.where(known, index, 0), known


@triton.jit(do_not_specialize=["rows"])
def recurrent_kernel(
    q, k, v,
    g, beta,  # with RAW a and b
    A_log, dt_bias,
    state,  # [rows, HV, V, K], read
    new_state,  # the same, written
    read_indices, write_indices,
    out,  # [B, SQ, HV, V]
    rows, scale,
    q_stride_b, q_stride_s, q_stride_h, q_stride_d, k_stride_b, k_stride_s, k_stride_h, k_stride_d,
    v_stride_b, v_stride_s, v_stride_h, v_stride_d, g_stride_b, g_stride_s, g_stride_h,
    beta_stride_b, beta_stride_s, beta_stride_h, A_stride, dt_stride,
    s_stride_n, s_stride_h, n_stride_n, n_stride_h,
    read_stride, write_stride_b, write_stride_s,
    # Strides of V and K in the two states: known to the compiler, offsets cost no register.
    S_V: tl.constexpr, S_K: tl.constexpr, N_V: tl.constexpr, N_K: tl.constexpr,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SQ: tl.constexpr,
    BLOCK_S: tl.constexpr,  # a power of two from SQ on
    KO: tl.constexpr, BV: tl.constexpr, KI: tl.constexpr,
    RAW: tl.constexpr, L2NORM: tl.constexpr, HAS_INDICES: tl.constexpr,
    WRITE_EACH: tl.constexpr,  # write_indices is [B, SQ]
    UNROLL: tl.constexpr, LOAD_POLICY: tl.constexpr, STORE_POLICY: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes ``out`` and ``new_state``. Grid: ``B * HV * ceil(V / BV)`` programs."""
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    EVEN_V: tl.constexpr = V % BV == 0
    AFTER_EACH: tl.constexpr = WRITE_EACH or SQ == 1
    # Sums over a row of k or q: in tiles that one warp holds, no warp waits for another.
    RI: tl.constexpr = 32 if KI > 32 else KI
    RO: tl.constexpr = KO * KI // RI

    # All offsets have 64 bits.
    program = tl.program_id(0)
    row = (program // (V_TILES * HV)).to(tl.int64)
    head = (program // V_TILES % HV).to(tl.int64)
    q_head = head // GROUP
    first_v = (program % V_TILES * BV).to(tl.int64)
    vd = first_v + tl.arange(0, BV)
    kd = tl.arange(0, KI).to(tl.int64)[None, :]
    rd = tl.arange(0, RI).to(tl.int64)[None, :]
    state += head * s_stride_h
    if PREFETCH:
        # Before gdc_wait, as it is no access. Without indices the address is known.
        BYTES: tl.constexpr = BV * K * state.dtype.element_ty.primitive_bitwidth // 8
        begin = state + row * s_stride_n + first_v * S_V
        prefetch_lines(begin.to(tl.int64) + tl.arange(0, BYTES // 128) * 128)
    if PDL:
        # Before this point nothing reads memory that an earlier kernel may still write.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    # ---- The state first: everything else is there before it.
    slot = row
    reads = True
    writes = True
    target = row
    if HAS_INDICES:
        slot, reads = _slot(read_indices + row * read_stride, rows)
        write_indices += row * write_stride_b
        if not WRITE_EACH:
            target, writes = _slot(write_indices, rows)
        s = tl.arange(0, BLOCK_S).to(tl.int64)
        wanted = s < (SQ if WRITE_EACH else 1)
        targets = tl.load(write_indices + s * write_stride_s, mask=wanted, other=-1)
        known = ((targets >= 0) & (targets < rows)).to(tl.int32)
        idle = tl.max(known, 0) + reads.to(tl.int32) == 0
    S = _load_state(
        state + slot * s_stride_n + vd[:, None] * S_V, reads, vd, kd, K, V, S_K, KO, KI,
        HAS_INDICES, EVEN_V, LOAD_POLICY,
    )  # fmt: skip

    q += row * q_stride_b + q_head * q_stride_h
    k += row * k_stride_b + q_head * k_stride_h
    v += row * v_stride_b + head * v_stride_h
    g += row * g_stride_b + head * g_stride_h
    beta += row * beta_stride_b + head * beta_stride_h
    out += (row * SQ * HV + head) * V + vd
    to = new_state + head * n_stride_h + vd[:, None] * N_V

    for _ in tl.range(0, SQ, loop_unroll_factor=UNROLL):
        place = target
        kept = writes
        if WRITE_EACH:
            place, kept = _slot(write_indices, rows)
            write_indices += write_stride_s
        k_row = _load_row(k, rd, k_stride_d, K, RO, RI)
        q_row = _load_row(q, rd, q_stride_d, K, RO, RI)
        v_t = tl.load(v + vd * v_stride_d, mask=vd < V, other=0.0).to(tl.float32)
        g_t = tl.load(g).to(tl.float32)
        beta_t = tl.load(beta).to(tl.float32)
        if RAW:
            A_head = tl.load(A_log + head * A_stride).to(tl.float32)
            g_t = forget_gate(g_t, A_head, tl.load(dt_bias + head * dt_stride).to(tl.float32))
            beta_t = writing_strength(beta_t)
        k_factor = _norm_factor(k_row, L2NORM, RO)
        q_factor = _norm_factor(q_row, L2NORM, RO)
        k_t = _normalised(k_row, k_factor, L2NORM, RO)
        q_t = _normalised(q_row, q_factor, L2NORM, RO)
        kq = tl.sum(_product(k_t, q_t, RO))
        if RI != KI:  # the same rows in tiles as wide as those of S
            k_t = _normalised(_load_row(k, kd, k_stride_d, K, KO, KI), k_factor, L2NORM, KO)
            q_t = _normalised(_load_row(q, kd, q_stride_d, K, KO, KI), q_factor, L2NORM, KO)

        decay = tl.exp(g_t)
        d = beta_t * (v_t - decay * tl.sum(_product(S, k_t, KO), 1))
        o = scale * (decay * tl.sum(_product(S, q_t, KO), 1) + kq * d)
        S = _updated(S, decay, d, k_t, KO)

        if AFTER_EACH:
            _store_state(
                to + place * n_stride_n, S, kept, vd, kd, K, V, N_K, KO, KI, HAS_INDICES, EVEN_V,
                STORE_POLICY,
            )  # fmt: skip
        if HAS_INDICES:
            o = tl.where(idle, 0.0, o)
        tl.store(out, o.to(out.dtype.element_ty), mask=vd < V)
        q += q_stride_s
        k += k_stride_s
        v += v_stride_s
        g += g_stride_s
        beta += beta_stride_s
        out += HV * V

    if not AFTER_EACH:
        _store_state(
            to + target * n_stride_n, S, writes, vd, kd, K, V, N_K, KO, KI, HAS_INDICES, EVEN_V,
            STORE_POLICY,
        )  # fmt: skip
