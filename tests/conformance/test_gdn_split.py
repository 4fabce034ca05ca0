"""Sequences that the Triton tier splits into segments: cases, checkpoints, pools, invariants.

Splitting pays from thousands of tokens on. Here segments of a few chunks are forced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.conformance import test_gdn_invariants as invariants
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import CHUNK, check_or_skip, prompts
from tests.conformance.gdn_plans import forced, noted
from tests.conformance.gdn_pool_calls import check_or_skip as check_pool_or_skip
from tests.conformance.gdn_pool_calls import pooled
from tests.conformance.test_gdn import CASES, OVERLOADS
from tests.conformance.test_gdn_pool import CASES as POOL_CASES
from tests.tolerances import assert_gdn_close

pytest.importorskip("triton")

from csrc_free_ops.gdn import launch

Make = Callable[..., Maker]
TIER = "triton"
one_and_two_chunks = pytest.mark.parametrize("segments_of", [1, 2], indirect=True)


@pytest.fixture(autouse=True)
def segments_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many chunks a segment has, by default one; in plans of this test's own."""
    chunks: int = getattr(request, "param", 1)
    with forced(monkeypatch, "segment_chunks", chunks):
        yield chunks


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch, segments_of: int) -> list[bool]:
    """Of each plan that the test has led to, whether it splits sequences."""
    return noted(monkeypatch, lambda plan: plan.split is not None)


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("segments_of", [1, 2, 3], indirect=True)
def test_lengths_around_the_ends_of_segments(
    overload: str,
    segments_of: int,
    maker: Make,
    must_run: frozenset[str],
    splits: list[bool],
) -> None:
    end = segments_of * CHUNK
    lengths = [end - 1, end, end + 1, 0, 2 * end - 1, 0, 2 * end, 2 * end + 1, 1, 0]
    call = prompts(maker(), lengths, T=sum(lengths) + 9, Hv=1, K=16, V=32).with_(overload)
    check_or_skip(call, TIER, must_run)
    assert all(splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K, V", [(16, 16), (80, 48)])
def test_many_segments_are_as_accurate(
    K: int, V: int, dtype: torch.dtype, maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    call = prompts(maker(dtype), [17 * CHUNK + 5], Hv=1, K=K, V=V, qk_l2norm=True)
    slow = call.tensors["g"]
    assert slow is not None
    check_or_skip(call.with_("h_fla", g=slow / 100), TIER, must_run)
    assert all(splits)


NAMES = (
    "rows_of_a_batch_without_cu_seqlens",
    "lengths_in_int64",
    "empty_sequences_in_front_of_tokens_of_none",
    "tokens_past_the_last_sequence_are_zero_and_not_read",
    "three_value_heads_for_each_head_of_q",
    "key_size_below_value_size",
    "key_size_above_value_size",
    "sizes_that_are_no_powers_of_two",
    "widest_heads",
    "no_initial_state",
    "initial_state_in_float16",
    "states_with_v_first",
    "initial_state_taken_out_of_a_pool",
    "without_final_state",
    "no_forgetting",
    "forgetting_at_once",
    "gates_slightly_positive",
    "unnormalised_keys",
    "unnormalised_keys_in_float16",
    "unnormalised_keys_in_bfloat16",
    "norms_taken_inside",
    "inputs_in_bfloat16",
    "inputs_in_float16",
    "heads_before_tokens_in_memory",
    "values_whose_last_stride_is_not_one",
    "keys_and_queries_whose_last_stride_is_not_one",
)


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, maker: Make, must_run: frozenset[str], splits: list[bool]) -> None:
    check_or_skip(CASES[name](maker), TIER, must_run)
    assert all(splits)


POOL_NAMES = (
    "states_go_to_other_places",
    "negative_read_starts_from_zero",
    "negative_write_drops_the_last_state",
    "empty_sequences_copy_their_state",
    "rows_of_a_batch_without_cu_seqlens",
    "what_no_sequence_reads_is_not_read",
    "state_inside_a_sequence_is_kept",
    "state_at_the_end_is_kept_too",
    "counts_that_are_not_reached_or_no_chunk_ends_with_keep_none",
    "of_two_states_in_one_place_the_last_stays",
    "kept_where_the_sequence_started_from",
    "pool_in_bfloat16",
    "pool_with_inner_strides",
)


@pytest.mark.parametrize("name", POOL_NAMES)
def test_pool_case(name: str, maker: Make, must_run: frozenset[str], splits: list[bool]) -> None:
    check_pool_or_skip(POOL_CASES[name](maker), TIER, must_run)
    assert all(splits)


@one_and_two_chunks
def test_states_at_the_ends_of_segments_are_kept(
    maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    track = [(64, 3), (128, 4), (192, 5), (257, 6), (256, 7)]
    call = pooled(maker(), [257, 257, 257, 257, 256], [0, 1, -1, 2, 2], [0, 1, 2, 9, 9], track, P=8)
    check_pool_or_skip(call, TIER, must_run)
    assert all(splits)


# --------------------------------------------------------------------------- several calls


@one_and_two_chunks
@pytest.mark.parametrize("cut", [63, 64, 128, 199])
def test_calls_chained_through_the_state_equal_one_call(
    cut: int, maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    invariants.test_calls_chained_through_the_state_equal_one_call(TIER, cut, maker, must_run)
    assert splits[0]


@one_and_two_chunks
def test_layouts_of_checkpoints_hold_the_same_states(
    maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    invariants.test_layouts_of_checkpoints_hold_the_same_states(TIER, maker, must_run)
    assert all(splits)


def test_checkpoints_change_no_other_result(
    maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    invariants.test_checkpoints_change_no_other_result(TIER, maker, must_run)
    assert all(splits)


def test_batch_of_sequences_equals_one_by_one(
    maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    call = prompts(maker(), invariants.LENGTHS, T=invariants.BOUNDS[-1] + 9)
    call.require(TIER, must_run)
    out, final_state = call.run(TIER)
    assert all(splits)
    for i, (first, end) in enumerate(zip(invariants.BOUNDS, invariants.BOUNDS[1:], strict=False)):
        alone_out, alone_state = invariants.one(call, i).run(TIER)
        assert_gdn_close(out[:, first:end], alone_out, inputs=out.dtype, what="out")
        assert_gdn_close(final_state[i : i + 1], alone_state, inputs=out.dtype, what="state")


def test_batch_invariant_calls_are_not_split(
    maker: Make, must_run: frozenset[str], splits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = prompts(maker(), [200, 70])
    call.require(TIER, must_run)
    splits.clear()
    invariant = call.with_(batch_invariant=True).run(TIER)
    assert not any(splits)
    monkeypatch.setattr(launch, "segment_chunks", lambda *_: 0)
    for got, wanted in zip(invariant, call.run(TIER), strict=True):
        assert same_bits(got, wanted)


def test_sequence_of_length_zero_keeps_its_state_bit_for_bit(
    maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    call = prompts(maker(), [0, 130, 0])
    call.require(TIER, must_run)
    state = call.tensors["initial_state"]
    assert state is not None
    final_state = call.run(TIER)[1]
    assert same_bits(final_state[0], state[0]) and same_bits(final_state[2], state[2])
    assert all(splits)


@one_and_two_chunks
@pytest.mark.parametrize("overload", OVERLOADS)
def test_lengths_changed_in_place_are_seen(
    overload: str, maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    m = maker()
    call = prompts(m, [70, 60, 190]).with_(overload)
    check_or_skip(call, TIER, must_run)
    lengths = call.tensors["cu_seqlens"]
    assert lengths is not None
    plans = len(splits)
    for bounds in ([0, 320, 320, 320], [0, 0, 1, 193], [0, 0, 0, 0], [0, 64, 192, 320]):
        lengths.copy_(m.integers(bounds))
        call.check(TIER)
    assert all(splits) and len(splits) == plans


@one_and_two_chunks
@pytest.mark.parametrize("overload", OVERLOADS[1:])
@pytest.mark.parametrize(
    "bounds",
    [[0, 9, 5], [0, 5, 200], [-7, 5, 9], [0, 150, 0, 150, 0, 150], [150, 0], [10**6, -5]],
)
def test_bounds_that_break_the_rules_touch_no_other_memory(
    bounds: list[int], overload: str, maker: Make, must_run: frozenset[str], splits: list[bool]
) -> None:
    invariants.test_bounds_that_break_the_rules_touch_no_other_memory(
        bounds, overload, TIER, maker, must_run
    )
    assert all(splits)


@one_and_two_chunks
@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_wide_tiles(
    overload: str,
    qk_l2norm: bool,
    maker: Make,
    must_run: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
    segments_of: int,
) -> None:
    """64 columns of S a program, and descriptors."""
    lengths = [segments_of * CHUNK + 1, 0, 5 * CHUNK, 70]
    call = prompts(
        maker(torch.bfloat16), lengths, T=sum(lengths) + 9, Hq=2, K=32, V=40, qk_l2norm=qk_l2norm
    )
    with forced(monkeypatch, "has_tiles_by_programs", True):
        made = noted(monkeypatch, lambda plan: (plan.split is not None, plan.scan.constants))
        check_or_skip(call.with_(overload), TIER, must_run)
    assert made
    for is_split, constants in made:
        assert is_split and constants["BV"] == 64 and constants["BOXED"]
