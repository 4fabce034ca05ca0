"""Where a kernel in Triton runs: the predicates that tiers of such kernels share."""

from __future__ import annotations

from csrc_free_ops.facts import has_triton
from torch_attn_tiers.problem import Problem
from torch_attn_tiers.tier import Predicate


def no_triton(problem: Problem) -> str | None:
    return None if has_triton() else "the package triton is not installed"


def device_type(name: str) -> Predicate:
    """The predicate of the tier ``name``: CUDA and ROCm, or the interpreter when asked for."""

    def _device_type(problem: Problem) -> str | None:
        device = problem.device
        if device.type == "cpu":
            if not device.interpret:
                return "no CPU kernel: runs there by Triton's interpreter only (TRITON_INTERPRET=1)"
            if problem.requested != name:
                return f"Triton's interpreter runs on the CPU when asked for only, by tier={name!r}"
        elif device.type != "cuda":
            return f"runs on CUDA and ROCm devices, not on {device.type}"
        return None

    return _device_type


def _amd(name: str) -> Predicate:
    def _amd(problem: Problem) -> str | None:
        device = problem.device
        if device.type == "cuda" and not device.is_nvidia and problem.requested != name:
            return f"not run on AMD GPUs yet: only when asked for by tier={name!r}"
        return None

    return _amd


def capability(problem: Problem) -> str | None:
    device = problem.device
    if device.is_nvidia and device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        return f"needs compute capability 8.0 or newer, the device has {major}.{minor}"
    return None


def predicates(name: str) -> tuple[Predicate, ...]:
    """Those of a tier whose kernels have run on NVIDIA's GPUs."""
    return no_triton, device_type(name), _amd(name), capability


def runs(problem: Problem) -> bool:
    """Whether no shared predicate speaks against a tier named ``triton``."""
    return all(predicate(problem) is None for predicate in PREDICATES)


#: Of tiers named ``triton``.
PREDICATES = predicates("triton")
