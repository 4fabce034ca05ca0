"""Where a kernel in Triton runs: the predicates that tiers named ``triton`` share."""

from __future__ import annotations

import functools
import importlib.util

from torch_attn_tiers.problem import Problem


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def no_triton(problem: Problem) -> str | None:
    return None if _triton_is_installed() else "the package triton is not installed"


def _device(problem: Problem) -> str | None:
    device = problem.device
    if device.type == "cpu":
        if not device.interpret:
            return "no CPU kernel: runs there by Triton's interpreter only (TRITON_INTERPRET=1)"
        if problem.requested != "triton":
            return "Triton's interpreter runs on the CPU when asked for only, by tier='triton'"
        return None
    if device.type != "cuda":
        return f"runs on CUDA and ROCm devices, not on {device.type}"
    if not device.arch.startswith("sm_"):
        if problem.requested != "triton":
            return "not run on AMD GPUs yet: only when asked for by tier='triton'"
        return None
    if device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        return f"needs compute capability 8.0 or newer, the device has {major}.{minor}"
    return None


PREDICATES = (no_triton, _device)


def runs(problem: Problem) -> bool:
    """Whether no shared predicate speaks against it."""
    return all(predicate(problem) is None for predicate in PREDICATES)
