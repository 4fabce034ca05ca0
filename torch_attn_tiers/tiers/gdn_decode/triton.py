"""Our recurrent kernel in Triton (``csrc_free_ops.gdn.recurrent``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_attn_tiers.problem import GdnDecodeProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.triton_runs import PREDICATES, runs, wrong_in_interpreter

if TYPE_CHECKING:
    from csrc_free_ops.gdn.decode import GdnDecodePlan


def _dtype(problem: GdnDecodeProblem) -> str | None:
    return wrong_in_interpreter(problem, "triton", results=[problem.q.dtype, problem.state.dtype])


def _kernel_limits(problem: GdnDecodeProblem) -> str | None:
    """What the kernel itself says, where it could run: importing Triton takes a second."""
    if not runs(problem):
        return None
    from csrc_free_ops.gdn.decode import unsupported

    return unsupported(problem.q, problem.v, problem.state)


def _plan(problem: GdnDecodeProblem) -> GdnDecodePlan:
    from csrc_free_ops.facts import contiguous_facts
    from csrc_free_ops.gdn.decode import plan_gdn_decode

    new_state = None
    if not problem.in_place:
        new_state = contiguous_facts(problem.state.shape, problem.state.dtype)
    return plan_gdn_decode(
        problem.q,
        problem.k,
        problem.v,
        problem.g,
        problem.beta,
        problem.state,
        problem.device,
        A_log=problem.A_log,
        dt_bias=problem.dt_bias,
        new_state=new_state,
        read_indices=problem.read_indices,
        write_indices=problem.write_indices,
        scale=problem.scale,
        qk_l2norm=problem.qk_l2norm,
    )


def _ready(problem: GdnDecodeProblem) -> bool:
    return _plan(problem).is_compiled()


def _build(problem: GdnDecodeProblem) -> Plan:
    plan = _plan(problem)
    plan.compile()
    return plan.run


TIER = Tier(
    op="gdn_decode",
    name="triton",
    predicates=(*PREDICATES, _dtype, _kernel_limits),
    build=_build,
    ready=_ready,
)
