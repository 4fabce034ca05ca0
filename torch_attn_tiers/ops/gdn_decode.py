"""``attn_tiers::gdn_decode`` and ``gdn_decode_``: a few tokens of each row, one by one.

====================  =====================================================================
operator              returns
====================  =====================================================================
``gdn_decode``        ``(out, new_state)``
``gdn_decode_``       ``out``; the state is updated in place, in a pool if there are indices
``gdn_decode_.raw``   the same with ``a, b, A_log, dt_bias`` in place of ``g, beta``: the
                      gates as :mod:`gdn_gates <torch_attn_tiers.ops.gdn_gates>` makes them
====================  =====================================================================

Each value head has a state ``S [K,V]``. A token makes ``S <- exp(g) S``, ``d = beta (v - Sᵀk)``,
``S <- S + k dᵀ``, ``o = scale Sᵀq``. The tokens of a row follow each other, with S in float32 from
the first to the last.

Tensors (positional)
    q, k ``[B,Sq,Hq,K]``, v ``[B,Sq,Hv,V]``: float16, bfloat16 or float32, alike; any strides.
    ``Sq`` is 1 to 16. ``Hv`` is a multiple of ``Hq``: value head ``h`` uses head ``h // (Hv/Hq)``
    of q and k. ``K`` and ``V`` are at most 256. g, beta (or a, b) ``[B,Sq,Hv]``: the log of the
    forget gate, and the writing strength after its sigmoid, each float32 or of v's dtype. A_log,
    dt_bias ``[Hv]``: float32, bfloat16 or float16.
    state ``[B,Hv,K,V]``, or a pool ``[P,Hv,K,V]`` with indices: float32, bfloat16 or float16, any
    strides that do not overlap. Memory that is V-first (``[..,V,K]`` contiguous) is what the kernel
    is made for.
    read_indices ``[B]``, int32 or int64 on the device: the state of the pool that a row starts
    from; a negative one starts from zero. write_indices ``[B]``: where its last state goes, by
    default where it came from; a negative one writes none. ``[B,Sq]``: where the state after each
    token goes (of two tokens of a row that name one place the later stays). A row that neither
    reads nor writes has outputs of zero. Other indices that the pool does not have count as
    negative. The host never reads them.
Scalars (keyword)
    scale (default ``K**-0.5``), qk_l2norm (``x / sqrt(sum(x²) + 1e-6)`` of q and k first, rounded
    to their dtype), state_v_first (states are ``[..,V,K]``), tier (see
    :func:`torch_attn_tiers.explain`).
Results
    out ``[B,Sq,Hv,V]``, contiguous, in v's dtype. new_state ``[B,Hv,K,V]`` in the dtype of state;
    its memory is V-first, so without state_v_first it is a transposed view.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

Rows run in any order, beside each other. If two rows write one place of the pool, or one reads a
place that another one writes, what comes out is undefined; ``ATTN_TIERS_CHECK=1`` makes it an
error.

Example:
    >>> import torch, torch_attn_tiers
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 3, 1, 2, 16), dim=-1)
    >>> v = torch.randn(3, 1, 4, 8)
    >>> g, beta = -torch.rand(3, 1, 4), torch.rand(3, 1, 4)
    >>> pool = torch.zeros(10, 4, 8, 16)  # [P,Hv,V,K]
    >>> slots = torch.tensor([7, 2, -1])  # the last row is padding
    >>> out = torch.ops.attn_tiers.gdn_decode_(q, k, v, g, beta, pool, slots, state_v_first=True)
    >>> out.shape, pool.flatten(1).any(1).nonzero().flatten().tolist(), bool(out[2].any())
    (torch.Size([3, 1, 4, 8]), [2, 7], False)
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts, tensor_facts
from torch_attn_tiers.dispatch import Decision, decide, define_call, facts_for, is_capturing, known
from torch_attn_tiers.ops.checks import (
    layout,
    require,
    require_apart_from_others,
    require_dense,
    require_floats,
    require_integers,
    require_number_of_float32,
    require_same_device,
    require_shape,
    require_tier,
    require_type,
    require_writable,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad, mark_written
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import GdnDecodeProblem, dtype_name, library_versions

OP = "gdn_decode"
IN_PLACE = "gdn_decode_"
RAW = "gdn_decode_.raw"
MAX_TOKENS = 16
MAX_HEAD_SIZE = 256

_SCALARS = (
    "float? scale=None, bool qk_l2norm=False, bool state_v_first=False, str? tier=None"  # keywords
)


class Tensors(NamedTuple):
    """The positional arguments of all forms; of the raw one a and b are g and beta here."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    read_indices: Tensor | None = None
    write_indices: Tensor | None = None


class Scalars(NamedTuple):
    """The keyword arguments of all forms."""

    scale: float | None = None
    qk_l2norm: bool = False
    state_v_first: bool = False
    tier: str | None = None


def _named(op: str, tensors: Tensors) -> dict[str, Tensor | None]:
    """The arguments by the names that the caller knows."""
    named = tensors._asdict()
    if op == RAW:
        return {{"g": "a", "beta": "b"}.get(name, name): t for name, t in named.items()}
    del named["A_log"], named["dt_bias"]
    return named


# ---------------------------------------------------------------------------------------------
# Checks, shared by the kernels, the fake kernels, explain and prepare
# ---------------------------------------------------------------------------------------------


def _check(op: str, tensors: Tensors, scalars: Scalars) -> None:
    """A ValueError or TypeError for a call that is not legal."""
    named = _named(op, tensors)
    optional = ("read_indices", "write_indices")
    require_dense(op, [name for name in named if name not in optional], **named)
    require_same_device(op, **named)
    _check_dtypes(op, named)
    _check_shapes(op, named, scalars)
    if op != OP:
        require_writable(op, "state", tensors.state)
    require_number_of_float32(op, "scale", scalars.scale, "K**-0.5")
    require_tier(op, OP, scalars.tier)


def _check_dtypes(op: str, named: dict[str, Any]) -> None:
    dtype = named["q"].dtype
    for name in ("q", "state", "A_log", "dt_bias"):
        if name in named:
            require_floats(op, name, named[name])
    for name in ("k", "v"):
        other = named[name].dtype
        require_type(
            other is dtype,
            f"{op}: {name} is {dtype_name(other)} and q {dtype_name(dtype)}; they must have one "
            "dtype (nothing is cast, under autocast neither): convert one of them",
        )
    for name in ("a", "b") if op == RAW else ("g", "beta"):
        other = named[name].dtype
        require_type(
            other is torch.float32 or other is dtype,
            f"{op}: {name} is {dtype_name(other)} and q {dtype_name(dtype)}; it must be float32 or "
            "of q's dtype",
        )
    for name in ("read_indices", "write_indices"):
        if named[name] is not None:
            require_integers(op, name, named[name])


def _check_shapes(op: str, named: dict[str, Any], scalars: Scalars) -> None:
    q, v, state = named["q"], named["v"], named["state"]
    require(q.dim() == 4, f"{op}: q has shape {shape_of(q)}; it must be [B,Sq,Hq,K]")
    require(v.dim() == 4, f"{op}: v has shape {shape_of(v)}; it must be [B,Sq,Hv,V]")
    B, Sq, Hq, K = q.shape
    Hv, V = v.shape[2:]
    require(
        1 <= Sq <= MAX_TOKENS,
        f"{op}: q has {Sq} tokens in each row; it must have 1 to {MAX_TOKENS} "
        "(gdn_chunk_prefill takes more)",
    )
    require_shape(op, "k", named["k"], (B, Sq, Hq, K), "that of q")
    require_shape(op, "v", v, (B, Sq, Hv, V), "[B,Sq,Hv,V] with B and Sq of q")
    for name in ("a", "b") if op == RAW else ("g", "beta"):
        require_shape(op, name, named[name], (B, Sq, Hv), "[B,Sq,Hv], one for each head of v")
    require(Hq >= 1 and Hv >= 1, f"{op}: q has {Hq} heads and v {Hv}; each must be at least 1")
    require(
        Hv % Hq == 0,
        f"{op}: v has {Hv} heads and q {Hq}; the first must be a multiple of the second",
    )
    for name, size in (("q", K), ("v", V)):
        require(
            1 <= size <= MAX_HEAD_SIZE,
            f"{op}: {name} has head size {size}; it must be 1 to {MAX_HEAD_SIZE}",
        )
    for name in ("A_log", "dt_bias"):
        if name in named:
            require_shape(op, name, named[name], (Hv,), "[Hv], one for each head of v")
    reads, writes = named["read_indices"], named["write_indices"]
    first = scalars.state_v_first
    axes = f"Hv,V,K] (state_v_first={first})" if first else "Hv,K,V]"
    sizes = (Hv, V, K) if first else (Hv, K, V)
    if reads is None and writes is None:
        require_shape(op, "state", state, (B, *sizes), f"[B,{axes}")
        return
    require(
        reads is not None,
        f"{op}: write_indices is given and read_indices is None; with indices the state is a pool: "
        "give read_indices too (negative ones start from zero)",
    )
    require(state.dim() == 4, f"{op}: state has shape {shape_of(state)}; it must be [P,{axes}")
    require_shape(op, "state", state, (state.shape[0], *sizes), f"a pool [P,{axes}")
    require_shape(op, "read_indices", reads, (B,), "[B], one for each row")
    if writes is not None:
        each = writes.dim() == 2
        expected = (B, Sq) if each else (B,)
        meaning = "[B] or [B,Sq], one for each row or for each token"
        require_shape(op, "write_indices", writes, expected, meaning)


def _check_values(op: str, decision: Decision, tensors: Tensors) -> None:
    """Under the ``check`` option: raise where the result is undefined or was not meant."""
    problem: GdnDecodeProblem = decision.problem
    if op != OP:
        require_apart_from_others(op, "state", _named(op, tensors))
    reads, writes = tensors.read_indices, tensors.write_indices
    if reads is None or is_capturing(problem.device):
        return
    rows = problem.state.shape[0]
    writes = reads if writes is None else writes
    for name, indices in (("read_indices", reads), ("write_indices", writes)):
        if bool((indices >= rows).any()):
            raise ValueError(
                f"{problem.call}: {name} is {indices.tolist()}; an index must be below {rows}, the "
                "states of the pool (a negative one means none)"
            )
    read_from = reads.tolist()
    written_by: dict[int, int] = {}
    for row, places in enumerate(writes.tolist()):
        for place in places if isinstance(places, list) else (places,):
            if place >= 0 and written_by.setdefault(place, row) != row:
                raise ValueError(
                    f"{problem.call}: rows {written_by[place]} and {row} both write state {place} "
                    "of the pool; which one stays is undefined"
                )
    for row, place in enumerate(read_from):
        if place >= 0 and written_by.get(place, row) != row:
            raise ValueError(
                f"{problem.call}: row {row} reads state {place} of the pool and row "
                f"{written_by[place]} writes it; whether before or after is undefined"
            )


# ---------------------------------------------------------------------------------------------
# The problem
# ---------------------------------------------------------------------------------------------


def _problem(
    op: str, tensors: Tensors, scalars: Scalars, facts: DeviceFacts | None
) -> GdnDecodeProblem:
    """The problem of a call, checked and in canonical form; ``facts`` replace its device."""
    _check(op, tensors, scalars)
    options = current()
    device = facts_for(tensors.q, facts)
    default = tensors.q.shape[3] ** -0.5
    reads, writes = tensors.read_indices, tensors.write_indices
    return GdnDecodeProblem(
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
        A_log=_facts(tensors.A_log),
        dt_bias=_facts(tensors.dt_bias),
        state=tensor_facts(_v_first(tensors.state, scalars.state_v_first)),
        in_place=op != OP,
        read_indices=_facts(reads),
        write_indices=_facts(reads if writes is None else writes),
        # Written as 1/sqrt(K) it may differ in its last bits, which shall not make two plans.
        scale=default
        if scalars.scale is None or math.isclose(scalars.scale, default, rel_tol=1e-14)
        else scalars.scale,
        qk_l2norm=scalars.qk_l2norm,
        state_v_first=scalars.state_v_first,
    )


def _facts(tensor: Tensor | None) -> TensorFacts | None:
    return None if tensor is None else tensor_facts(tensor)


def _v_first(state: Tensor, state_v_first: bool) -> Tensor:
    """A state as the caller sees it as a view ``[..,V,K]``; and back."""
    return state if state_v_first else state.transpose(-1, -2)


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _run(op: str, tensors: Tensors, scalars: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The outputs and the states written, V-first."""
    forbid_grad(op, *tensors)
    options = current()
    q, k, v, g, beta, A_log, dt_bias, state, reads, writes = tensors
    try:
        flat = (op, options, q.device, *map(layout, tensors), *scalars, *scalars.values())
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        named = _named(op, tensors)
        optional = ("read_indices", "write_indices")
        require_dense(op, [name for name in named if name not in optional], **named)
        raise
    decision = known(flat)
    if decision is None:
        decision = decide(flat, _problem(op, tensors, Scalars(**scalars), None))
    if options.check:
        _check_values(op, decision, tensors)
    state = _v_first(state, decision.problem.state_v_first)
    new_state = state if op != OP else _new_state(state)
    out = v.new_empty(v.shape)
    writes = reads if writes is None else writes
    decision(q, k, v, g, beta, A_log, dt_bias, state, new_state, reads, writes, out)
    return out, new_state


def _new_state(state: Tensor) -> Tensor:
    """Memory for new states like the V-first ``state``: contiguous, whatever its strides are."""
    return state.new_empty(state.shape)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **scalars: Any
) -> tuple[Tensor, Tensor]:
    tensors = Tensors(q, k, v, g, beta, None, None, state)
    out, new_state = _run(OP, tensors, scalars)
    return out, _v_first(new_state, scalars.get("state_v_first", False))


def _decode_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    read_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    **scalars: Any,
) -> Tensor:
    tensors = Tensors(q, k, v, g, beta, None, None, state, read_indices, write_indices)
    out, _ = _run(IN_PLACE, tensors, scalars)
    mark_written(state)
    return out


def _decode_raw(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    read_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    **scalars: Any,
) -> Tensor:
    tensors = Tensors(q, k, v, a, b, A_log, dt_bias, state, read_indices, write_indices)
    out, _ = _run(RAW, tensors, scalars)
    mark_written(state)
    return out


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _tensors(op: str, args: tuple[Any, ...]) -> Tensors:
    """The positional arguments of a form by name."""
    q, k, v, g, beta, *rest = args
    return Tensors(q, k, v, g, beta, *(rest if op == RAW else (None, None, *rest)))


def _fake(op: str, *args: Any, **scalars: Any) -> Any:
    forbid_grad(op, *args)
    tensors = _tensors(op, args)
    _check(op, tensors, Scalars(**scalars))
    out = tensors.v.new_empty(tensors.v.shape)
    if op != OP:
        return out
    v_first = scalars.get("state_v_first", False)
    return out, _v_first(_new_state(_v_first(tensors.state, v_first)), v_first)


def _problem_of(op: str, *args: Any, facts: DeviceFacts | None, **scalars: Any) -> GdnDecodeProblem:
    """:func:`_problem` for ``explain`` and ``prepare``, from the operator's own arguments."""
    forbid_grad(op, *args)
    return _problem(op, _tensors(op, args), Scalars(**scalars), facts)


# ---------------------------------------------------------------------------------------------
# Registration: the default overload first, a call by the packet takes the first that matches
# ---------------------------------------------------------------------------------------------

_TOKENS = "Tensor q, Tensor k, Tensor v, "
_GATES = "Tensor g, Tensor beta, "
_PROJECTED = "Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
_POOL = "Tensor(a!) state, Tensor? read_indices=None, Tensor? write_indices=None, *, "

define(
    f"attn_tiers::{OP}",
    f"({_TOKENS}{_GATES}Tensor state, *, {_SCALARS}) -> (Tensor, Tensor)",
    _decode,
    functools.partial(_fake, OP),
)
for _name, _gates, _kernel in (
    (IN_PLACE, _GATES, _decode_in_place),
    (RAW, _PROJECTED, _decode_raw),
):
    define(
        f"attn_tiers::{_name}",
        f"({_TOKENS}{_gates}{_POOL}{_SCALARS}) -> Tensor",
        _kernel,
        functools.partial(_fake, _name),
        mutates=("state",),
    )
for _name in (OP, IN_PLACE, RAW):
    define_call(_name, functools.partial(_problem_of, _name))
