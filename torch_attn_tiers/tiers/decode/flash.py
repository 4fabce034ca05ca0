"""Our split-KV kernel in Triton (``csrc_free_ops.decode``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from csrc_free_ops.facts import has_triton
from torch_attn_tiers.problem import DecodeProblem, dtype_name
from torch_attn_tiers.tier import Tier
from torch_attn_tiers.tiers import triton_runs
from torch_attn_tiers.tiers.decode.layout import DecodePlan, output_shape

if TYPE_CHECKING:
    from csrc_free_ops.decode import SplitKVPlan


def _dtype(problem: DecodeProblem) -> str | None:
    dtype = problem.query.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {dtype_name(dtype)}"
    return triton_runs.wrong_in_interpreter(problem, "flash", products=[dtype], results=[dtype])


def _qk_output(problem: DecodeProblem) -> str | None:
    return None if problem.qk_mode is None else "does not write qk_matmul_output"


_RUNS = (*triton_runs.predicates("flash"), _dtype)
_BASICS = (*_RUNS, _qk_output)


def _kernel_limits(problem: DecodeProblem) -> str | None:
    """What the kernel itself says, where it could run at all: importing Triton takes a second."""
    if any(basic(problem) is not None for basic in _RUNS):
        return None
    from csrc_free_ops.decode import unsupported

    return unsupported(**_arguments(problem))


def _arguments(problem: DecodeProblem) -> dict[str, Any]:
    """The problem as the kernel's planner takes it."""
    return dict(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        device=problem.device,
        lengths_dtype=problem.lengths_dtype,
        mask=problem.mask,
        sinks_dtype=problem.sinks_dtype,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        is_causal=problem.is_causal,
        offset=problem.past_len,
        scale=problem.scale,
        softcap=problem.softcap,
        left_window=problem.left_window,
        right_window=problem.right_window,
        batch_invariant=problem.batch_invariant,
    )


def _split_kv(problem: DecodeProblem) -> SplitKVPlan:
    from csrc_free_ops.decode import plan_split_kv

    out_stride = None
    if problem.rank == 3:  # Y is [B,Sq,Hq*Dv]; strides of batch, head and query row
        width = problem.Hq * problem.Dv
        out_stride = (problem.Sq * width, problem.Dv, width)
    return plan_split_kv(**_arguments(problem), out_stride=out_stride)


def _ready(problem: DecodeProblem) -> bool:
    return _split_kv(problem).is_compiled()


def _build(problem: DecodeProblem) -> DecodePlan:
    split_kv = _split_kv(problem)
    split_kv.compile()
    run = split_kv.run
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
    ) -> Tensor:
        out = query.new_empty(*shape)  # faster than with a tuple
        return run(query, key, value, nonpad_kv_seqlen, attn_mask, sinks, out, k_scale, v_scale)

    return plan


def _release() -> None:
    if has_triton():
        from csrc_free_ops.decode import release_captured_counters

        release_captured_counters()


TIER = Tier(
    op="decode",
    name="flash",
    predicates=(*_BASICS, _kernel_limits),
    build=_build,
    ready=_ready,
    release=_release,
)
