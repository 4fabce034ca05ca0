"""What a prefill kernel of another library wants in front of it, and what it leaves undone.

Such a kernel takes dense tokens with aligned rows, ``exp(g)`` in place of ``g``, keys that are
normalised already, and bounds that it trusts. It works on whole tiles of tokens: what follows a
sequence in its last tile is multiplied by zero, so that a NaN or Inf there would spread into the
sequence. One launch makes all of that, with zeros for tokens of no sequence; a token that could
spread is made zero too, and its writing strength NaN, which no other sequence reads. A second
launch, after the library's, zeroes the outputs of tokens of no sequence and gives empty sequences
their state.

Both are bound by bytes: what is copied is read once and written once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts, contiguous_facts
from csrc_free_ops.launch import Launch, LaunchesPlan

C = 64  # tokens between two checkpoints
_BT = 16  # tokens that a program packs
_BOUNDS = 256  # sequences that are added up at a time
_BLOCK = 2048  # elements that a program zeroes or copies at a time
_PROGRAMS = 4  # of the second launch, for each multiprocessor


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _within(bound, tokens):
    """A bound of a sequence, whatever was given: between 0 and the tokens."""
    return tl.minimum(tl.maximum(bound.to(tl.int64), 0), tokens)


@triton.jit
def _write_bounds(
    cu_seqlens, bounds, h_cu_starts, tokens, row_tokens, sequences,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_CU: tl.constexpr, HAS_H_STARTS: tl.constexpr,
):  # fmt: skip
    """Where sequences begin, none before the one ahead of it, and their first checkpoints."""
    last = tl.zeros((), tl.int64)
    complete = tl.zeros((), tl.int64)
    for at in range(0, sequences, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < sequences
        if HAS_CU:
            first = _within(tl.load(cu_seqlens + i, mask=inside, other=0), tokens)
            first = tl.maximum(tl.associative_scan(first, 0, _larger), last)
            end = _within(tl.load(cu_seqlens + i + 1, mask=inside, other=0), tokens)
            end = tl.maximum(end, first)
            last = tl.maximum(tl.max(end, 0), last)
        else:
            first = i.to(tl.int64) * row_tokens
            end = first + row_tokens
        tl.store(bounds + i, first, mask=inside)
        if HAS_H_STARTS:
            count = tl.where(inside, (end - first) // C, 0)
            tl.store(h_cu_starts + i, complete + tl.cumsum(count, 0) - count, mask=inside)
            complete += tl.sum(count, 0)
    if not HAS_CU:
        last += tokens
    tl.store(bounds + sequences, last)
    if HAS_H_STARTS:
        tl.store(h_cu_starts + sequences, complete)


@triton.jit
def _normalised(x):
    """Rows divided by their length, ``x / sqrt(sum(x^2) + 1e-6)``, in the dtype of x."""
    wide = x.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    return (wide / length[:, None]).to(x.dtype)


@triton.jit
def _finite_rows(x):
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) != 0


@triton.jit(do_not_specialize=["tokens", "row_tokens", "sequences"])
def pack_kernel(
    q, k, v, g, beta, cu_seqlens,
    q_out, k_out, v_out,  # [tokens, HQ, K], [tokens, HV, V]
    decay, strength,  # out, float32 [tokens, HV]: exp(g), and beta
    bounds, h_cu_starts,  # out, int64 [sequences + 1]
    tokens, row_tokens, sequences,
    q_stride_b, q_stride_t, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_h, k_stride_d,
    v_stride_b, v_stride_t, v_stride_h, v_stride_d, g_stride_b, g_stride_t, g_stride_h,
    beta_stride_b, beta_stride_t, beta_stride_h,
    HQ: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BLOCK: tl.constexpr, MANY_ROWS: tl.constexpr, HAS_CU: tl.constexpr,
    HAS_H_STARTS: tl.constexpr, L2NORM: tl.constexpr, COPY_Q: tl.constexpr, COPY_K: tl.constexpr,
    COPY_V: tl.constexpr, ISOLATE: tl.constexpr,
):  # fmt: skip
    """Grid: one program for the bounds, then ``cdiv(tokens, BT) * HQ``, a head of q each.

    K and V are powers of two. With ISOLATE all three of q, k and v are copied.
    """
    program = tl.program_id(0) - 1
    if program < 0:
        _write_bounds(
            cu_seqlens, bounds, h_cu_starts, tokens, row_tokens, sequences,
            C, BLOCK, HAS_CU, HAS_H_STARTS,
        )  # fmt: skip
    else:
        head = (program % HQ).to(tl.int64)
        token = (program // HQ).to(tl.int64) * BT + tl.arange(0, BT)
        inside = token < tokens
        real = inside
        if HAS_CU:
            real = inside & (token < _within(tl.load(cu_seqlens + sequences), tokens))
        b = tl.zeros_like(token)
        t = token
        if MANY_ROWS:
            b = token // row_tokens
            t = token % row_tokens
        kd = tl.arange(0, K).to(tl.int64)[None, :]
        vd = tl.arange(0, V).to(tl.int64)[None, :]

        to = (token * HQ + head)[:, None] * K + kd
        if COPY_Q:
            at = (b * q_stride_b + t * q_stride_t + head * q_stride_h)[:, None] + kd * q_stride_d
            query = tl.load(q + at, mask=real[:, None], other=0.0)
            if L2NORM:
                query = _normalised(query)
            tl.store(q_out + to, query, mask=inside[:, None])
        harmless = real
        if COPY_K:
            at = (b * k_stride_b + t * k_stride_t + head * k_stride_h)[:, None] + kd * k_stride_d
            key = tl.load(k + at, mask=real[:, None], other=0.0)
            if L2NORM:
                key = _normalised(key)
            if ISOLATE:
                harmless = _finite_rows(key)
                key = tl.where(harmless[:, None], key, 0.0)
            tl.store(k_out + to, key, mask=inside[:, None])

        for j in range(GROUP):
            v_head = head * GROUP + j
            g_at = b * g_stride_b + t * g_stride_t + v_head * g_stride_h
            beta_at = b * beta_stride_b + t * beta_stride_t + v_head * beta_stride_h
            gate = tl.load(g + g_at, mask=real, other=0.0).to(tl.float32)
            writing = tl.load(beta + beta_at, mask=real, other=0.0).to(tl.float32)
            row = token * (HQ * GROUP) + v_head
            if COPY_V:
                v_at = b * v_stride_b + t * v_stride_t + v_head * v_stride_h
                v_at = v_at[:, None] + vd * v_stride_d
                value = tl.load(v + v_at, mask=real[:, None], other=0.0)
                if ISOLATE:
                    both = harmless & _finite_rows(value)
                    value = tl.where(both[:, None], value, 0.0)
                    writing = tl.where(both, writing, float("nan"))
                tl.store(v_out + row[:, None] * V + vd, value, mask=inside[:, None])
            tl.store(decay + row, tl.exp(gate), mask=inside)
            tl.store(strength + row, writing, mask=inside)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def finish_kernel(
    bounds, initial_state,  # [sequences, HV, STATE]
    out,  # out [tokens, WIDTH]
    final_state,  # out, float32 [sequences, HV, STATE]
    tokens, sequences,
    WIDTH: tl.constexpr, HV: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, which share the tokens after the last bound, and the states of sequences."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    end = tokens.to(tl.int64) * WIDTH
    at = tl.load(bounds + sequences) * WIDTH + program * BLOCK
    while at < end:
        tl.store(out + at + i, tl.zeros((BLOCK,), out.dtype.element_ty), mask=at + i < end)
        at += PROGRAMS * BLOCK
    if HAS_FINAL:
        unit = program.to(tl.int64)  # a head of a sequence
        while unit < sequences * HV:
            first = tl.load(bounds + unit // HV)
            if first == tl.load(bounds + unit // HV + 1):
                for part in range(0, STATE, BLOCK):
                    to = unit * STATE + part + i
                    state = tl.zeros((BLOCK,), tl.float32)
                    if HAS_STATE:
                        state = tl.load(initial_state + to).to(tl.float32)
                    tl.store(final_state + to, state)
            unit += PROGRAMS


class Packed(NamedTuple):
    """What the first launch makes, all contiguous and aligned to 16 bytes.

    q, k ``[tokens,Hq,K]``, v ``[tokens,Hv,V]``: themselves where they can be used as they are.
    decay, strength ``[tokens,Hv]`` float32. bounds ``[N+1]`` int64, which do not decrease and lie
    within the tokens, whatever ``cu_seqlens`` holds.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor
    bounds: Tensor


def plan_pack(
    q: TensorFacts,
    k: TensorFacts,
    v: TensorFacts,
    g: TensorFacts,
    beta: TensorFacts,
    device: DeviceFacts,
    *,
    cu_seqlens_dtype: torch.dtype | None,
    sequences: int,
    qk_l2norm: bool,
    initial_state_dtype: torch.dtype | None,
    output_final_state: bool,
    has_h_starts: bool,
) -> PackPlan:
    """A plan over facts ``[B,T,Hq,K]``, ``[B,T,Hv,V]``, ``[B,T,Hv]``; K and V powers of two.

    There is a token and a sequence at least. Without ``cu_seqlens`` each of the B rows is one.
    """
    B, T, Hq, K = q.shape
    Hv, V = v.shape[2:]
    has_cu = cu_seqlens_dtype is not None
    isolate = has_cu or B > 1  # else nothing follows the tokens of the sequence
    copies = tuple(isolate or norm or not _is_dense(x)
                   for x, norm in ((q, qk_l2norm), (k, qk_l2norm), (v, False)))  # fmt: skip

    def read(facts: TensorFacts) -> tuple[torch.dtype, bool]:
        return facts.dtype, facts.aligned

    made, gate, bound = (q.dtype, True), (torch.float32, True), (torch.int64, True)
    state = (initial_state_dtype or torch.float32, True)
    pack = Launch(
        pack_kernel,
        grid=1 + -(-B * T // _BT) * Hq,
        pointers=dict(
            q=read(q), k=read(k), v=read(v), g=read(g), beta=read(beta),
            cu_seqlens=(cu_seqlens_dtype or torch.int64, False), q_out=made, k_out=made, v_out=made,
            decay=gate, strength=gate, bounds=bound, h_cu_starts=bound,
        ),
        scalars=dict(
            tokens=B * T, row_tokens=T, sequences=sequences,
            **_strides("q", q), **_strides("k", k), **_strides("v", v),
            **_strides("g", g), **_strides("beta", beta),
        ),
        constants=dict(
            HQ=Hq, GROUP=Hv // Hq, K=K, V=V, C=C, BT=_BT, BLOCK=_BOUNDS, MANY_ROWS=B > 1,
            HAS_CU=has_cu, HAS_H_STARTS=has_h_starts, L2NORM=qk_l2norm, COPY_Q=copies[0],
            COPY_K=copies[1], COPY_V=copies[2], ISOLATE=isolate,
        ),
        options=dict(num_warps=4),
    )  # fmt: skip
    programs = _PROGRAMS * device.multiprocessors
    finish = Launch(
        finish_kernel,
        grid=programs,
        pointers=dict(
            bounds=bound, initial_state=state, out=made, final_state=(torch.float32, True)
        ),
        scalars=dict(tokens=B * T, sequences=sequences),
        constants=dict(
            WIDTH=Hv * V, HV=Hv, STATE=K * V, BLOCK=_BLOCK, PROGRAMS=programs,
            HAS_STATE=initial_state_dtype is not None, HAS_FINAL=output_final_state,
        ),
        options=dict(num_warps=4),
    )  # fmt: skip
    return PackPlan(device, pack, finish if has_cu else None, q, v, sequences, copies)


class PackPlan(LaunchesPlan):
    """Both launches of one problem."""

    def __init__(
        self,
        device: DeviceFacts,
        pack: Launch,
        finish: Launch | None,
        q: TensorFacts,
        v: TensorFacts,
        sequences: int,
        copies: tuple[bool, ...],
    ) -> None:
        super().__init__(device, [pack] if finish is None else [pack, finish])
        self._pack, self._finish = pack, finish
        #: Whether q, k and v are copied.
        self.copies = copies
        tokens = q.shape[0] * q.shape[1]
        self._q_shape = (tokens, *q.shape[2:])
        self._v_shape = (tokens, *v.shape[2:])
        self._bounds_shape = (sequences + 1,)

    def pack(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        h_cu_starts: Tensor | None,
    ) -> Packed:
        """What is to be handed to the library; ``h_cu_starts [N+1]`` int64 is written too."""
        shapes = (self._q_shape, self._q_shape, self._v_shape)
        q_out, k_out, v_out = (
            x.new_empty(shape) if copy else x.view(shape)
            for x, shape, copy in zip((q, k, v), shapes, self.copies)
        )
        gates = self._v_shape[:2]
        decay, strength = (g.new_empty(gates, dtype=torch.float32) for _ in range(2))
        bounds = g.new_empty(self._bounds_shape, dtype=torch.int64)
        # An argument that the kernel does not use is stood in for by one that it has.
        cu = bounds if cu_seqlens is None else cu_seqlens
        starts = bounds if h_cu_starts is None else h_cu_starts
        packed = Packed(q_out, k_out, v_out, decay, strength, bounds)
        self._pack(self.device.index, q, k, v, g, beta, cu, *packed, starts)
        return packed

    def finish(
        self,
        bounds: Tensor,
        initial_state: Tensor | None,
        out: Tensor,
        final_state: Tensor | None,
    ) -> None:
        """Zeroes out ``[..,Hv,V]`` past the last bound; gives empty sequences their state.

        States are contiguous. Launches nothing if no sequence can be empty and no token is left.
        """
        if self._finish is not None:
            initial = bounds if initial_state is None else initial_state
            final = bounds if final_state is None else final_state
            self._finish(self.device.index, bounds, initial, out, final)


def _is_dense(x: TensorFacts) -> bool:
    return x.aligned and x.stride == contiguous_facts(x.shape, x.dtype).stride


def _strides(name: str, facts: TensorFacts) -> dict[str, Any]:
    return {f"{name}_stride_{dim}": stride for dim, stride in zip("bthd", facts.stride)}
