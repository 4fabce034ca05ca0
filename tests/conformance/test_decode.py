"""Every case in every tier against the float64 oracle, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.calls import Maker, run_or_skip
from tests.conformance.cases import CASES, Case
from tests.conformance.tiers import DECODE_TIERS

DTYPES = {
    # The interpreter's bfloat16 products are wrong (triton 3.7), so that flash gets the other two.
    "flash": (torch.float16, torch.float32),
    "unfused": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _params() -> list:
    return [
        pytest.param(
            case, tier, dtype, id=f"{case.name}-{tier}-{str(dtype).removeprefix('torch.')}"
        )
        for case in CASES
        if case.everywhere
        for tier in DECODE_TIERS
        for dtype in DTYPES.get(tier, (torch.float16,))
    ]


@pytest.mark.parametrize(("case", "tier", "dtype"), _params())
def test_decode_agrees_with_the_oracle(
    case: Case, tier: str, dtype: torch.dtype, must_run: frozenset[str]
) -> None:
    call = case.make(Maker(dtype))
    run_or_skip(call, tier, must_run if case.meant_for(tier) else frozenset())


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
