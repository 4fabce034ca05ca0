"""Split-KV decode attention in one launch: the device code.

The work is a list of *tasks*, one per (batch row, KV head, tile of query rows), each cut into tiles of ``BLOCK_N``
keys. How many tiles a task has follows from the row's length, which only the device knows. There are two ways to deal
tiles out to programs:

* ``BALANCED`` (all query rows of a KV head fit one tile): every program adds up the tiles of the whole batch and takes
  an equal, contiguous share of the flat list of tiles. One loop runs through the share, across the ends of tasks, so
  that the loads of the next task are under way while the last one is finished.
* otherwise the grid is (task, split). A split is an equal part of the task's visible keys, or, with
  ``SPLIT_TILES > 0``, a fixed run of tiles, cut at positions that depend on the key index alone, so that a row's bits
  depend neither on its neighbours nor on the capacity.

A task that lies within one program is finished there. The parts of any other go to scratch, and the program that
arrives last at the task's counter merges them, in their order, and sets the counter back to zero.

Notation: S = scale * Q K^T (logits), P = softmax numerators, m = running row maximum, l = running row sum, all float32.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """tanh to float32 accuracy: the exponential form cancels near 0, so small arguments take the Taylor series."""
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
def _exp(x, NATURAL: tl.constexpr):
    """exp of logits in natural units, or of logits already multiplied by log2(e)."""
    if NATURAL:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def _new_maximum(m, m_other, NATURAL: tl.constexpr):
    """The new row maximum, the same with 0 for -inf, and the factor for what the old maximum scaled."""
    m_new = tl.maximum(m, m_other)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, m_safe, _exp(m - m_safe, NATURAL)


@triton.jit
def _valid_length(lengths, b, capacity, in_batch, HAS_LENGTHS: tl.constexpr):
    """The row's count of valid keys, clamped to [0, capacity]; the capacity where no lengths are given."""
    if HAS_LENGTHS:
        n = tl.load(lengths + b, mask=in_batch, other=0)
        n = tl.minimum(tl.maximum(n, 0), capacity).to(tl.int32)
    else:
        n = b * 0 + capacity
    return n


@triton.jit
def _key_bounds(
    n, first_row, last_row, q_len, past, left, right,
    HAS_LENGTHS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """[lo, hi): the keys that query rows first_row..last_row can see together (exact for one row); [0, 0) for none."""
    if HAS_LENGTHS:
        offset = n - q_len
    else:
        offset = n * 0 + past
    lo = n * 0
    hi = n
    if HAS_LEFT:
        lo = tl.maximum(lo, first_row + offset - left)
    if IS_CAUSAL:
        hi = tl.minimum(hi, last_row + offset + 1)
    if HAS_RIGHT:
        hi = tl.minimum(hi, last_row + offset + right + 1)
    empty = lo >= hi
    return tl.where(empty, 0, lo), tl.where(empty, 0, hi)


@triton.jit
def _tiles(lo, hi, BLOCK_N: tl.constexpr):
    """The first tile of keys [lo, hi) and how many there are; one for no keys: somebody has to write the zeros."""
    first_tile = lo // BLOCK_N
    return first_tile, tl.maximum(tl.cdiv(hi, BLOCK_N) - first_tile, 1)


@triton.jit
def _batch_row_of(position, cumulated, n_all, BLOCK_B: tl.constexpr):
    """The batch row that holds a position of the flat list, where it begins in the list, and its valid length."""
    if BLOCK_B == 1:
        b = position * 0
        return b, b, tl.sum(n_all, 0)
    else:
        before = cumulated <= position
        b = tl.sum(before.to(tl.int32), 0)
        row_start = tl.max(tl.where(before, cumulated, 0), 0)
        return b, row_start, tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, n_all, 0), 0)


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
def _store_rows(
    out, sinks, m, l, acc, seen, b, head, s_row, row_ok, o_stride_b, o_stride_h, o_stride_s,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Adds the sinks, divides by the row sums and writes finished rows; rows that saw no key become zero."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=row_ok, other=float("-inf")).to(tl.float32)
        if not NATURAL:
            sink = sink * LOG2E
        _m, m_safe, alpha = _new_maximum(m, sink, NATURAL)
        l = l * alpha + _exp(sink - m_safe, NATURAL)
        acc = acc * alpha[:, None]
    y = tl.where((seen != 0)[:, None], acc * (1.0 / l)[:, None], 0.0)
    dv = tl.arange(0, BLOCK_DV)
    rows = (
        out
        + tl.cast(b, tl.int64) * o_stride_b
        + head * o_stride_h
        + s_row.to(tl.int64) * o_stride_s
    )
    tl.store(
        rows[:, None] + dv[None, :],
        y.to(out.dtype.element_ty),
        mask=row_ok[:, None] & (dv < DV)[None, :],
    )


@triton.jit
def _store_part(partials, slot, slots, m, l, acc, seen, row_ok, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Writes a part to scratch. Rows that saw no key carry l = -1: the merge must tell them from a sum of zero."""
    r_part = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    ok = row_ok & (r_part < ROWS)
    at = slot * ROWS + r_part
    ml = partials + slots * ROWS * BLOCK_DV
    tl.store(partials + at[:, None] * BLOCK_DV + dv[None, :], acc, mask=ok[:, None])
    tl.store(ml + at, m, mask=ok)
    tl.store(ml + slots * ROWS + at, tl.where(seen != 0, l, -1.0), mask=ok)


@triton.jit
def _load_part(
    partials, slots, part, first_part, last_part, first_slot, slot_step, row_ok, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of one part; of a part past the last, what adds nothing.

    The first part lies in ``first_slot``, part p > first in ``(first_slot // slot_step + p - first) * slot_step``.
    Past the L1, which may hold what other programs have overwritten since.
    """
    slot = tl.where(
        part == first_part, first_slot, (first_slot // slot_step + part - first_part) * slot_step
    )
    ok = row_ok & (part <= last_part)
    at = slot * ROWS + tl.arange(0, ROWS)
    ml = partials + slots * ROWS * BLOCK_DV + at
    a_ptrs = partials + at[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    a_part = tl.load(a_ptrs, mask=ok[:, None], other=0.0, cache_modifier=".cg")
    m_part = tl.load(ml, mask=ok, other=float("-inf"), cache_modifier=".cg")
    l_part = tl.load(ml + slots * ROWS, mask=ok, other=-1.0, cache_modifier=".cg")
    return a_part, m_part, l_part


@triton.jit
def _add_part(l, acc, seen, a_part, m_part, l_part, m_safe, NATURAL: tl.constexpr):
    """(l, acc, seen) with one part added, relative to the maximum ``m_safe``."""
    w = _exp(m_part - m_safe, NATURAL)
    hidden = l_part < 0.0
    return (
        l + tl.where(hidden, 0.0, l_part) * w,
        acc + a_part * w[:, None],
        seen | tl.where(hidden, 0, 1),
    )


@triton.jit
def _merge_parts(
    partials, slots, first_part, last_part, first_slot, slot_step, out, sinks, b, h, row_tile, group, rows_total,
    o_stride_b, o_stride_h, o_stride_s, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, MERGE_STAGES: tl.constexpr, HAS_SINKS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Merges all parts of one task, in their order, and writes its rows.

    A rolled, pipelined loop: unrolled, fetching its instructions takes longer than the merge (measured: 3-10 us).
    """
    r_part = tl.arange(0, ROWS)
    r = row_tile * BLOCK_M + r_part
    row_ok = r < rows_total
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    seen = tl.zeros([ROWS], tl.int32)
    for part in tl.range(first_part, last_part + 1, UNROLL, num_stages=MERGE_STAGES):
        a0, m0, l0 = _load_part(
            partials,
            slots,
            part,
            first_part,
            last_part,
            first_slot,
            slot_step,
            row_ok,
            BLOCK_DV,
            ROWS,
        )
        m_parts = m0
        if UNROLL == 4:
            a1, m1, l1 = _load_part(
                partials,
                slots,
                part + 1,
                first_part,
                last_part,
                first_slot,
                slot_step,
                row_ok,
                BLOCK_DV,
                ROWS,
            )
            a2, m2, l2 = _load_part(
                partials,
                slots,
                part + 2,
                first_part,
                last_part,
                first_slot,
                slot_step,
                row_ok,
                BLOCK_DV,
                ROWS,
            )
            a3, m3, l3 = _load_part(
                partials,
                slots,
                part + 3,
                first_part,
                last_part,
                first_slot,
                slot_step,
                row_ok,
                BLOCK_DV,
                ROWS,
            )
            m_parts = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
        m, m_safe, alpha = _new_maximum(m, m_parts, NATURAL)
        l, acc, seen = _add_part(l * alpha, acc * alpha[:, None], seen, a0, m0, l0, m_safe, NATURAL)
        if UNROLL == 4:
            l, acc, seen = _add_part(l, acc, seen, a1, m1, l1, m_safe, NATURAL)
            l, acc, seen = _add_part(l, acc, seen, a2, m2, l2, m_safe, NATURAL)
            l, acc, seen = _add_part(l, acc, seen, a3, m3, l3, m_safe, NATURAL)
    s_row = r // group
    head = (h * group + r - s_row * group).to(tl.int64)
    _store_rows(
        out, sinks, m, l, acc, seen, b, head, s_row, row_ok, o_stride_b, o_stride_h, o_stride_s,
        DV, BLOCK_DV, HAS_SINKS, NATURAL,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "batch", "kv_heads", "group", "q_len", "capacity", "mask_len", "past", "left", "right", "splits", "slots",
    ],
    do_not_specialize_on_alignment=["lengths", "sinks"],
)  # fmt: skip
def split_kv_kernel(
    query, key, value, out, lengths, mask, sinks,
    partials,  # float32 [slots, ROWS, BLOCK_DV] of acc, then [slots, ROWS] of m and of l
    counters,  # int32, one a task, zero at entry and at exit
    batch, kv_heads, group, q_len, capacity, mask_len, past, left, right, splits, slots, scale, softcap,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    o_stride_b, o_stride_h, o_stride_s, mask_stride_b, mask_stride_h, mask_stride_s, mask_stride_t,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, MERGE_STAGES: tl.constexpr, BALANCED: tl.constexpr,
    SPLIT_TILES: tl.constexpr, MERGE: tl.constexpr, SINGLE_QUERY: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_BOOL_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DOT_PRECISION: tl.constexpr,
    STAGES: tl.constexpr, NARROW_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Natural units where a bias may be finfo.min: times log2(e) it would become -inf.
    NATURAL: tl.constexpr = HAS_BIAS or HAS_SOFTCAP
    HAS_MASK: tl.constexpr = HAS_BIAS or HAS_BOOL_MASK

    program = tl.program_id(0)
    rows_total = group * q_len
    if PDL:
        # Before this point nothing touches memory that an earlier kernel may still write.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    # ---- which tiles: positions [begin, end); position i is key tile i + shift of the current task
    if BALANCED:
        programs = tl.num_programs(0)
        in_batch = tl.arange(0, BLOCK_B)
        n_all = _valid_length(lengths, in_batch, capacity, in_batch < batch, HAS_LENGTHS)
        lo_all, hi_all = _key_bounds(
            n_all,
            0,
            q_len - 1,
            q_len,
            past,
            left,
            right,
            HAS_LENGTHS,
            IS_CAUSAL,
            HAS_LEFT,
            HAS_RIGHT,
        )
        _first, tiles_all = _tiles(lo_all, hi_all, BLOCK_N)
        work = tl.where(in_batch < batch, tiles_all * kv_heads, 0)
        cumulated = tl.cumsum(work, 0)
        total = tl.sum(work, 0)
        share = tl.cdiv(total, programs)
        begin = tl.minimum(program * share, total)
        end = tl.minimum(begin + share, total)
        s_last = q_len - 1
        b, row_start, n = _batch_row_of(begin, cumulated, n_all, BLOCK_B)
        lo, hi = _key_bounds(
            n, 0, s_last, q_len, past, left, right, HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT
        )
        first_tile, tiles = _tiles(lo, hi, BLOCK_N)
        h = (begin - row_start) // tiles
        task_end = row_start + (h + 1) * tiles
        shift = first_tile - (row_start + h * tiles)
        b_first, h_first, tiles_first, end_first = b, h, tiles, task_end
        row_tile = 0
    else:
        row_tiles = tl.cdiv(rows_total, BLOCK_M)
        task = program // splits
        split = program - task * splits
        in_row = task % (kv_heads * row_tiles)
        b = task // (kv_heads * row_tiles)
        h = in_row // row_tiles
        row_tile = in_row - h * row_tiles
        n = _valid_length(lengths, b, capacity, True, HAS_LENGTHS)
        s_first = row_tile * BLOCK_M // group
        s_last = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1)
        lo, hi = _key_bounds(
            n,
            s_first,
            s_last,
            q_len,
            past,
            left,
            right,
            HAS_LENGTHS,
            IS_CAUSAL,
            HAS_LEFT,
            HAS_RIGHT,
        )
        first_tile, tiles = _tiles(lo, hi, BLOCK_N)
        if SPLIT_TILES > 0:
            first_part = first_tile // SPLIT_TILES
            last_part = (first_tile + tiles - 1) // SPLIT_TILES
            begin = tl.maximum(split * SPLIT_TILES, first_tile)
            end = tl.minimum((split + 1) * SPLIT_TILES, first_tile + tiles)
        else:
            split_tiles = tl.cdiv(tiles, splits)
            first_part = 0
            last_part = (tiles - 1) // split_tiles
            begin = first_tile + split * split_tiles
            end = tl.minimum(begin + split_tiles, first_tile + tiles)
        shift = 0

    # ---- query rows: row r is query position r // G of query head h * G + r % G
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = r < rows_total
    if SINGLE_QUERY:
        s_row = r * 0
    else:
        s_row = r // group
    g_row = r - s_row * group
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    t_tile = tl.arange(0, BLOCK_N)
    # Rows past the last one repeat it, and are not stored.
    r_read = tl.minimum(r, rows_total - 1)
    if SINGLE_QUERY:
        q_rows = r_read.to(tl.int64) * q_stride_h
    else:
        q_rows = (r_read % group).to(tl.int64) * q_stride_h + (r_read // group).to(
            tl.int64
        ) * q_stride_s
    q_ptrs = query + q_rows[:, None] + d[None, :]
    k_columns = key + d[None, :]
    v_columns = value + dv[None, :]
    if HAS_MASK:
        mask_rows = g_row.to(tl.int64) * mask_stride_h + s_row.to(tl.int64) * mask_stride_s
        mask_ptrs = mask + mask_rows[:, None] + t_tile.to(tl.int64)[None, :] * mask_stride_t

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    seen = tl.zeros([BLOCK_M], tl.int32)
    task_begin = begin
    q_base = _base(b, h * group, q_stride_b, q_stride_h)
    k_base = _base(b, h, k_stride_b, k_stride_h)
    v_base = _base(b, h, v_stride_b, v_stride_h)

    # ---- one loop over all tiles; Triton keeps STAGES - 1 tiles of loads in flight
    for i in tl.range(begin, end, num_stages=STAGES):
        if BALANCED:
            if i >= task_end:
                # Tasks follow each other: the next head, or head 0 of the next batch row.
                h = tl.where(h + 1 < kv_heads, h + 1, 0)
                b = tl.where(h == 0, b + 1, b)
                n = _valid_length(lengths, b, capacity, True, HAS_LENGTHS)
                lo, hi = _key_bounds(
                    n,
                    0,
                    s_last,
                    q_len,
                    past,
                    left,
                    right,
                    HAS_LENGTHS,
                    IS_CAUSAL,
                    HAS_LEFT,
                    HAS_RIGHT,
                )
                first_tile, tiles = _tiles(lo, hi, BLOCK_N)
                task_begin = i + 0
                task_end = i + tiles
                shift = first_tile - i
                q_base = _base(b, h * group, q_stride_b, q_stride_h)
                k_base = _base(b, h, k_stride_b, k_stride_h)
                v_base = _base(b, h, v_stride_b, v_stride_h)
        t0 = (i + shift) * BLOCK_N
        wide_t = tl.cast(t0, tl.int64)
        t = t0 + t_tile
        key_ok = t < hi
        if HAS_LEFT:
            key_ok = key_ok & (t >= lo)
        # Keys outside [lo, hi) are not read: the nearest key inside stands in for them, at weight zero. This costs
        # less than a predicate a row. (An empty row reads key 0; its zeros are written by select.)
        key_row = tl.minimum(t_tile, hi - 1 - t0)
        if HAS_LEFT:
            key_row = tl.maximum(key_row, lo - t0)
        key_row = tl.maximum(key_row, -t0)[:, None]
        if not NARROW_ROWS:
            key_row = key_row.to(tl.int64)
        q_tile = _load_columns(q_ptrs + q_base, D, BLOCK_D)
        k_tile = _load_columns(
            k_columns + (k_base + wide_t * k_stride_t) + key_row * k_stride_t, D, BLOCK_D
        )
        v_tile = _load_columns(
            v_columns + (v_base + wide_t * v_stride_t) + key_row * v_stride_t, DV, BLOCK_DV
        )

        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=DOT_PRECISION) * scale
        if HAS_SOFTCAP:
            s = softcap * _tanh(s / softcap)
        if SINGLE_QUERY:
            ok = key_ok[None, :]
        else:
            lo_row, hi_row = _key_bounds(
                n,
                s_row,
                s_row,
                q_len,
                past,
                left,
                right,
                HAS_LENGTHS,
                IS_CAUSAL,
                HAS_LEFT,
                HAS_RIGHT,
            )
            ok = (t[None, :] >= (lo_row + r * 0)[:, None]) & (
                t[None, :] < (hi_row + r * 0)[:, None]
            )
        if HAS_MASK:
            ok = ok & row_ok[:, None] & (t < mask_len)[None, :]
            mask_at = mask_ptrs + (
                _base(b, h * group, mask_stride_b, mask_stride_h) + wide_t * mask_stride_t
            )
            given = tl.load(mask_at, mask=ok, other=0)
            if HAS_BIAS:
                bias = given.to(tl.float32)
                ok = ok & (bias != float("-inf"))
                s = s + bias
            else:
                ok = ok & (given != 0)
            # A key hidden from every row must not reach the product even as 0 * NaN.
            shown = tl.max(ok.to(tl.int32), 0) != 0
            v_tile = tl.where(shown[:, None], v_tile, 0.0)
        s = tl.where(ok, s, float("-inf"))

        m, m_safe, alpha = _new_maximum(m, tl.max(s, 1), NATURAL)
        p = _exp(s - m_safe[:, None], NATURAL)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(
            p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=DOT_PRECISION
        )
        if HAS_MASK:
            seen = seen | tl.max(ok.to(tl.int32), 1)

        if BALANCED:
            if (i + 1 == task_end) | (i + 1 == end):
                if not HAS_MASK:
                    lo_row, hi_row = _key_bounds(
                        n,
                        s_row,
                        s_row,
                        q_len,
                        past,
                        left,
                        right,
                        HAS_LENGTHS,
                        IS_CAUSAL,
                        HAS_LEFT,
                        HAS_RIGHT,
                    )
                    seen_to = tl.minimum(hi_row + r * 0, (i + 1 + shift) * BLOCK_N)
                    seen_from = tl.maximum(lo_row + r * 0, (task_begin + shift) * BLOCK_N)
                    seen = (seen_to > seen_from).to(tl.int32)
                if i + 1 - task_begin == tiles:
                    _store_rows(
                        out, sinks, m, l, acc, seen, b, (h * group + g_row).to(tl.int64), s_row, row_ok,
                        o_stride_b, o_stride_h, o_stride_s, DV, BLOCK_DV, HAS_SINKS, NATURAL,
                    )  # fmt: skip
                elif MERGE:
                    # A share holds at most two unfinished parts: its first (even slot) and its last (odd slot).
                    slot = 2 * program + tl.where(task_begin > begin, 1, 0)
                    _store_part(
                        partials, slot, slots, m, l, acc, seen, row_ok, BLOCK_M, BLOCK_DV, ROWS
                    )
                m = tl.full([BLOCK_M], float("-inf"), tl.float32)
                l = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                seen = tl.zeros([BLOCK_M], tl.int32)

    # ---- what is left: unfinished tasks
    if BALANCED:
        if MERGE:
            # Each part adds its tiles to the task's counter; who completes the sum has arrived last.
            first_tiles = tl.minimum(end_first, end) - begin
            last_tiles = end - tl.maximum(task_end - tiles, begin)
            parted_first = (begin < end) & (first_tiles < tiles_first)
            parted_last = (begin < end) & (last_tiles < tiles) & (task_end > end_first)
            tl.debug_barrier()  # every thread's parts are written before this program counts as arrived
            before_first = tl.atomic_add(
                counters + b_first * kv_heads + h_first,
                first_tiles,
                mask=parted_first,
                sem="acq_rel",
                scope="gpu",
            )
            before_last = tl.atomic_add(
                counters + b * kv_heads + h,
                last_tiles,
                mask=parted_last,
                sem="acq_rel",
                scope="gpu",
            )
            merge_first = parted_first & (before_first + first_tiles == tiles_first)
            merge_last = parted_last & (before_last + last_tiles == tiles)
            # One copy of the code serves both: it is cold, and fetching it takes longer than running it.
            for is_last in range(tl.where(merge_first, 0, 1), tl.where(merge_last, 2, 1)):
                b_task = tl.where(is_last > 0, b, b_first)
                h_task = tl.where(is_last > 0, h, h_first)
                task_stop = tl.where(is_last > 0, task_end, end_first)
                task_start = task_stop - tl.where(is_last > 0, tiles, tiles_first)
                first_part = task_start // share
                # In its first program the part is a later one (odd slot) unless the share begins with the task.
                first_slot = 2 * first_part + tl.where(first_part * share < task_start, 1, 0)
                _merge_parts(
                    partials, slots, first_part, (task_stop - 1) // share, first_slot, 2, out, sinks, b_task, h_task, 0,
                    group, rows_total, o_stride_b, o_stride_h, o_stride_s,
                    DV, BLOCK_DV, BLOCK_M, ROWS, UNROLL, MERGE_STAGES, HAS_SINKS, NATURAL,
                )  # fmt: skip
                tl.store(counters + b_task * kv_heads + h_task, 0)
    else:
        if begin < end:
            if not HAS_MASK:
                lo_row, hi_row = _key_bounds(
                    n,
                    s_row,
                    s_row,
                    q_len,
                    past,
                    left,
                    right,
                    HAS_LENGTHS,
                    IS_CAUSAL,
                    HAS_LEFT,
                    HAS_RIGHT,
                )
                seen_to = tl.minimum(hi_row + r * 0, end * BLOCK_N)
                seen = (seen_to > tl.maximum(lo_row + r * 0, begin * BLOCK_N)).to(tl.int32)
            if first_part == last_part:
                _store_rows(
                    out, sinks, m, l, acc, seen, b, (h * group + g_row).to(tl.int64), s_row, row_ok,
                    o_stride_b, o_stride_h, o_stride_s, DV, BLOCK_DV, HAS_SINKS, NATURAL,
                )  # fmt: skip
            elif MERGE:
                _store_part(
                    partials, program, slots, m, l, acc, seen, row_ok, BLOCK_M, BLOCK_DV, ROWS
                )
                tl.debug_barrier()  # every thread's part is written before this program counts as arrived
                arrived = tl.atomic_add(counters + task, 1, sem="acq_rel", scope="gpu")
                if arrived == last_part - first_part:
                    _merge_parts(
                        partials, slots, first_part, last_part, task * splits + first_part, 1,
                        out, sinks, b, h, row_tile, group, rows_total, o_stride_b, o_stride_h, o_stride_s,
                        DV, BLOCK_DV, BLOCK_M, ROWS, UNROLL, MERGE_STAGES, HAS_SINKS, NATURAL,
                    )  # fmt: skip
                    tl.store(counters + task, 0)
