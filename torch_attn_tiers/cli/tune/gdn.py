"""The grid of `gdn_chunk_prefill`: prompts one after the other, their bounds on the device."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.reference.gdn import l2norm
from torch_attn_tiers.cli.bench.cases import relative_error
from torch_attn_tiers.cli.bench.clock import Call
from torch_attn_tiers.cli.bench.gdn_sides import PEER_TOLERANCE
from torch_attn_tiers.cli.tune.points import Inputs, Memory, Point, spread

_HEAD_SIZE = 128
#: Tokens of a point, and of one that writes checkpoints, 2 MiB for each chunk.
_MOST_TOKENS = 1 << 17
_MOST_TOKENS_WITH_H = 1 << 16
_MOST_SETS = 24
#: Tokens that a result is checked against: the reference takes one chunk after the other.
_MOST_CHECKED = 1 << 13


@dataclass(frozen=True)
class GdnPoint(Point):
    """Prompts of about ``2**octave`` tokens over ``2**rows`` rows of (sequence, value head).

    Half as many heads of q and k as of v, of 128; bfloat16, float32 states on both ends.
    """

    op = "gdn_chunk_prefill"
    tolerance = PEER_TOLERANCE

    #: Exponents of the powers of two that rows and tokens of a sequence are near.
    rows: int
    octave: int
    h_layout: str | None = None  # "compact", "fla"
    batch_invariant: bool = False
    head_size: int = _HEAD_SIZE
    dtype: torch.dtype = torch.bfloat16

    @property
    def overload(self) -> str:
        return self.op if self.h_layout is None else f"{self.op}.h_{self.h_layout}"

    @property
    def length_names(self) -> tuple[str, ...]:
        return ("even", "half") if self.N == 1 else ("even", "uneven", "half")

    @property
    def Hv(self) -> int:
        return min(1 << self.rows, 32)

    @property
    def Hq(self) -> int:
        return max(1, self.Hv // 2)

    @property
    def N(self) -> int:
        return (1 << self.rows) // self.Hv

    @property
    def L(self) -> int:
        """Tokens of a sequence if all have as many; no power of two, as prompts are none."""
        return 7 << (self.octave - 3)

    @property
    def T(self) -> int:
        return self.N * self.L

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors, in the operator's order; the state is V-first."""
        qk = (1, self.T, self.Hq, self.head_size)
        gate = (1, self.T, self.Hv)
        return {
            "q": qk,
            "k": qk,
            "v": (*gate, self.head_size),
            "g": gate,
            "beta": gate,
            "initial_state": (self.N, self.Hv, self.head_size, self.head_size),
        }

    @property
    def scalars(self) -> dict[str, Any]:
        return dict(qk_l2norm=True, state_v_first=True, batch_invariant=self.batch_invariant)

    def lengths(self, name: str) -> list[int]:
        """Tokens of each sequence: alike; evenly over L/16 to 2 L - L/16, in no order; half as many
        as there is memory for."""
        N, L = self.N, self.L
        if name == "even":
            return [L] * N
        if name == "half":
            return [L // 2] * N
        # Sums of lengths that grow by one step, so that together they are T whatever is rounded.
        ends = [round(L / 16 * i + 15 / 16 * L * i * i / N) for i in range(N + 1)]
        even = [end - start for start, end in itertools.pairwise(ends)]
        order = torch.randperm(N, generator=torch.Generator().manual_seed(N)).tolist()
        return [even[i] for i in order]

    def call(self) -> tuple[list[Tensor | None], dict[str, Any]]:
        tensors: list[Tensor | None] = [
            torch.empty(shape, dtype=self.dtype_of(name), device="meta")
            for name, shape in self.shapes.items()
        ]
        bounds = torch.empty(self.N + 1, dtype=torch.int64, device="meta")
        return [*tensors, bounds], self.scalars

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype if name in ("q", "k", "v") else torch.float32

    def inputs(self, memory: Memory, l2_bytes: int) -> Inputs:
        return _GdnInputs(self, memory, l2_bytes)


class _GdnInputs(Inputs):
    def __init__(self, point: GdnPoint, memory: Memory, l2_bytes: int) -> None:
        self._point = point
        sizes = {
            name: math.prod(shape) * point.dtype_of(name).itemsize
            for name, shape in point.shapes.items()
        }
        read = sum(sizes.values())
        #: What is read, and out and the last state written.
        self.moved_bytes = read + sizes["v"] + sizes["initial_state"]
        wanted = min(_MOST_SETS, max(2, 4 * l2_bytes // read + 1))
        self.sets = max(1, min(wanted, memory.limit // read))
        packed = [point.shapes[name] for name in ("q", "k", "v")]
        numbers = iter(memory.cut(point.dtype, packed * self.sets))
        states = memory.cut(torch.float32, [point.shapes["initial_state"]] * self.sets)
        self._sets = [
            (*itertools.islice(numbers, 3), *self._gates(memory.device), state) for state in states
        ]
        self._bounds = torch.zeros(point.N + 1, dtype=torch.int64, device=memory.device)
        self._lengths: list[int] = []
        self.set_lengths("even")

    def _gates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """g and beta: a tenth of the state is forgotten at most, and each key writes."""
        g, beta = torch.randn(2, *self._point.shapes["g"], device=device).sigmoid_()
        return g.mul_(-0.1), beta

    def calls(self, tier: str) -> list[Call]:
        operator = torch.ops.attn_tiers.gdn_chunk_prefill
        layout = self._point.h_layout
        overload = operator.default if layout is None else getattr(operator, f"h_{layout}")
        return [
            functools.partial(overload, *tensors, self._bounds, **self._point.scalars, tier=tier)
            for tensors in self._sets
        ]

    def set_lengths(self, name: str) -> None:
        self._lengths = self._point.lengths(name)
        self._bounds.copy_(torch.tensor([0, *itertools.accumulate(self._lengths)]))

    def error(self, output: Sequence[Tensor]) -> float:
        """The larger of those of out and the last states, over some sequences, both ends among
        them; checkpoints are not looked at. Infinite if tokens of no sequence are not zero."""
        out, final_state = output[:2]
        bounds = [0, *itertools.accumulate(self._lengths)]
        if not bool(out.isfinite().all() & final_state.isfinite().all()):
            return math.nan
        if bool(out[:, bounds[-1] :].any()):
            return math.inf
        chosen = spread(self._point.N, _MOST_CHECKED // self._point.L)
        tokens = [slice(bounds[i], bounds[i + 1]) for i in chosen]

        def of_chosen(x: Tensor) -> Tensor:
            return torch.cat([x[:, those] for those in tokens], 1)

        *packed, initial_state = self._sets[-1]
        q, k, v, g, beta = map(of_chosen, packed)
        lengths = [self._lengths[i] for i in chosen]
        expected, state = torch.ops.attn_tiers.gdn_chunk_prefill(
            l2norm(q).float(),
            l2norm(k).float(),
            v.float(),
            g,
            beta,
            initial_state[chosen],
            torch.tensor([0, *itertools.accumulate(lengths)], device=q.device),
            state_v_first=True,
            tier="reference",
        )
        return max(
            relative_error(of_chosen(out), expected), relative_error(final_state[chosen], state)
        )


def grid() -> list[GdnPoint]:
    """The points, the most useful first: prompts without checkpoints in coarse steps, compact
    checkpoints, ``batch_invariant``, and finer steps of the first.

    ``h_fla``, pools and head sizes other than 128 are not there: one tier alone takes them.
    """
    return [
        *_points((3, 5, 7, 9), (9, 13)),
        *_points((3, 6, 9), (8, 10, 12, 14), h_layout="compact"),
        *_points((5, 8), (8, 12), batch_invariant=True),
        *_points((5, 8), (8, 12), h_layout="compact", batch_invariant=True),
        *_points((3, 5, 7, 9), (7, 11, 15)),
    ]


def _points(rows: Iterable[int], octaves: Iterable[int], **rest: Any) -> list[GdnPoint]:
    """Those that are not too long."""
    points = [GdnPoint(*sizes, **rest) for sizes in itertools.product(rows, octaves)]
    return [
        point
        for point in points
        if point.T <= (_MOST_TOKENS if point.h_layout is None else _MOST_TOKENS_WITH_H)
    ]
