"""`gdn_chunk_prefill.pool_` on the GPU: all cases in all dtypes, graphs, memory, large pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import torch_attn_tiers
from tests.conformance import test_gdn_pool as conformance
from tests.conformance.calls import Maker
from tests.conformance.gdn_calls import GDN_TIERS
from tests.conformance.gdn_decode_calls import copy_with_storage
from tests.conformance.gdn_pool_calls import PoolCall, check_or_skip, pooled
from tests.conformance.test_gdn_pool import (  # noqa: F401  (collects them again, here)
    test_bits_are_those_of_the_default_overload,
    test_bounds_that_break_the_rules_touch_no_other_memory,
    test_calls_chained_through_the_pool_equal_one_call,
    test_indices_changed_in_place_are_seen,
    test_kept_state_is_that_of_a_run_of_the_prefix,
    test_kept_states_are_bits_of_the_checkpoints,
)
from tests.gpu.capturing import capture
from tests.gpu.compiled_pools import check_compiled
from tests.gpu.gdn_graphs import SCRATCH, SEGMENT_SCRATCH, check_pool_replays, ready
from tests.test_ops_gdn_pool import CALLS
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_tier = pytest.mark.parametrize("tier", GDN_TIERS)
pool_ = torch.ops.attn_tiers.gdn_chunk_prefill.pool_


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


@every_tier
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", conformance.CASES)
def test_case_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, tier: str, must_run: frozenset[str]
) -> None:
    def make(dtype: torch.dtype = dtype, seed: int = 0) -> Maker:
        return Maker(dtype, "cuda", real_sizes=True, seed=seed)

    check_or_skip(conformance.CASES[name](make), tier, must_run)


def _model(m: Maker, lengths: list[int], *args: Any, **options: Any) -> PoolCall:
    """Sequences with the heads of Qwen3-Next."""
    return pooled(m, lengths, *args, Hq=16, Hv=32, K=128, V=128, qk_l2norm=True, **options)


@every_tier
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_model_agree_with_the_oracle(
    dtype: torch.dtype, pool: torch.dtype, tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    call = _model(
        maker(dtype), [1000, 17, 63, 64, 65, 300, 1], [3, -1, 0, 1, 2, 3, 3],
        [4, 5, 0, -1, 2, 6, 7], [(960, 8), (17, 9), (0, 0), (64, 10), (64, 11), (128, -1), (1, 12)],
        P=14, T=1600, pool=pool,
    )  # fmt: skip
    check_or_skip(call, tier, must_run)


@every_tier
def test_replays_follow_lengths_and_indices_that_change(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker(torch.float16)
    track = [(64, -1)] * 3
    call = pooled(m, [70, 200, 30], [0] * 3, [-1] * 3, track, P=9, T=320, Hq=2, Hv=4, K=64, V=32)
    call = call.with_(qk_l2norm=True)
    ready(call, tier, must_run)
    call.run(tier)  # libraries make their handles
    names = ("cu_seqlens", "read_indices", "write_indices", "track_lens", "track_indices")
    steps = (
        ([0, 320, 320, 320], [1, 2, -1], [0, 2, 3], [256, 0, 0], [4, -1, -1]),
        ([0, 0, 64, 128], [-1, -1, 5], [6, 7, 5], [0, 64, 64], [1, 2, 3]),
        ([0, 1, 2, 3], [8, 8, 8], [-1, 0, 99], [1, 0, 1], [3, 4, 5]),
        ([0, 0, 0, 0], [-1, -1, -1], [-1, -1, -1], [0, 0, 0], [-1, -1, -1]),
        ([0, 64, 193, 320], [3, 4, 5], [3, 4, 5], [64, 128, 64], [3, 7, -9]),
    )
    check_pool_replays(call, tier, m, names, steps)


@every_tier
def test_the_host_does_not_wait(
    tier: str, maker: Make, must_run: frozenset[str], request: pytest.FixtureRequest
) -> None:
    call = pooled(
        maker(torch.float16), [70, 200], [0, -1], [1, 2], [(64, 3), (128, 4)], Hq=2, Hv=4, K=64
    )
    call.require(tier, must_run)
    call.run(tier)  # builds
    request.getfixturevalue("no_host_sync")
    call.run(tier)


def test_one_kept_state_takes_no_memory_for_checkpoints(
    maker: Make, must_run: frozenset[str]
) -> None:
    call = _model(maker(torch.bfloat16), [8192], [0], [1], [(4096, 2)], P=3)
    call.require("triton", must_run)
    call.run("triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call.run("triton")
    taken = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    two_segments = 2 * SEGMENT_SCRATCH * 32
    assert taken <= 1.01 * (SCRATCH * 8192 * 32 + two_segments)
    assert taken < 128 * 32 * 128 * 128 * 4  # a state for each chunk


def test_cold_capture_names_the_call_to_make(must_run: frozenset[str]) -> None:
    m = Maker(torch.float16, "cuda", seed=1)
    call = pooled(m, [70], [0], [1], [(64, 2)], Hv=3, K=24, V=56)  # sizes that no other test has
    call.require("triton", must_run)
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match=r"prepare\('gdn_chunk_prefill.po"):
        capture(lambda: call.op()(*call.args(), tier="triton"))
    torch_attn_tiers.prepare(call.op(), *call.args(), tier="triton")
    call.run("triton")
    graph, _ = capture(lambda: call.run("triton"))
    graph.replay()
    torch.cuda.synchronize()


def test_place_beyond_2_to_the_31_elements(maker: Make, must_run: frozenset[str]) -> None:
    """Place 4099 of states of 32 x 128 x 128: elements from 2^31 on."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    m = maker(torch.bfloat16)
    call = _model(m, [130, 65], [2, 0], [1, -1], [(64, 0), (64, 2)], P=3)
    call.require("triton", must_run)
    expected = call.expected()
    pool = torch.empty(4100, 32, 128, 128, device="cuda")
    places = m.integers([4098, 1, 4099], torch.int64)
    pool[places] = call.pool.mT
    names = ("read_indices", "write_indices", "track_indices")
    index = {n: call.tensors[n] for n in names}
    large = {n: torch.where(i >= 0, places[i.clamp(min=0)], -1) for n, i in index.items()}  # type: ignore[union-attr,operator]
    out = call.with_(pool=pool.mT, **large).run("triton")
    assert_gdn_close(out, expected.out, inputs=torch.bfloat16, what="out")
    for place, wanted in expected.written.items():
        got = pool[places[place]].mT
        assert_gdn_close(got, wanted, inputs=torch.bfloat16, what=f"state {place}")


class Layer(torch.nn.Module):
    """A prefill of two layers over pools that are buffers."""

    def __init__(self, m: Maker) -> None:
        super().__init__()
        self.register_buffer("pools", m.normal(2, 9, 4, 64, 32, dtype=torch.float32))

    def forward(self, q: Any, v: Any, gate: Any, *rest: Any) -> torch.Tensor:
        for layer in range(2):
            g, beta = -gate.abs().float(), gate.float().sigmoid()
            out = pool_(
                q * 0.5, q, v, g, beta, self.pools[layer], *rest, qk_l2norm=True,
                state_v_first=True, tier="triton",
            )  # fmt: skip
            v = v + out
        return v


def test_compiled_step_is_one_graph_and_copies_no_pool(maker: Make) -> None:
    m = maker()
    reads, writes, lens, places = (m.integers([0, 1]) for _ in range(4))
    bounds = m.integers([0, 64, 150])

    def arguments(i: int) -> tuple[Any, ...]:
        reads.copy_(m.integers([i, -1]))
        writes.copy_(m.integers([5, i]))
        lens.copy_(m.integers([64, 64 * (i % 2)]))
        places.copy_(m.integers([6, 7]))
        args = (m.normal(1, 150, 2, 32), m.normal(1, 150, 4, 64), m.normal(1, 150, 4))
        return (*args, reads, writes, lens, places, bounds)

    check_compiled(Layer(m), Layer(m), arguments)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    args, scalars = CALLS[name]
    moved = tuple(None if a is None else copy_with_storage(a, "cuda") for a in args)
    opcheck(pool_, moved, scalars)
