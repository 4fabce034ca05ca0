"""A state in the registers of a program: some columns of S as rows, in up to four tiles.

S^T is ``[V, K]``. A program holds its rows ``vd`` as tiles ``S0 .. S3`` of BK columns each, NK of
them; the others are stand-ins that nothing touches. Shared by the kernels that go through chunks.
"""

import triton
import triton.language as tl

from csrc_free_ops.gdn.prepare import halves, load_rows, offsets


@triton.jit
def made_of(x, other, NVIDIA: tl.constexpr):
    """x, of float32. The compiler takes it to be made of the other too, which broadcasts to it, and
    has that loaded before it uses x."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x, other], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def load_tile(state, vd, kd, stride_v, stride_k, wanted, rows, K: tl.constexpr):
    """A tile of a state of so many rows, in float32; zero if it is not wanted."""
    inside = (vd < rows)[:, None] & (kd < K)[None, :] & wanted
    at = state + offsets(vd, stride_v, kd, stride_k, True)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_state(
    state, S0, S1, S2, S3, vd, stride_v, stride_k, wanted, rows, K: tl.constexpr, BK: tl.constexpr,
    NK: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """The rows vd of a state of that many rows, in place of the tiles given; zero if not wanted."""
    kd = tl.arange(0, BK)
    S0 = load_tile(state, vd, kd, stride_v, stride_k, wanted, rows, K)
    if NK > 1:
        S1 = load_tile(state, vd, BK + kd, stride_v, stride_k, wanted, rows, K)
    if NK > 2:
        S2 = load_tile(state, vd, 2 * BK + kd, stride_v, stride_k, wanted, rows, K)
    if NK > 3:
        S3 = load_tile(state, vd, 3 * BK + kd, stride_v, stride_k, wanted, rows, K)
    # All loads are under way before the first tile is waited for: its layout changes next.
    if NK > 1:
        S0 = made_of(S0, S1, NVIDIA)
    if NK > 2:
        S0 = made_of(S0, S2, NVIDIA)
    if NK > 3:
        S0 = made_of(S0, S3, NVIDIA)
    return S0, S1, S2, S3


@triton.jit
def load_given_state(
    initial_state, read_indices, places, i, v_head, S0, S1, S2, S3, vd, stride_n, stride_h,
    stride_v, stride_k, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr,
    HAS_POOL: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """The rows vd of what sequence i begins with: its own state, or the one of the pool it names,
    zero if there is none such."""
    place = i
    known = True
    if HAS_POOL:
        place = tl.load(read_indices + i).to(tl.int64)
        known = (place >= 0) & (place < places)
    given = initial_state + place * stride_n + v_head * stride_h
    return load_state(given, S0, S1, S2, S3, vd, stride_v, stride_k, known, V, K, BK, NK, NVIDIA)


@triton.jit
def _store_columns(
    state, S, vd, first: tl.constexpr, stride_v, stride_k, wanted, rows, K: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Writes columns of a state from ``first`` on."""
    kd = first + tl.arange(0, S.shape[1])
    inside = (vd < rows)[:, None] & (kd < K)[None, :] & wanted
    at = state + offsets(vd, stride_v, kd, stride_k, WIDE)
    tl.store(at, S.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _store_tile(
    state, S, vd, first: tl.constexpr, stride_v, stride_k, wanted, rows, K: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Writes a tile of a state, columns from ``first`` on. NARROW: 32 of them at a time, as each
    store goes through shared memory."""
    N: tl.constexpr = S.shape[1] // 2
    if NARROW and N >= 32:
        left, right = halves(S)
        _store_tile(state, left, vd, first, stride_v, stride_k, wanted, rows, K, WIDE, N > 32)
        _store_tile(state, right, vd, first + N, stride_v, stride_k, wanted, rows, K, WIDE, N > 32)
    else:
        _store_columns(state, S, vd, first, stride_v, stride_k, wanted, rows, K, WIDE)


@triton.jit
def store_state(
    state, S0, S1, S2, S3, vd, stride_v, stride_k, wanted, rows, K: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr = False,
):  # fmt: skip
    """Writes the rows vd of a state of that many rows; for NARROW see _store_tile."""
    _store_tile(state, S0, vd, 0, stride_v, stride_k, wanted, rows, K, WIDE, NARROW)
    if NK > 1:
        _store_tile(state, S1, vd, BK, stride_v, stride_k, wanted, rows, K, WIDE, NARROW)
    if NK > 2:
        _store_tile(state, S2, vd, 2 * BK, stride_v, stride_k, wanted, rows, K, WIDE, NARROW)
    if NK > 3:
        _store_tile(state, S3, vd, 3 * BK, stride_v, stride_k, wanted, rows, K, WIDE, NARROW)


@triton.jit
def _store_pairs(
    state, S, vd, first: tl.constexpr, wanted, rows: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Writes columns from ``first`` on of a state in float32, contiguous and aligned to 8 bytes, of
    which K is even. ``rows`` is V.

    For NVIDIA GPUs. Products leave two columns side by side in a thread, and each thread writes its
    own. A store of Triton's brings rows together in shared memory first, and waits for that.
    """
    BV: tl.constexpr = S.shape[0]
    PAIRS: tl.constexpr = S.shape[1] // 2
    even, odd = tl.split(tl.reshape(S, [BV, PAIRS, 2]))
    kd = first + 2 * tl.arange(0, PAIRS)
    at = state + offsets(vd, K, kd, 1, True)  # in 32 bits they would stay in registers
    if rows % BV != 0:
        wanted &= (vd < rows)[:, None]
    if K % BK != 0:
        wanted &= (kd < K)[None, :]
    tl.inline_asm_elementwise(
        """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $4, 0;
            @wanted st.global.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r", [at.to(tl.int64), even, odd, wanted.to(tl.int32)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_half(
    n: tl.constexpr, state, S0, S1, S2, S3, vd, wanted, rows: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """Writes the left (n = 0) or the right half of the tiles, each thread what it has; see
    _store_pairs."""
    if NK == 1:
        left, right = halves(S0)
        if n == 0:
            _store_pairs(state, left, vd, 0, wanted, rows, K, BK)
        else:
            _store_pairs(state, right, vd, BK // 2, wanted, rows, K, BK)
    elif n == 0:
        _store_pairs(state, S0, vd, 0, wanted, rows, K, BK)
        if NK > 2:
            _store_pairs(state, S1, vd, BK, wanted, rows, K, BK)
    elif NK == 2:
        _store_pairs(state, S1, vd, BK, wanted, rows, K, BK)
    else:
        _store_pairs(state, S2, vd, 2 * BK, wanted, rows, K, BK)
        if NK > 3:
            _store_pairs(state, S3, vd, 3 * BK, wanted, rows, K, BK)


@triton.jit
def keys_of_chunks(
    k, keys, row, q_head, begin, first_chunk, stride_b, stride_t, stride_h, stride_d,
    HQ: tl.constexpr, C: tl.constexpr, K: tl.constexpr, HAS_KEYS: tl.constexpr,
):  # fmt: skip
    """Where the keys of chunks from ``first_chunk`` on lie, whose first token is ``begin``: as
    prepare has stored them with HAS_KEYS, else in k. Also strides of tokens and columns, and the
    step from one chunk to the next."""
    if HAS_KEYS:
        at = keys + (first_chunk * HQ + q_head) * (C * K)
        stride_t = K
        stride_d = 1
        step = C * K * HQ
    else:
        at = k + row * stride_b + q_head * stride_h + begin * stride_t
        step = C * stride_t
    return at, stride_t, stride_d, step


@triton.jit
def load_keys(
    k, k_row, r, n: tl.constexpr, token_ok, stride_t, stride_d, K: tl.constexpr, BK: tl.constexpr,
    PADDED: tl.constexpr, WIDE: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """The n-th BK columns of a chunk's keys. PADDED: k has rows for all tokens of the chunk. BOXED:
    it is a descriptor, and they are the rows from ``k_row`` on."""
    d = n * BK + tl.arange(0, BK)
    if BOXED:
        k_tile = k.load([k_row, n * BK])
    elif PADDED and K % BK == 0:
        k_tile = tl.load(k + offsets(r, stride_t, d, stride_d, WIDE))
    else:
        k_tile = load_rows(k, r, d, token_ok | PADDED, stride_t, stride_d, K, BK, WIDE)
    return k_tile


@triton.jit
def load_factors(vectors, r, C: tl.constexpr):
    """The three factors of each token of a chunk, which lie side by side in fours.

    Loaded one by one, each thread would copy its own to shared memory, where others have as well.
    """
    fours = tl.load(vectors + r[:, None] * 4 + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(fours, [C, 2, 2]))
    since_start, of_query = tl.split(even)
    own, _ = tl.split(odd)
    return since_start, own, of_query


@triton.jit
def load_values(
    v, vd, r, token_ok, stride_d, stride_t, V: tl.constexpr, BV: tl.constexpr, WIDE: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Columns vd of a chunk's v, zero where there are none; as rows but BY_PRODUCT."""
    if BY_PRODUCT:
        values = load_rows(v, r, vd, token_ok, stride_t, stride_d, V, BV, WIDE)
    else:
        wanted = token_ok[None, :]
        if V % BV != 0:
            wanted &= (vd < V)[:, None]
        values = tl.load(v + offsets(vd, stride_d, r, stride_t, WIDE), mask=wanted, other=0.0)
    return values


@triton.jit
def as_accumulator(values, BY_PRODUCT: tl.constexpr):
    """The columns that were loaded, as rows in float32.

    BY_PRODUCT (of 16 bits): the identity times them, which changes no bit. Only operands of
    products are copied to shared memory chunks ahead and come from there in the layout of
    accumulators. What is not finite stays with its token.
    """
    if BY_PRODUCT:
        n = tl.arange(0, values.shape[1])
        identity = tl.where(n[:, None] == n[None, :], 1.0, 0.0).to(values.dtype)
        values = tl.dot(identity, tl.trans(values))
    else:
        values = values.to(tl.float32)
    return values


@triton.jit
def update_state(
    S0, S1, S2, S3, D, k0, k1, k2, k3, of_chunk, NK: tl.constexpr, TWO_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- of_chunk S + K^T D, with D^T as it is written and the tiles of the chunk's keys."""
    rounded = D.to(k0.dtype)
    S0 = tl.dot(rounded, k0, of_chunk * S0, input_precision=PRECISION)
    if NK > 1:
        S1 = tl.dot(rounded, k1, of_chunk * S1, input_precision=PRECISION)
    if NK > 2:
        S2 = tl.dot(rounded, k2, of_chunk * S2, input_precision=PRECISION)
    if NK > 3:
        S3 = tl.dot(rounded, k3, of_chunk * S3, input_precision=PRECISION)
    if TWO_TERMS:
        tl.static_assert(NK == 1)
        rest = (D - rounded.to(tl.float32)).to(k0.dtype)
        S0 = tl.dot(rest, k0, S0, input_precision=PRECISION)
    return S0, S1, S2, S3
