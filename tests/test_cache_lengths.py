"""Counts of valid keys and zero rows: Triton (by the interpreter on a CPU) and PyTorch alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from csrc_free_ops.cache.lengths import RowGuard
from csrc_free_ops.facts import device_facts

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES = (0, 5, -1, 16, 17, 2**31 - 1, -(2**31), 1)
CLAMPED = (0, 5, 0, 16, 16, 16, 0, 1)


def _guard(width: int, **kwargs: object) -> RowGuard:
    defaults = dict(
        batch=len(VALUES), capacity=16, width=width, out_dtype=torch.float16,
        lengths_dtype=torch.int32,
    )  # fmt: skip
    guard = RowGuard(device_facts(DEVICE), **{**defaults, **kwargs})  # type: ignore[arg-type]
    guard.compile()
    return guard


def _lengths(dtype: torch.dtype, values: tuple[int, ...] = VALUES) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _junk(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((len(VALUES), width), math.nan, dtype=dtype, device=DEVICE)


def _counts(
    guard: RowGuard,
    lengths: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    counts = torch.full(shape, -7, dtype=torch.int32, device=DEVICE).view(dtype)
    guard.count(lengths, counts)
    return counts


def _as_ints(counts: torch.Tensor) -> list[int]:
    return counts.view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("use_triton", [True, False])
@pytest.mark.parametrize("counts_dtype", [torch.int32, torch.uint32])
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
def test_counts_are_clamped(
    lengths_dtype: torch.dtype, counts_dtype: torch.dtype, use_triton: bool
) -> None:
    guard = _guard(8, lengths_dtype=lengths_dtype, use_triton=use_triton)
    counts = _counts(guard, _lengths(lengths_dtype), (len(VALUES), 1, 1, 1), counts_dtype)
    assert _as_ints(counts) == list(CLAMPED)


@pytest.mark.parametrize("use_triton", [True, False])
def test_lengths_of_64_bits_do_not_wrap(use_triton: bool) -> None:
    values = (2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63), 3, 0, 1)
    guard = _guard(8, lengths_dtype=torch.int64, use_triton=use_triton)
    assert _as_ints(_counts(guard, _lengths(torch.int64, values), (8,))) == [
        16, 16, 0, 16, 0, 3, 0, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("use_triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [8, 1024, 2048, 5000])
def test_only_empty_rows_become_zero(width: int, dtype: torch.dtype, use_triton: bool) -> None:
    empty = torch.tensor(CLAMPED, device=DEVICE) == 0
    for lengths_dtype in (torch.int32, torch.int64):
        guard = _guard(width, out_dtype=dtype, lengths_dtype=lengths_dtype, use_triton=use_triton)
        lengths = _lengths(lengths_dtype)
        out = _junk(width, dtype)
        counts = _counts(guard, lengths, (len(VALUES), 1))
        assert _as_ints(counts) == list(CLAMPED)
        guard.zero(counts, out)
        assert bool((out[empty] == 0).all()) and bool(out[~empty].isnan().all())


@pytest.mark.parametrize("use_triton", [True, False])
def test_no_rows_and_rows_of_no_width(use_triton: bool) -> None:
    for batch, width in itertools.product((0, 2), (0, 8)):
        if not (batch and width):
            guard = _guard(width, batch=batch, use_triton=use_triton)
            lengths = torch.ones(batch, dtype=torch.int32, device=DEVICE)
            out = torch.ones(batch, width, dtype=torch.float16, device=DEVICE)
            assert _counts(guard, lengths, (batch,)).tolist() == [1] * batch
            guard.zero(_counts(guard, lengths, (batch,)), out)


def test_many_rows_take_several_programs() -> None:
    guard = _guard(8, batch=700)
    lengths = torch.arange(-100, 600, dtype=torch.int32, device=DEVICE)
    assert torch.equal(_counts(guard, lengths, (700,)), lengths.clamp(0, 16))


def test_lengths_may_begin_anywhere() -> None:
    """A slice of other lengths is dense and not aligned."""
    lengths = torch.arange(9, dtype=torch.int32, device=DEVICE)[1:]
    out = _junk(8, torch.float16)
    counts = _counts(_guard(8), lengths, (8,))
    _guard(8).zero(counts, out)
    assert counts.tolist() == list(range(1, 9)) and bool(out.isnan().all())
