"""One call of `gdn_decode` in any of its forms: made on a device, sent to one tier, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import gdn_decode_oracle
from tests.conformance.calls import Maker, poisoned_memory, same_bits
from tests.tolerances import assert_gdn_close

STEP_TIERS = ("triton", "reference")
POSITIONS = {
    "gdn_decode": ("q", "k", "v", "g", "beta", "state"),
    "gdn_decode_": ("q", "k", "v", "g", "beta", "state", "read_indices", "write_indices"),
    "gdn_decode_.raw": (
        "q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "read_indices", "write_indices",
    ),
}  # fmt: skip
NAMES = (*POSITIONS["gdn_decode_.raw"], "g", "beta")


def copy_with_storage(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy with the strides, the place in the storage and all else that the storage holds."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = tensor.as_strided((size,), (1,), 0).to(device or tensor.device, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def assert_only_written(before: torch.Tensor, after: torch.Tensor, places: Iterable[int]) -> None:
    """What a call did not have to write is what it was, between the states as well."""
    wiped = []
    for tensor in (before, after):
        copy = copy_with_storage(tensor)
        for place in places:
            copy[place] = 0
        size = copy.untyped_storage().nbytes() // copy.element_size()
        wiped.append(copy.as_strided((size,), (1,), 0))
    assert same_bits(*wiped), "another place was written"


@dataclasses.dataclass
class StepCall:
    """The arguments of one call, by name, those of every form; which are used is up to the form."""

    tensors: Mapping[str, torch.Tensor | None]
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: str = "gdn_decode_"

    def op(self) -> Any:
        packet, _, overload = self.form.partition(".")
        return getattr(getattr(torch.ops.attn_tiers, packet), overload or "default")

    def args(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.tensors.get(name) for name in POSITIONS[self.form])

    def with_(self, form: str | None = None, **changes: Any) -> StepCall:
        """The same call with other tensors or scalars."""
        tensors = {**self.tensors, **{n: x for n, x in changes.items() if n in NAMES}}
        scalars = {**self.scalars, **{n: x for n, x in changes.items() if n not in NAMES}}
        return StepCall(tensors, scalars, form or self.form)

    def forms(self) -> list[str]:
        """The forms that take these arguments."""
        in_place = ["gdn_decode_", "gdn_decode_.raw"]
        return in_place if self.tensors.get("read_indices") is not None else [*POSITIONS]

    @property
    def state(self) -> torch.Tensor:
        state = self.tensors["state"]
        assert state is not None
        return state

    def run(self, tier: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and the states afterwards; exactly this tier must have run."""
        with torch_attn_tiers.record_dispatch() as records:
            result = self.op()(*self.args(), **self.scalars, tier=tier)
        assert [(record.op, record.tier) for record in records] == [("gdn_decode", tier)]
        return result if self.form == "gdn_decode" else (result, self.state)

    def expected(self) -> gdn_decode_oracle.StepResult:
        named = {n: self.tensors.get(n) for n in POSITIONS["gdn_decode_"]}
        if self.form == "gdn_decode_.raw":
            projected = (self.tensors[n] for n in ("a", "b", "A_log", "dt_bias"))
            named["g"], named["beta"] = gdn_decode_oracle.gates(*projected)  # type: ignore[arg-type]
        return gdn_decode_oracle.gdn_decode(**named, **self.scalars)  # type: ignore[arg-type]

    def require(self, tier: str, must_run: frozenset[str] = frozenset()) -> None:
        """Skips the test if the tier is not eligible for the call, or fails it if it has to be."""
        explanation = torch_attn_tiers.explain(
            self.op(), *self.args(), **dict(self.scalars, tier=tier)
        )
        (verdict,) = [v for v in explanation.verdicts if v.name == tier]
        if verdict.eligible:
            return
        text = f"{tier}: {'; '.join(verdict.reasons)}"
        if tier in must_run:
            pytest.fail(f"required tier not eligible: {text}")
        pytest.skip(text)

    def check(self, tier: str) -> None:
        """Runs a copy of the call and compares all that it returns and writes with the oracle."""
        before = self.state
        call = self.with_(state=copy_with_storage(before))
        with poisoned_memory():
            out, after = call.run(tier)
        expected = self.expected()
        q, v = self.tensors["q"], self.tensors["v"]
        assert q is not None and v is not None
        assert out.dtype is q.dtype and out.shape == v.shape and out.is_contiguous()
        assert_gdn_close(out, expected.out, inputs=q.dtype, what="out")

        assert after.dtype is before.dtype and after.shape == before.shape
        v_first = self.scalars.get("state_v_first", False)
        if self.form == "gdn_decode":
            assert (after if v_first else after.mT).is_contiguous()
            assert same_bits(call.state, before), "the state was written"
        else:
            assert_only_written(self.state, call.state, expected.written)
        for place, wanted in expected.written.items():
            got = after[place].mT if v_first else after[place]
            assert_gdn_close(got, wanted, inputs=q.dtype, what=f"state {place}")


def check_or_skip(call: StepCall, tier: str, must_run: frozenset[str] = frozenset()) -> None:
    """Checks all forms of the call in this tier; skips with explain's reason where it cannot."""
    call.require(tier, must_run)
    for form in call.forms():
        call.with_(form).check(tier)


def step(
    m: Maker,
    B: int = 2,
    Sq: int = 1,
    *,
    Hq: int = 1,
    Hv: int = 2,
    K: int = 16,
    V: int = 16,
    state: torch.dtype = torch.float32,
    pool: int | None = None,
    reads: Sequence[int] | None = None,
    writes: Sequence[Any] | None = None,
    index_dtype: torch.dtype = torch.int32,
    **scalars: Any,
) -> StepCall:
    """A call over normal numbers; with `pool` states and indices, or a state for each row.

    Keys are normalised, gates those of a model: decays between 0.4 and 1. States are `[..,K,V]`, in
    V-first memory.
    """

    def gate(*shape: int) -> torch.Tensor:
        return m.normal(*shape, dtype=torch.float32)

    P = B if pool is None else pool
    states = m.normal(P, Hv, V, K, dtype=state)
    return StepCall(
        {
            "q": m.normal(B, Sq, Hq, K),
            "k": torch.nn.functional.normalize(m.normal(B, Sq, Hq, K).float(), dim=-1).to(m.dtype),
            "v": m.normal(B, Sq, Hv, V),
            "g": -gate(B, Sq, Hv).square() / 4,
            "beta": gate(B, Sq, Hv).sigmoid(),
            "a": m.normal(B, Sq, Hv),
            "b": m.normal(B, Sq, Hv),
            "A_log": gate(Hv) / 2 - 1,
            "dt_bias": gate(Hv),
            "state": states if scalars.get("state_v_first") else states.mT,
            "read_indices": None if reads is None else m.integers(reads, index_dtype),
            "write_indices": None if writes is None else m.integers(writes, index_dtype),
        },
        scalars,
    )
