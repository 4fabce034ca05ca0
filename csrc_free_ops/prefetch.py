"""Having memory brought into the L2, for kernels."""

import triton
import triton.language as tl


@triton.jit
def prefetch_lines(at):
    """Asks for the lines of 128 bytes of pointers, or of addresses in 64 bits; reads nothing.

    For NVIDIA GPUs only. It is no access: it may come before ``gdc_wait``.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_rows(x, rows, stride, column_stride, SIZE: tl.constexpr):
    """Asks for some rows of SIZE elements; see ``prefetch_lines``."""
    LINE: tl.constexpr = 128 * 8 // x.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + LINE - 1) // LINE)
    rows = rows.to(tl.int64)[:, None]
    columns = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)[None, :]
    prefetch_lines(x + rows * stride + columns.to(tl.int64) * column_stride)
