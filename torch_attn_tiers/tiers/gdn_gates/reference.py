"""The reference as a tier: takes every legal call on every device."""

from __future__ import annotations

from csrc_free_ops.reference import gdn_gates
from torch_attn_tiers.problem import GdnGatesProblem
from torch_attn_tiers.tier import Plan, Tier


def _build(problem: GdnGatesProblem) -> Plan:
    return gdn_gates


TIER = Tier(op="gdn_gates", name="reference", predicates=(), build=_build, kernel_tier=False)
