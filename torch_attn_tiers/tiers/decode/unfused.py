"""The reference as a tier: takes every legal call on every device."""

from __future__ import annotations

from torch import Tensor

from csrc_free_ops.reference import decode, decode_batch_invariant
from torch_attn_tiers.problem import DecodeProblem
from torch_attn_tiers.tier import Plan, Tier


def _build(problem: DecodeProblem) -> Plan:
    compute = decode_batch_invariant if problem.batch_invariant else decode
    B, Hq, Sq, Dv = problem.B, problem.Hq, problem.Sq, problem.Dv

    def plan(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        k_scale: None,
        v_scale: None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        attention, products = compute(
            heads_first(query, Hq),
            heads_first(key, problem.Hkv),
            heads_first(value, problem.Hkv),
            nonpad_kv_seqlen,
            attn_mask,
            sinks,
            scale=problem.scale,
            past_len=problem.past_len,
            is_causal=problem.is_causal,
            softcap=problem.softcap,
            left_window_size=problem.left_window,
            right_window_size=problem.right_window,
            qk_matmul_output_mode=problem.qk_mode,
        )
        # Copies into new memory, so that the strides are those that the fake kernel promises.
        if problem.rank == 4:
            output = query.new_empty(B, Hq, Sq, Dv).copy_(attention)
        else:
            output = query.new_empty(B, Sq, Hq * Dv)
            output.view(B, Sq, Hq, Dv).copy_(attention.transpose(1, 2))
        if products is None:
            return output
        return output, query.new_empty(products.shape).copy_(products)

    return plan


def heads_first(tensor: Tensor, heads: int) -> Tensor:
    """The view ``[B,heads,S,D]`` of a tensor ``[B,heads,S,D]`` or ``[B,S,heads*D]``."""
    if tensor.dim() == 4:
        return tensor
    batch, length, width = tensor.shape
    return tensor.view(batch, length, heads, width // heads).transpose(1, 2)


TIER = Tier(op="decode", name="unfused", predicates=(), build=_build, kernel_tier=False)
