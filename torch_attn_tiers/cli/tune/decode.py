"""The grid of `decode`: one query row over caches of many sizes, with lengths on the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_attn_tiers.cli.bench.cases import relative_error
from torch_attn_tiers.cli.bench.clock import Call
from torch_attn_tiers.cli.bench.sides import PEER_TOLERANCE
from torch_attn_tiers.cli.tune.points import Inputs, Memory, Point, spread

#: K and V of a point: beyond it a call is a matter of bytes alone.
_MOST_CACHE_BYTES = 1 << 31
#: A smaller cache stays in the L2, whatever it is rotated with.
_SMALL_BYTES = 1 << 20
_SMALL_SETS = 8
_MOST_SETS = 64
#: Elements of K and V that a result is checked against: in float32 all may take longer than timing.
_MOST_CHECKED = 1 << 25
#: k_scale and v_scale of float8 caches.
_SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class DecodePoint(Point):
    """A decode step over ``2**rows`` rows of (sequence, KV head)."""

    op = "decode"
    length_names = ("full", "uniform", "short")
    tolerance = PEER_TOLERANCE

    #: Exponents of the powers of two that rows and capacity are near.
    rows: int
    octave: int
    G: int
    D: int
    Dv: int
    window: int = -1  # keys before the current one
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16

    @property
    def Hkv(self) -> int:
        return min(1 << self.rows, 32 if self.G == 1 else 8)

    @property
    def B(self) -> int:
        return (1 << self.rows) // self.Hkv

    @property
    def T(self) -> int:
        """The capacity: a multiple of 128 near the power of two, and none but for the smallest."""
        return {7: 128, 8: 256, 9: 384}.get(self.octave, 7 << (self.octave - 3))

    @property
    def cache_bytes(self) -> int:
        return (self.T << self.rows) * (self.D + self.Dv) * self.cache_dtype.itemsize

    @property
    def query_shape(self) -> tuple[int, ...]:
        return self.B, self.Hkv * self.G, 1, self.D

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of key and value."""
        B, Hkv, T = self.B, self.Hkv, self.T
        return (B, Hkv, T, self.D), (B, Hkv, T, self.Dv)

    def lengths(self, name: str) -> list[int]:
        """Valid keys of each sequence: all; evenly over T/16 to T, in no order; T/32."""
        B, T = self.B, self.T
        if name == "full":
            return [T] * B
        if name == "short":
            return [T // 32] * B
        even = [T // 16 + round((i + 0.5) / B * (T - T // 16)) for i in range(B)]
        order = torch.randperm(B, generator=torch.Generator().manual_seed(B)).tolist()
        return [even[i] for i in order]

    @property
    def is_float8(self) -> bool:
        return self.cache_dtype is torch.float8_e4m3fn

    def call(self) -> tuple[list[Tensor | None], dict[str, Any]]:
        query = torch.empty(self.query_shape, dtype=self.dtype, device="meta")
        caches = [
            torch.empty(shape, dtype=self.cache_dtype, device="meta") for shape in self.cache_shapes
        ]
        lengths = torch.empty(self.B, dtype=torch.int32, device="meta")
        return [query, *caches, lengths, *self.scales("meta")], {"left_window_size": self.window}

    def scales(self, device: torch.device | str) -> list[Tensor | None]:
        """What follows the lengths: mask, sinks and scales if the caches are float8."""
        if not self.is_float8:
            return []
        k_scale, v_scale = (torch.tensor(scale, device=device) for scale in _SCALES)
        return [None, None, k_scale, v_scale]

    def inputs(self, memory: Memory, l2_bytes: int) -> Inputs:
        return _DecodeInputs(self, memory, l2_bytes)


class _DecodeInputs(Inputs):
    def __init__(self, point: DecodePoint, memory: Memory, l2_bytes: int) -> None:
        self._point = point
        self.sets = self._number_of_sets(memory, l2_bytes)
        self.moved_bytes = point.cache_bytes
        caches = memory.cut(point.cache_dtype, point.cache_shapes * self.sets)
        queries = [
            torch.randn(point.query_shape, dtype=point.dtype, device=memory.device)
            for _ in range(self.sets)
        ]
        self._tensors = list(zip(queries, caches[::2], caches[1::2]))
        self._lengths = torch.empty(point.B, dtype=torch.int32, device=memory.device)
        self._scales = point.scales(memory.device)
        self.set_lengths("full")

    def _number_of_sets(self, memory: Memory, l2_bytes: int) -> int:
        """As many as leave the L2 four times over at the shortest lengths, within the memory."""
        size = self._point.cache_bytes
        if size < _SMALL_BYTES:
            return _SMALL_SETS
        wanted = min(_MOST_SETS, max(2, 4 * l2_bytes * 32 // size + 1))
        return max(1, min(wanted, memory.limit // size))

    def calls(self, tier: str) -> list[Call]:
        decode = torch.ops.attn_tiers.decode.default
        return [
            functools.partial(
                decode,
                *tensors,
                self._lengths,
                *self._scales,
                left_window_size=self._point.window,
                tier=tier,
            )
            for tensors in self._tensors
        ]

    def set_lengths(self, name: str) -> None:
        self._lengths.copy_(torch.tensor(self._point.lengths(name), dtype=torch.int32))

    def error(self, output: Tensor) -> float:
        """Over some rows and KV heads, the first and the last among them; NaN if any is NaN."""
        point = self._point
        if not bool(output.isfinite().all()):
            return float("nan")
        query, key, value = self._tensors[-1]
        size = point.T * (point.D + point.Dv)
        heads = spread(point.Hkv, _MOST_CHECKED // size)
        rows = spread(point.B, _MOST_CHECKED // (size * len(heads)))
        k_scale, v_scale = _SCALES if point.is_float8 else (1.0, 1.0)
        expected = torch.ops.attn_tiers.decode(
            _sample(query, rows, heads, point.G).float(),
            _sample(key, rows, heads, 1).float() * k_scale,
            _sample(value, rows, heads, 1).float() * v_scale,
            self._lengths[rows],
            left_window_size=point.window,
            tier="unfused",
        )
        return relative_error(_sample(output, rows, heads, point.G), expected)


def _sample(tensor: Tensor, rows: Sequence[int], heads: Sequence[int], G: int) -> Tensor:
    """``[B,Hkv*G,..]`` as ``[rows,heads*G,..]``: those of some rows and KV heads."""
    at = torch.tensor(rows)[:, None], torch.tensor(heads)
    return tensor.unflatten(1, (-1, G))[at].flatten(1, 2)


#: Group and head size of the models that are served most, and of all others, likewise.
_COMMON = ((4, 128), (8, 128), (1, 128), (8, 64), (8, 256), (2, 256))
_OTHERS = ((2, 128), (16, 128), (4, 256), (1, 256), (16, 256), (4, 64), (1, 64), (2, 64), (16, 64))
#: G, D, Dv and window.
_SPECIAL = (
    (1, 192, 128, -1),
    (8, 64, 64, 127),
    (4, 128, 128, 1023),
    (2, 256, 256, 1023),
)
#: Of float8 caches: there are few kernels for them.
_FLOAT8 = ((4, 128), (8, 128), (1, 128), (8, 256))


def grid() -> list[DecodePoint]:
    """The points, the most useful first, so that a run that is cut short is worth most.

    A few sizes of each group and head size come first, near enough to every other for a table to
    serve it; then finer steps of the common kinds, the rest, float8 caches, and the finest steps.

    No other kernel but ``flash`` takes more than one query row with lengths, nor float32: there is
    nothing to rank. The same holds for float8 caches where the libraries have no kernel for them:
    a session leaves out what fewer than two tiers take.
    """
    common, others = ([(G, D, D, -1) for G, D in kinds] for kinds in (_COMMON, _OTHERS))
    float8 = [(G, D, D, -1) for G, D in _FLOAT8]
    rest = _sizes((1, 4, 7), (8, 11, 14, 17)) + _sizes((9,), (8, 11))
    points = [
        *_points(common, _sizes((3, 7), (9, 13, 15))),
        *_points(others, _sizes((4, 7), (8, 11, 14))),
        *_points(common, _sizes((1, 3, 5, 7, 9), (7, 9, 11, 13, 15, 17))),
        *_points((*others, *_SPECIAL), rest),
        *_points(float8, _sizes((3, 7), (9, 13, 15)), torch.float8_e4m3fn),
        *_points(common, _sizes((1, 3, 5, 7, 9), (10, 12, 14, 16))),
        *_points(common, _sizes((2, 4, 6, 8), (10, 12, 14))),
    ]
    return list(dict.fromkeys(points))


def _sizes(rows: Iterable[int], octaves: Iterable[int]) -> list[tuple[int, int]]:
    return list(itertools.product(rows, octaves))


def _points(
    kinds: Iterable[tuple[int, int, int, int]],
    sizes: Sequence[tuple[int, int]],
    cache_dtype: torch.dtype = torch.bfloat16,
) -> Iterator[DecodePoint]:
    """Those of the kinds and sizes that are not too large, and no window hides too little of."""
    for (G, D, Dv, window), (rows, octave) in itertools.product(kinds, sizes):
        point = DecodePoint(rows, octave, G, D, Dv, window, cache_dtype=cache_dtype)
        if point.cache_bytes <= _MOST_CACHE_BYTES and point.T > 2 * (window + 1):
            yield point
