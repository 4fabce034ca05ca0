"""The cases of `bench gdn`, their inputs and their reference."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from csrc_free_ops.reference.gdn import chunk_bound, gdn_chunk_prefill, l2norm

HEAD_SIZE = 128
CHUNK = 64


@dataclass(frozen=True)
class GdnCase:
    """Prompts of `lengths` tokens, one after the other, under `q_heads` and `v_heads` heads."""

    name: str
    q_heads: int
    v_heads: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def complete_chunks(self) -> int:
        return sum(n // CHUNK for n in self.lengths)

    @property
    def checkpoints(self) -> int:
        """Rows of h in FLA's layout that hold a state."""
        return sum(-(-n // CHUNK) for n in self.lengths)

    def rows_of_h(self, layout: str) -> int:
        """Rows of h in a layout that hold a state."""
        return self.checkpoints if layout == "fla" else self.complete_chunks

    @property
    def track_lens(self) -> tuple[int, ...]:
        """After how many tokens a prefix cache keeps a state: at the last chunk that ends inside.

        0 in prompts of no such chunk.
        """
        return tuple((n - 1) // CHUNK * CHUNK for n in self.lengths)

    @property
    def checkpoint_rows(self) -> int:
        """Rows of h that are allocated where the host does not know the lengths."""
        return chunk_bound(self.tokens, self.sequences)


_MIXED = (1000, 17, 4096, 63, 64, 65, 2048, 300, 5000, 1)
#: Qwen3-Next.
MODEL_CASES = tuple(
    GdnCase(name, 16, 32, lengths)
    for name, lengths in (
        ("1x512", (512,)),
        ("1x2k", (2048,)),
        ("1x8k", (8192,)),
        ("1x32k", (32768,)),
        ("32x256", (256,) * 32),
        ("mixed", _MIXED),
    )
)
#: Heads of other models, and of shards of them.
HEADS_CASES = tuple(
    GdnCase(f"{q_heads}/{v_heads}_{name}", q_heads, v_heads, (tokens,))
    for (q_heads, v_heads), (name, tokens) in itertools.product(
        ((2, 8), (4, 16), (16, 16), (16, 48), (16, 64)),
        (("1x2k", 2048), ("1x8k", 8192), ("1x32k", 32768)),
    )
)
CASES = {case.name: case for case in (*MODEL_CASES, *HEADS_CASES)}

_MOST_SETS = 24


class GdnInputs:
    """Several sets of inputs of one case: together more bytes than 4 times the L2.

    One entry a set of `q, k [1,T,Hq,K]`, `v [1,T,Hv,V]`, standard normal, `g, beta [1,T,Hv]`
    float32; one `initial_state [N,Hv,V,K]` float32 and one `cu_seqlens [N+1]` int64 for all.
    """

    def __init__(
        self, case: GdnCase, dtype: torch.dtype, device: torch.device, l2_bytes: int
    ) -> None:
        self.case = case
        self.dtype = dtype
        self.device = device
        generator = torch.Generator(device=device).manual_seed(3)
        make = functools.partial(torch.randn, device=device, generator=generator)
        T, Hq, Hv, D = case.tokens, case.q_heads, case.v_heads, HEAD_SIZE
        read = T * D * (2 * Hq + Hv) * dtype.itemsize
        self.sets = min(_MOST_SETS, max(2, 4 * l2_bytes // read + 1))
        self.q, self.k, self.v, self.g, self.beta = (
            [make(1, T, *sizes, dtype=kind) for _ in range(self.sets)]
            for sizes, kind in (
                ((Hq, D), dtype),
                ((Hq, D), dtype),
                ((Hv, D), dtype),
                ((Hv,), torch.float32),
                ((Hv,), torch.float32),
            )
        )
        for i in range(self.sets):
            self.g[i] = -0.1 * torch.sigmoid(self.g[i])
            self.beta[i] = torch.sigmoid(self.beta[i])
        self.initial_state = make(case.sequences, Hv, D, D) * 0.1
        bounds = [0, *itertools.accumulate(case.lengths)]
        self.cu_seqlens = torch.tensor(bounds, device=device)

    @property
    def scale(self) -> float:
        return HEAD_SIZE**-0.5

    @property
    def moved_bytes(self) -> int:
        """The fewest bytes of one call: inputs and results once, without checkpoints."""
        case, D = self.case, HEAD_SIZE
        rows = case.tokens * D * 2 * (case.q_heads + case.v_heads) * self.dtype.itemsize
        gates = 2 * case.tokens * case.v_heads * 4
        return rows + gates + 2 * self.initial_state.numel() * 4

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the float32 states of one call with FLA's checkpoints."""
        return self.case.checkpoints * self.case.v_heads * HEAD_SIZE**2 * 4

    @functools.cached_property
    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[1,T,Hv,V]` and final state `[N,Hv,V,K]` of the last set, in float64."""
        return self._computed(slice(None), self.case.lengths)

    def states(self, layout: str) -> torch.Tensor:
        """The checkpoints `[R,Hv,V,K]` of the last set in a layout, in float64."""
        R, D = self.case.rows_of_h(layout), HEAD_SIZE
        h = torch.empty(R, self.case.v_heads, D, D, dtype=torch.float64, device=self.device)
        self._computed(slice(None), self.case.lengths, h, layout)
        return h

    @functools.cached_property
    def tracked_states(self) -> torch.Tensor:
        """The states `[N,Hv,V,K]` after `track_lens` tokens of the last set, in float64."""
        starts = itertools.accumulate((0, *self.case.lengths[:-1]))
        prefixes = [
            torch.arange(first, first + n) for first, n in zip(starts, self.case.track_lens)
        ]
        return self._computed(torch.cat(prefixes).to(self.device), self.case.track_lens)[1]

    def _computed(
        self,
        tokens: Any,
        lengths: tuple[int, ...],
        h: torch.Tensor | None = None,
        h_layout: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and last states of some tokens of the last set; checkpoints into h."""
        last = self.sets - 1
        q, k = (l2norm(x[last][:, tokens]).double() for x in (self.q, self.k))
        v, g, beta = (x[last][:, tokens].double() for x in (self.v, self.g, self.beta))
        out = torch.empty_like(v)
        final_state = self.initial_state.double()
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=self.device)
        gdn_chunk_prefill(
            q, k, v, g, beta, self.initial_state, bounds, out, final_state, h, None,
            scale=self.scale, h_layout=h_layout,
        )  # fmt: skip
        return out, final_state
