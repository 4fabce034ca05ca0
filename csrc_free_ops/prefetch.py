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
