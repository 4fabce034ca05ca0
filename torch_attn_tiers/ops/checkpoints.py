"""``attn_tiers::scatter_checkpoints_``: states at page boundaries into the pool that keeps them.

Of each sequence at most one state is written: row ``h_src[i]`` of the checkpoints ``h`` where
``track_mask[i]``, the last state where ``final_mask[i]``. It goes to ``pool[dst[i]]`` in the dtype
of the pool. One launch; returns nothing.
:func:`torch_attn_tiers.checkpoints.scatter_checkpoints_` calls it with what ``gdn_chunk_prefill``
returned.

Tensors (positional)
    pool ``[P,Hv,K,V]``: float32, bfloat16 or float16, any strides that do not overlap.
    dst ``[N]``: the place of each sequence's state; one that the pool does not have, as -1, writes
    nothing. h ``[R,Hv,K,V]``, any strides, float32, bfloat16 or float16. h_src ``[N]``: rows of
    h; one that h does not have writes nothing. track_mask ``[N]``, bool.
    final_state ``[N,Hv,K,V]`` and final_mask ``[N]``, bool: both or neither. Where both masks are
    set the last state is written.
    Indices are int32 or int64. The host never reads a mask or an index. The last two axes of all
    states are in one order, ``[K,V]`` or ``[V,K]``.
Scalars (keyword)
    tier (see :func:`torch_attn_tiers.explain`).
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

If two sequences write one place, which state stays is undefined. The pool does not overlap h or
final_state in memory: its span, from the first to the last element, is apart from theirs.
``ATTN_TIERS_CHECK=1`` makes either an error, and so a place past the end of the pool and a row that
h does not have.

Example:
    >>> import torch, torch_attn_tiers
    >>> pool, h = torch.zeros(5, 1, 2, 2), torch.ones(3, 1, 2, 2)
    >>> dst, h_src, mask = torch.tensor([4, 1]), torch.tensor([0, 2]), torch.tensor([True, False])
    >>> torch.ops.attn_tiers.scatter_checkpoints_(pool, dst, h, h_src, mask)
    >>> pool.flatten(1).sum(1).tolist()
    [0.0, 0.0, 0.0, 0.0, 4.0]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, tensor_facts
from torch_attn_tiers.dispatch import (
    Decision,
    decide,
    define_call,
    facts_for,
    is_capturing,
    known,
)
from torch_attn_tiers.ops.checks import (
    layout,
    require,
    require_apart,
    require_dense,
    require_floats,
    require_integers,
    require_same_device,
    require_shape,
    require_tier,
    require_type,
    require_writable,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad, mark_written
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import CheckpointProblem, dtype_name, library_versions

OP = "scatter_checkpoints_"

_REQUIRED = ("pool", "dst", "h", "h_src", "track_mask")
_NAMES = (*_REQUIRED, "final_state", "final_mask")


def _check(named: dict[str, Any], tier: str | None) -> None:
    """A ValueError or TypeError for a call that is not legal."""
    require_dense(OP, _REQUIRED, **named)
    require_same_device(OP, **named)
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name in ("final_state", "final_mask"):
        other = "final_mask" if name == "final_state" else "final_state"
        require(
            name not in given or other in given,
            f"{OP}: {name} is given and {other} is None; give both or neither",
        )
    _check_dtypes(given)
    pool, dst, h = given["pool"], given["dst"], given["h"]
    require(pool.dim() == 4, f"{OP}: pool has shape {shape_of(pool)}; it must be [P,Hv,K,V]")
    require(h.dim() == 4, f"{OP}: h has shape {shape_of(h)}; it must be [R,Hv,K,V]")
    require(dst.dim() == 1, f"{OP}: dst has shape {shape_of(dst)}; it must be [N]")
    N = dst.shape[0]
    state = tuple(pool.shape[1:])
    for name, expected, meaning in (
        ("h", (h.shape[0], *state), "states like those of the pool"),
        ("h_src", (N,), "one for each sequence, as dst"),
        ("track_mask", (N,), "one for each sequence, as dst"),
        ("final_state", (N, *state), "the last state of each sequence, asked for as such"),
        ("final_mask", (N,), "one for each sequence, as dst"),
    ):
        if name in given:
            require_shape(OP, name, given[name], expected, meaning)
    require_writable(OP, "pool", pool)
    require_tier(OP, OP, tier)


def _check_dtypes(given: dict[str, Tensor]) -> None:
    for name, tensor in given.items():
        if name in ("pool", "h", "final_state"):
            require_floats(OP, name, tensor)
        elif name in ("dst", "h_src"):
            require_integers(OP, name, tensor)
        else:
            text = f"{OP}: {name} is {dtype_name(tensor.dtype)}; it must be bool"
            require_type(tensor.dtype is torch.bool, text)


def _check_values(decision: Decision, named: dict[str, Any]) -> None:
    """Under the ``check`` option: raise for states that are lost, misplaced or written twice."""
    for name in ("h", "final_state"):
        if named[name] is not None:
            require_apart(OP, "pool", named["pool"], name, named[name])
    if is_capturing(decision.problem.device):
        return
    from_h = wanted = named["track_mask"]
    if named["final_mask"] is not None:
        from_h, wanted = from_h & ~named["final_mask"], wanted | named["final_mask"]
    sources = named["h_src"][from_h & (named["dst"] >= 0)].tolist()
    R = named["h"].shape[0]
    if not all(0 <= source < R for source in sources):
        raise ValueError(
            f"{OP}: h_src is {sources} where a row of h is kept; it must be from 0 to below {R}, "
            "the rows of h (is total_chunks too small?), or the state is lost"
        )
    places = named["dst"][wanted].tolist()
    rows = named["pool"].shape[0]
    kept = [place for place in places if place >= 0]
    if any(place >= rows for place in kept):
        raise ValueError(
            f"{OP}: dst is {places} where a state is written; a place must be below {rows}, the "
            "states of the pool (a negative one means none)"
        )
    if len(set(kept)) < len(kept):
        raise ValueError(
            f"{OP}: dst is {places} where a state is written; two sequences write one place, and "
            "which state stays is undefined"
        )


def _problem(
    pool: Tensor,
    dst: Tensor,
    h: Tensor,
    h_src: Tensor,
    track_mask: Tensor,
    final_state: Tensor | None,
    final_mask: Tensor | None,
    *,
    facts: DeviceFacts | None,
    tier: str | None = None,
) -> CheckpointProblem:
    """The problem of a call, checked; ``facts`` replace its device."""
    tensors = (pool, dst, h, h_src, track_mask, final_state, final_mask)
    forbid_grad(OP, *tensors)
    _check(dict(zip(_NAMES, tensors)), tier)
    options = current()
    device = facts_for(pool, facts)
    return CheckpointProblem(
        call=OP,
        device=device,
        versions=library_versions(),
        requested=tier or options.forced(OP),
        jit=options.jit,
        capturing=is_capturing(device),
        pool=tensor_facts(pool),
        dst=tensor_facts(dst),
        h=tensor_facts(h),
        h_src=tensor_facts(h_src),
        track_mask=tensor_facts(track_mask),
        final_state=None if final_state is None else tensor_facts(final_state),
        final_mask=None if final_mask is None else tensor_facts(final_mask),
    )


def _run(
    pool: Tensor,
    dst: Tensor,
    h: Tensor,
    h_src: Tensor,
    track_mask: Tensor,
    final_state: Tensor | None = None,
    final_mask: Tensor | None = None,
    *,
    tier: str | None = None,
) -> None:
    tensors = (pool, dst, h, h_src, track_mask, final_state, final_mask)
    forbid_grad(OP, *tensors)
    options = current()
    try:
        flat = (OP, options, pool.device, *map(layout, tensors), tier)
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        require_dense(OP, _REQUIRED, **dict(zip(_NAMES, tensors)))
        raise
    decision = known(flat) or decide(flat, _problem(*tensors, facts=None, tier=tier))
    if options.check:
        _check_values(decision, dict(zip(_NAMES, tensors)))
    decision(*tensors)
    mark_written(pool)


def _fake(
    pool: Tensor,
    dst: Tensor,
    h: Tensor,
    h_src: Tensor,
    track_mask: Tensor,
    final_state: Tensor | None = None,
    final_mask: Tensor | None = None,
    *,
    tier: str | None = None,
) -> None:
    tensors = (pool, dst, h, h_src, track_mask, final_state, final_mask)
    forbid_grad(OP, *tensors)
    _check(dict(zip(_NAMES, tensors)), tier)


define(
    f"attn_tiers::{OP}",
    "(Tensor(a!) pool, Tensor dst, Tensor h, Tensor h_src, Tensor track_mask, "
    "Tensor? final_state=None, Tensor? final_mask=None, *, str? tier=None) -> ()",
    _run,
    _fake,
    mutates=("pool",),
)
define_call(OP, _problem)
