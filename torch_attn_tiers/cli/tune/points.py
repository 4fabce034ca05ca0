"""What a grid is made of: problems to measure, and the memory that their inputs are cut from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import torch_attn_tiers
from torch_attn_tiers import ranking
from torch_attn_tiers.cli.bench.clock import Call
from torch_attn_tiers.ranking import ProblemClass
from torch_attn_tiers.tier import tiers_of

#: One piece of random numbers; larger memory repeats nothing, but is filled piece by piece.
_PIECE = 1 << 28
#: Elements: pieces that begin at a multiple of it are aligned for every kernel.
_ALIGNMENT = 256


class Memory:
    """Standard normal numbers that all inputs of one dtype are views of.

    They are made once: filling new caches for each point would take longer than timing it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    @property
    def limit(self) -> int:
        """Bytes that the inputs of a point may take together."""
        if self.device.type != "cuda":
            return 1 << 28
        return min(16 << 30, torch.cuda.get_device_properties(self.device).total_memory // 4)

    def cut(self, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Contiguous tensors of the shapes, which do not overlap."""
        starts = [0]
        for shape in shapes:
            size = -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
            starts.append(starts[-1] + size)
        numbers = self._at_least(starts[-1], dtype)
        return [
            numbers[start : start + math.prod(shape)].view(*shape)
            for start, shape in zip(starts, shapes)
        ]

    def _at_least(self, count: int, dtype: torch.dtype) -> Tensor:
        numbers = self._numbers.get(dtype)
        if numbers is None or numbers.numel() < count:
            self._numbers.pop(dtype, None)
            numbers = torch.empty(count, dtype=dtype, device=self.device)
            for piece in numbers.split(_PIECE):
                piece.copy_(torch.randn(piece.numel(), dtype=torch.bfloat16, device=self.device))
            self._numbers[dtype] = numbers
        return numbers


class Inputs(ABC):
    """Several sets of tensors for one point, to be gone through in turn."""

    sets: int
    #: The fewest bytes that one call at full length moves.
    moved_bytes: int

    @abstractmethod
    def calls(self, tier: str) -> list[Call]:
        """The operator's call over each set, the tier forced. Returns its output."""

    @abstractmethod
    def set_lengths(self, name: str) -> None:
        """Changes the lengths in place: one of the point's ``length_names``."""

    @abstractmethod
    def error(self, output: Any) -> float:
        """Relative Frobenius error of what the call over the last set has returned, over a sample
        of it; NaN if any of it is."""


def spread(count: int, most: int) -> list[int]:
    """At most so many of the indices below ``count``, but one at least: evenly, the ends first."""
    wanted = max(1, min(count, most))
    return [(count - 1) * i // max(1, wanted - 1) for i in range(wanted)]


class Point(ABC):
    """One problem of a grid. Its parts can be pickled."""

    op: ClassVar[str]
    #: Relative error above which a result is wrong.
    tolerance: float

    @property
    @abstractmethod
    def length_names(self) -> tuple[str, ...]:
        """Names of the lengths that it is measured at."""

    @property
    def overload(self) -> str:
        """The operator as ``explain`` and ``prepare`` name it."""
        return self.op

    @abstractmethod
    def call(self) -> tuple[list[Tensor | None], dict[str, Any]]:
        """The operator's positional arguments as meta tensors, and its keyword arguments."""

    def problem_class(self, device: torch.device) -> ProblemClass:
        """The class that the point stands for."""
        tensors, scalars = self.call()
        explanation = torch_attn_tiers.explain(self.overload, *tensors, device=device, **scalars)
        return ranking.class_of(explanation.problem)

    def takers(self, device: torch.device) -> tuple[str, ...]:
        """The kernel tiers that take it when asked for."""
        tensors, scalars = self.call()
        names = [tier.name for tier in tiers_of(self.op) if tier.kernel_tier]
        return tuple(
            name
            for name in names
            if torch_attn_tiers.explain(
                self.overload, *tensors, device=device, tier=name, **scalars
            ).chosen
        )

    @abstractmethod
    def inputs(self, memory: Memory, l2_bytes: int) -> Inputs:
        """Inputs that take no more than ``memory.limit`` bytes, if one set does not."""
