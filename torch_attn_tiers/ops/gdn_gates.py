"""``attn_tiers::gdn_gates``: the gates of the gated delta net, from what a model projects.

``g = -exp(A_log) softplus(a + dt_bias)``, the log of the forget gate, and ``beta = sigmoid(b)``,
the writing strength, in one launch. ``gdn_decode_.raw`` takes ``a, b, A_log, dt_bias`` and needs no
such call before it.

Tensors (positional)
    a, b ``[..,Hv]``, of one shape, as ``[1,T,Hv]``; A_log, dt_bias ``[Hv]``: each float16, bfloat16
    or float32; any strides.
Scalars (keyword)
    tier (see :func:`torch_attn_tiers.explain`).
Results
    g, beta: float32 ``[..,Hv]``, contiguous, computed in float32.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

Example:
    >>> import torch, torch_attn_tiers
    >>> a, b = torch.randn(2, 1, 100, 4)
    >>> g, beta = torch.ops.attn_tiers.gdn_gates(a, b, torch.rand(4), torch.rand(4))
    >>> g.shape, bool((g < 0).all()), bool((beta < 1).all())
    (torch.Size([1, 100, 4]), True, True)
"""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, tensor_facts
from torch_attn_tiers.dispatch import decide, define_call, facts_for, is_capturing, known
from torch_attn_tiers.ops.checks import (
    layout,
    require,
    require_dense,
    require_floats,
    require_same_device,
    require_tier,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import GdnGatesProblem, library_versions

OP = "gdn_gates"


def _check(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, tier: str | None) -> None:
    """A ValueError or TypeError for a call that is not legal."""
    named = dict(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    require_dense(OP, named, **named)
    require_same_device(OP, **named)
    for name, tensor in named.items():
        require_floats(OP, name, tensor)
    require(a.dim() >= 1, f"{OP}: a has no dimension; it must be [..,Hv]")
    Hv = a.shape[-1]
    require(Hv >= 1, f"{OP}: a has {Hv} heads; it must have at least 1")
    for name, tensor, expected in (
        ("b", b, tuple(a.shape)),
        ("A_log", A_log, (Hv,)),
        ("dt_bias", dt_bias, (Hv,)),
    ):
        text = (
            f"{OP}: {name} has shape {shape_of(tensor)} and a {shape_of(a)}; it must be "
            f"{shape_of(expected)}"
        )
        require(tensor.dim() == len(expected), text)
        for size, wanted in zip(tensor.shape, expected):
            require(size == wanted, text)
    require_tier(OP, OP, tier)


def _problem(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    facts: DeviceFacts | None,
    tier: str | None = None,
) -> GdnGatesProblem:
    """The problem of a call, checked; ``facts`` replace its device."""
    forbid_grad(OP, a, b, A_log, dt_bias)
    _check(a, b, A_log, dt_bias, tier)
    options = current()
    device = facts_for(a, facts)
    return GdnGatesProblem(
        call=OP,
        device=device,
        versions=library_versions(),
        requested=tier or options.forced(OP),
        jit=options.jit,
        capturing=is_capturing(device),
        a=tensor_facts(_rows(a)),
        b=tensor_facts(_rows(b)),
        A_log=tensor_facts(A_log),
        dt_bias=tensor_facts(dt_bias),
    )


def _rows(x: Tensor) -> Tensor:
    """``[..,Hv]`` as ``[tokens,Hv]``: a view, but for strides that have no such view."""
    return x.reshape(-1, x.shape[-1])


def _run(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, tier: str | None = None
) -> tuple[Tensor, Tensor]:
    tensors = (a, b, A_log, dt_bias)
    forbid_grad(OP, *tensors)
    try:
        flat = (OP, current(), a.device, *map(layout, tensors), tier)
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        named = dict(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
        require_dense(OP, named, **named)
        raise
    decision = known(flat) or decide(flat, _problem(*tensors, facts=None, tier=tier))
    g, beta = _allocate(a), _allocate(a)
    decision(_rows(a), _rows(b), A_log, dt_bias, _rows(g), _rows(beta))
    return g, beta


def _allocate(a: Tensor) -> Tensor:
    return a.new_empty(a.shape, dtype=torch.float32)


def _fake(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, tier: str | None = None
) -> tuple[Tensor, Tensor]:
    forbid_grad(OP, a, b, A_log, dt_bias)
    _check(a, b, A_log, dt_bias, tier)
    return _allocate(a), _allocate(a)


define(
    f"attn_tiers::{OP}",
    "(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, *, str? tier=None) -> (Tensor, Tensor)",
    _run,
    _fake,
)
define_call(OP, _problem)
