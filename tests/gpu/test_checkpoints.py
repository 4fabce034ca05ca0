"""`scatter_checkpoints_` on the GPU: all cases, captured steps, compiled steps, large pools."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import torch_attn_tiers
from tests.conformance.calls import Maker, same_bits
from tests.conformance.test_checkpoints import *  # noqa: F403  (collects them again, here)
from tests.conformance.test_checkpoints import TIERS, arguments, loop, require, scatter
from tests.gpu.capturing import capture
from tests.test_ops_checkpoints import CALLS
from torch_attn_tiers.checkpoints import CheckpointMetadata, scatter_checkpoints_

Make = Callable[..., Maker]
every_tier = pytest.mark.parametrize("tier", TIERS)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch_attn_tiers.release_captured_plans()


@every_tier
def test_replays_follow_indices_and_masks_that_change(
    tier: str, maker: Make, must_run: frozenset[str]
) -> None:
    m = maker()
    args = arguments(m)
    require(tier, args, must_run)
    torch_attn_tiers.prepare("scatter_checkpoints_", *args, tier=tier)
    scatter(args[0].clone(), *args[1:], tier=tier)  # type: ignore[union-attr]
    graph, _ = capture(lambda: scatter(*args, tier=tier))
    # Steps that have no factor of 9: no place is written twice.
    for i, step in enumerate((1, 2, 4, 5, 7)):
        other = Maker(torch.float32, "cuda", seed=i)
        changed = arguments(
            m, dst=tuple((j * step + i) % 9 - 1 for j in range(5)), h_src=(i, 1, 5 - i, 0, 2),
            track=tuple(map(int, other.flags(5))), final=tuple(map(int, other.flags(5))),
        )  # fmt: skip
        for tensor, values in zip(args, changed):
            tensor.copy_(values)  # type: ignore[union-attr]
        expected, _ = loop(args)
        graph.replay()
        assert same_bits(args[0].cpu(), expected)  # type: ignore[union-attr]


def _step(pool: Any, tokens: Any, lens: Any, prefixes: Any, slots: Any, layout: str) -> Any:
    """Metadata, prefill and the copy, as one captured step of a layer."""
    metadata = CheckpointMetadata.build(lens, prefixes, 64, slots)
    extend = lens - prefixes
    bounds = torch.cat([extend.new_zeros(1), extend.cumsum(0)])
    result = torch_attn_tiers.gdn_chunk_prefill(
        *tokens, scale=None, initial_state=None, cu_seqlens=bounds, qk_l2norm=True, output_h=True,
        h_layout=layout, state_v_first=True, solution="reference",
    )  # fmt: skip
    scatter_checkpoints_(pool, metadata.dst, result, metadata)
    return result.final_state


@pytest.mark.parametrize("layout", ["fla", "compact"])
def test_captured_step_follows_lengths_that_change(layout: str, maker: Make) -> None:
    m = maker(torch.float16)
    T, Hv, K, V = 400, 4, 64, 64
    tokens = (
        m.normal(1, T, 2, K), m.normal(1, T, 2, K), m.normal(1, T, Hv, V),
        -m.normal(1, T, Hv, dtype=torch.float32).abs(),
        m.normal(1, T, Hv, dtype=torch.float32).sigmoid(),
    )  # fmt: skip
    pool = m.normal(9, Hv, V, K, dtype=torch.bfloat16)
    lens, prefixes, slots = (m.integers([64, 64, 64], torch.int64) for _ in range(3))
    args = (pool, tokens, lens, prefixes, slots, layout)
    _step(*args)
    graph, _ = capture(lambda: _step(*args))
    for values in (
        ([350, 64, 100], [192, 0, 41], [5, 1, 0]),
        ([0, 320, 319], [0, 192, 192], [7, 3, 8]),
        ([64, 64, 64], [64, 64, 64], [2, 4, 6]),
        ([400, 0, 0], [0, 0, 0], [-1, 4, 6]),
    ):
        for tensor, numbers in zip((lens, prefixes, slots), values):
            tensor.copy_(m.integers(numbers, torch.int64))
        other = pool.clone()
        graph.replay()
        _step(other, *args[1:])
        assert same_bits(pool, other)


def test_the_host_does_not_wait(
    maker: Make, must_run: frozenset[str], request: pytest.FixtureRequest
) -> None:
    m = maker()
    args = arguments(m)
    require("triton", args, must_run)
    lens = m.integers([350, 0, 64])
    scatter(*args, tier="triton")  # builds
    CheckpointMetadata.build(lens, lens * 0, 64, lens)
    request.getfixturevalue("no_host_sync")
    CheckpointMetadata.build(lens, lens * 0, 64, lens)
    scatter(*args, tier="triton")


def test_cold_capture_names_the_call_to_make(must_run: frozenset[str]) -> None:
    m = Maker(torch.float32, "cuda")
    args = arguments(m, pool=torch.float16, h=torch.float16, index=torch.int32)
    for i in (0, 2, 5):
        args[i] = m.normal(args[i].shape[0], 3, 17, 19, dtype=args[i].dtype)  # type: ignore[union-attr]
    require("triton", args, must_run)
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match=r"prepare\('scatter_checkpoints_'"):
        capture(lambda: scatter(*args))
    assert torch_attn_tiers.prepare("scatter_checkpoints_", *args).chosen == "triton"
    expected, _ = loop(args)
    graph, _ = capture(lambda: scatter(*args))
    graph.replay()
    assert same_bits(args[0].cpu(), expected)  # type: ignore[union-attr]


def test_place_and_row_beyond_2_to_the_31_elements(must_run: frozenset[str]) -> None:
    """Row 4099 of states of 32 x 128 x 128: elements from 2^31 on."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    shape = (4100, 32, 128, 128)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    h = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    h[4099], h[3] = 1, 2
    dst, src = torch.tensor([[4099, 0, 4098], [4099, 4099, 3]], device="cuda")
    mask = torch.ones(3, dtype=torch.bool, device="cuda")
    args = [pool, dst, h, src, mask]
    require("triton", args, must_run)
    scatter(*args, tier="triton")
    assert bool((pool[4099] == 1).all() and (pool[0] == 1).all() and (pool[4098] == 2).all())
    assert not bool(pool[1:4098].any())


def test_compiled_step_is_one_graph_and_copies_no_pool(maker: Make) -> None:
    torch._dynamo.reset()
    m = maker()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pools", torch.zeros(2, *args[0].shape, device="cuda"))

        def forward(self, *rest: torch.Tensor) -> torch.Tensor:
            for layer in range(2):
                scatter(self.pools[layer], *rest)
            return rest[1] * 2

    args = arguments(m)
    model = Layer()
    address = model.pools.data_ptr()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}), torch.no_grad():
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        _, codes = run_and_get_code(compiled, *args[1:])
        P, Hv, K, V = args[0].shape  # type: ignore[union-attr]
        assert f"empty_strided_cuda((2, {P}, {Hv}, {K}, {V})" not in "\n".join(codes)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            args[1].copy_(args[1].roll(1))  # type: ignore[union-attr]
            args[0] = model.pools[1].clone()
            expected, _ = loop(args)
            compiled(*args[1:])
            assert same_bits(model.pools[1].cpu(), expected)
    assert model.pools.data_ptr() == address
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    opcheck(scatter.default, tuple(t.cuda() for t in copy.deepcopy(CALLS[name])))  # type: ignore[union-attr]
