"""Plans, views and outputs that tiers of ``decode`` share."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from torch_attn_tiers.problem import DecodeProblem


class DecodePlan(Protocol):
    """What ``build`` of a tier returns; see :class:`torch_attn_tiers.Tier`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        /,
    ) -> Tensor | tuple[Tensor, Tensor]: ...


def heads_first(tensor: Tensor, heads: int) -> Tensor:
    """The view ``[B,heads,S,D]`` of a tensor ``[B,heads,S,D]`` or ``[B,S,heads*D]``."""
    if tensor.dim() == 4:
        return tensor
    batch, length, width = tensor.shape
    return tensor.view(batch, length, heads, width // heads).transpose(1, 2)


def output_shape(problem: DecodeProblem) -> tuple[int, ...]:
    """The shape of ``Y``, which is contiguous whatever the strides of the query are."""
    if problem.rank == 4:
        return (problem.B, problem.Hq, problem.Sq, problem.Dv)
    return (problem.B, problem.Sq, problem.Hq * problem.Dv)
