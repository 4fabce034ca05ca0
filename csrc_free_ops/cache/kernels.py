"""The Triton kernel behind `tensor_scatter` and `kv_scatter`.

A tensor arrives here as `[B, M, S, D]`: batch, the other dimensions folded into M and D, and S
along the axis that is written (T in the cache). One program copies ROWS x BLOCK_D elements of one
batch row. Numbers that go into a float8 cache are divided by a scale and rounded on the way.
"""

import triton
import triton.language as tl


@triton.jit
def _wrap(start, T):
    """Returns `start mod T` in [0, T): Triton's remainder has the sign of the dividend."""
    start = start % T
    return tl.where(start < 0, start + T, start)


@triton.jit
def _float8_bits(x):
    """float8_e4m3fn bits of float32 numbers: nearest even, 448 for all beyond it, NaN for NaN.

    By integers, as not every device has an instruction for it. Sizes of floats are ordered as their
    bits are.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # Three bits of the mantissa stay; rounding may carry into the exponent, of bias 7 and not 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, which is the last place of 2^14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def _load_tile(
    update,
    cache,
    scale,
    scale_stride,
    start,
    batch,
    row_block,
    d_block,
    M,
    S,
    T,
    D,
    cache_stride_b,
    cache_stride_m,
    cache_stride_t,
    cache_stride_d,
    update_stride_b,
    update_stride_m,
    update_stride_s,
    update_stride_d,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CIRCULAR: tl.constexpr,
    QUANTISED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Returns where a tile goes, what is kept of it, and its values; all offsets have 64 bits."""
    row = row_block * ROWS + tl.arange(0, ROWS)
    s = (row % S).to(tl.int64)
    m = (row // S).to(tl.int64)
    d = d_block * BLOCK_D + tl.arange(0, BLOCK_D)

    position = start + s
    keep = row < M * S
    if CIRCULAR:  # 0 <= start < T and s < S <= T: one subtraction wraps
        position = tl.where(position >= T, position - T, position)
    else:  # outside is dropped, never moved onto a valid slot; a negative start drops the row
        keep = keep & (start >= 0) & (position >= 0) & (position < T)
    mask = keep[:, None] & (d < D)[None, :]

    source = update + batch * update_stride_b + (m * update_stride_m + s * update_stride_s)[:, None]
    target = (
        cache + batch * cache_stride_b + (m * cache_stride_m + position * cache_stride_t)[:, None]
    )
    column = d.to(tl.int64)[None, :]
    values = tl.load(source + column * update_stride_d, mask=mask)
    if QUANTISED:
        values = values.to(tl.float32)
        if HAS_SCALE:  # one for all (stride 0), or one for each m
            of_row = tl.load(scale + m * scale_stride, mask=row < M * S, other=1.0)
            values = tl.div_rn(values, of_row[:, None])
        values = _float8_bits(values)
    return target + column * cache_stride_d, mask, values


# M, S, T and the index stride change from call to call and help no load become wider.
@triton.jit(
    do_not_specialize=[
        "M", "S", "key_T", "value_T", "index_stride", "key_scale_stride", "value_scale_stride",
    ]
)  # fmt: skip
def scatter_kernel(
    key_cache,
    key,
    value_cache,
    value,
    write_indices,
    key_scale,
    value_scale,
    index_stride,
    key_scale_stride,
    value_scale_stride,
    M,
    S,
    key_T,
    value_T,
    key_D,
    value_D,
    key_cache_stride_b,
    key_cache_stride_m,
    key_cache_stride_t,
    key_cache_stride_d,
    key_stride_b,
    key_stride_m,
    key_stride_s,
    key_stride_d,
    value_cache_stride_b,
    value_cache_stride_m,
    value_cache_stride_t,
    value_cache_stride_d,
    value_stride_b,
    value_stride_m,
    value_stride_s,
    value_stride_d,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CIRCULAR: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    KEY_QUANTISED: tl.constexpr,
    VALUE_QUANTISED: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
):
    """Grid: one dimension, `B * cdiv(M*S, ROWS) * cdiv(max(key_D, value_D), BLOCK_D)` programs."""
    d_blocks = tl.cdiv(key_D, BLOCK_D)
    if HAS_VALUE:
        d_blocks = tl.maximum(d_blocks, tl.cdiv(value_D, BLOCK_D))
    row_blocks = tl.cdiv(M * S, ROWS)
    program = tl.program_id(0)
    d_block = program % d_blocks
    row_block = (program // d_blocks) % row_blocks
    batch = (program // d_blocks // row_blocks).to(tl.int64)

    start = batch * 0
    if HAS_INDICES:
        start = tl.load(write_indices + batch * index_stride).to(tl.int64)
    key_start = start
    if CIRCULAR:
        key_start = _wrap(start, key_T)
    key_target, key_mask, key_values = _load_tile(
        key, key_cache, key_scale, key_scale_stride,
        key_start, batch, row_block, d_block, M, S, key_T, key_D,
        key_cache_stride_b, key_cache_stride_m, key_cache_stride_t, key_cache_stride_d,
        key_stride_b, key_stride_m, key_stride_s, key_stride_d,
        ROWS, BLOCK_D, CIRCULAR, KEY_QUANTISED, HAS_KEY_SCALE,
    )  # fmt: skip
    if HAS_VALUE:
        value_start = start
        if CIRCULAR:
            value_start = _wrap(start, value_T)
        value_target, value_mask, value_values = _load_tile(
            value, value_cache, value_scale, value_scale_stride,
            value_start, batch, row_block, d_block, M, S, value_T, value_D,
            value_cache_stride_b, value_cache_stride_m, value_cache_stride_t, value_cache_stride_d,
            value_stride_b, value_stride_m, value_stride_s, value_stride_d,
            ROWS, BLOCK_D, CIRCULAR, VALUE_QUANTISED, HAS_VALUE_SCALE,
        )  # fmt: skip
        # Stored after both loads were issued: one trip to memory, not two.
        tl.store(value_target, value_values, mask=value_mask)
    tl.store(key_target, key_values, mask=key_mask)
