"""One call of `attn_tiers::decode`: made on a device, sent to one tier, and to the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import oracle
from tests.tolerances import assert_close, assert_rounded_once

POSITIONS = {
    "default": (
        "query", "key", "value", "nonpad_kv_seqlen", "attn_mask", "sinks", "k_scale", "v_scale",
    ),
    "present": (
        "query", "key", "value", "past_key", "past_value", "nonpad_kv_seqlen", "attn_mask",
        "sinks", "k_scale", "v_scale",
    ),
}  # fmt: skip
POSITIONS["qk"] = POSITIONS["present"]


@dataclasses.dataclass
class Call:
    """The arguments of one call, by name."""

    tensors: Mapping[str, torch.Tensor | None]
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overload: str = "default"

    def op(self) -> Any:
        return getattr(torch.ops.attn_tiers.decode, self.overload)

    def args(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.tensors.get(name) for name in POSITIONS[self.overload])

    def run(self, tier: str | None = None) -> Any:
        """What the operator returns; with a tier, exactly that tier must have run."""
        scalars = dict(self.scalars, tier=tier) if tier else dict(self.scalars)
        if tier is None:
            return self.op()(*self.args(), **scalars)
        with torch_attn_tiers.record_dispatch() as records:
            result = self.op()(*self.args(), **scalars)
        assert [record.tier for record in records] == [tier]
        return result

    def y(self, tier: str | None = None) -> torch.Tensor:
        """The first result."""
        result = self.run(tier)
        return result if self.overload == "default" else result[0]

    def expected(self) -> oracle.DecodeResult:
        scalars = dict(self.scalars)
        if self.overload == "qk":
            scalars.setdefault("qk_matmul_output_mode", 0)
        return oracle.decode(**self.tensors, **scalars)  # type: ignore[arg-type]

    def reasons_against(self, tier: str) -> tuple[str, ...]:
        """Why this tier cannot take the call when it is asked to; empty if it can."""
        explanation = torch_attn_tiers.explain(
            self.op(), *self.args(), **dict(self.scalars, tier=tier)
        )
        (verdict,) = [v for v in explanation.verdicts if v.name == tier]
        return () if verdict.eligible else tuple(verdict.reasons)

    def check(self, tier: str) -> None:
        """Runs the call and compares every result with the oracle."""
        with poisoned_memory():
            result = self.run(tier)
        expected = self.expected()
        y = result if self.overload == "default" else result[0]
        query = self.tensors["query"]
        assert query is not None
        assert y.dtype == query.dtype and y.device == query.device and y.is_contiguous()
        assert_close(y, expected.y, tier=tier)
        if self.overload == "default":
            return
        for name, actual, wanted in (
            ("present_key", result[1], expected.present_key),
            ("present_value", result[2], expected.present_value),
        ):
            assert actual.dtype == wanted.dtype and actual.is_contiguous(), name
            assert torch.equal(_bits(actual), _bits(wanted)), f"{name} is not a copy"
            assert not _shares_memory(actual, self.tensors.values()), f"{name} is an alias"
        if self.overload == "qk":
            assert expected.qk is not None and result[3].is_contiguous()
            assert result[3].dtype == query.dtype
            probabilities = self.scalars.get("qk_matmul_output_mode", 0) == 3
            assert_rounded_once(
                result[3],
                expected.qk,
                what="qk_matmul_output",
                magnitude=0.0 if probabilities else 1.0,
            )


def run_or_skip(call: Call, tier: str, must_run: frozenset[str] = frozenset()) -> None:
    """Checks the call in this tier; skips with explain's reason where the tier is not eligible."""
    require(call, tier, must_run)
    call.check(tier)


def require(call: Call, tier: str, must_run: frozenset[str] = frozenset()) -> None:
    """Skips the test if the tier is not eligible for the call, or fails it if it has to be."""
    reasons = call.reasons_against(tier)
    if not reasons:
        return
    text = f"{tier}: {'; '.join(reasons)}"
    if tier in must_run:
        pytest.fail(f"required tier not eligible: {text}")
    pytest.skip(text)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised tensor made inside holds NaN, so that nothing unwritten goes unseen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = before[2]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals NaN."""
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(size[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree bit for bit."""
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _shares_memory(tensor: torch.Tensor, others: Any) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return bool(tensor.numel()) and any(
        other is not None and other.untyped_storage().data_ptr() == storage for other in others
    )


class Maker:
    """Makes seeded inputs of one dtype on one device; `T` and `D` are the sizes to prefer.

    The interpreter of Triton takes milliseconds a tile, so that the sizes on a CPU are small: just
    large enough that a row is split and its parts are merged. On a GPU they are those of a model.
    """

    def __init__(
        self, dtype: torch.dtype, device: str = "cpu", *, real_sizes: bool = False, seed: int = 0
    ) -> None:
        self.dtype, self.device, self.real_sizes = dtype, device, real_sizes
        self.T, self.D = (1100, 128) if real_sizes else (197, 128)
        self._generator = torch.Generator().manual_seed(seed)

    def reseed(self, seed: int) -> None:
        """Goes on with the numbers of another seed."""
        self._generator.manual_seed(seed)

    def pick(self, small: int, real: int) -> int:
        """A size by whether the machine is slow (interpreter) or not (GPU)."""
        return real if self.real_sizes else small

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self._generator)
        return numbers.to(dtype or self.dtype).to(self.device)

    def float8(self, *shape: int) -> torch.Tensor:
        """Normal numbers of a cache in float8_e4m3fn."""
        return self.normal(*shape, dtype=torch.float8_e4m3fn)

    def scales(self, *values: float) -> torch.Tensor:
        """Float32 scales `[len(values)]`; of one value `[]`."""
        numbers = torch.tensor(values, dtype=torch.float32, device=self.device)
        return numbers[0] if len(values) == 1 else numbers

    def flags(self, *shape: int, share: float = 0.6) -> torch.Tensor:
        """Bool, True with this probability."""
        return (torch.rand(*shape, generator=self._generator) < share).to(self.device)

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    lengths = integers

    def qkv(
        self,
        B: int = 2,
        Hq: int = 4,
        Hkv: int = 2,
        Sq: int = 1,
        T: int | None = None,
        D: int | None = None,
        Dv: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """Contiguous 4-D query, key, value."""
        T = self.T if T is None else T
        D = self.D if D is None else D
        return {
            "query": self.normal(B, Hq, Sq, D),
            "key": self.normal(B, Hkv, T, D, dtype=cache_dtype),
            "value": self.normal(B, Hkv, T, D if Dv is None else Dv, dtype=cache_dtype),
        }


def of_dtype(make: Callable[..., Maker], dtype: torch.dtype) -> Callable[..., Maker]:
    """The function that makes a `Maker`, with this dtype where a case asks for none."""

    def made(dtype: torch.dtype = dtype, seed: int = 0) -> Maker:
        return make(dtype, seed)

    return made
