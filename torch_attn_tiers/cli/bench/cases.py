"""The decode cases, their inputs and their reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One query row for each of `batch` sequences over a cache of `capacity` keys."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    lengths: str  # "full", "mixed": capacity/16..capacity, "short": 100..999

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def make_lengths(self, device: torch.device) -> torch.Tensor:
        """Valid keys of each sequence, int32 [B], from a fixed seed."""
        generator = torch.Generator(device=device).manual_seed(1)
        low, high = {
            "full": (self.capacity, self.capacity + 1),
            "mixed": (self.capacity // 16, self.capacity + 1),
            "short": (100, 1000),
        }[self.lengths]
        return torch.randint(
            low, high, (self.batch,), device=device, dtype=torch.int32, generator=generator
        )


CASES = {
    case.name: case
    for case in (
        Case("tiny", 1, 8, 1, 64, 128, "full"),
        Case("llama8b_b1_4k", 1, 32, 8, 128, 4096, "full"),
        Case("llama8b_b16_8k_mixed", 16, 32, 8, 128, 8192, "mixed"),
        Case("llama70b_b64_4k_mixed", 64, 64, 8, 128, 4096, "mixed"),
        Case("qwen3next_b32_4k_mixed", 32, 16, 2, 256, 4096, "mixed"),
        Case("mha_b8_4k", 8, 32, 32, 128, 4096, "full"),
        Case("long_b1_128k", 1, 32, 8, 128, 131072, "full"),
        Case("short_of_cap_b8_32kcap", 8, 32, 8, 128, 32768, "short"),
    )
}
QUICK_CASES = (
    "llama8b_b1_4k",
    "llama8b_b16_8k_mixed",
    "qwen3next_b32_4k_mixed",
    "short_of_cap_b8_32kcap",
)

# A smaller case rotates over a few caches and stays in the L2: "tiny" is about latency, and 8000
# caches of 32 KB would not show more of it.
_SMALL_BYTES = 1 << 20
_SMALL_SETS = 8
_MOST_SETS = 64


# Of float8 caches: standard normal numbers then reach some 300 of 448.
_K_SCALE, _V_SCALE = 1 / 64, 1 / 48


class Inputs:
    """Several sets of q, K and V for one case: together more valid bytes than 4 times the L2.

    `query [B,Hq,1,D]`, `key` and `value [B,Hkv,T,D]`, contiguous, standard normal; one entry a set.
    Caches in float8_e4m3fn (`kv_dtype`) are those numbers divided by the one in `scales`.
    """

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        l2_bytes: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.case = case
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        #: k_scale and v_scale, `[]`; None over caches in the query's dtype.
        self.scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.kv_dtype is not dtype:
            k_scale, v_scale = torch.tensor([_K_SCALE, _V_SCALE], device=device).unbind()
            self.scales = (k_scale, v_scale)
        self.lengths = case.make_lengths(device)
        self.host_lengths: list[int] = self.lengths.tolist()
        self.sets = self._number_of_sets(l2_bytes)
        generator = torch.Generator(device=device).manual_seed(2)

        def normal(*shape: int) -> list[torch.Tensor]:
            return [
                torch.randn(shape, device=device, dtype=dtype, generator=generator)
                for _ in range(self.sets)
            ]

        def caches(scale: torch.Tensor | None) -> list[torch.Tensor]:
            numbers = normal(case.batch, case.kv_heads, case.capacity, case.head_dim)
            if scale is None:
                return numbers
            return [x.div_(scale).to(self.kv_dtype) for x in numbers]

        self.query = normal(case.batch, case.q_heads, 1, case.head_dim)
        self.key, self.value = map(caches, self.scales)

    def _number_of_sets(self, l2_bytes: int) -> int:
        if self.valid_bytes < _SMALL_BYTES:
            return _SMALL_SETS
        return min(_MOST_SETS, max(2, 4 * l2_bytes // self.valid_bytes + 1))

    @property
    def valid_bytes(self) -> int:
        """Bytes of K and V below the lengths, in one set."""
        row = self.case.kv_heads * self.case.head_dim * self.kv_dtype.itemsize
        return 2 * sum(self.host_lengths) * row

    @property
    def moved_bytes(self) -> int:
        """The fewest bytes one call moves: valid K and V, the query, the output."""
        case = self.case
        return (
            self.valid_bytes + 2 * case.batch * case.q_heads * case.head_dim * self.dtype.itemsize
        )

    @functools.cached_property
    def key_nhd(self) -> list[torch.Tensor]:
        """The keys as contiguous [B,T,Hkv,D], the layout of the paged libraries."""
        return [k.transpose(1, 2).contiguous() for k in self.key]

    @functools.cached_property
    def value_nhd(self) -> list[torch.Tensor]:
        return [v.transpose(1, 2).contiguous() for v in self.value]

    @property
    def pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(key, value) of each set, [B,Hkv,T,D]."""
        return zip(self.key, self.value, strict=True)

    @property
    def pairs_nhd(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(key, value) of each set, [B,T,Hkv,D]."""
        return zip(self.key_nhd, self.value_nhd, strict=True)

    @functools.cached_property
    def reference(self) -> torch.Tensor:
        """The last set's output in float32, [B,Hq,1,D]."""
        query, key, value = self.query[-1], self.key[-1], self.value[-1]
        k_scale, v_scale = self.scales
        if k_scale is not None and v_scale is not None:
            key, value = key.float() * k_scale, value.float() * v_scale
        return reference(query, key, value, self.host_lengths, self.case.scale)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
) -> torch.Tensor:
    """Plain attention, one sequence after the other, over its valid keys alone, in float32."""
    batch, q_heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    out = query.new_zeros(query.shape, dtype=torch.float32)
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        q = query[b].float().view(kv_heads, q_heads // kv_heads, head_dim)
        scores = q @ key[b, :, :n].float().transpose(1, 2) * scale
        out[b] = (scores.softmax(-1) @ value[b, :, :n].float()).view(q_heads, 1, head_dim)
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; NaN if the output holds one."""
    return ((out.float() - expected).norm() / expected.norm()).item()
