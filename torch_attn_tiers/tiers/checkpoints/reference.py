"""The reference as a tier: takes every legal call on every device."""

from __future__ import annotations

from csrc_free_ops.reference import scatter_checkpoints
from torch_attn_tiers.problem import CheckpointProblem
from torch_attn_tiers.tier import Plan, Tier


def _build(problem: CheckpointProblem) -> Plan:
    return scatter_checkpoints


TIER = Tier(
    op="scatter_checkpoints_", name="reference", predicates=(), build=_build, kernel_tier=False
)
