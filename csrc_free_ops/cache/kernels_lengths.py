"""The Triton kernels behind `RowGuard`: counts of valid keys, and zeros in rows that have none."""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def _valid(lengths, row, capacity, mask):
    """Returns the lengths at `row`, clamped to [0, capacity], whatever their integer type."""
    length = tl.load(lengths + row, mask=mask, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "capacity"])
def count_kernel(lengths, counts, batch, capacity, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Grid: `cdiv(batch, ROWS)` programs."""
    if PDL:
        tl_cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < batch
    tl.store(counts + row, _valid(lengths, row, capacity, mask), mask=mask)


@triton.jit
def zero_kernel(counts, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: `batch * cdiv(width, BLOCK)` programs; only those of empty rows write to `out`."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    empty = tl.load(counts + row) == 0
    tl.store(out + row * width + column, zeros, mask=(column < width) & empty)
