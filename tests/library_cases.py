"""Calls that the tiers of other libraries are meant to take: one query row, in every arrangement.

The same tables serve stand-ins on a CPU and the libraries on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from tests.conformance.calls import Call, Maker

HEADS = {"mha": (4, 4), "gqa2": (4, 2), "gqa4": (8, 2), "mqa": (4, 1)}
HEAD_SIZES = (64, 72, 128, 248, 256)
#: Head sizes of key and value that differ.
PAIRS = ((64, 32), (128, 64), (192, 128), (64, 128), (256, 64))
#: How the valid keys are said.
KINDS = ("all", "shorter", "empty", "mixed", "past", "past_causal")


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """One call in words."""

    rank: int  # 3, 4, or 34: 4-D views with positions before heads
    D: int
    Dv: int
    heads: tuple[int, int]
    B: int
    kind: str
    T: int = 32
    past: int = 5

    def __str__(self) -> str:
        Hq, Hkv = self.heads
        return f"{self.kind}-rank{self.rank}-B{self.B}-{Hq}on{Hkv}-D{self.D}-Dv{self.Dv}"

    def make(self, m: Maker) -> Call:
        """The call."""
        if self.kind.startswith("past"):
            return self._with_past(m)
        Hq, Hkv = self.heads
        tensors: dict[str, torch.Tensor | None] = {}
        for name, heads, length, size in (
            ("query", Hq, 1, self.D), ("key", Hkv, self.T, self.D), ("value", Hkv, self.T, self.Dv),
        ):  # fmt: skip
            tensors[name] = self._input(m, heads, length, size)
        lengths = self._lengths()
        if lengths is not None:
            dtype = torch.int64 if self.kind == "mixed" else torch.int32
            tensors["nonpad_kv_seqlen"] = m.lengths(lengths, dtype)
        return Call(tensors, self._scalars())

    def _input(self, m: Maker, heads: int, length: int, size: int) -> torch.Tensor:
        if self.rank == 3:
            return m.normal(self.B, length, heads * size)
        if self.rank == 34:
            return m.normal(self.B, length, heads, size).transpose(1, 2)
        return m.normal(self.B, heads, length, size)

    def _with_past(self, m: Maker) -> Call:
        Hq, Hkv = self.heads
        new = 3
        tensors: dict[str, torch.Tensor | None] = {
            "query": self._input(m, Hq, 1, self.D),
            "key": self._input(m, Hkv, new, self.D),
            "value": self._input(m, Hkv, new, self.Dv),
            "past_key": m.normal(self.B, Hkv, self.past, self.D),
            "past_value": m.normal(self.B, Hkv, self.past, self.Dv),
        }
        scalars = {**self._scalars(), "is_causal": self.kind == "past_causal"}
        return Call(tensors, scalars, "present")

    def _scalars(self) -> dict[str, int]:
        if self.rank != 3:
            return {}
        return {"q_num_heads": self.heads[0], "kv_num_heads": self.heads[1]}

    def _lengths(self) -> list[int] | None:
        values = {
            "all": None, "shorter": [self.T - 9], "empty": [0, 5], "mixed": [self.T, 1, 0, 17],
        }[self.kind]  # fmt: skip
        return None if values is None else [values[b % len(values)] for b in range(self.B)]


def cudnn_arrangements() -> Iterator[Arrangement]:
    """Head sizes by heads by kinds, with rank and batch going round; and the unequal pairs."""
    rounds = itertools.cycle(itertools.product((3, 4, 34), (1, 3)))
    sizes = [(size, size) for size in HEAD_SIZES] + list(PAIRS)
    for (D, Dv), heads, kind in itertools.product(sizes, HEADS.values(), KINDS):
        if D != Dv and heads not in (HEADS["gqa2"], HEADS["mqa"]):
            continue
        rank, B = next(rounds)
        yield Arrangement(rank, D, Dv, heads, 2 if kind == "empty" else B, kind)


def xqa_arrangements() -> Iterator[Arrangement]:
    """Head sizes by groups by layouts by kinds; a capacity is a multiple of 16."""
    rounds = itertools.cycle((1, 3))
    for size, group, rank, kind in itertools.product(
        (64, 128, 256), (1, 2, 4, 5, 8, 16), (3, 4, 34), KINDS
    ):
        B = 2 if kind == "empty" else next(rounds)
        Hkv = 1 if kind == "mixed" else 2
        yield Arrangement(rank, size, size, (group * Hkv, Hkv), B, kind, T=64, past=61)
