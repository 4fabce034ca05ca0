"""The reference as a tier: takes every legal call on every device.

Its float32 products obey PyTorch's switches: with TF32 allowed for matrix products they are TF32.
The bits of a sequence depend on nothing but itself, so that it takes ``batch_invariant`` too.
"""

from __future__ import annotations

import functools

from csrc_free_ops.reference import gdn_chunk_prefill, gdn_chunk_prefill_pool
from torch_attn_tiers.problem import GdnProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.products import ready, with_products


def _build(problem: GdnProblem) -> Plan:
    if problem.pool is not None:
        return functools.partial(
            gdn_chunk_prefill_pool, scale=problem.scale, qk_l2norm=problem.qk_l2norm
        )
    return functools.partial(
        gdn_chunk_prefill,
        scale=problem.scale,
        qk_l2norm=problem.qk_l2norm,
        h_layout=problem.h_layout,
    )


TIER = Tier(
    op="gdn_chunk_prefill",
    name="reference",
    predicates=(),
    build=with_products(_build),
    ready=ready,
    kernel_tier=False,
)
