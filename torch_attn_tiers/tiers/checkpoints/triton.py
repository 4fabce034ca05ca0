"""Our copy of states in Triton (``csrc_free_ops.gdn.checkpoints``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_attn_tiers.problem import CheckpointProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.triton_runs import PREDICATES, runs, wrong_in_interpreter

if TYPE_CHECKING:
    from csrc_free_ops.gdn.checkpoints import CheckpointPlan


def _dtype(problem: CheckpointProblem) -> str | None:
    return wrong_in_interpreter(problem, "triton", results=[problem.pool.dtype])


def _kernel_limits(problem: CheckpointProblem) -> str | None:
    """What the kernel itself says, where it could run: importing Triton takes a second."""
    if not runs(problem):
        return None
    from csrc_free_ops.gdn.checkpoints import unsupported

    return unsupported(problem.pool, problem.dst.shape[0])


def _plan(problem: CheckpointProblem) -> CheckpointPlan:
    from csrc_free_ops.gdn.checkpoints import plan_checkpoints

    return plan_checkpoints(
        problem.pool,
        problem.dst,
        problem.h,
        problem.h_src,
        problem.track_mask,
        problem.final_state,
        problem.final_mask,
        problem.device,
    )


def _ready(problem: CheckpointProblem) -> bool:
    return _plan(problem).is_compiled()


def _build(problem: CheckpointProblem) -> Plan:
    plan = _plan(problem)
    plan.compile()
    return plan.run


TIER = Tier(
    op="scatter_checkpoints_",
    name="triton",
    predicates=(*PREDICATES, _dtype, _kernel_limits),
    build=_build,
    ready=_ready,
)
