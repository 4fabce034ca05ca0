"""The reference as a tier: takes every legal call on every device.

Its float32 products obey PyTorch's switches: with TF32 allowed for matrix products they are TF32.
"""

from __future__ import annotations

from torch import Tensor

from csrc_free_ops.reference import decode, decode_batch_invariant
from torch_attn_tiers.problem import DecodeProblem
from torch_attn_tiers.tier import Tier
from torch_attn_tiers.tiers.decode.layout import DecodePlan, heads_first, output_shape
from torch_attn_tiers.tiers.products import ready, with_products


def _build(problem: DecodeProblem) -> DecodePlan:
    attention = decode_batch_invariant if problem.batch_invariant else decode
    Hq, Hkv = problem.Hq, problem.Hkv
    shape = output_shape(problem)

    def plan(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result, products = attention(
            heads_first(query, Hq),
            heads_first(key, Hkv),
            heads_first(value, Hkv),
            nonpad_kv_seqlen,
            attn_mask,
            sinks,
            k_scale,
            v_scale,
            scale=problem.scale,
            past_len=problem.past_len,
            is_causal=problem.is_causal,
            softcap=problem.softcap,
            left_window_size=problem.left_window,
            right_window_size=problem.right_window,
            qk_matmul_output_mode=problem.qk_mode,
        )
        # Copies into new memory, so that the strides are those that the fake kernel promises.
        output = query.new_empty(shape)
        heads_first(output, Hq).copy_(result)
        if products is None:
            return output
        return output, query.new_empty(products.shape).copy_(products)

    return plan


TIER = Tier(
    op="decode",
    name="unfused",
    predicates=(),
    build=with_products(_build),
    ready=ready,
    kernel_tier=False,
)
