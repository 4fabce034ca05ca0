"""The gated delta net as functions with named results, over the operators of the same names."""

from __future__ import annotations

import functools
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn_tiers import tier as registry
from torch_attn_tiers.ops.gdn import OP, model_problem
from torch_attn_tiers.options import Options, current

_KERNEL_SUFFIX = f"_{OP}"


class GdnPrefill(NamedTuple):
    """What :func:`gdn_chunk_prefill` returns without checkpoints."""

    out: Tensor
    final_state: Tensor


class GdnPrefillFla(NamedTuple):
    """With ``h [1,R,Hv,K,V]``: the state before each chunk."""

    out: Tensor
    final_state: Tensor
    h: Tensor


class GdnPrefillCompact(NamedTuple):
    """With ``h [R,Hv,K,V]``: the state after each complete chunk, from ``h_cu_starts[i]`` on."""

    out: Tensor
    final_state: Tensor
    h: Tensor
    h_cu_starts: Tensor


def gdn_chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool = False,
    output_final_state: bool = True,
    output_h: bool = False,
    override: str | None = None,
    solution: str | None = None,
    state_v_first: bool = False,
    h_dtype: torch.dtype | None = None,
    total_chunks: int | None = None,
    h_layout: str | None = None,
) -> GdnPrefill | GdnPrefillFla | GdnPrefillCompact:
    """The gated delta rule over whole prompts, with or without checkpoints of the state.

    Args:
        q, k: ``[1,T,Hq,K]``.
        v: ``[1,T,Hv,V]``, with ``Hv`` a multiple of ``Hq``.
        g, beta: ``[1,T,Hv]``, the log of the forget gate and the writing strength.
        scale: of the output; None is ``K**-0.5``.
        initial_state: ``[N,Hv,K,V]``; None is zero.
        cu_seqlens: ``[N+1]``, starts of the sequences and the end of the last, on the device. None:
            each row of the batch is a sequence.
        qk_l2norm: divide q and k by their length first.
        output_final_state: if False, ``final_state`` is ``[0,Hv,K,V]``.
        output_h: return checkpoints too.
        solution: the tier to use.
        override: the same by the name of its kernel, ``"reference_gdn_chunk_prefill"``, or a
            solution.
        state_v_first: states are ``[..,V,K]``.
        h_dtype: of ``h``; None is the initial state's dtype, else float32.
        total_chunks: rows of ``h``; None is the most that any lengths can need.
        h_layout: ``"fla"`` or ``"compact"``. None is compact if the tier flashinfer can take the
            model, whatever its tokens and sequences, and else fla: one form for each model.

    Returns:
        ``GdnPrefill``, or with ``output_h`` ``GdnPrefillFla`` or ``GdnPrefillCompact``.

    Raises:
        ValueError: two tiers asked for, or an argument about checkpoints without ``output_h``.
        TypeError: ``override`` or ``solution`` is no str.
        ValueError, TypeError, RuntimeError: as the operator, see :mod:`torch_attn_tiers.ops.gdn`;
            it calls the tier asked for ``tier``.

    Example:
        >>> import torch, torch_attn_tiers
        >>> q, k = torch.randn(2, 1, 100, 2, 16)
        >>> v = torch.randn(1, 100, 4, 8)
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> result = torch_attn_tiers.gdn_chunk_prefill(
        ...     q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, qk_l2norm=True,
        ...     output_h=True, h_layout="fla")
        >>> result.final_state.shape, result.h.shape
        (torch.Size([1, 4, 16, 8]), torch.Size([1, 2, 4, 16, 8]))
    """
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens)
    scalars: dict[str, Any] = dict(
        scale=scale,
        qk_l2norm=qk_l2norm,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        tier=_tier(override, solution),
    )
    checkpoints: dict[str, Any] = dict(total_chunks=total_chunks, h_dtype=h_dtype)
    if not output_h:
        for name, value in (
            ("h_dtype", h_dtype),
            ("total_chunks", total_chunks),
            ("h_layout", h_layout),
        ):
            if value is not None:
                raise ValueError(
                    f"gdn_chunk_prefill: {name}={value} and output_h=False; it is about "
                    "checkpoints, leave it out or set output_h=True"
                )
        out, final_state = torch.ops.attn_tiers.gdn_chunk_prefill.default(*tensors, **scalars)
        return GdnPrefill(out, final_state)

    if h_layout not in (None, "fla", "compact"):
        raise ValueError(
            f"gdn_chunk_prefill: h_layout={h_layout!r}; it must be 'fla', 'compact' or None"
        )
    if h_layout is None:
        # index(): a size that is a symbol becomes a number, on which the graph then depends.
        # Of a wrong call any layout will do: the operator says what is wrong.
        well_formed = all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, v))
        h_layout = (
            _layout_of_model(
                q.device,
                q.dtype,
                None if initial_state is None else initial_state.dtype,
                h_dtype,
                index(q.shape[2]),
                index(v.shape[2]),
                index(q.shape[3]),
                index(v.shape[3]),
                qk_l2norm,
            )
            if well_formed
            else "fla"
        )
    if h_layout == "fla":
        out, final_state, h = torch.ops.attn_tiers.gdn_chunk_prefill.h_fla(
            *tensors, **scalars, **checkpoints
        )
        return GdnPrefillFla(out, final_state, h)
    out, final_state, h, h_cu_starts = torch.ops.attn_tiers.gdn_chunk_prefill.h_compact(
        *tensors, **scalars, **checkpoints
    )
    return GdnPrefillCompact(out, final_state, h, h_cu_starts)


def _tier(override: str | None, solution: str | None) -> str | None:
    """The tier that the two ask for; the operator checks that there is one of this name."""
    for name, value in (("override", override), ("solution", solution)):
        if not (value is None or isinstance(value, str)):
            raise TypeError(f"gdn_chunk_prefill: {name} is {value!r}; it must be a str or None")
    if override is None:
        return solution
    named = override.removesuffix(_KERNEL_SUFFIX)
    if solution is not None and solution != named:
        raise ValueError(
            f"gdn_chunk_prefill: override={override!r} and solution={solution!r} name two tiers; "
            "give one of them"
        )
    return named


@torch.compiler.assume_constant_result
def _layout_of_model(
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    h_dtype: torch.dtype | None,
    Hq: int,
    Hv: int,
    K: int,
    V: int,
    qk_l2norm: bool,
) -> str:
    """The layout of h for a model: that of the tier flashinfer if it can take it."""
    return _judge(current(), device, dtype, state_dtype, h_dtype, (Hq, Hv, K, V), qk_l2norm)


@functools.lru_cache(maxsize=1024)
def _judge(
    options: Options,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    h_dtype: torch.dtype | None,
    sizes: tuple[int, int, int, int],
    qk_l2norm: bool,
) -> str:
    for tier in registry.tiers_of(OP):
        if tier.name == "flashinfer" and (OP, tier.name) not in options.disable:
            problem = model_problem(device, dtype, state_dtype, h_dtype, sizes, qk_l2norm)
            return "fla" if tier.reasons(problem) else "compact"
    return "fla"


registry.on_change(_judge.cache_clear)
