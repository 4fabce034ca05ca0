"""Our chunked kernels in Triton (``csrc_free_ops.gdn``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_attn_tiers.problem import GdnProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers import triton_runs

if TYPE_CHECKING:
    from csrc_free_ops.gdn import GdnPlan


def _dtype(problem: GdnProblem) -> str | None:
    dtype, state = problem.q.dtype, problem.initial_state
    pool = None if problem.pool is None or state is None else state.dtype
    return triton_runs.wrong_in_interpreter(
        problem, "triton", products=[dtype], results=[dtype, problem.h_dtype, pool]
    )


_BASICS = (
    triton_runs.no_triton,
    triton_runs.device_type("triton"),
    triton_runs.capability,
    _dtype,
)


def _kernel_limits(problem: GdnProblem) -> str | None:
    """What the kernels themselves say, where they could run: importing Triton takes a second."""
    if any(basic(problem) is not None for basic in _BASICS):
        return None
    from csrc_free_ops.gdn import unsupported

    return unsupported(**_arguments(problem))


def _arguments(problem: GdnProblem) -> dict[str, Any]:
    """The problem as the kernels' planner takes it."""
    return dict(
        q=problem.q,
        k=problem.k,
        v=problem.v,
        g=problem.g,
        beta=problem.beta,
        device=problem.device,
        initial_state=problem.initial_state,
        cu_seqlens_dtype=problem.cu_seqlens_dtype,
        sequences=problem.N,
        scale=problem.scale,
        qk_l2norm=problem.qk_l2norm,
        output_final_state=problem.output_final_state,
        h_layout=problem.h_layout,
        h_rows=problem.h_rows,
        h_dtype=problem.h_dtype,
        pool=problem.pool,
        batch_invariant=problem.batch_invariant,
    )


def _plan(problem: GdnProblem) -> GdnPlan:
    from csrc_free_ops.gdn import plan_gdn

    return plan_gdn(**_arguments(problem))


def _ready(problem: GdnProblem) -> bool:
    return _plan(problem).is_compiled()


def _build(problem: GdnProblem) -> Plan:
    plan = _plan(problem)
    plan.compile()
    return plan.run if problem.pool is None else plan.run_pool


TIER = Tier(
    op="gdn_chunk_prefill",
    name="triton",
    predicates=(*_BASICS, _kernel_limits),
    build=_build,
    ready=_ready,
)
