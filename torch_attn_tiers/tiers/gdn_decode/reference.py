"""The reference as a tier: takes every legal call on every device."""

from __future__ import annotations

import functools

from csrc_free_ops.reference import gdn_decode
from torch_attn_tiers.problem import GdnDecodeProblem
from torch_attn_tiers.tier import Plan, Tier


def _build(problem: GdnDecodeProblem) -> Plan:
    return functools.partial(gdn_decode, scale=problem.scale, qk_l2norm=problem.qk_l2norm)


TIER = Tier(op="gdn_decode", name="reference", predicates=(), build=_build, kernel_tier=False)
