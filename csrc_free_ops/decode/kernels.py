"""Split-KV decode attention: the device code. Two launches, the second already waiting when the first ends.

The work is a list of *tasks*, one per (batch row, KV head, tile of query rows), each cut into tiles of ``BLOCK_N``
keys. How many tiles a task has follows from the row's length, which only the device knows. So the device makes the
schedule: every program of `split_kv_kernel` adds up the tiles of the whole batch and takes an equal, contiguous share
of the flat list of tiles. A share may begin or end in the middle of a task. A task that lies within one share is
finished there; the parts of any other go to scratch, and `merge_kernel` puts them together.

With ``SPLIT_TILES > 0`` shares are fixed runs of tiles instead, cut at positions that depend on nothing but the key
index, so that a row's bits do not depend on its neighbours or on the capacity.

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
        # Through L2: the merge reads this while its predecessor still runs.
        n = tl.load(lengths + b, mask=in_batch, other=0, cache_modifier=".cg")
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
def _row_tiles(
    lengths, b, in_batch, capacity, q_len, past, left, right, BLOCK_N: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """A batch row's valid length, its first key tile and its number of key tiles.

    An empty row keeps one tile: somebody has to write its zeros.
    """
    n = _valid_length(lengths, b, capacity, in_batch, HAS_LENGTHS)
    lo, hi = _key_bounds(n, 0, q_len - 1, q_len, past, left, right, HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT)
    first_tile = lo // BLOCK_N
    return n, first_tile, tl.maximum(tl.cdiv(hi, BLOCK_N) - first_tile, 1)


@triton.jit
def _share_start(program, share, rest):
    """Where a program's share of the flat list begins; the first ``rest`` shares are one tile longer."""
    return program * share + tl.minimum(program, rest)


@triton.jit
def _share_of(tile, share, rest):
    """The program whose share holds a tile of the flat list."""
    cut = rest * (share + 1)
    return tl.where(tile < cut, tile // (share + 1), rest + (tile - cut) // tl.maximum(share, 1))


@triton.jit
def _batch_row_of(position, cumulated, program, BLOCK_B: tl.constexpr):
    """The batch row that holds a position of the flat list, and where that row begins in the list."""
    if BLOCK_B == 1:
        return program * 0, program * 0
    else:
        before = cumulated <= position
        return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, cumulated, 0), 0)


@triton.jit
def _schedule(
    lengths, batch, tasks_per_row, programs, capacity, q_len, past, left, right, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LENGTHS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Running sums of the batch rows' tiles, and the share of each program: (cumulated, share, rest)."""
    rows = tl.arange(0, BLOCK_B)
    _n, _first, tiles = _row_tiles(
        lengths, rows, rows < batch, capacity, q_len, past, left, right, BLOCK_N,
        HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    work = tl.where(rows < batch, tiles * tasks_per_row, 0)
    total = tl.sum(work, 0)
    share = total // programs
    return tl.cumsum(work, 0), share, total - share * programs


@triton.jit
def _attend_tile(
    t0, q_tile, m, l, acc, seen, k_ptrs, v_ptrs, mask_ptrs, d, dv, t_tile, row_ok, lo_tile, hi_tile, lo_row, hi_row,
    mask_len, scale, softcap, k_stride_t, v_stride_t, mask_stride_t,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WHOLE: tl.constexpr,
    SINGLE_QUERY: tl.constexpr, HAS_BOOL_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to (m, l, acc, seen). WHOLE: every row sees every key of the tile."""
    NATURAL: tl.constexpr = HAS_BIAS or HAS_SOFTCAP
    HAS_MASK: tl.constexpr = HAS_BIAS or HAS_BOOL_MASK
    start = tl.cast(t0, tl.int64)
    t = t0 + t_tile
    key_ok = (t >= lo_tile) & (t < hi_tile)
    k_at = k_ptrs + start * k_stride_t
    if WHOLE and BLOCK_D == D:
        k_tile = tl.load(k_at)
    elif WHOLE:
        k_tile = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
    else:
        k_tile = tl.load(k_at, mask=key_ok[:, None] & (d < D)[None, :], other=0.0)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=DOT_PRECISION) * scale
    if HAS_SOFTCAP:
        s = softcap * _tanh(s / softcap)

    if not WHOLE:
        if SINGLE_QUERY:
            ok = key_ok[None, :]
        else:
            ok = (t[None, :] >= lo_row[:, None]) & (t[None, :] < hi_row[:, None])
        if HAS_MASK:
            ok = ok & row_ok[:, None] & (t < mask_len)[None, :]
            given = tl.load(mask_ptrs + start * mask_stride_t, mask=ok, other=0)
            if HAS_BIAS:
                bias = given.to(tl.float32)
                ok = ok & (bias != float("-inf"))
                s = s + bias
            else:
                ok = ok & (given != 0)
            seen = seen | tl.max(ok.to(tl.int32), 1)
        s = tl.where(ok, s, float("-inf"))

    m_new, m_safe, alpha = _new_maximum(m, tl.max(s, 1), NATURAL)
    p = _exp(s - m_safe[:, None], NATURAL)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]

    v_at = v_ptrs + start * v_stride_t
    if WHOLE and BLOCK_DV == DV:
        v_tile = tl.load(v_at)
    elif WHOLE:
        v_tile = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
    else:
        v_tile = tl.load(v_at, mask=key_ok[:, None] & (dv < DV)[None, :], other=0.0)
        if HAS_MASK:
            # A key hidden from every row must not reach the product even as 0 * NaN.
            shown = tl.max(ok.to(tl.int32), 0) != 0
            v_tile = tl.where(shown[:, None], v_tile, 0.0)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=DOT_PRECISION)
    return m_new, l, acc, seen


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
    y = tl.where((seen != 0)[:, None], acc / l[:, None], 0.0)
    dv = tl.arange(0, BLOCK_DV)
    rows = out + tl.cast(b, tl.int64) * o_stride_b + head * o_stride_h + s_row.to(tl.int64) * o_stride_s
    tl.store(rows[:, None] + dv[None, :], y.to(out.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])


@triton.jit(
    do_not_specialize=[
        "batch", "kv_heads", "group", "q_len", "capacity", "mask_len", "past", "left", "right", "splits", "slots",
    ],
    do_not_specialize_on_alignment=["lengths", "sinks"],
)  # fmt: skip
def split_kv_kernel(
    query, key, value, out, lengths, mask, sinks,
    partials,  # float32 [slots, ROWS, BLOCK_DV], then [slots, ROWS, 2] of (m, l)
    batch, kv_heads, group, q_len, capacity, mask_len, past, left, right, splits, slots, scale, softcap,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    o_stride_b, o_stride_h, o_stride_s, mask_stride_b, mask_stride_h, mask_stride_s, mask_stride_t,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SPLIT_TILES: tl.constexpr,
    SINGLE_QUERY: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_BOOL_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, DOT_PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Natural units where a bias may be finfo.min: times log2(e) it would become -inf.
    NATURAL: tl.constexpr = HAS_BIAS or HAS_SOFTCAP
    HAS_MASK: tl.constexpr = HAS_BIAS or HAS_BOOL_MASK
    FIXED_SPLITS: tl.constexpr = SPLIT_TILES > 0

    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows_total = group * q_len
    row_tiles = tl.cdiv(rows_total, BLOCK_M)
    tasks_per_row = kv_heads * row_tiles

    if PDL:
        # Before this point nothing touches memory that an earlier kernel may still write.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    share = 0
    rest = 0
    if FIXED_SPLITS:
        cumulated = tl.zeros([BLOCK_B], tl.int32)
        position = program
        end = program + 1
    else:
        cumulated, share, rest = _schedule(
            lengths, batch, tasks_per_row, programs, capacity, q_len, past, left, right, BLOCK_B, BLOCK_N,
            HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        position = _share_start(program, share, rest)
        end = _share_start(program + 1, share, rest)
    own_start = position

    while position < end:
        # Which task, and which of its tiles.
        if FIXED_SPLITS:
            task = position // splits
            b = task // tasks_per_row
            in_row = task - b * tasks_per_row
        else:
            b, row_start = _batch_row_of(position, cumulated, program, BLOCK_B)
        n, first_tile, tiles = _row_tiles(
            lengths, b, True, capacity, q_len, past, left, right, BLOCK_N,
            HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        if FIXED_SPLITS:
            split = position - task * splits
            tile_begin = tl.maximum(split * SPLIT_TILES, first_tile)
            tile_end = tl.minimum((split + 1) * SPLIT_TILES, first_tile + tiles)
            finished = first_tile // SPLIT_TILES == (first_tile + tiles - 1) // SPLIT_TILES
            slot = position
            position = end
        else:
            in_row = (position - row_start) // tiles
            task_start = row_start + in_row * tiles
            tile_begin = first_tile + position - task_start
            tile_end = tl.minimum(first_tile + tiles, tile_begin + end - position)
            finished = tile_end - tile_begin == tiles
            # A share holds at most two unfinished parts: its first (even slot) and its last (odd slot).
            slot = 2 * program + tl.where(position > own_start, 1, 0)
            position += tile_end - tile_begin
        h = in_row // row_tiles
        row_tile = in_row - h * row_tiles

        if tile_begin < tile_end:
            # Query rows of this task: row r is query position r // G of query head h * G + r % G.
            r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
            row_ok = r < rows_total
            if SINGLE_QUERY:
                s_row = r * 0
            else:
                s_row = r // group
            head = (h * group + r - s_row * group).to(tl.int64)
            d = tl.arange(0, BLOCK_D)
            dv = tl.arange(0, BLOCK_DV)
            q_rows = query + b.to(tl.int64) * q_stride_b + head * q_stride_h + s_row.to(tl.int64) * q_stride_s
            q_tile = tl.load(q_rows[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)

            # Keys that these query rows can see: together, and row by row.
            if SINGLE_QUERY:
                s_first = 0
                s_last = 0
            else:
                s_first = row_tile * BLOCK_M // group
                s_last = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1)
            lo_tile, hi_tile = _key_bounds(
                n, s_first, s_last, q_len, past, left, right, HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT
            )
            lo_row, hi_row = _key_bounds(
                n, s_row, s_row, q_len, past, left, right, HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT
            )
            lo_row, hi_row = lo_row + r * 0, hi_row + r * 0
            key_begin = tl.maximum(tile_begin * BLOCK_N, lo_tile)
            key_end = tl.minimum(tile_end * BLOCK_N, hi_tile)

            t_tile = tl.arange(0, BLOCK_N)
            t_wide = t_tile.to(tl.int64)
            k_ptrs = key + b.to(tl.int64) * k_stride_b + h.to(tl.int64) * k_stride_h
            k_ptrs = k_ptrs + t_wide[:, None] * k_stride_t + d[None, :]
            v_ptrs = value + b.to(tl.int64) * v_stride_b + h.to(tl.int64) * v_stride_h
            v_ptrs = v_ptrs + t_wide[:, None] * v_stride_t + dv[None, :]
            if HAS_MASK:
                mask_rows = head * mask_stride_h + s_row.to(tl.int64) * mask_stride_s
                mask_ptrs = mask + b.to(tl.int64) * mask_stride_b
                mask_ptrs = mask_ptrs + mask_rows[:, None] + t_wide[None, :] * mask_stride_t
            else:
                mask_ptrs = mask

            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            seen = tl.zeros([BLOCK_M], tl.int32)

            t_begin = (key_begin // BLOCK_N) * BLOCK_N
            if SINGLE_QUERY and not (HAS_MASK or HAS_LEFT):
                t_whole = tl.maximum((key_end // BLOCK_N) * BLOCK_N, t_begin)
                for t0 in tl.range(t_begin, t_whole, BLOCK_N, num_stages=STAGES):
                    m, l, acc, seen = _attend_tile(
                        t0, q_tile, m, l, acc, seen, k_ptrs, v_ptrs, mask_ptrs, d, dv, t_tile, row_ok, lo_tile,
                        hi_tile, lo_row, hi_row, mask_len, scale, softcap, k_stride_t, v_stride_t, mask_stride_t,
                        D, DV, BLOCK_D, BLOCK_DV, True, SINGLE_QUERY, HAS_BOOL_MASK, HAS_BIAS, HAS_SOFTCAP,
                        DOT_PRECISION,
                    )  # fmt: skip
                t_begin = t_whole
                TAIL_STAGES: tl.constexpr = 1
            else:
                TAIL_STAGES: tl.constexpr = STAGES
            for t0 in tl.range(t_begin, key_end, BLOCK_N, num_stages=TAIL_STAGES):
                m, l, acc, seen = _attend_tile(
                    t0, q_tile, m, l, acc, seen, k_ptrs, v_ptrs, mask_ptrs, d, dv, t_tile, row_ok, lo_tile,
                    hi_tile, lo_row, hi_row, mask_len, scale, softcap, k_stride_t, v_stride_t, mask_stride_t,
                    D, DV, BLOCK_D, BLOCK_DV, False, SINGLE_QUERY, HAS_BOOL_MASK, HAS_BIAS, HAS_SOFTCAP,
                    DOT_PRECISION,
                )  # fmt: skip
            if not HAS_MASK:
                seen = (tl.minimum(hi_row, key_end) > tl.maximum(lo_row, key_begin)).to(tl.int32)

            if finished:
                _store_rows(
                    out, sinks, m, l, acc, seen, b, head, s_row, row_ok, o_stride_b, o_stride_h, o_stride_s,
                    DV, BLOCK_DV, HAS_SINKS, NATURAL,
                )  # fmt: skip
            else:
                # Rows that saw no key carry l = -1, so that the merge can tell them from a sum of zero.
                r_part = tl.arange(0, BLOCK_M)
                part_ok = row_ok & (r_part < ROWS)
                part_row = slot.to(tl.int64) * ROWS + r_part
                ml = partials + slots.to(tl.int64) * ROWS * BLOCK_DV
                tl.store(partials + part_row[:, None] * BLOCK_DV + dv[None, :], acc, mask=part_ok[:, None])
                tl.store(ml + part_row * 2, m, mask=part_ok)
                tl.store(ml + part_row * 2 + 1, tl.where(seen != 0, l, -1.0), mask=part_ok)


@triton.jit(
    do_not_specialize=[
        "batch", "kv_heads", "group", "q_len", "capacity", "past", "left", "right", "splits", "slots", "programs",
    ],
    do_not_specialize_on_alignment=["lengths", "sinks"],
)  # fmt: skip
def merge_kernel(
    partials, out, lengths, sinks,
    batch, kv_heads, group, q_len, capacity, past, left, right, splits, slots, programs,
    o_stride_b, o_stride_h, o_stride_s,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, SPLIT_TILES: tl.constexpr, PARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_SINKS: tl.constexpr, NATURAL: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the parts of unfinished tasks, in their order. Grid: (cuts between shares or tasks, rows of a task).

    The program of the first cut inside a task merges that task; programs of other cuts have nothing to do.
    """
    FIXED_SPLITS: tl.constexpr = SPLIT_TILES > 0
    unit = tl.program_id(0)
    row = tl.program_id(1)
    row_tiles = tl.cdiv(group * q_len, BLOCK_M)
    tasks_per_row = kv_heads * row_tiles

    if PDL:
        tl_cuda.gdc_launch_dependents()
    # The lengths were complete before the split kernel started, so they may be read before it ends.
    if FIXED_SPLITS:
        b = unit // tasks_per_row
        in_row = unit - b * tasks_per_row
        n, first_tile, tiles = _row_tiles(
            lengths, b, True, capacity, q_len, past, left, right, BLOCK_N,
            HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        first_part = first_tile // SPLIT_TILES
        last_part = (first_tile + tiles - 1) // SPLIT_TILES
        first_slot = unit * splits + first_part
        work = first_part < last_part
    else:
        cumulated, share, rest = _schedule(
            lengths, batch, tasks_per_row, programs, capacity, q_len, past, left, right, BLOCK_B, BLOCK_N,
            HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        cut = _share_start(unit + 1, share, rest)
        b, row_start = _batch_row_of(cut, cumulated, unit, BLOCK_B)
        in_batch = b < batch  # beyond it: a cut at the very end of the list
        n, first_tile, tiles = _row_tiles(
            lengths, b, in_batch, capacity, q_len, past, left, right, BLOCK_N,
            HAS_LENGTHS, IS_CAUSAL, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        in_row = (cut - row_start) // tiles
        task_start = row_start + in_row * tiles
        begin = _share_start(unit, share, rest)
        # The first cut inside the task: the share before it began at or before the task did.
        work = in_batch & (in_row < tasks_per_row) & (cut > task_start) & (begin <= task_start) & (begin < cut)
        first_part = unit
        last_part = _share_of(task_start + tiles - 1, share, rest)
        first_slot = 2 * unit + tl.where(begin < task_start, 1, 0)

    h = in_row // row_tiles
    r = (in_row - h * row_tiles) * BLOCK_M + row
    if PDL:
        # In every program: a grid of which none waits could end before the kernel that it depends on.
        tl_cuda.gdc_wait()
    if work & (r < group * q_len):
        i = tl.arange(0, PARTS)
        dv = tl.arange(0, BLOCK_DV)
        ml = partials + slots.to(tl.int64) * ROWS * BLOCK_DV
        m_parts = tl.full([PARTS], float("-inf"), tl.float32)
        for part0 in range(first_part, last_part + 1, PARTS):
            part = part0 + i
            slot = tl.where(part == first_part, first_slot, first_slot + part - first_part if FIXED_SPLITS else 2 * part)
            at = slot.to(tl.int64) * ROWS + row
            m_parts = tl.maximum(m_parts, tl.load(ml + at * 2, mask=part <= last_part, other=float("-inf")))
        m = tl.max(m_parts, 0)
        m_safe = tl.where(m == float("-inf"), 0.0, m)
        l_parts = tl.zeros([PARTS], tl.float32)
        seen_parts = tl.zeros([PARTS], tl.int32)
        acc_parts = tl.zeros([PARTS, BLOCK_DV], tl.float32)
        for part0 in range(first_part, last_part + 1, PARTS):
            part = part0 + i
            ok = part <= last_part
            slot = tl.where(part == first_part, first_slot, first_slot + part - first_part if FIXED_SPLITS else 2 * part)
            at = slot.to(tl.int64) * ROWS + row
            w = _exp(tl.load(ml + at * 2, mask=ok, other=float("-inf")) - m_safe, NATURAL)
            l_part = tl.load(ml + at * 2 + 1, mask=ok, other=-1.0)
            a_part = tl.load(partials + at[:, None] * BLOCK_DV + dv[None, :], mask=ok[:, None], other=0.0)
            hidden = l_part < 0.0
            l_parts += tl.where(hidden, 0.0, l_part) * w
            seen_parts = seen_parts | tl.where(hidden, 0, 1)
            acc_parts += a_part * w[:, None]
        one = tl.arange(0, 1)
        s_row = r // group + one
        head = (h * group + r - s_row * group).to(tl.int64)
        _store_rows(
            out, sinks, m + one.to(tl.float32), tl.sum(l_parts, 0) + one.to(tl.float32), tl.sum(acc_parts, 0)[None, :],
            tl.max(seen_parts, 0) + one, b, head, s_row, one == 0, o_stride_b, o_stride_h, o_stride_s,
            DV, BLOCK_DV, HAS_SINKS, NATURAL,
        )  # fmt: skip
