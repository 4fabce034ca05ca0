"""Split-KV decode attention in one launch: the device code.

A *task* is one tile of query rows of one KV head of one batch row. The keys that it sees are cut
into tiles of ``BLOCK_N``; how many there are follows from the row's length, which only the device
knows. Tiles are dealt out to programs in one of two ways:

* ``BALANCED`` (all query rows of a KV head fit one task): the tiles of all tasks form one flat
  list, and every program takes a contiguous *share* of them, equal to the others' up to one tile.
  One loop runs through the share, across the ends of tasks, so that the loads of the next task are
  under way while the last one is finished.
* otherwise a program is one split of one task: a share of the tiles that the task sees, or,
  with ``SPLIT_TILES > 0``, those of a fixed run of ``SPLIT_TILES`` tiles that it sees. Which task
  that is does not wait for lengths.

A task that lies within one program is finished there. Of any other task each program writes its
*part* to a *slot* of scratch and then adds to the task's counter: the part's tiles where
``BALANCED``, else 1. The program that completes the sum has arrived last: it merges the parts, in
their order, and sets the counter back to zero.

What holds throughout:

* Nothing touches memory before ``gdc_wait``: an earlier kernel may still be writing.
* Keys and query rows outside the valid ones are not predicated away: the nearest valid one is read
  in their place, at weight zero (keys) or never stored (rows). That costs less.
* Whether a row saw a key is kept apart from its sum, which is zero also where all logits are -inf:
  in ``seen``, and as ``l = -1`` in parts of rows that saw none.
* With ``SPLIT_TILES > 0`` the bits of a row depend neither on its neighbours nor on the capacity:
  cuts and the order of sums, ``UNROLL`` included, may follow from key positions alone.

Every task reads the keys and values that it sees once; memory bandwidth is the bound.

Float8 caches are read as bytes and become 16-bit numbers in registers, which is exact: keys in the
query's dtype; values in float16, as the numerators then are. ``k_scale`` is part of a task's factor
of the logits, ``v_scale`` multiplies acc where a task or share ends. Values are read two at a time
as one 16-bit word, since matrix units want the keys of a column side by side and no instruction
transposes bytes: there are two tiles of them, of even and of odd columns, and two accs.

Notation: s = scale * Q K^T (logits), p = softmax numerators, m = running row maximum, l = running
row sum, acc = running P V, all float32. b, h and t count batch rows, KV heads and keys; r counts
the query rows of a KV head, s_row and g_row are their query positions and heads in the group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from csrc_free_ops.prefetch import prefetch_rows

LOG2E = tl.constexpr(1.4426950408889634)
MOST_LOGIT = tl.constexpr(2.35e38)  # times LOG2E it is below the largest float32

# Values that travel together through the helpers. A tuple's members are values of the device: what
# the compiler must know is passed beside it, or in a tuple that is itself a ``tl.constexpr``.


class Window(NamedTuple):
    """Where query rows stand among the keys, and how far they see."""

    q_len: Any
    past: Any  # position of query row 0; with lengths it is n - q_len
    left: Any
    right: Any


class Rules(NamedTuple):
    """Which bounds on the keys apply."""

    LENGTHS: Any
    CAUSAL: Any
    LEFT: Any
    RIGHT: Any


class Output(NamedTuple):
    """Where finished rows go, and the sinks that they take in last."""

    out: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    sinks: Any


class Shares(NamedTuple):
    """How the flat list is cut: ``more`` shares of ``size + 1`` tiles, then shares of ``size``."""

    more: Any
    size: Any


class Parts(NamedTuple):
    """The parts of one task, named by program (``BALANCED``) or by split.

    Part p lies in slot ``base + p * STEP``, the first in the one after that if ``odd`` is 1.
    """

    first: Any
    last: Any
    base: Any
    odd: Any


@triton.jit
def _tanh(x):
    """tanh to float32 accuracy: where the exponential form cancels, near 0, the Taylor series."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0, -large, large)
    x2 = x * x
    series = 21844.0 / 6081075.0
    series = series * x2 - 1382.0 / 155925.0
    series = series * x2 + 62.0 / 2835.0
    series = series * x2 - 17.0 / 315.0
    series = series * x2 + 2.0 / 15.0
    series = series * x2 - 1.0 / 3.0
    return tl.where(tl.abs(x) < 0.35, x + x * x2 * series, large)


@triton.jit
def _to_float32(x):
    """Float32 values; of float64, finite ones stay finite."""
    if x.dtype == tl.float64:
        finite = tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)
        x = tl.where(tl.abs(x) == float("inf"), x, finite)
    return x.to(tl.float32)


@triton.jit
def _half_of_bits(x):
    """Float16 values of float8_e4m3fn bits in the low byte of 16-bit words."""
    size = x & 0x7F
    # The exponent has four bits of five, and is biased by 7 and not by 15.
    half = (((x & 0x80) << 8) | (size << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(size == 0x7F, float("nan"), half).to(tl.float16)


@triton.jit
def _keys_of_bytes(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Keys in ``dtype`` of a tile of float8 bytes."""
    if not NATIVE:
        return _half_of_bits(x.to(tl.uint16)).to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:  # by way of float32: the direct conversion is an instruction of its own for each element
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 half_low, half_high;
            .reg .f32 fa, fb, fc, fd;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 half_low, low;
            cvt.rn.f16x2.e4m3x2 half_high, high;
            mov.b32 {a, b}, half_low;
            mov.b32 {c, d}, half_high;
            cvt.f32.f16 fa, a;
            cvt.f32.f16 fb, b;
            cvt.f32.f16 fc, c;
            cvt.f32.f16 fd, d;
            cvt.rn.bf16x2.f32 $0, fb, fa;
            cvt.rn.bf16x2.f32 $1, fd, fc;
            }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _values_of_pairs(x, NATIVE: tl.constexpr):
    """(even, odd) columns of values in float16, of a tile of words of two float8 bytes."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return _half_of_bits(x & 0xFF), _half_of_bits(x >> 8)


@triton.jit
def _columns_in_order(even, odd):
    """[rows, 2 * columns] of the even and the odd columns."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def _scale_of(scales, h, stride, factor, IS_GIVEN: tl.constexpr):
    """``factor`` times the scale of KV head h, if there are scales."""
    if IS_GIVEN:
        factor = factor * tl.load(scales + h * stride)
    return factor


@triton.jit
def _exp(x, NATURAL: tl.constexpr):
    """exp of logits in natural units, or of logits already multiplied by log2(e)."""
    if NATURAL:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def _new_maximum(m, m_other, NATURAL: tl.constexpr):
    """The new row maximum, the same with 0 for -inf, and the factor for what the old one scaled."""
    m_new = tl.maximum(m, m_other)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, m_safe, _exp(m - m_safe, NATURAL)


@triton.jit
def _empty_rows(ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """(m, l, acc, seen) of rows before their first key."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    seen = tl.zeros([ROWS], tl.int32)
    return m, l, acc, seen


@triton.jit
def _valid_length(lengths, b, capacity, in_batch, HAS_LENGTHS: tl.constexpr):
    """The row's count of valid keys, clamped to [0, capacity]; the capacity without lengths."""
    if HAS_LENGTHS:
        n = tl.load(lengths + b, mask=in_batch, other=0)
        n = tl.minimum(tl.maximum(n, 0), capacity).to(tl.int32)
    else:
        n = b * 0 + capacity
    return n


@triton.jit
def _key_bounds(n, first_row, last_row, window, RULES: tl.constexpr):
    """[lo, hi): the keys that query rows first_row..last_row see between them; [0, 0) for none."""
    if RULES.LENGTHS:
        offset = n - window.q_len
    else:
        offset = n * 0 + window.past
    lo = n * 0
    hi = n
    if RULES.LEFT:
        lo = tl.maximum(lo, first_row + offset - window.left)
    if RULES.CAUSAL:
        hi = tl.minimum(hi, last_row + offset + 1)
    if RULES.RIGHT:
        hi = tl.minimum(hi, last_row + offset + window.right + 1)
    empty = lo >= hi
    return tl.where(empty, 0, lo), tl.where(empty, 0, hi)


@triton.jit
def _row_bounds(n, s_row, window, RULES: tl.constexpr):
    """[lo, hi) of each query row by itself, as vectors even where all rows see the same keys."""
    lo, hi = _key_bounds(n, s_row, s_row, window, RULES)
    return lo + s_row * 0, hi + s_row * 0


@triton.jit
def _sees_any(n, s_row, begin, end, shift, window, RULES: tl.constexpr, BLOCK_N: tl.constexpr):
    """1 for each query row that sees a key at positions [begin, end) of its task, else 0."""
    lo, hi = _row_bounds(n, s_row, window, RULES)
    t_end = tl.minimum(hi, (end + shift) * BLOCK_N)
    t_begin = tl.maximum(lo, (begin + shift) * BLOCK_N)
    return (t_end > t_begin).to(tl.int32)


@triton.jit
def _tiles(lo, hi, BLOCK_N: tl.constexpr):
    """The first tile of keys [lo, hi) and their number: one for no keys, to write the zeros."""
    first_tile = lo // BLOCK_N
    return first_tile, tl.maximum(tl.cdiv(hi, BLOCK_N) - first_tile, 1)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _batch_row_of(position, cumulated, work, n_all, BLOCK_B: tl.constexpr):
    """The batch row that holds a position of the flat list, where it begins, and its length."""
    if BLOCK_B == 1:
        b = position * 0
        return b, b, tl.sum(n_all, 0)
    else:
        start = cumulated - work
        holds = (start <= position) & (position < cumulated)
        b = tl.where(holds, tl.arange(0, BLOCK_B), 0)
        # In one reduction: each is a barrier.
        return tl.reduce((b, tl.where(holds, start, 0), tl.where(holds, n_all, 0)), 0, _add_three)


@triton.jit
def _shares(total, programs):
    """Equal shares of ``total`` tiles."""
    size = total // programs
    return Shares(total - size * programs, size)


@triton.jit
def _shares_by_reciprocal(total, programs, reciprocal):
    """`_shares` for 2**31 / programs rounded up; exact while total * programs < 2**31."""
    size = tl.umulhi(2 * total, reciprocal)
    return Shares(total - size * programs, size)


@triton.jit
def _share_begin(shares, program):
    """The position at which a program's share begins."""
    return program * shares.size + tl.minimum(program, shares.more)


@triton.jit
def _share_at(shares, position):
    """The program whose share holds a position."""
    past = position - shares.more * (shares.size + 1)
    is_larger = past < 0
    size = tl.where(is_larger, shares.size + 1, tl.maximum(shares.size, 1))
    return tl.where(is_larger, position, past) // size + tl.where(is_larger, 0, shares.more)


@triton.jit
def _pick(pair, i):
    """One of two values."""
    return tl.sum(tl.where(tl.arange(0, 2) == i, pair, 0), 0)


@triton.jit
def _base(b, head, stride_b, stride_h):
    """Offset of a batch row and head, in 64 bits."""
    return b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def _load_columns(ptrs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows of SIZE elements, zero-padded to BLOCK columns."""
    if SIZE == BLOCK:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(tl.arange(0, BLOCK) < SIZE)[None, :], other=0.0)


@triton.jit
def _load_pairs(ptrs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows of SIZE bytes as BLOCK words of two, byte by byte, wherever they lie."""
    column = 2 * tl.arange(0, BLOCK)[None, :]
    even = tl.load(ptrs, mask=column < SIZE, other=0).to(tl.uint16)
    odd = tl.load(ptrs + 1, mask=column + 1 < SIZE, other=0).to(tl.uint16)
    return even | (odd << 8)


@triton.jit
def _store_rows(
    output, m, l, acc, seen, b, head, s_row, row_ok,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Adds the sinks, divides and writes finished rows; rows that saw no key become zero."""
    if HAS_SINKS:
        sink = tl.load(output.sinks + head, mask=row_ok, other=float("-inf")).to(tl.float32)
        if not NATURAL:
            # A finite one stays finite; infinity and NaN stay what they are.
            is_beyond = (sink > MOST_LOGIT) & (sink < float("inf"))
            sink = tl.where(is_beyond, MOST_LOGIT, sink) * LOG2E
        _m, m_safe, alpha = _new_maximum(m, sink, NATURAL)
        l = l * alpha + _exp(sink - m_safe, NATURAL)
        acc = acc * alpha[:, None]
    y = tl.where((seen != 0)[:, None], acc * (1.0 / l)[:, None], 0.0)
    dv = tl.arange(0, BLOCK_DV)
    rows = (
        output.out
        + tl.cast(b, tl.int64) * output.stride_b
        + head * output.stride_h
        + s_row.to(tl.int64) * output.stride_s
    )
    tl.store(
        rows[:, None] + dv[None, :],
        y.to(output.out.dtype.element_ty),
        mask=row_ok[:, None] & (dv < DV)[None, :],
    )


@triton.jit
def _store_part(
    partials, slots, slot, m, l, acc, seen, row_ok,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes a part to its slot, l = -1 in rows that saw no key."""
    r_part = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    ok = row_ok & (r_part < ROWS)
    at = slot * ROWS + r_part
    ml = partials + slots * ROWS * BLOCK_DV
    tl.store(partials + at[:, None] * BLOCK_DV + dv[None, :], acc, mask=ok[:, None])
    tl.store(ml + at, m, mask=ok)
    tl.store(ml + slots * ROWS + at, tl.where(seen != 0, l, -1.0), mask=ok)


@triton.jit
def _merge_parts(
    partials, slots, parts, output, b, h, row_tile, group, rows_total,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    SINGLE_QUERY: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Merges all parts of one task, in their order, and writes its rows.

    ``UNROLL`` parts are under way at a time. Neither all of them, nor a pipeline: this code is
    cold, and fetching its instructions takes longer than they do.
    """
    row = tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    ml = partials + slots * ROWS * BLOCK_DV
    m, l, acc, seen = _empty_rows(ROWS, BLOCK_DV)
    for part in tl.range(parts.first, parts.last + 1, UNROLL, num_stages=1):
        slot = parts.base + part * STEP
        a_ptrs = partials + (slot * ROWS + row)[:, None] * BLOCK_DV + dv[None, :]
        m_ptrs = ml + slot * ROWS + row
        loaded = ()
        m_new = m
        for j in tl.static_range(UNROLL):
            ahead = j * STEP * ROWS
            if j == 0:
                ahead += tl.where(part == parts.first, parts.odd, 0) * ROWS
            there = part + j <= parts.last
            # Past the L1: it may hold what was there before other programs wrote these lines.
            a_part = tl.load(a_ptrs + ahead * BLOCK_DV, mask=there, other=0.0, cache_modifier=".cg")
            m_part = tl.load(m_ptrs + ahead, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_ptrs = m_ptrs + slots * ROWS
            l_part = tl.load(l_ptrs + ahead, mask=there, other=-1.0, cache_modifier=".cg")
            loaded += ((a_part, m_part, l_part),)  # type: ignore[assignment]
            m_new = tl.maximum(m_new, m_part)
        m, m_safe, alpha = _new_maximum(m, m_new, NATURAL)
        l = l * alpha
        acc = acc * alpha[:, None]
        for j in tl.static_range(UNROLL):
            a_part, m_part, l_part = loaded[j]
            w = _exp(m_part - m_safe, NATURAL)
            hidden = l_part < 0.0
            l += tl.where(hidden, 0.0, l_part) * w
            acc += a_part * w[:, None]
            seen = seen | tl.where(hidden, 0, 1)
    r = row_tile * BLOCK_M + tl.arange(0, ROWS)
    s_row = r * 0 if SINGLE_QUERY else r // group
    head = (h * group + r - s_row * group).to(tl.int64)
    row_ok = r < rows_total
    _store_rows(output, m, l, acc, seen, b, head, s_row, row_ok, DV, BLOCK_DV, HAS_SINKS, NATURAL)


@triton.jit(
    # Otherwise a 1 or a multiple of 16 among these would mean another kernel to compile.
    do_not_specialize=[
        "batch", "kv_heads", "group", "q_len", "capacity", "mask_len",
        "past", "left", "right",
        "splits", "splits_reciprocal", "slots",
        "k_scale_stride", "v_scale_stride",
    ],
    do_not_specialize_on_alignment=["lengths", "sinks", "k_scales", "v_scales"],
)  # fmt: skip
def split_kv_kernel(
    # Tensors. The query stands in for an absent one, the output for absent partials and counters.
    query,  # [B, Hq, Sq, D]
    key,  # [B, Hkv, T, D]; uint8 for float8
    value,  # [B, Hkv, T, Dv]; float8 as uint16 where V_WORDS, else as uint8
    out,  # [B, Hq, Sq, Dv]
    lengths,  # [B], valid keys
    mask,  # [B, Hq, Sq, mask_len]: uint8 for bool, or any type of bias; keys past it are hidden
    sinks,  # [Hq], logits
    partials,  # float32 [slots, ROWS, BLOCK_DV] of acc, then [slots, ROWS] of m and of l
    counters,  # int32, one a task, zero at entry and at exit
    k_scales, v_scales,  # float32, of float8 caches
    # Sizes: group = Hq // Hkv, q_len = Sq, capacity = T.
    batch, kv_heads, group, q_len, capacity, mask_len,
    # Which keys a row sees, see Window.
    past, left, right,
    # Schedule.
    splits,  # programs a task; 1 where BALANCED
    splits_reciprocal,  # 2**31 / splits, rounded up; not used for 1
    slots,  # parts that scratch has room for
    # Logits: scale is multiplied by log2(e) unless NATURAL.
    scale, softcap,
    # Strides in elements, of float8 too; those of the last dimensions are 1.
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_t,
    v_stride_b, v_stride_h, v_stride_t,
    o_stride_b, o_stride_h, o_stride_s,
    mask_stride_b, mask_stride_h, mask_stride_s, mask_stride_t,
    k_scale_stride, v_scale_stride,  # 0 for one scale for all heads
    # Sizes of heads, and the powers of two that hold them and the batch (1 unless BALANCED).
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr,
    # Tile: query rows, keys, stages of the loop's pipeline.
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    # Schedule.
    BALANCED: tl.constexpr,
    SPLIT_TILES: tl.constexpr,  # tiles of a split at fixed positions; 0 for equal splits
    ONE_ROW_TILE: tl.constexpr,  # all query rows of a KV head are one task
    ONE_TILE: tl.constexpr,  # a program is a task of one tile
    # Merge: rows of a part, parts at a time. Without MERGE no task has two parts.
    MERGE: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    # What the problem has.
    SINGLE_QUERY: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_BOOL_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    FLOAT8: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    # How it is compiled.
    DOT_PRECISION: tl.constexpr,
    TWO_TERMS: tl.constexpr,  # P V by P in two terms
    NARROW_ROWS: tl.constexpr,  # offsets within a tile of keys fit 32 bits
    PDL: tl.constexpr,  # programmatic dependent launch
    NATIVE_FLOAT8: tl.constexpr,  # the device converts float8 itself
    V_WORDS: tl.constexpr,  # pairs of float8 values are words in memory
):  # fmt: skip
    """Writes the attention of every query over the keys that it sees to ``out``, in one launch."""
    # Natural units where a bias may be finfo.min: times log2(e) it would become -inf.
    NATURAL: tl.constexpr = HAS_BIAS or HAS_SOFTCAP
    HAS_MASK: tl.constexpr = HAS_BIAS or HAS_BOOL_MASK
    V_COLUMNS: tl.constexpr = BLOCK_DV // 2 if FLOAT8 else BLOCK_DV  # of a tile of V, and of acc

    RULES: tl.constexpr = Rules(HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT)
    window = Window(q_len, past, left, right)
    output = Output(out, o_stride_b, o_stride_h, o_stride_s, sinks)

    if V_WORDS:
        v_stride_b, v_stride_h, v_stride_t = v_stride_b // 2, v_stride_h // 2, v_stride_t // 2

    program = tl.program_id(0)
    rows_total = group * q_len

    # ---- What does not wait for lengths, while an earlier kernel may still run.
    if ONE_ROW_TILE:
        row_tile = 0
        s_first = 0
        s_last = q_len - 1
    if not BALANCED:
        task = program // splits
        split = program - task * splits
        if ONE_ROW_TILE:
            b = task // kv_heads
            h = task - b * kv_heads
        else:
            row_tiles = tl.cdiv(rows_total, BLOCK_M)
            in_row = task % (kv_heads * row_tiles)
            b = task // (kv_heads * row_tiles)
            h = in_row // row_tiles
            row_tile = in_row - h * row_tiles
            s_first = row_tile * BLOCK_M // group
            s_last = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1)
        q_base = _base(b, h * group, q_stride_b, q_stride_h)
        k_base = _base(b, h, k_stride_b, k_stride_h)
        v_base = _base(b, h, v_stride_b, v_stride_h)
    if PDL:
        # Before this point nothing touches memory that an earlier kernel may still write.
        if BALANCED:
            tl_cuda.gdc_wait()
        elif h < kv_heads:  # always; without a condition the compiler would wait before it divides
            tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
        if ONE_TILE and HAS_LENGTHS:
            # The only tile is on its way to the L2 while the length is.
            V_SIZE: tl.constexpr = DV // 2 if V_WORDS else DV
            rows = tl.minimum(tl.arange(0, BLOCK_N), capacity - 1)
            prefetch_rows(key + k_base, rows, k_stride_t, 1, D)
            prefetch_rows(value + v_base, rows, v_stride_t, 1, V_SIZE)

    # ---- Which tiles: positions [begin, end); position i is key tile i + shift of the task.
    if BALANCED:
        in_batch = tl.arange(0, BLOCK_B)
        n_all = _valid_length(lengths, in_batch, capacity, in_batch < batch, HAS_LENGTHS)
        lo_all, hi_all = _key_bounds(n_all, 0, q_len - 1, window, RULES)
        _first, tiles_all = _tiles(lo_all, hi_all, BLOCK_N)
        work = tl.where(in_batch < batch, tiles_all * kv_heads, 0)
        cumulated = tl.cumsum(work, 0)
        total = tl.sum(work, 0)
        shares = _shares(total, tl.num_programs(0))
        begin = _share_begin(shares, program)
        end = _share_begin(shares, program + 1)

        first = tl.minimum(begin, total - 1)  # a program without a share stands at the last tile
        b, row_start, n = _batch_row_of(first, cumulated, work, n_all, BLOCK_B)
        lo, hi = _key_bounds(n, 0, s_last, window, RULES)
        first_tile, tiles = _tiles(lo, hi, BLOCK_N)
        h = (first - row_start) // tiles
        task_end = row_start + (h + 1) * tiles
        shift = first_tile - (row_start + h * tiles)
        q_base = _base(b, h * group, q_stride_b, q_stride_h)
        k_base = _base(b, h, k_stride_b, k_stride_h)
        v_base = _base(b, h, v_stride_b, v_stride_h)
        b_first, h_first, tiles_first, end_first = b, h, tiles, task_end
    else:
        n = _valid_length(lengths, b, capacity, True, HAS_LENGTHS)
        lo, hi = _key_bounds(n, s_first, s_last, window, RULES)
        first_tile, tiles = _tiles(lo, hi, BLOCK_N)
        if SPLIT_TILES > 0:
            first_part = first_tile // SPLIT_TILES
            last_part = (first_tile + tiles - 1) // SPLIT_TILES
            begin = tl.maximum(split * SPLIT_TILES, first_tile)
            end = tl.minimum((split + 1) * SPLIT_TILES, first_tile + tiles)
        elif ONE_TILE:
            first_part, last_part = 0, 0
            begin, end = 0, splits  # which is 1: a loop that is known to run once is not pipelined
        elif not MERGE:
            first_part, last_part = 0, 0
            begin, end = first_tile, first_tile + tiles
        else:
            shares = _shares_by_reciprocal(tiles, splits, splits_reciprocal)
            first_part = 0
            last_part = tl.minimum(tiles, splits) - 1
            begin = first_tile + _share_begin(shares, split)
            end = first_tile + _share_begin(shares, split + 1)
        shift = 0

    # ---- Query rows: row r is query position r // group of query head h * group + r % group.
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = r < rows_total
    if SINGLE_QUERY:
        s_row = r * 0
    else:
        s_row = r // group
    g_row = r - s_row * group
    d = tl.arange(0, BLOCK_D)
    t_tile = tl.arange(0, BLOCK_N)
    # Rows past the last one repeat it, and are not stored.
    r_read = tl.minimum(r, rows_total - 1)
    if SINGLE_QUERY:
        q_rows = r_read.to(tl.int64) * q_stride_h
    else:
        q_rows = (r_read % group).to(tl.int64) * q_stride_h
        q_rows += (r_read // group).to(tl.int64) * q_stride_s
    q_ptrs = query + q_rows[:, None] + d[None, :]
    k_columns = key + d[None, :]
    if FLOAT8 and not V_WORDS:
        v_columns = value + 2 * tl.arange(0, V_COLUMNS)[None, :]
    else:
        v_columns = value + tl.arange(0, V_COLUMNS)[None, :]
    if HAS_MASK:
        mask_rows = g_row.to(tl.int64) * mask_stride_h + s_row.to(tl.int64) * mask_stride_s
        mask_ptrs = mask + mask_rows[:, None] + t_tile.to(tl.int64)[None, :] * mask_stride_t

    m, l, acc, seen = _empty_rows(BLOCK_M, V_COLUMNS)
    task_begin = begin  # of this share's part of the current task
    factor = scale
    if FLOAT8:
        acc_odd = tl.zeros([BLOCK_M, V_COLUMNS], tl.float32)
        factor = _scale_of(k_scales, h, k_scale_stride, scale, HAS_K_SCALE)
        v_factor = _scale_of(v_scales, h, v_scale_stride, 1.0, HAS_V_SCALE)

    # ---- One loop over all tiles; Triton keeps STAGES - 1 tiles of loads in flight.
    for i in tl.range(begin, end, num_stages=STAGES):
        if BALANCED:
            if i >= task_end:
                # Tasks follow each other: the next head, or head 0 of the next batch row.
                h = tl.where(h + 1 < kv_heads, h + 1, 0)
                b = tl.where(h == 0, b + 1, b)
                n = _valid_length(lengths, b, capacity, True, HAS_LENGTHS)
                lo, hi = _key_bounds(n, 0, s_last, window, RULES)
                first_tile, tiles = _tiles(lo, hi, BLOCK_N)
                task_begin = i
                task_end = i + tiles
                shift = first_tile - i
                q_base = _base(b, h * group, q_stride_b, q_stride_h)
                k_base = _base(b, h, k_stride_b, k_stride_h)
                v_base = _base(b, h, v_stride_b, v_stride_h)
                if FLOAT8:
                    factor = _scale_of(k_scales, h, k_scale_stride, scale, HAS_K_SCALE)
                    v_factor = _scale_of(v_scales, h, v_scale_stride, 1.0, HAS_V_SCALE)

        # Load. The nearest key inside stands in for keys outside [lo, hi), at weight zero: this
        # costs less than a predicate a row. (An empty row reads key 0; a select zeroes the row.)
        t0 = (i + shift) * BLOCK_N
        wide_t = tl.cast(t0, tl.int64)
        t = t0 + t_tile
        key_ok = t < hi
        if HAS_LEFT:
            key_ok = key_ok & (t >= lo)
        key_row = tl.minimum(t_tile, hi - 1 - t0)
        if HAS_LEFT:
            key_row = tl.maximum(key_row, lo - t0)
        key_row = tl.maximum(key_row, -t0)[:, None]
        if not NARROW_ROWS:
            key_row = key_row.to(tl.int64)
        q_offset = q_base
        if ONE_ROW_TILE and not BALANCED and SPLIT_TILES == 0:
            # Adds 0. What does not change in the loop Triton loads ahead of it, and waits for it
            # before it asks for the first keys.
            q_offset += (i >> 31) * BLOCK_D
        q_tile = _load_columns(q_ptrs + q_offset, D, BLOCK_D)
        k_ptrs = k_columns + (k_base + wide_t * k_stride_t) + key_row * k_stride_t
        k_tile = _load_columns(k_ptrs, D, BLOCK_D)
        v_ptrs = v_columns + (v_base + wide_t * v_stride_t) + key_row * v_stride_t
        if V_WORDS:
            v_tile = _load_columns(v_ptrs, DV // 2, V_COLUMNS)
        elif FLOAT8:
            v_tile = _load_pairs(v_ptrs, DV, V_COLUMNS)
        else:
            v_tile = _load_columns(v_ptrs, DV, V_COLUMNS)

        # Logits.
        if FLOAT8:
            k_tile = _keys_of_bytes(k_tile, q_tile.dtype, NATIVE_FLOAT8)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=DOT_PRECISION) * factor
        if HAS_SOFTCAP:
            s = softcap * _tanh(s / softcap)
        if SINGLE_QUERY:
            ok = key_ok[None, :]
        else:
            lo_row, hi_row = _row_bounds(n, s_row, window, RULES)
            ok = (t[None, :] >= lo_row[:, None]) & (t[None, :] < hi_row[:, None])
        if HAS_MASK:
            ok = ok & row_ok[:, None] & (t < mask_len)[None, :]
            mask_base = _base(b, h * group, mask_stride_b, mask_stride_h) + wide_t * mask_stride_t
            given = tl.load(mask_ptrs + mask_base, mask=ok, other=0)
            if HAS_BIAS:
                ok = ok & (given != float("-inf"))
                bias = _to_float32(given)
                s = s + bias
            else:
                ok = ok & (given != 0)
            # A key hidden from every row must not reach the product even as 0 * NaN.
            shown = tl.max(ok.to(tl.int32), 0) != 0
            v_tile = tl.where(shown[:, None], v_tile, 0 if FLOAT8 else 0.0)
        s = tl.where(ok, s, float("-inf"))

        # Online softmax.
        m, m_safe, alpha = _new_maximum(m, tl.max(s, 1), NATURAL)
        p = _exp(s - m_safe[:, None], NATURAL)
        l = l * alpha + tl.sum(p, 1)
        if FLOAT8:
            p = p.to(tl.float16)
            v_even, v_odd = _values_of_pairs(v_tile, NATIVE_FLOAT8)
            acc = tl.dot(p, v_even, acc * alpha[:, None])
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        else:
            rounded = p.to(v_tile.dtype)
            acc = tl.dot(rounded, v_tile, acc * alpha[:, None], input_precision=DOT_PRECISION)
            if TWO_TERMS:
                acc = tl.dot((p - rounded.to(tl.float32)).to(v_tile.dtype), v_tile, acc)
        if HAS_MASK:
            seen = seen | tl.max(ok.to(tl.int32), 1)

        # Store, where the task or the share ends.
        if BALANCED:
            if (i + 1 == task_end) | (i + 1 == end):
                if not HAS_MASK:
                    seen = _sees_any(n, s_row, task_begin, i + 1, shift, window, RULES, BLOCK_N)
                if FLOAT8:
                    sums = _columns_in_order(acc, acc_odd) * v_factor
                else:
                    sums = acc
                if i + 1 - task_begin == tiles:
                    head = (h * group + g_row).to(tl.int64)
                    _store_rows(
                        output, m, l, sums, seen, b, head, s_row, row_ok,
                        DV, BLOCK_DV, HAS_SINKS, NATURAL,
                    )  # fmt: skip
                elif MERGE:
                    # At most two parts of a share are of unfinished tasks: its first (even slot)
                    # and its last (odd slot).
                    slot = 2 * program + tl.where(task_begin > begin, 1, 0)
                    _store_part(
                        partials, slots, slot, m, l, sums, seen, row_ok, BLOCK_M, ROWS, BLOCK_DV
                    )
                m, l, acc, seen = _empty_rows(BLOCK_M, V_COLUMNS)
                if FLOAT8:
                    acc_odd = tl.zeros([BLOCK_M, V_COLUMNS], tl.float32)

    # ---- What is left: tasks that this program does not finish alone.
    if BALANCED:
        if MERGE:
            # As pairs, of the two tasks: where they lie, their tiles, this program's, their parts.
            # All this is done before the barrier, while the parts are on their way.
            pair = tl.arange(0, 2)
            b_task = tl.where(pair == 1, b, b_first)
            h_task = tl.where(pair == 1, h, h_first)
            task_tiles = tl.where(pair == 1, tiles, tiles_first)
            task_stop = tl.where(pair == 1, task_end, end_first)
            task_start = task_stop - task_tiles
            my_tiles = tl.minimum(task_stop, end) - tl.maximum(task_start, begin)
            parted = (my_tiles > 0) & (my_tiles < task_tiles)
            parted = parted & ((pair == 0) | (task_end > end_first))  # there may be one task only
            counter = counters + b_task * kv_heads + h_task
            first_part = _share_at(shares, task_start)
            last_part = _share_at(shares, task_stop - 1)
            # In its first program the part is the last one (odd slot), unless the share begins
            # with the task.
            odd = tl.where(_share_begin(shares, first_part) < task_start, 1, 0)
            # Every thread's parts are written before this program counts as arrived.
            tl.debug_barrier()
            # Each part adds its tiles to the task's counter; who completes the sum came last.
            before = tl.atomic_add(counter, my_tiles, mask=parted, sem="acq_rel", scope="gpu")
            complete = (parted & (before + my_tiles == task_tiles)).to(tl.int32)
            merges = tl.sum(complete << pair, 0)
            # One copy of the code for both: it is cold, and takes longer to fetch than to run.
            for i in range(tl.where(merges & 1 != 0, 0, 1), tl.where(merges > 1, 2, 1)):
                parts = Parts(_pick(first_part, i), _pick(last_part, i), 0, _pick(odd, i))
                _merge_parts(
                    partials, slots, parts, output, _pick(b_task, i), _pick(h_task, i), 0,
                    group, rows_total, 2, BLOCK_M, ROWS, UNROLL, SINGLE_QUERY,
                    DV, BLOCK_DV, HAS_SINKS, NATURAL,
                )  # fmt: skip
                tl.store(counter, 0, mask=pair == i)
    else:
        if begin < end:
            if not HAS_MASK:
                seen = _sees_any(n, s_row, begin, end, shift, window, RULES, BLOCK_N)
            if FLOAT8:
                sums = _columns_in_order(acc, acc_odd) * v_factor
            else:
                sums = acc
            if first_part == last_part:
                head = (h * group + g_row).to(tl.int64)
                _store_rows(
                    output, m, l, sums, seen, b, head, s_row, row_ok,
                    DV, BLOCK_DV, HAS_SINKS, NATURAL,
                )  # fmt: skip
            elif MERGE:
                _store_part(
                    partials, slots, program, m, l, sums, seen, row_ok, BLOCK_M, ROWS, BLOCK_DV
                )
                # Every thread's part is written before this program counts as arrived.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + task, 1, sem="acq_rel", scope="gpu")
                if arrived == last_part - first_part:
                    parts = Parts(first_part, last_part, task * splits, 0)
                    _merge_parts(
                        partials, slots, parts, output, b, h, row_tile, group, rows_total,
                        1, BLOCK_M, ROWS, UNROLL, SINGLE_QUERY, DV, BLOCK_DV, HAS_SINKS, NATURAL,
                    )  # fmt: skip
                    tl.store(counters + task, 0)
