"""Gates of the gated delta net from what a model projects: one formula, one elementwise kernel."""

import triton
import triton.language as tl


@triton.jit
def forget_gate(a, A_log, dt_bias):
    """``-exp(A_log) softplus(a + dt_bias)``, the log of the forget gate, in float32."""
    x = a + dt_bias
    # softplus(x) = max(x, 0) + log1p(e), and with s = e / (2 + e) <= 1/3 log1p(e) = 2 atanh(s).
    # The series up to s^13 is exact to 2e-8; a log of 1 + e would lose a small e.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 11 + s2 * (1.0 / 13)
    series = 1.0 / 9 + s2 * series
    series = 1.0 / 7 + s2 * series
    series = 1.0 / 5 + s2 * series
    series = 1.0 / 3 + s2 * series
    log1p = 2.0 * s * (1.0 + s2 * series)
    return -tl.exp(A_log) * (tl.maximum(x, 0.0) + log1p)


@triton.jit
def writing_strength(b):
    """``sigmoid(b)`` in float32."""
    return 1.0 / (1.0 + tl.exp(-b))


@triton.jit(do_not_specialize=["tokens"])
def gates_kernel(
    a, b, A_log, dt_bias,
    g, beta,  # out, float32 [tokens, HV]
    tokens, a_stride_t, a_stride_h, b_stride_t, b_stride_h, A_stride, dt_stride,
    HV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes both gates of BLOCK elements of ``[tokens, HV]``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head = i // HV, i % HV
    inside = token < tokens
    a_here = tl.load(a + token * a_stride_t + head * a_stride_h, mask=inside, other=0.0)
    b_here = tl.load(b + token * b_stride_t + head * b_stride_h, mask=inside, other=0.0)
    A_here = tl.load(A_log + head * A_stride)
    dt_here = tl.load(dt_bias + head * dt_stride)
    forget = forget_gate(a_here.to(tl.float32), A_here.to(tl.float32), dt_here.to(tl.float32))
    tl.store(g + i, forget, mask=inside)
    tl.store(beta + i, writing_strength(b_here.to(tl.float32)), mask=inside)
