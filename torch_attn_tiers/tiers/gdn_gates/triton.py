"""Our elementwise kernel in Triton (``csrc_free_ops.gdn.gates``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_attn_tiers.problem import GdnGatesProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.triton_runs import PREDICATES

if TYPE_CHECKING:
    from csrc_free_ops.gdn.decode import GdnGatesPlan


def _plan(problem: GdnGatesProblem) -> GdnGatesPlan:
    from csrc_free_ops.gdn.decode import plan_gdn_gates

    return plan_gdn_gates(problem.a, problem.b, problem.A_log, problem.dt_bias, problem.device)


def _ready(problem: GdnGatesProblem) -> bool:
    return _plan(problem).is_compiled()


def _build(problem: GdnGatesProblem) -> Plan:
    plan = _plan(problem)
    plan.compile()
    return plan.run


TIER = Tier(op="gdn_gates", name="triton", predicates=PREDICATES, build=_build, ready=_ready)
