"""Where a kernel in Triton runs: the predicates that tiers of such kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


def wrong_in_interpreter(
    problem: Problem,
    name: str,
    *,
    products: Sequence[torch.dtype | None] = (),
    results: Sequence[torch.dtype | None],
) -> str | None:
    """What the interpreter would get wrong in the tier ``name``, by dtypes multiplied and written.

    It is asked where it would run only: importing Triton takes a second.
    """
    interpreted = problem.device.interpret and problem.requested == name
    if not interpreted or torch.bfloat16 not in (*products, *results) or not has_triton():
        return None
    from csrc_free_ops.interpreter import bfloat16

    if torch.bfloat16 in products and not bfloat16().multiplies:
        return "bfloat16 products are wrong in Triton's interpreter"
    if torch.bfloat16 in results and not bfloat16().rounds:
        return "Triton's interpreter rounds to bfloat16 towards zero"
    return None


def predicates(name: str) -> tuple[Predicate, ...]:
    """Those of a tier whose kernels have run on NVIDIA's GPUs."""
    return no_triton, device_type(name), _amd(name), capability


def runs(problem: Problem) -> bool:
    """Whether no shared predicate speaks against a tier named ``triton``."""
    return all(predicate(problem) is None for predicate in PREDICATES)


#: Of tiers named ``triton``.
PREDICATES = predicates("triton")
