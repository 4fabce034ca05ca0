"""The scan beside the prepare kernel, waiting for a few chunks at a time: cases, pools, invariants.

Without a GPU the kernels run one after the other; the counters are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import CHUNK, check_or_skip, prompts
from tests.conformance.gdn_plans import forced, noted
from tests.conformance.gdn_pool_calls import check_or_skip as check_pool_or_skip
from tests.conformance.test_gdn import CASES, OVERLOADS
from tests.conformance.test_gdn_pool import CASES as POOL_CASES

pytest.importorskip("csrc_free_ops.gdn.launch")

Make = Callable[..., Maker]
TIER = "triton"


@pytest.fixture(autouse=True)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many chunks are waited for at a time, by default two; in plans of this test's own."""
    chunks: int = getattr(request, "param", 2)
    with forced(monkeypatch, "chunks_ahead", chunks):
        yield chunks


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch, ahead: int) -> list[int]:
    """Of each plan that the test has led to, how many counters it has."""

    def counters_of(plan: Any) -> int:
        if plan.counters and plan.device.type == "cpu":  # fewer programs than chunks and heads
            plan.prepare.grid = (min(3, plan.prepare.grid[0]), 1, 1)
        return plan.counters

    return noted(monkeypatch, counters_of)


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("ahead", [1, 2, 3, 8], indirect=True)
def test_lengths_around_the_ends_of_groups(
    overload: str, ahead: int, maker: Make, must_run: frozenset[str], counters: list[int]
) -> None:
    end = ahead * CHUNK
    lengths = [end - 1, end, end + 1, 0, 2 * end + 1, 0, 1, 2 * end, 0]
    call = prompts(maker(), lengths, T=sum(lengths) + 9, Hv=1, K=16, V=32).with_(overload)
    check_or_skip(call, TIER, must_run)
    assert all(counters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_that_share_queries(
    dtype: torch.dtype, maker: Make, must_run: frozenset[str], counters: list[int]
) -> None:
    call = prompts(maker(dtype), [5 * CHUNK + 5, 70], Hq=2, Hv=8, K=32, V=32, qk_l2norm=True)
    check_or_skip(call.with_("h_fla"), TIER, must_run)
    assert all(counters)


NAMES = (
    "rows_of_a_batch_without_cu_seqlens",
    "empty_sequences_in_front_of_tokens_of_none",
    "tokens_past_the_last_sequence_are_zero_and_not_read",
    "three_value_heads_for_each_head_of_q",
    "sizes_that_are_no_powers_of_two",
    "initial_state_taken_out_of_a_pool",
    "norms_taken_inside",
    "inputs_in_bfloat16",
)


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, maker: Make, must_run: frozenset[str], counters: list[int]) -> None:
    check_or_skip(CASES[name](maker), TIER, must_run)
    assert all(counters)


@pytest.mark.parametrize("name", ["state_inside_a_sequence_is_kept", "pool_in_bfloat16"])
def test_pool_case(name: str, maker: Make, must_run: frozenset[str], counters: list[int]) -> None:
    check_pool_or_skip(POOL_CASES[name](maker), TIER, must_run)
    assert all(counters)


@pytest.mark.parametrize("bounds", [[0, 300, 100, 370], [0, 370] * 2, [370, 0, 5, 0], [90] * 4])
def test_bounds_that_break_the_rules_are_waited_for_all_the_same(
    bounds: list[int], maker: Make, must_run: frozenset[str], counters: list[int]
) -> None:
    call = prompts(maker(), [300, 0, 70])
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=call.tensors["q"].device)  # type: ignore[union-attr]
    call = call.with_("h_fla", cu_seqlens=cu_seqlens)
    call.require(TIER, must_run)
    out, final_state, _ = call.run(TIER)  # within the tensors, and it ends
    assert out.shape[1] == 370 and final_state.shape[0] == 3 and all(counters)


def test_bits_are_those_of_one_kernel_after_the_other(
    maker: Make, must_run: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = prompts(maker(), [300, 0, 70]).with_("h_compact")
    call.require(TIER, must_run)
    beside = call.run(TIER)
    with forced(monkeypatch, "chunks_ahead", 0):
        one_after_the_other = call.run(TIER)
    for got, wanted in zip(beside, one_after_the_other, strict=True):
        assert same_bits(got, wanted)
