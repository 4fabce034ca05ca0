"""The scan with 16, 32 and 64 columns of S a program, which follow from how many programs run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from csrc_free_ops.facts import device_facts, tensor_facts
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_calls import CHUNK, check_or_skip, prompts
from tests.conformance.gdn_plans import forced, noted, plans_anew
from tests.conformance.gdn_pool_calls import check_or_skip as check_pool_or_skip
from tests.conformance.gdn_pool_calls import pooled
from tests.conformance.test_gdn import CASES, OVERLOADS
from tests.conformance.test_gdn_pool import CASES as POOL_CASES
from tests.conformance.test_gdn_pool import POOLS

pytest.importorskip("triton")

from csrc_free_ops.gdn import plan_gdn
from csrc_free_ops.gdn.launch import default_config

Make = Callable[..., Maker]
TIER = "triton"


@pytest.fixture(params=[16, 32, 64], autouse=True)
def bv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many columns of S a program of the scan has, by how many programs a call is said to have.

    32 are those of `default_config`, which calls for few heads do not take on Hopper.
    """
    with (
        forced(monkeypatch, "has_tiles_by_programs", request.param != 32),
        forced(monkeypatch, "fills_device", request.param == 64),
    ):
        yield request.param


@pytest.fixture(autouse=True)
def columns(bv: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each plan that the test has led to, how many those are."""
    return noted(monkeypatch, lambda plan: plan.scan.constants["BV"])


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("V", [64, 80])
def test_lengths_around_the_ends_of_chunks(
    overload: str, V: int, maker: Make, must_run: frozenset[str], bv: int, columns: list[int]
) -> None:
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, 0, 3 * CHUNK + 1, 0, 1]
    call = prompts(maker(), lengths, T=sum(lengths) + 9, Hv=1, K=16, V=V).with_(overload)
    check_or_skip(call, TIER, must_run)
    assert columns and set(columns) == {bv}


@pytest.mark.parametrize("overload", ["h_fla", "h_compact"])
@pytest.mark.parametrize("K", [64, 128])
def test_checkpoints_are_stored_column_by_column(
    overload: str, K: int, maker: Make, must_run: frozenset[str], bv: int, columns: list[int]
) -> None:
    """32 at a time, of tiles of K."""
    call = prompts(maker(torch.float16), [2 * CHUNK + 3], Hv=1, K=K, V=64, qk_l2norm=True)
    check_or_skip(call.with_(overload), TIER, must_run)
    assert columns and set(columns) == {bv}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_that_share_queries(
    dtype: torch.dtype, maker: Make, must_run: frozenset[str], bv: int, columns: list[int]
) -> None:
    call = prompts(maker(dtype), [3 * CHUNK + 5, 70], Hq=1, Hv=4, K=32, V=64, qk_l2norm=True)
    check_or_skip(call.with_("h_fla"), TIER, must_run)
    assert columns and set(columns) == {bv}


NAMES = (
    "rows_of_a_batch_without_cu_seqlens",
    "empty_sequences_in_front_of_tokens_of_none",
    "tokens_past_the_last_sequence_are_zero_and_not_read",
    "sizes_that_are_no_powers_of_two",
    "inputs_in_bfloat16",
)


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, maker: Make, must_run: frozenset[str], columns: list[int]) -> None:
    check_or_skip(CASES[name](maker), TIER, must_run)
    assert columns


POOL_NAMES = (
    "state_inside_a_sequence_is_kept",
    "zero_keeps_none",
    "state_at_the_end_is_kept_too",
    "place_past_the_pool_keeps_none",
    "counts_that_are_not_reached_or_no_chunk_ends_with_keep_none",
    "of_two_states_in_one_place_the_last_stays",
    "kept_where_the_sequence_started_from",
    "pool_in_bfloat16",
)


@pytest.mark.parametrize("name", POOL_NAMES)
def test_pool_case(
    name: str, maker: Make, must_run: frozenset[str], bv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = noted(monkeypatch, lambda plan: plan.scan.constants["TRACK"])
    check_pool_or_skip(POOL_CASES[name](maker), TIER, must_run)
    assert track and set(track) == {2 if bv == 64 else 1}  # inside the loop where programs are many


@pytest.mark.parametrize("V", [64, 72])
@pytest.mark.parametrize("name", POOLS)
def test_pools_of_any_strides(
    name: str, V: int, maker: Make, must_run: frozenset[str], bv: int, columns: list[int]
) -> None:
    track = [(CHUNK, 3), (0, 0)]
    call = pooled(
        maker(torch.bfloat16), [70, 5], [4, -1], [0, 1], track, K=32, V=V, pool=POOLS[name]
    )
    check_pool_or_skip(call, TIER, must_run)
    assert columns and set(columns) == {bv}


@pytest.mark.parametrize("segment_chunks", [0, 1])
@pytest.mark.parametrize("bv", [32, 64])
@pytest.mark.parametrize("h_layout", ["fla", "compact"])
def test_no_state_is_written_behind_h(
    h_layout: str, bv: int, segment_chunks: int, maker: Make, must_run: frozenset[str]
) -> None:
    """As total_chunks may say that there is less room than it takes."""
    call = prompts(maker(torch.bfloat16), None, T=4 * CHUNK + 3, K=32, V=64)
    call.require(TIER, must_run)
    q, k, v, g, beta = (call.tensors[name] for name in ("q", "k", "v", "g", "beta"))
    facts = device_facts(q.device)
    config = default_config(32, 64, v.shape[2] // q.shape[2], q.dtype, facts)._replace(
        bv=bv, segment_chunks=segment_chunks, v_early=bv == 64
    )
    B, _, Hv, V = v.shape
    for rows in range(B * 5 + 1):
        plan = plan_gdn(
            *map(tensor_facts, (q, k, v, g, beta)), facts, sequences=B, scale=1.0, config=config,
            h_layout=h_layout, h_rows=rows, h_dtype=torch.float32,
        )  # fmt: skip
        assert plan.scan.constants["H_PAIRS"] == facts.is_nvidia
        memory = torch.full((B * 5 + 2, Hv, V, 32), 7.0, device=q.device)
        starts = torch.empty(B + 1, dtype=torch.int64, device=q.device)
        state = torch.empty(B, Hv, V, 32, device=q.device)
        plan.run(q, k, v, g, beta, None, None, torch.empty_like(v), state, memory[:rows], starts)
        assert (memory[rows:] == 7).all()
        written = (memory != 7).flatten(1).any(1)
        assert written.sum() == min(rows, B * (5 if h_layout == "fla" else 4))


@pytest.mark.parametrize("bv", [16, 64], indirect=True)
def test_batch_invariant_calls_have_the_bits_of_32_columns(
    maker: Make, must_run: frozenset[str], monkeypatch: pytest.MonkeyPatch, columns: list[int]
) -> None:
    call = prompts(maker(torch.float16), [200, 0, 70], V=64).with_(batch_invariant=True)
    call.require(TIER, must_run)
    results = call.run(TIER)
    with forced(monkeypatch, "has_tiles_by_programs", False):
        always = call.run(TIER)
    for got, wanted in zip(results, always, strict=True):
        assert same_bits(got, wanted)
    assert set(columns) == {32}


def packed(q: torch.Tensor) -> torch.Tensor:
    """In front of other things in each token."""
    return torch.cat((q, torch.full_like(q, float("nan"))), 2)[:, :, : q.shape[2]]


def heads_first(q: torch.Tensor) -> torch.Tensor:
    return q.transpose(1, 2).contiguous().transpose(1, 2)


def off_by_one(q: torch.Tensor) -> torch.Tensor:
    """Not where 16 bytes begin."""
    return torch.cat((q.new_zeros(1), q.flatten()))[1:].view(q.shape)


@pytest.mark.parametrize("bv", [64], indirect=True)
@pytest.mark.parametrize(
    "memory, is_boxed",
    [(torch.clone, True), (packed, True), (heads_first, False), (off_by_one, False)],
)
@pytest.mark.parametrize("lengths", [[65, 10], None])
def test_whole_tiles_of_queries(
    memory: Callable[[torch.Tensor], torch.Tensor],
    is_boxed: bool,
    lengths: list[int] | None,
    maker: Make,
    must_run: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = prompts(
        maker(torch.bfloat16), lengths, T=160, B=1 if lengths else 2, Hq=2, K=32, V=40,
        qk_l2norm=True,
    )  # fmt: skip
    if lengths:
        for name in ("q", "k", "v"):
            call.tensors[name][:, 75:] = float("nan")  # type: ignore[index]
    q = memory(call.tensors["q"])  # type: ignore[arg-type]
    boxed = noted(monkeypatch, lambda plan: plan.scan.constants["BOXED"])
    check_or_skip(call.with_(q=q), TIER, must_run)
    assert boxed and set(boxed) == {is_boxed}
    boxed.clear()
    check_or_skip(call.with_(q=q, qk_l2norm=False, k=call.tensors["k"]), TIER, must_run)
    assert boxed and set(boxed) == {is_boxed}


def test_a_sequence_does_not_see_the_next_one(maker: Make, must_run: frozenset[str]) -> None:
    """Though its last tile has rows of that."""
    call = prompts(maker(torch.bfloat16), [70, 70], K=32, V=40, qk_l2norm=True)
    call.require(TIER, must_run)
    wanted = call.run(TIER)
    for name in ("q", "k", "v"):
        call.tensors[name][:, 70:] = float("nan")  # type: ignore[index]
    out, state = call.run(TIER)[:2]
    assert same_bits(out[:, :70], wanted[0][:, :70])
    assert same_bits(state[0], wanted[1][0])


@pytest.mark.parametrize("bv", [64], indirect=True)
@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("segment_chunks", [0, 2])
def test_v_that_comes_a_chunk_ahead_changes_no_bit(
    segment_chunks: int,
    overload: str,
    maker: Make,
    must_run: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [4 * CHUNK + 1, 0, CHUNK, 5]
    call = prompts(
        maker(torch.bfloat16), lengths, T=sum(lengths) + 70, K=32, V=72, qk_l2norm=True
    ).with_(overload)
    call.require(TIER, must_run)
    call.tensors["v"][:, sum(lengths) :] = float("nan")  # type: ignore[index]
    configs = noted(monkeypatch, lambda plan: plan.config)
    check_or_skip(call, TIER, must_run)
    early = noted(monkeypatch, lambda plan: plan.scan.constants["EARLY"])
    results = []
    for v_early in (False, True):
        config = configs[0]._replace(
            v_ahead=False, v_early=v_early, segment_chunks=segment_chunks, boxed=False
        )
        with forced(monkeypatch, "_for_programs", config):
            results.append(call.run(TIER)[:2])
    assert early == [False, True]
    for got, wanted in zip(*results, strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("overload", ["h_fla", "h_compact"])
@pytest.mark.parametrize("segment_chunks", [0, 2])
@pytest.mark.parametrize(
    "K, V, bv, bk",
    [
        (16, 16, 16, 16),
        (64, 80, 32, 64),  # columns of no state
        (66, 32, 32, 32),  # keys of none, in three tiles
        (128, 64, 64, 128),
        (256, 32, 32, 64),
    ],
)
def test_checkpoints_that_each_thread_writes_have_the_same_bits(
    K: int,
    V: int,
    bv: int,
    bk: int,
    segment_chunks: int,
    overload: str,
    maker: Make,
    must_run: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are such instructions: on NVIDIA's GPUs."""
    lengths = [2 * CHUNK + 1, 0, CHUNK, 5, 4 * CHUNK, 0]
    call = prompts(
        maker(torch.bfloat16), lengths, T=sum(lengths) + 70, Hv=2, K=K, V=V, qk_l2norm=True
    ).with_(overload, h_dtype=torch.float32)
    plans_anew(monkeypatch)
    plans = noted(monkeypatch, lambda plan: plan)
    check_or_skip(call, TIER, must_run)
    pairs = noted(monkeypatch, lambda plan: plan.scan.constants["H_PAIRS"])
    results = []
    for h_pairs in (False, True):
        config = plans[0].config._replace(
            bv=bv, bk=bk, segment_chunks=segment_chunks, h_pairs=h_pairs, boxed=bv == 64,
            v_early=bv == 64, scan_stages=3,
        )  # fmt: skip
        with forced(monkeypatch, "_for_programs", config):
            results.append(call.run(TIER)[:3])
    assert pairs == [False, plans[0].device.is_nvidia]
    rows = {"h_fla": 9, "h_compact": 7}[overload]  # the others are no state's
    for got, wanted in zip(
        *([*result[:2], result[2].flatten(0, -4)[:rows]] for result in results), strict=True
    ):
        assert same_bits(got, wanted)
    with forced(monkeypatch, "_for_programs", config):
        check_or_skip(call, TIER, must_run)
