"""The recurrent step: a few tokens of each row, one after the other, with the state in registers.

With S the state ``[V,K]`` before a token, and ``a = exp(g)``:

    d  = beta (v - a S k)
    o  = scale (a S q + (k . q) d)        which is S q after the update
    S <- a S + d k^T

so that both sums over S are taken in one pass. A program is one row, one value head and BV rows of
S: these do not depend on each other. S is read once and written once (or once after each token),
and its bytes are the bound: 4.27 TB/s both ways together on an H200.

A tile of S is ``[KO, BV, KI]``, column ``k = ko * KI + ki``. The compiler hands out threads from
the last dimension on: KI is what few threads load with 16 bytes each, next to them lie other rows
of S, and KO is left to the registers of one thread. A sum over ``[BV, K]`` would need five rounds
of shuffles for every row; here it is additions, and three rounds for all the rows of a warp.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from csrc_free_ops.gdn.gates import forget_gate, writing_strength


@triton.jit
def _prefetch(begin, BYTES: tl.constexpr):
    """Asks for memory to be brought into the L2, by lines of 128 bytes; reads nothing."""
    lines = begin.to(tl.int64) + tl.arange(0, BYTES // 128) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _load_row(x, kd, stride_d, K: tl.constexpr, EVEN_K: tl.constexpr):
    """A row ``[KO, 1, KI]`` of q or k, in its dtype, zero past K."""
    if EVEN_K:
        return tl.load(x + kd * stride_d)
    return tl.load(x + kd * stride_d, mask=kd < K, other=0.0)


@triton.jit
def _total(x):
    """The sum of all of ``[KO, 1, KI]``."""
    return tl.sum(x)


@triton.jit
def _over_k(x):
    """The sums ``[BV]`` over K of ``[KO, BV, KI]``."""
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def _normalised(x):
    """``x / sqrt(sum(x^2) + 1e-6)``, rounded to the dtype of x."""
    wide = x.to(tl.float32)
    return (wide * (1.0 / tl.sqrt(_total(wide * wide) + 1e-6))).to(x.dtype)


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
    EVEN_K: tl.constexpr = KO * KI == K
    EVEN: tl.constexpr = EVEN_K and V % BV == 0

    # All offsets have 64 bits.
    program = tl.program_id(0)
    row = (program // (V_TILES * HV)).to(tl.int64)
    head = (program // V_TILES % HV).to(tl.int64)
    q_head = head // GROUP
    first_v = (program % V_TILES * BV).to(tl.int64)
    vd = first_v + tl.arange(0, BV)
    kd = (tl.arange(0, KO) * KI)[:, None, None] + tl.arange(0, KI)[None, None, :]
    kd = kd.to(tl.int64)
    state += head * s_stride_h
    if PREFETCH:
        # Before gdc_wait, as it is no access. Without indices the address is known.
        BYTES: tl.constexpr = BV * K * state.dtype.element_ty.primitive_bitwidth // 8
        _prefetch(state + row * s_stride_n + first_v * S_V, BYTES)
    if PDL:
        # Before this point nothing reads memory that an earlier kernel may still write.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    # ---- The state first: everything else is there before it.
    inside = tl.full([1, 1, 1], 1, tl.int1)
    if not EVEN:
        inside = (vd < V)[None, :, None] & (kd < K)
    slot = row
    if HAS_INDICES:
        slot, reads = _slot(read_indices + row * read_stride, rows)
        inside_read = inside & reads
        s = tl.arange(0, BLOCK_S)
        wanted = s < (SQ if WRITE_EACH else 1)
        write_indices += row * write_stride_b
        targets = tl.load(write_indices + s * write_stride_s, mask=wanted, other=-1)
        writes = ((targets >= 0) & (targets < rows)).to(tl.int32)
        idle = tl.max(writes, 0) + reads.to(tl.int32) == 0
    at = state + slot * s_stride_n + vd[None, :, None] * S_V + kd * S_K
    if HAS_INDICES:
        S = tl.load(at, mask=inside_read, other=0.0, eviction_policy=LOAD_POLICY)
    elif EVEN:
        S = tl.load(at, eviction_policy=LOAD_POLICY)
    else:
        S = tl.load(at, mask=inside, other=0.0, eviction_policy=LOAD_POLICY)
    S = S.to(tl.float32)

    q += row * q_stride_b + q_head * q_stride_h
    k += row * k_stride_b + q_head * k_stride_h
    v += row * v_stride_b + head * v_stride_h
    g += row * g_stride_b + head * g_stride_h
    beta += row * beta_stride_b + head * beta_stride_h
    out += (row * SQ * HV + head) * V + vd
    to = new_state + head * n_stride_h + vd[None, :, None] * N_V + kd * N_K

    for _ in tl.range(0, SQ, loop_unroll_factor=UNROLL):
        k_t = _load_row(k, kd, k_stride_d, K, EVEN_K)
        q_t = _load_row(q, kd, q_stride_d, K, EVEN_K)
        v_t = tl.load(v + vd * v_stride_d, mask=vd < V, other=0.0).to(tl.float32)
        g_t = tl.load(g).to(tl.float32)
        beta_t = tl.load(beta).to(tl.float32)
        if RAW:
            A_head = tl.load(A_log + head * A_stride).to(tl.float32)
            g_t = forget_gate(g_t, A_head, tl.load(dt_bias + head * dt_stride).to(tl.float32))
            beta_t = writing_strength(beta_t)
        if L2NORM:
            k_t = _normalised(k_t)
            q_t = _normalised(q_t)
        k_t = k_t.to(tl.float32)
        q_t = q_t.to(tl.float32)

        decay = tl.exp(g_t)
        d = beta_t * (v_t - decay * _over_k(S * k_t))
        o = scale * (decay * _over_k(S * q_t) + _total(k_t * q_t) * d)
        S = decay * S + d[None, :, None] * k_t

        if HAS_INDICES:
            o = tl.where(idle, 0.0, o)
        tl.store(out, o.to(out.dtype.element_ty), mask=vd < V)
        if WRITE_EACH:
            target, known = _slot(write_indices, rows)
            made = S.to(new_state.dtype.element_ty)
            tl.store(
                to + target * n_stride_n, made, mask=inside & known, eviction_policy=STORE_POLICY
            )
            write_indices += write_stride_s
        q += q_stride_s
        k += k_stride_s
        v += v_stride_s
        g += g_stride_s
        beta += beta_stride_s
        out += HV * V

    if not WRITE_EACH:
        made = S.to(new_state.dtype.element_ty)
        if HAS_INDICES:
            target, known = _slot(write_indices, rows)
            to += target * n_stride_n
            tl.store(to, made, mask=inside & known, eviction_policy=STORE_POLICY)
        elif EVEN:
            tl.store(to + row * n_stride_n, made, eviction_policy=STORE_POLICY)
        else:
            tl.store(to + row * n_stride_n, made, mask=inside, eviction_policy=STORE_POLICY)
