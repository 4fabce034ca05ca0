"""Every case in every tier against the float64 oracle, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.calls import Maker, run_or_skip
from tests.conformance.cases import CASES, Case
from tests.conformance.tiers import DECODE_TIERS

DTYPES = {
    # Of the 16-bit dtypes bfloat16 gets all cases, float16 every second: they take the same path.
    "flash": (torch.float16, torch.bfloat16, torch.float32),
    "unfused": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _params() -> list:
    return [
        pytest.param(
            case, tier, dtype, id=f"{case.name}-{tier}-{str(dtype).removeprefix('torch.')}"
        )
        for i, case in enumerate(CASES)
        if case.everywhere
        for tier in DECODE_TIERS
        for dtype in DTYPES.get(tier, (torch.float16,))
        if case.is_legal_in(dtype) and not (tier == "flash" and dtype is torch.float16 and i % 2)
    ]


@pytest.mark.parametrize(("case", "tier", "dtype"), _params())
def test_decode_agrees_with_the_oracle(
    case: Case, tier: str, dtype: torch.dtype, must_run: frozenset[str]
) -> None:
    call = case.make(Maker(dtype))
    run_or_skip(call, tier, must_run if case.meant_for(tier) else frozenset())


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES["flash"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sizes_on_a_cpu_are_large_enough_for_merges(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, batch_invariant: bool
) -> None:
    """Otherwise none of the cases would see the merge of a row's parts."""
    pytest.importorskip("triton")
    from csrc_free_ops.decode import plan_split_kv
    from csrc_free_ops.facts import device_facts, tensor_facts

    m = Maker(dtype)
    tensors = m.qkv(T=600 if batch_invariant else None, cache_dtype=cache_dtype)
    plan = plan_split_kv(
        *(tensor_facts(tensor) for tensor in tensors.values()),
        device_facts("cpu"),
        scale=1.0,
        batch_invariant=batch_invariant,
    )
    tasks = 2 * 2  # batch rows times KV heads
    assert plan.launch.grid[0] > tasks


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
