"""One call of `gdn_chunk_prefill.pool_`: made on a device, sent to one tier, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import gdn_oracle
from tests.conformance.calls import Maker, poisoned_memory
from tests.conformance.gdn_calls import CHUNK, GdnCall, is_meant_for, prompts
from tests.conformance.gdn_decode_calls import assert_only_written, copy_with_storage
from tests.tolerances import assert_gdn_close

NAMES = (
    "q", "k", "v", "g", "beta", "pool", "read_indices", "write_indices", "track_lens",
    "track_indices", "cu_seqlens",
)  # fmt: skip


@dataclasses.dataclass
class Expected:
    """What one call must leave behind, in float64 on the CPU, states as `[Hv, K, V]`."""

    out: torch.Tensor
    written: dict[int, torch.Tensor]


@dataclasses.dataclass
class PoolCall:
    """The arguments of one call, by name. The pool is `[P,Hv,K,V]`, or V-first if so asked for."""

    tensors: Mapping[str, torch.Tensor | None]
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def op(self) -> Any:
        return torch.ops.attn_tiers.gdn_chunk_prefill.pool_

    def args(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.tensors.get(name) for name in NAMES)

    def with_(self, **changes: Any) -> PoolCall:
        """The same call with other tensors or scalars."""
        tensors = {**self.tensors, **{n: x for n, x in changes.items() if n in NAMES}}
        scalars = {**self.scalars, **{n: x for n, x in changes.items() if n not in NAMES}}
        return PoolCall(tensors, scalars)

    @property
    def pool(self) -> torch.Tensor:
        pool = self.tensors["pool"]
        assert pool is not None
        return pool

    def k_first(self, states: torch.Tensor) -> torch.Tensor:
        return states.mT if self.scalars.get("state_v_first") else states

    def run(self, tier: str) -> torch.Tensor:
        """The outputs; exactly this tier must have run."""
        with torch_attn_tiers.record_dispatch() as records:
            out = self.op()(*self.args(), **self.scalars, tier=tier)
        assert [(record.op, record.tier) for record in records] == [("gdn_chunk_prefill", tier)]
        return out

    def require(self, tier: str, must_run: frozenset[str] = frozenset()) -> None:
        """Skips the test if the tier is not eligible for the call, or fails it if it has to be."""
        explanation = torch_attn_tiers.explain(
            self.op(), *self.args(), **dict(self.scalars, tier=tier)
        )
        (verdict,) = [v for v in explanation.verdicts if v.name == tier]
        if verdict.eligible:
            return
        text = f"{tier}: {'; '.join(verdict.reasons)}"
        is_meant = is_meant_for(tier, self.tensors, self.scalars, "pool_")
        if tier == "flashinfer" and self.tensors.get("track_lens") is not None:
            is_meant = False
        if tier in must_run and is_meant:
            pytest.fail(f"required tier not eligible: {text}")
        pytest.skip(text)

    def gathered(self) -> GdnCall:
        """The call of the default overload that starts from the same states, `[N,Hv,K,V]`."""
        states = self.k_first(self.pool)
        reads = self.tensors["read_indices"]
        assert reads is not None
        rows = [
            states[i] if 0 <= i < len(states) else states.new_zeros(states.shape[1:])
            for i in reads.tolist()
        ]
        initial = torch.stack(rows) if rows else states.new_zeros(0, *states.shape[1:])
        names = ("q", "k", "v", "g", "beta", "cu_seqlens")
        tensors = {n: self.tensors.get(n) for n in names}
        scalars = {n: x for n, x in self.scalars.items() if n != "state_v_first"}
        return GdnCall({**tensors, "initial_state": initial}, scalars)

    def expected(self) -> Expected:
        """From the oracle of the default overload, written from the contract's rules."""
        call = self.gathered()
        result: gdn_oracle.GdnResult = call.expected()
        P, N = self.pool.shape[0], len(result.final_state)
        lengths = self.lengths()

        def given(name: str, default: list[int]) -> list[int]:
            tensor = self.tensors.get(name)
            return default if tensor is None else tensor.tolist()

        reads = given("read_indices", [])
        writes = given("write_indices", reads)
        written = {}
        tracked = zip(given("track_lens", [0] * N), given("track_indices", [-1] * N), strict=True)
        for i, (count, place) in enumerate(tracked):
            if not 0 < count <= lengths[i] or not 0 <= place < P:
                continue
            if count == lengths[i]:
                written[place] = result.final_state[i]
            elif count % CHUNK == 0:
                written[place] = result.compact[result.starts[i] + count // CHUNK - 1]
        for i, place in enumerate(writes):
            if 0 <= place < P:
                written[place] = result.final_state[i]
        return Expected(result.out, written)

    def lengths(self) -> list[int]:
        q, bounds = self.tensors["q"], self.tensors.get("cu_seqlens")
        assert q is not None
        return [q.shape[1]] * q.shape[0] if bounds is None else bounds.diff().tolist()

    def check(self, tier: str) -> None:
        """Runs a copy of the call and compares all that it returns and writes with the oracle."""
        call = self.with_(pool=copy_with_storage(self.pool))
        with poisoned_memory():
            out = call.run(tier)
        call.compare(out, self.expected(), before=self.pool)

    def compare(self, out: torch.Tensor, expected: Expected, before: torch.Tensor) -> None:
        """Compares what a run of the call returned and wrote with what it had to."""
        q, v = self.tensors["q"], self.tensors["v"]
        assert q is not None and v is not None
        assert out.dtype is q.dtype and out.shape == v.shape and out.is_contiguous()
        assert_gdn_close(out, expected.out, inputs=q.dtype, what="out")
        for place, wanted in expected.written.items():
            got = self.k_first(self.pool[place])
            assert_gdn_close(got, wanted, inputs=q.dtype, what=f"state {place}")
        assert_only_written(before, self.pool, expected.written)


def check_or_skip(call: PoolCall, tier: str, must_run: frozenset[str] = frozenset()) -> None:
    """Checks the call in this tier; skips with explain's reason where it is not eligible."""
    call.require(tier, must_run)
    call.check(tier)


def pooled(
    m: Maker,
    lengths: Sequence[int] | None,
    reads: Sequence[int],
    writes: Sequence[int] | None = None,
    track: Sequence[tuple[int, int]] | None = None,
    *,
    P: int = 6,
    pool: torch.dtype | Callable[..., torch.Tensor] = torch.float32,
    index: torch.dtype = torch.int64,
    state_v_first: bool = False,
    **options: Any,
) -> PoolCall:
    """Sequences over a pool of `P` states, `track` being (tokens, place) of each of them.

    A pool of a dtype lies V-first in memory; a function makes one of `[P, Hv, K, V]`.
    """
    call = prompts(m, lengths, state=None, **options)
    (Hv, V), K = call.tensors["v"].shape[2:], call.tensors["q"].shape[3]  # type: ignore[union-attr]
    if isinstance(pool, torch.dtype):
        states = m.normal(P, Hv, V, K, dtype=pool).mT
    else:
        states = pool(m, P, Hv, K, V)
    tensors = {n: t for n, t in call.tensors.items() if n != "initial_state"}
    tensors["pool"] = states.mT if state_v_first else states
    for name, values in (
        ("read_indices", reads),
        ("write_indices", writes),
        ("track_lens", None if track is None else [count for count, _ in track]),
        ("track_indices", None if track is None else [place for _, place in track]),
    ):
        tensors[name] = None if values is None else m.integers(values, index)
    scalars = dict(call.scalars)
    if state_v_first:
        scalars["state_v_first"] = True
    return PoolCall(tensors, scalars)
