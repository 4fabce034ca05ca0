"""The one table of tolerances, and the error measure they belong to.

The measure is the relative Frobenius error against the float64 oracle, of the whole output and of
each row (last dimension), so that one wrong row among many good ones fails. Inputs are standard
normal. A tolerance follows from the dtype; no test brings its own.
"""

from __future__ import annotations

import torch

OWN = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 3e-3,
}
LIBRARY = {**OWN, torch.bfloat16: 5e-3}
LIBRARY_TIERS = frozenset({"xqa", "cudnn", "mea", "flashinfer"})


#: Of gdn_chunk_prefill, by the dtype of q: a recurrence adds up the errors of many products.
GDN = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def tolerance(dtype: torch.dtype, tier: str | None = None) -> float:
    """The largest relative error that an output of this dtype may have."""
    return (LIBRARY if tier in LIBRARY_TIERS else OWN)[dtype]


def relative_errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, int]:
    """(error of the whole, error of the worst row, index of that row).

    A row that should be zero has error 0 if it is exactly zero and inf otherwise; NaN counts as
    inf, so that it never passes a comparison. Half the smallest subnormal of the dtype is taken off
    each error: below that a float16 row under a large sink (1e-6 of it is left) cannot be resolved.
    """
    resolution = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps / 2
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if actual.numel() == 0:
        return 0.0, 0.0, 0
    actual = actual.reshape(-1, actual.shape[-1])
    expected = expected.reshape(-1, expected.shape[-1])

    def relative(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        ratio = torch.where(error == 0, torch.zeros_like(error), error / size)
        return torch.nan_to_num(ratio, nan=float("inf"), posinf=float("inf"))

    difference = actual - expected
    difference = torch.where(
        expected == 0, difference, (difference.abs() - resolution).clamp(min=0.0)
    )
    rows = relative(difference.norm(dim=-1), expected.norm(dim=-1))
    whole = relative(difference.norm(), expected.norm())
    worst = int(rows.argmax())
    return float(whole), float(rows[worst]), worst


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    tier: str | None = None,
    what: str = "Y",
) -> None:
    """Fails unless shape agrees and the errors of the whole and of each row are in tolerance.

    Values that are not finite in `expected` (a score of -inf, a product with a NaN key) must be
    the same in `actual`; the rest is measured.
    """
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    limit = tolerance(dtype or actual.dtype, tier)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    # A float64 score below the range of the output's dtype is -inf there, rightly.
    rounded = expected.to(actual.dtype)
    finite = torch.isfinite(rounded)
    if not bool(finite.all()):
        odd_actual, odd_expected = actual[~finite], rounded[~finite]
        same = (odd_actual == odd_expected) | (odd_actual.isnan() & odd_expected.isnan())
        assert bool(same.all()), (
            f"{what}: {int((~same).sum())} of {same.numel()} non-finite values differ"
        )
        actual = torch.where(finite, actual, torch.zeros_like(actual))
        expected = torch.where(finite, expected, torch.zeros_like(expected))
    whole, row, index = relative_errors(actual, expected)
    assert whole <= limit and row <= limit, (
        f"{what}: relative error {whole:.3g} of the whole, {row:.3g} of row {index}, "
        f"tolerance {limit:.3g} ({actual.dtype}, tier {tier})"
    )


def assert_gdn_close(
    actual: torch.Tensor, expected: torch.Tensor, *, inputs: torch.dtype, what: str
) -> None:
    """Fails unless the relative error of the whole is that of the dtype, and no row is wrong.

    The dtype is that of the inputs or of the result, whichever is coarser. The tolerance is one of
    the whole; a row may have four times as much, relative to its own norm or to that of the mean
    row, whichever is larger: roundings do not average out in a row of a few numbers, and what is
    left of a state that has decayed is far below its error. A row that is zero is zero exactly.
    """
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    limit = max(GDN[inputs], GDN[actual.dtype])
    if actual.numel() == 0:
        return
    assert bool(torch.isfinite(actual).all()), f"{what}: values that are not finite"
    actual = actual.detach().cpu().double().reshape(-1, actual.shape[-1])
    expected = expected.detach().cpu().double().reshape(-1, expected.shape[-1])
    size = expected.norm(dim=-1)
    mean = size.square().mean().sqrt()
    error = (actual - expected).norm(dim=-1)
    assert bool((error[size == 0] == 0).all()), f"{what}: a row that should be zero is not"
    whole = float(error.norm() / size.norm().clamp(min=1e-300))
    rows = error / size.maximum(mean).clamp(min=1e-300)
    assert whole <= limit and float(rows.max()) <= 4 * limit, (
        f"{what}: relative error {whole:.3g} of the whole, {float(rows.max()):.3g} of row "
        f"{int(rows.argmax())}, tolerance {limit:.3g} ({inputs})"
    )


def assert_rounded_once(
    actual: torch.Tensor, expected: torch.Tensor, *, what: str, magnitude: float = 0.0
) -> None:
    """Fails unless each value is the float32 one, within its tolerance, rounded to the dtype.

    The tolerance of float32 is relative to the largest value of the row, or to `magnitude`: the
    size of the terms that a score is the sum of, where they may cancel.

    For scores: a row of them may have one finite value, and the rounding of one bfloat16 (up to
    2^-8) is more than the error of a whole row may be. This is sharper: it holds for each value.
    """
    dtype = actual.dtype
    computed_in = torch.promote_types(dtype, torch.float32)
    assert tuple(actual.shape) == tuple(expected.shape), what
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    rounded = expected.to(dtype)
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    finite = torch.isfinite(rounded) & torch.isfinite(actual)
    scale = torch.where(finite, expected, 0.0).abs().amax(-1, keepdim=True).clamp(min=magnitude)
    unit = torch.finfo(dtype).eps / 2
    allowed = unit * expected.abs() + OWN[computed_in] * scale
    near = finite & ((actual.double() - expected).abs() <= allowed)
    wrong = ~(same | near)
    assert not bool(wrong.any()), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values differ, first at "
        f"{wrong.nonzero()[0].tolist()}: {actual[wrong][0]}, expected {expected[wrong][0]}"
    )
