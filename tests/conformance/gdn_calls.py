"""One call of `attn_tiers::gdn_chunk_prefill`: made on a device, sent to one tier, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import gdn_oracle
from tests.conformance.calls import Maker, poisoned_memory
from tests.tolerances import assert_gdn_close

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
CHUNK = gdn_oracle.CHUNK


def _names() -> tuple[str, ...]:
    q, gate = torch.empty(1, 1, 1, 16, device="meta"), torch.empty(1, 1, 1, device="meta")
    explanation = torch_attn_tiers.explain("gdn_chunk_prefill", q, q, q, gate, gate, device="cpu")
    return tuple(verdict.name for verdict in explanation.verdicts)


GDN_TIERS = _names()


def is_meant_for(
    tier: str,
    tensors: Mapping[str, torch.Tensor | None],
    scalars: Mapping[str, Any],
    overload: str,
) -> bool:
    """Whether `--require-tiers` may insist on it: a library's tier does not take every call."""
    if tier != "flashinfer":
        return True
    q, v, bounds = (tensors.get(name) for name in ("q", "v", "cu_seqlens"))
    assert q is not None and v is not None
    sequences = q.shape[0] if bounds is None else bounds.shape[0] - 1
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and (q.shape[3], v.shape[3]) == (128, 128)
        and q.shape[1] * sequences > 0
        and scalars.get("scale") != 0.0
        and overload != "h_fla"
    )


@dataclasses.dataclass
class GdnCall:
    """The arguments of one call, by name."""

    tensors: Mapping[str, torch.Tensor | None]
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overload: str = "default"

    def op(self) -> Any:
        return getattr(torch.ops.attn_tiers.gdn_chunk_prefill, self.overload)

    def args(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.tensors.get(name) for name in NAMES)

    def with_(self, overload: str | None = None, **changes: Any) -> GdnCall:
        """The same call with other tensors or scalars."""
        tensors = {**self.tensors, **{n: x for n, x in changes.items() if n in NAMES}}
        scalars = {**self.scalars, **{n: x for n, x in changes.items() if n not in NAMES}}
        return GdnCall(tensors, scalars, overload or self.overload)

    def run(self, tier: str) -> tuple[torch.Tensor, ...]:
        """What the operator returns; exactly this tier must have run."""
        with torch_attn_tiers.record_dispatch() as records:
            result = self.op()(*self.args(), **self.scalars, tier=tier)
        assert [record.tier for record in records] == [tier]
        return result

    def expected(self) -> gdn_oracle.GdnResult:
        known = ("scale", "qk_l2norm", "state_v_first")
        scalars = {name: self.scalars[name] for name in known if name in self.scalars}
        return gdn_oracle.gdn_chunk_prefill(**self.tensors, **scalars)  # type: ignore[arg-type]

    def require(self, tier: str, must_run: frozenset[str] = frozenset()) -> None:
        """Skips the test if the tier is not eligible for the call, or fails it if it has to be."""
        explanation = torch_attn_tiers.explain(
            self.op(), *self.args(), **dict(self.scalars, tier=tier)
        )
        (verdict,) = [v for v in explanation.verdicts if v.name == tier]
        if verdict.eligible:
            return
        text = f"{tier}: {'; '.join(verdict.reasons)}"
        if tier in must_run and is_meant_for(tier, self.tensors, self.scalars, self.overload):
            pytest.fail(f"required tier not eligible: {text}")
        pytest.skip(text)

    def check(self, tier: str) -> None:
        """Runs the call and compares every result with the oracle."""
        with poisoned_memory():
            result = self.run(tier)
        self.compare(result, self.expected())

    def compare(self, result: tuple[torch.Tensor, ...], expected: gdn_oracle.GdnResult) -> None:
        """Compares what a run of the call returned with what it had to."""
        q, v = self.tensors["q"], self.tensors["v"]
        assert q is not None and v is not None
        out, final_state = result[:2]
        assert out.dtype is q.dtype and out.shape == v.shape and out.is_contiguous()
        assert_gdn_close(out, expected.out, inputs=q.dtype, what="out")

        assert final_state.dtype is torch.float32
        wanted = expected.final_state
        if not self.scalars.get("output_final_state", True):
            wanted = wanted[:0]
        assert_gdn_close(self.k_first(final_state), wanted, inputs=q.dtype, what="final_state")
        if self.overload == "default":
            return
        h = result[2][0] if self.overload == "h_fla" else result[2]
        rows = expected.fla if self.overload == "h_fla" else expected.compact
        written = min(len(rows), len(h))
        assert_gdn_close(self.k_first(h[:written]), rows[:written], inputs=q.dtype, what="h")
        assert bool(h[written:].isnan().all()), "a row past the last chunk was written"
        if self.overload == "h_compact":
            assert result[3].dtype is torch.int64 and result[3].tolist() == expected.starts

    def k_first(self, state: torch.Tensor) -> torch.Tensor:
        """The states `[..,K,V]`; they must lie V-first in memory."""
        v_first = self.scalars.get("state_v_first", False)
        assert (state if v_first else state.transpose(-1, -2)).is_contiguous()
        return state.transpose(-1, -2) if v_first else state


def check_or_skip(call: GdnCall, tier: str, must_run: frozenset[str] = frozenset()) -> None:
    """Checks the call in this tier; skips with explain's reason where it is not eligible."""
    call.require(tier, must_run)
    call.check(tier)


def prompts(
    m: Maker,
    lengths: Sequence[int] | None,
    *,
    T: int | None = None,
    B: int = 1,
    Hq: int = 1,
    Hv: int = 2,
    K: int = 16,
    V: int = 16,
    state: torch.dtype | None = torch.float32,
    cu_dtype: torch.dtype = torch.int32,
    **scalars: Any,
) -> GdnCall:
    """Sequences of these lengths in one row of `T` tokens, or `B` rows of `T`; normal numbers.

    Keys are normalised, gates those of a model: decays between 0.4 and 1.
    """
    if T is None:
        T = sum(lengths or ())
    N = B if lengths is None else len(lengths)
    bounds = [sum((lengths or ())[:i]) for i in range(N + 1)]
    return GdnCall(
        {
            "q": m.normal(B, T, Hq, K),
            "k": torch.nn.functional.normalize(m.normal(B, T, Hq, K).float(), dim=-1).to(m.dtype),
            "v": m.normal(B, T, Hv, V),
            "g": -m.normal(B, T, Hv, dtype=torch.float32).square() / 4,
            "beta": m.normal(B, T, Hv, dtype=torch.float32).sigmoid(),
            "initial_state": None if state is None else m.normal(N, Hv, K, V, dtype=state),
            "cu_seqlens": None if lengths is None else m.integers(bounds, cu_dtype),
        },
        scalars,
    )
