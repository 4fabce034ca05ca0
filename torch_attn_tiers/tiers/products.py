"""Matrix products of PyTorch in CUDA graph captures.

They are cuBLAS's, whose handle a thread makes at its first product on a device. That allocates
memory and would break a capture: a tier that multiplies by them is ready on a device once the
thread has multiplied there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_attn_tiers.problem import Problem
from torch_attn_tiers.tier import Plan


class _Thread(threading.local):
    """Devices on which this thread has multiplied matrices."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def ready(problem: Problem) -> bool:
    """Whether this thread can multiply on the problem's device within a capture."""
    return problem.device.type != "cuda" or problem.device.index in _thread.devices


def with_products(build: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
    """The same build, of plans that multiply: it sees to the handle, and so does a run."""

    @functools.wraps(build)
    def build_and_multiply(problem: Problem) -> Plan:
        plan = build(problem)
        if problem.device.type != "cuda":
            return plan
        index = problem.device.index
        if not ready(problem):
            _multiply(index)

        def run(*tensors: Any) -> Any:
            result = plan(*tensors)
            _thread.devices.add(index)
            return result

        return run

    return build_and_multiply


def _multiply(index: int) -> None:
    try:
        one = torch.ones(1, 1, 1, dtype=torch.float32, device=torch.device("cuda", index))
        torch.bmm(one, one)
    except RuntimeError:  # no verdict on any problem: the call itself says what is wrong
        return
    _thread.devices.add(index)
