"""``attn_tiers::gdn_chunk_prefill``: the gated delta rule over whole prompts, chunk by chunk.

==============  ===========================================================================
overload        returns
==============  ===========================================================================
default         ``(out, final_state)``
``h_fla``       ``(out, final_state, h)``: also the state before each chunk of 64 tokens
``h_compact``   ``(out, final_state, h, h_cu_starts)``: the state after each complete chunk
``pool_``       ``out``; states come from a pool and go to it, see
                :mod:`gdn_pool <torch_attn_tiers.ops.gdn_pool>`
==============  ===========================================================================

Each value head has a state ``S [K,V]``. A token makes ``S <- exp(g) S``, ``d = beta (v - Sᵀk)``,
``S <- S + k dᵀ``, ``o = scale Sᵀq``; see ``csrc_free_ops/reference/gdn.py`` for it in code. Name
the overload when you call one that is not the default, or call
:func:`torch_attn_tiers.gdn_chunk_prefill`.

Tensors (positional)
    q, k ``[1,T,Hq,K]``, v ``[1,T,Hv,V]``: float16, bfloat16 or float32, alike; any strides. ``Hv``
    is a multiple of ``Hq`` and value head ``h`` uses head ``h // (Hv/Hq)`` of q and k; ``K`` and
    ``V`` at most 256. g, beta ``[1,T,Hv]``: the log of the forget gate, and the writing strength
    after its sigmoid, each float32 or of v's dtype; for ``beta |k|² <= 2``, past which the state
    grows without bound.
    initial_state ``[N,Hv,K,V]``, float32, bfloat16 or float16, any strides; None is zero.
    cu_seqlens ``[N+1]`` int32 or int64: sequence ``i`` is tokens ``cu_seqlens[i]`` to
    ``cu_seqlens[i+1]``. It starts at 0, does not decrease and ends at most at ``T``; the host never
    reads it. Without it the first dimension may be ``B``: as many sequences of ``T`` tokens.
Scalars (keyword)
    scale (default ``K**-0.5``), qk_l2norm (``x / sqrt(sum(x²) + 1e-6)`` of q and k first, rounded
    to their dtype), output_final_state, state_v_first (states are ``[..,V,K]``), batch_invariant (a
    sequence's bits depend on nothing but itself), tier (see :func:`torch_attn_tiers.explain`). With
    h also total_chunks (its number of rows; further states are dropped) and h_dtype (default: the
    initial state's, else float32).
Results
    out ``[1,T,Hv,V]``, contiguous, in v's dtype, zero for tokens past ``cu_seqlens[-1]``.
    final_state ``[N,Hv,K,V]`` float32, or ``[0,Hv,K,V]`` if it is not asked for; of an empty
    sequence it is the initial one. h ``[1,R,Hv,K,V]`` (fla) or ``[R,Hv,K,V]`` (compact); rows past
    the last chunk are not written. h_cu_starts ``[N+1]`` int64: the first row of each sequence.
    The memory of states is V-first always: without state_v_first they are transposed views.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

Example:
    >>> import torch, torch_attn_tiers
    >>> q, k = torch.randn(2, 1, 100, 2, 16)
    >>> v = torch.randn(1, 100, 4, 8)
    >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> lengths = torch.tensor([0, 70, 100])
    >>> out, state = torch.ops.attn_tiers.gdn_chunk_prefill(
    ...     q, k, v, g, beta, None, lengths, qk_l2norm=True)
    >>> out.shape, state.shape
    (torch.Size([1, 100, 4, 8]), torch.Size([2, 4, 16, 8]))
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, contiguous_facts, device_facts, tensor_facts
from torch_attn_tiers.dispatch import Decision, decide, define_call, facts_for, is_capturing, known
from torch_attn_tiers.ops.checks import (
    FLOAT_NAMES,
    FLOATS,
    layout,
    require,
    require_dense,
    require_floats,
    require_integers,
    require_number_of_float32,
    require_same_device,
    require_shape,
    require_tier,
    require_type,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import GdnProblem, dtype_name, library_versions

OP = "gdn_chunk_prefill"
#: Tokens between two checkpoints.
C = 64
MAX_HEAD_SIZE = 256


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, "
    "Tensor? cu_seqlens=None, *, "
)
_SCALARS = (
    "float? scale=None, bool qk_l2norm=False, bool output_final_state=True, "
    "bool state_v_first=False, bool batch_invariant=False, str? tier=None"
)
_H_SCALARS = "SymInt? total_chunks=None, ScalarType? h_dtype=None"

#: The layout of h that an overload returns.
H_LAYOUTS = {OP: None, f"{OP}.h_fla": "fla", f"{OP}.h_compact": "compact"}


class Tensors(NamedTuple):
    """The positional arguments of all overloads."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


_REQUIRED = ("q", "k", "v", "g", "beta")


class Scalars(NamedTuple):
    """The keyword arguments of all overloads."""

    scale: float | None = None
    qk_l2norm: bool = False
    output_final_state: bool = True
    state_v_first: bool = False
    batch_invariant: bool = False
    tier: str | None = None
    total_chunks: int | None = None  # with h only
    h_dtype: torch.dtype | None = None  # with h only


class Sizes(NamedTuple):
    """The letters of the contract, read off checked arguments."""

    B: int
    T: int
    N: int
    Hq: int
    Hv: int
    K: int
    V: int
    R: int  # rows of h


def _bind(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensors, Scalars]:
    """The arguments of an overload by name. PyTorch leaves out those at their default."""
    keyword = Scalars._fields[:-2] if H_LAYOUTS[op] is None else Scalars._fields
    unknown = [name for name in kwargs if name not in Tensors._fields + keyword]
    twice = [name for name in Tensors._fields[: len(args)] if name in kwargs]
    if unknown or twice or len(args) > len(Tensors._fields):
        raise TypeError(
            f"{op}: got {len(args)} positional arguments, unknown ones: "
            f"{', '.join(unknown) or 'none'}, given twice: {', '.join(twice) or 'none'}; it takes "
            f"{', '.join(Tensors._fields)}, and as keywords {', '.join(keyword)}"
        )
    tensors = {name: kwargs[name] for name in Tensors._fields if name in kwargs}
    scalars = {name: kwargs[name] for name in keyword if name in kwargs}
    return Tensors(*args, **tensors), Scalars(**scalars)


# ---------------------------------------------------------------------------------------------
# Checks, shared by the kernels, the fake kernels, explain and prepare
# ---------------------------------------------------------------------------------------------


def check(op: str, tensors: Tensors, scalars: Scalars) -> Sizes:
    """The sizes of a legal call; a ValueError or TypeError for any other."""
    require_dense(op, _REQUIRED, **tensors._asdict())
    require_same_device(op, **tensors._asdict())
    _check_dtypes(op, tensors)
    B, T, N, Hq, Hv, K, V = _check_shapes(op, tensors, scalars)
    _check_scalars(op, scalars)
    R = _h_rows(op, B, T, N, tensors.cu_seqlens is not None, scalars.total_chunks)
    return Sizes(B, T, N, Hq, Hv, K, V, R)


def _check_dtypes(op: str, tensors: Tensors) -> None:
    dtype = tensors.q.dtype
    require_floats(op, "q", tensors.q)
    for name in ("k", "v"):
        other = getattr(tensors, name).dtype
        require_type(
            other is dtype,
            f"{op}: {name} is {dtype_name(other)} and q {dtype_name(dtype)}; they must have one "
            "dtype (nothing is cast, under autocast neither): convert one of them",
        )
    for name in ("g", "beta"):
        other = getattr(tensors, name).dtype
        require_type(
            other is torch.float32 or other is dtype,
            f"{op}: {name} is {dtype_name(other)} and q {dtype_name(dtype)}; it must be float32 or "
            "of q's dtype",
        )
    if tensors.initial_state is not None:
        require_floats(op, "initial_state", tensors.initial_state)
    if tensors.cu_seqlens is not None:
        require_integers(op, "cu_seqlens", tensors.cu_seqlens)


def _check_shapes(
    op: str, tensors: Tensors, scalars: Scalars
) -> tuple[int, int, int, int, int, int, int]:
    q, k, v, g, beta, initial_state, cu_seqlens = tensors
    require(q.dim() == 4, f"{op}: q has shape {shape_of(q)}; it must be [1,T,Hq,K] or [B,T,Hq,K]")
    require(v.dim() == 4, f"{op}: v has shape {shape_of(v)}; it must be [1,T,Hv,V] or [B,T,Hv,V]")
    B, T, Hq, K = q.shape
    Hv, V = v.shape[2:]
    require_shape(op, "k", k, (B, T, Hq, K), "that of q")
    require_shape(op, "v", v, (B, T, Hv, V), "[B,T,Hv,V] with B and T of q")
    require_shape(op, "g", g, (B, T, Hv), "[B,T,Hv], one gate for each head of v")
    require_shape(op, "beta", beta, (B, T, Hv), "[B,T,Hv], one for each head of v")
    require(Hq >= 1 and Hv >= 1, f"{op}: q has {Hq} heads and v {Hv}; each must be at least 1")
    require(
        Hv % Hq == 0,
        f"{op}: v has {Hv} heads and q {Hq}; the first must be a multiple of the second",
    )
    for name, size in (("q", K), ("v", V)):
        require(size >= 1, f"{op}: {name} has head size {size}; it must be at least 1")
        require(
            size <= MAX_HEAD_SIZE,
            f"{op}: {name} has head size {size}; it must be at most {MAX_HEAD_SIZE}",
        )
    N = B
    if cu_seqlens is not None:
        require(
            B == 1,
            f"{op}: cu_seqlens is given and q has shape {shape_of(q)}; with cu_seqlens the "
            "sequences lie one after the other in [1,T,..], without it each of the B rows is one",
        )
        require(
            cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1,
            f"{op}: cu_seqlens has shape {shape_of(cu_seqlens)}; it must be [N+1], the starts of "
            "N sequences and the end of the last",
        )
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        first = scalars.state_v_first
        axes = f"[N,Hv,V,K] (state_v_first={first})" if first else "[N,Hv,K,V]"
        sizes = (V, K) if first else (K, V)
        require_shape(op, "initial_state", initial_state, (N, Hv, *sizes), axes)
    return B, T, N, Hq, Hv, K, V


def _check_scalars(op: str, scalars: Scalars) -> None:
    h_dtype = scalars.h_dtype
    require_number_of_float32(op, "scale", scalars.scale, "K**-0.5")
    if h_dtype is not None:
        require_type(
            h_dtype in FLOATS,
            f"{op}: h_dtype={dtype_name(h_dtype)}; it must be {FLOAT_NAMES}",
        )
    require_tier(op, OP, scalars.tier)


def _h_rows(op: str, B: int, T: int, N: int, packed: bool, total_chunks: int | None) -> int:
    """Rows of h: as given, or the most that any lengths can need."""
    h_layout = H_LAYOUTS.get(op)
    if h_layout is None:
        return 0
    if total_chunks is not None:
        require(
            0 <= total_chunks < 2**31,
            f"{op}: total_chunks={total_chunks}; it must be 0 or more and below 2^31 (None is the "
            "most that any lengths can need)",
        )
        return total_chunks
    if h_layout == "compact":
        return B * (T // C)
    if not packed:
        return B * ((T + C - 1) // C)
    m = torch.sym_min(N, T)  # each of so many sequences has a chunk that is not complete
    return m + (T - m) // C


# ---------------------------------------------------------------------------------------------
# The problem
# ---------------------------------------------------------------------------------------------


def make_problem(
    op: str, tensors: Tensors, scalars: Scalars, sizes: Sizes, facts: DeviceFacts | None
) -> GdnProblem:
    """The problem of a checked call, in canonical form; ``facts`` replace its device."""
    initial_state, cu_seqlens = tensors.initial_state, tensors.cu_seqlens
    options = current()
    device = facts_for(tensors.q, facts)
    default = sizes.K**-0.5
    return GdnProblem(
        call=op,
        device=device,
        versions=library_versions(),
        requested=scalars.tier or options.forced(OP),
        jit=options.jit,
        capturing=is_capturing(device),
        q=tensor_facts(tensors.q),
        k=tensor_facts(tensors.k),
        v=tensor_facts(tensors.v),
        g=tensor_facts(tensors.g),
        beta=tensor_facts(tensors.beta),
        initial_state=None
        if initial_state is None
        else tensor_facts(v_first(initial_state, scalars.state_v_first)),
        cu_seqlens_dtype=None if cu_seqlens is None else cu_seqlens.dtype,
        N=sizes.N,
        # Written as 1/sqrt(K) it may differ in its last bits, which shall not make two plans.
        scale=default
        if scalars.scale is None or math.isclose(scalars.scale, default, rel_tol=1e-14)
        else scalars.scale,
        qk_l2norm=scalars.qk_l2norm,
        output_final_state=scalars.output_final_state,
        h_layout=H_LAYOUTS.get(op),
        h_rows=sizes.R,
        h_dtype=None if H_LAYOUTS.get(op) is None else _h_dtype(tensors, scalars),
        batch_invariant=scalars.batch_invariant,
        state_v_first=scalars.state_v_first,
    )


def _problem_of(op: str, *args: Any, facts: DeviceFacts | None = None, **kwargs: Any) -> GdnProblem:
    """The problem of a call, checked, from the operator's own arguments."""
    forbid_grad(op, *args)
    tensors, scalars = _bind(op, args, kwargs)
    return make_problem(op, tensors, scalars, check(op, tensors, scalars), facts)


def model_problem(
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    h_dtype: torch.dtype | None,
    sizes: tuple[int, int, int, int],
    qk_l2norm: bool,
) -> GdnProblem:
    """The problem of a model's compact checkpoints, whatever the tokens and sequences.

    It stands for all calls of the model with ``sizes`` Hq, Hv, K, V: one sequence of one chunk, in
    contiguous tensors.
    """
    Hq, Hv, K, V = sizes
    gates = contiguous_facts((1, C, Hv), torch.float32)
    return GdnProblem(
        call=f"{OP}.h_compact",
        device=device_facts(device),
        versions=library_versions(),
        q=contiguous_facts((1, C, Hq, K), dtype),
        k=contiguous_facts((1, C, Hq, K), dtype),
        v=contiguous_facts((1, C, Hv, V), dtype),
        g=gates,
        beta=gates,
        initial_state=None if state_dtype is None else contiguous_facts((1, Hv, V, K), state_dtype),
        cu_seqlens_dtype=torch.int32,
        N=1,
        scale=K**-0.5,
        qk_l2norm=qk_l2norm,
        output_final_state=True,
        h_layout="compact",
        h_rows=1,
        h_dtype=h_dtype or state_dtype or torch.float32,
        batch_invariant=False,
    )


def _h_dtype(tensors: Tensors, scalars: Scalars) -> torch.dtype:
    if scalars.h_dtype is not None:
        return scalars.h_dtype
    return torch.float32 if tensors.initial_state is None else tensors.initial_state.dtype


def v_first(state: Tensor, state_v_first: bool) -> Tensor:
    """A state as the caller sees it as a view ``[..,V,K]``; and back."""
    return state if state_v_first else state.transpose(-1, -2)


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens)
    forbid_grad(op, *tensors)
    options = current()
    try:
        flat = (op, options, q.device, *map(layout, tensors), *scalars, *scalars.values())
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        require_dense(op, _REQUIRED, **dict(zip(Tensors._fields, tensors)))
        raise
    decision = known(flat)
    if decision is None:
        decision = decide(flat, _problem_of(op, *tensors, **scalars))
    if options.check:
        check_values(decision, cu_seqlens)
    problem: GdnProblem = decision.problem
    state_v_first = problem.state_v_first
    rows = max(problem.h_rows, getattr(decision.built.plan, "h_rows", 0))
    out, final_state, h, h_cu_starts = _allocate(
        q, problem.N, problem.v.shape, problem.K, problem.output_final_state, problem.h_layout,
        rows, problem.h_dtype,
    )  # fmt: skip
    decision(
        q,
        k,
        v,
        g,
        beta,
        None if initial_state is None else v_first(initial_state, state_v_first),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        out,
        final_state if problem.output_final_state else None,
        h,
        h_cu_starts,
    )
    if h is not None and rows > problem.h_rows:
        h = h[: problem.h_rows]
    return _results(out, final_state, h, h_cu_starts, state_v_first)


def _allocate(
    q: Tensor,
    N: int,
    shape: tuple[int, ...],
    K: int,
    output_final_state: bool,
    h_layout: str | None,
    R: int,
    h_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Memory for all results, states V-first; ``shape`` is that of v."""
    Hv, V = shape[2:]
    out = q.new_empty(shape)
    final_state = q.new_empty((N if output_final_state else 0, Hv, V, K), dtype=torch.float32)
    if h_layout is None:
        return out, final_state, None, None
    h = q.new_empty((R, Hv, V, K), dtype=h_dtype)
    if h_layout == "fla":
        return out, final_state, h, None
    return out, final_state, h, q.new_empty((N + 1,), dtype=torch.int64)


def _results(
    out: Tensor,
    final_state: Tensor,
    h: Tensor | None,
    h_cu_starts: Tensor | None,
    state_v_first: bool,
) -> tuple[Tensor, ...]:
    """The results as the caller sees them."""
    final_state = v_first(final_state, state_v_first)
    if h is None:
        return out, final_state
    h = v_first(h, state_v_first)
    if h_cu_starts is None:
        return out, final_state, h.unsqueeze(0)
    return out, final_state, h, h_cu_starts


def check_values(decision: Decision, cu_seqlens: Tensor | None) -> None:
    """Under the ``check`` option: raise for ``cu_seqlens`` that are none."""
    problem: GdnProblem = decision.problem
    if cu_seqlens is None or is_capturing(problem.device):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] > problem.T or values != sorted(values):
        raise ValueError(
            f"{problem.call}: cu_seqlens is {values}; it must start at 0, must not decrease, and "
            f"must end at most at T={problem.T}"
        )


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _fake(op: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    forbid_grad(op, *args)
    tensors, scalars = _bind(op, args, kwargs)
    sizes = check(op, tensors, scalars)
    h_layout = H_LAYOUTS[op]
    results = _allocate(
        tensors.q, sizes.N, (sizes.B, sizes.T, sizes.Hv, sizes.V), sizes.K,
        scalars.output_final_state, h_layout, sizes.R,
        None if h_layout is None else _h_dtype(tensors, scalars),
    )  # fmt: skip
    return _results(*results, scalars.state_v_first)


# ---------------------------------------------------------------------------------------------
# Registration: the default overload first, a call by the packet takes the first that matches
# ---------------------------------------------------------------------------------------------

for _name, _layout in H_LAYOUTS.items():
    _scalars = _SCALARS if _layout is None else f"{_SCALARS}, {_H_SCALARS}"
    _count = {None: 2, "fla": 3, "compact": 4}[_layout]
    define(
        f"attn_tiers::{_name}",
        f"({_TENSORS}{_scalars}) -> ({', '.join(['Tensor'] * _count)})",
        functools.partial(_run, _name),
        functools.partial(_fake, _name),
    )
    define_call(_name, functools.partial(_problem_of, _name))
