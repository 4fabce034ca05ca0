"""``attn_tiers::gdn_chunk_prefill.pool_``: whole prompts, with states in a pool that is updated.

Sequence ``i`` starts from the state ``pool[read_indices[i]]`` and leaves its last one in
``pool[write_indices[i]]``, and on the way one more in ``pool[track_indices[i]]``: that after
``track_lens[i]`` of its tokens. Nothing else is written, so that a prefix cache costs the bytes of
the states that it keeps. What is computed is what the default overload computes, see
:mod:`gdn <torch_attn_tiers.ops.gdn>`. Always name the overload.

Tensors (positional)
    q, k, v, g, beta: as of the default overload.
    pool ``[P,Hv,K,V]``, float32, bfloat16 or float16, any strides that do not overlap. Memory that
    is V-first (``[..,V,K]`` contiguous) is what the kernel is made for.
    read_indices ``[N]``, int32 or int64 on the device: where each sequence starts from; a negative
    one starts from zero. write_indices ``[N]``: where its last state goes, by default where it came
    from; a negative one drops it.
    track_lens ``[N]``, with track_indices ``[N]``: after how many of its tokens a state is kept,
    and where. A multiple of 64, or the length of the sequence; 0 keeps none. A negative track index
    drops the state. Other numbers, and those that the sequence does not reach, keep none.
    Indices that the pool does not have count as negative. The host never reads any of them.
    cu_seqlens: as of the default overload.
Scalars (keyword)
    scale, qk_l2norm, state_v_first, batch_invariant, tier: as of the default overload.
Results
    out, as of the default overload.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

Sequences run in any order, beside each other. If two of them write one place of the pool, or one
reads a place that another one writes, what comes out is undefined; ``ATTN_TIERS_CHECK=1`` makes it
an error. Of one sequence all is defined: it reads before it writes, and if both its states go to
one place the last one stays.

Example:
    >>> import torch, torch_attn_tiers
    >>> q, k = torch.randn(2, 1, 170, 2, 16)
    >>> v, gate = torch.randn(1, 170, 4, 8), torch.rand(1, 170, 4)
    >>> pool = torch.zeros(10, 4, 8, 16)  # [P,Hv,V,K]
    >>> reads, writes = torch.tensor([-1, 3]), torch.tensor([5, 4])
    >>> track_lens, track_indices = torch.tensor([64, 0]), torch.tensor([8, -1])
    >>> out = torch.ops.attn_tiers.gdn_chunk_prefill.pool_(
    ...     q, k, v, -gate, gate, pool, reads, writes, track_lens, track_indices,
    ...     torch.tensor([0, 100, 170]), qk_l2norm=True, state_v_first=True)
    >>> out.shape, pool.flatten(1).any(1).nonzero().flatten().tolist()
    (torch.Size([1, 170, 4, 8]), [4, 5, 8])
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, PoolIndices, tensor_facts
from torch_attn_tiers.dispatch import Decision, decide, define_call, is_capturing, known
from torch_attn_tiers.ops import gdn
from torch_attn_tiers.ops.checks import (
    layout,
    require,
    require_apart_from_others,
    require_dense,
    require_floats,
    require_integers,
    require_same_device,
    require_shape,
    require_writable,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad, mark_written
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import GdnProblem

OP = f"{gdn.OP}.pool_"


class Tensors(NamedTuple):
    """The positional arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    pool: Tensor
    read_indices: Tensor
    write_indices: Tensor | None = None
    track_lens: Tensor | None = None
    track_indices: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def of_default(self) -> gdn.Tensors:
        """Those of the default overload, without an initial state."""
        return gdn.Tensors(*self[:5], None, self.cu_seqlens)


_REQUIRED = Tensors._fields[:7]
_INDICES = ("read_indices", "write_indices", "track_lens", "track_indices")


def _check(tensors: Tensors, scalars: gdn.Scalars) -> gdn.Sizes:
    """The sizes of a legal call; a ValueError or TypeError for any other."""
    require_dense(OP, _REQUIRED, **tensors._asdict())
    require_same_device(OP, **tensors._asdict())
    sizes = gdn.check(OP, tensors.of_default(), scalars)
    pool = tensors.pool
    require_floats(OP, "pool", pool)
    first = scalars.state_v_first
    axes = f"a pool [P,Hv,V,K] (state_v_first={first})" if first else "a pool [P,Hv,K,V]"
    state = (sizes.V, sizes.K) if first else (sizes.K, sizes.V)
    require(pool.dim() == 4, f"{OP}: pool has shape {shape_of(pool)}; it must be {axes}")
    require_shape(OP, "pool", pool, (pool.shape[0], sizes.Hv, *state), axes)
    require_writable(OP, "pool", pool)
    for name in _INDICES:
        indices = getattr(tensors, name)
        if indices is not None:
            require_integers(OP, name, indices)
            require_shape(OP, name, indices, (sizes.N,), "[N], one for each sequence")
    for name, other in (("track_lens", "track_indices"), ("track_indices", "track_lens")):
        require(
            getattr(tensors, name) is None or getattr(tensors, other) is not None,
            f"{OP}: {name} is given and {other} is None; give both or neither",
        )
    return sizes


def _check_values(decision: Decision, tensors: Tensors) -> None:
    """Under the ``check`` option: raise where the result is undefined or was not meant."""
    problem: GdnProblem = decision.problem
    require_apart_from_others(OP, "pool", tensors._asdict())
    if is_capturing(problem.device):
        return
    gdn.check_values(decision, tensors.cu_seqlens)
    bounds = tensors.cu_seqlens
    lengths = [problem.T] * problem.N if bounds is None else bounds.diff().tolist()
    reads = tensors.read_indices.tolist()
    writes = reads if tensors.write_indices is None else tensors.write_indices.tolist()
    places = {"read_indices": reads, "write_indices": writes}
    kept = [[place] for place in writes]
    if tensors.track_lens is not None and tensors.track_indices is not None:
        track_lens = tensors.track_lens.tolist()
        for count, length in zip(track_lens, lengths):
            require(
                0 <= count <= length and (count % gdn.C == 0 or count == length),
                f"{OP}: track_lens is {track_lens} for sequences of {lengths} tokens; each must be "
                f"a multiple of {gdn.C} that the sequence reaches, its length, or 0",
            )
        places["track_indices"] = tensors.track_indices.tolist()
        for row, count, place in zip(kept, track_lens, places["track_indices"]):
            row += [place] if count else []
    P = tensors.pool.shape[0]
    for name, values in places.items():
        require(
            max(values, default=-1) < P,
            f"{OP}: {name} is {values}; an index must be below {P}, the states of the pool (a "
            "negative one means none)",
        )
    written_by: dict[int, int] = {}
    for i, row in enumerate(kept):
        for place in row:
            other = i if place < 0 else written_by.setdefault(place, i)
            require(
                other == i,
                f"{OP}: sequences {other} and {i} both write state {place} of the pool; which one "
                "stays is undefined",
            )
    for i, place in enumerate(reads):
        other = written_by.get(place, i)
        require(
            other == i,
            f"{OP}: sequence {i} reads state {place} of the pool and sequence {other} writes it; "
            "whether before or after is undefined",
        )


def _problem(tensors: Tensors, scalars: gdn.Scalars, facts: DeviceFacts | None) -> GdnProblem:
    """The problem of a call, checked and in canonical form; ``facts`` replace its device."""
    sizes = _check(tensors, scalars)
    reads, writes = tensors.read_indices, tensors.write_indices
    track_lens, track_indices = tensors.track_lens, tensors.track_indices
    return dataclasses.replace(
        gdn.make_problem(OP, tensors.of_default(), scalars, sizes, facts),
        initial_state=tensor_facts(gdn.v_first(tensors.pool, scalars.state_v_first)),
        pool=PoolIndices(
            reads.dtype,
            reads.dtype if writes is None else writes.dtype,
            None if track_lens is None else track_lens.dtype,
            None if track_indices is None else track_indices.dtype,
        ),
    )


def _problem_of(*args: Any, facts: DeviceFacts | None, **scalars: Any) -> GdnProblem:
    """:func:`_problem` for ``explain`` and ``prepare``, from the operator's own arguments."""
    forbid_grad(OP, *args)
    return _problem(Tensors(*args), gdn.Scalars(**scalars), facts)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **scalars: Any,
) -> Tensor:
    tensors = Tensors(
        q, k, v, g, beta, pool, read_indices, write_indices, track_lens, track_indices, cu_seqlens
    )
    forbid_grad(OP, *tensors)
    options = current()
    try:
        flat = (OP, options, q.device, *map(layout, tensors), *scalars, *scalars.values())
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        require_dense(OP, _REQUIRED, **tensors._asdict())
        raise
    decision = known(flat)
    if decision is None:
        decision = decide(flat, _problem(tensors, gdn.Scalars(**scalars), None))
    if options.check:
        _check_values(decision, tensors)
    out = q.new_empty(v.shape)
    writes = read_indices if write_indices is None else write_indices
    decision(
        q,
        k,
        v,
        g,
        beta,
        gdn.v_first(pool, decision.problem.state_v_first),
        read_indices.contiguous(),
        writes.contiguous(),
        None if track_lens is None else track_lens.contiguous(),
        None if track_indices is None else track_indices.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        out,
    )
    mark_written(pool)
    return out


def _fake(*args: Any, **scalars: Any) -> Tensor:
    forbid_grad(OP, *args)
    tensors = Tensors(*args)
    _check(tensors, gdn.Scalars(**scalars))
    return tensors.q.new_empty(tensors.v.shape)


define(
    f"attn_tiers::{OP}",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) pool, Tensor read_indices, "
    "Tensor? write_indices=None, Tensor? track_lens=None, Tensor? track_indices=None, "
    "Tensor? cu_seqlens=None, *, float? scale=None, bool qk_l2norm=False, "
    "bool state_v_first=False, bool batch_invariant=False, str? tier=None) -> Tensor",
    _run,
    _fake,
    mutates=("pool",),
)
define_call(OP, _problem_of)
