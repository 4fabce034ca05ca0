"""Every case of the conformance table on the GPU: all tiers, all dtypes, sizes of a model."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.calls import Maker, run_or_skip
from tests.conformance.cases import CASES, Case
from tests.conformance.tiers import DECODE_TIERS

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _params() -> list:
    return [
        pytest.param(
            case, tier, dtype, id=f"{case.name}-{tier}-{str(dtype).removeprefix('torch.')}"
        )
        for case in CASES
        for dtype in DTYPES
        for tier in DECODE_TIERS
        if case.is_legal_in(dtype)
    ]


@pytest.mark.parametrize(("case", "tier", "dtype"), _params())
def test_decode_agrees_with_the_oracle(
    case: Case, tier: str, dtype: torch.dtype, must_run: frozenset[str]
) -> None:
    call = case.make(Maker(dtype, "cuda", real_sizes=True))
    run_or_skip(call, tier, must_run if case.meant_for(tier) else frozenset())
