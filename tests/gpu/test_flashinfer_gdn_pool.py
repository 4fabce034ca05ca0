"""`pool_` in the tier `flashinfer` of `gdn_chunk_prefill` with its library, on a GPU.

See `test_flashinfer_gdn.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_decode_calls import copy_with_storage
from tests.conformance.gdn_pool_calls import check_or_skip, pooled
from tests.gdn_library_cases import POOL_CASES
from tests.gpu.gdn_graphs import check_pool_replays, ready
from tests.gpu.test_flashinfer_gdn import (
    HALVES,
    Must,
    _release,  # noqa: F401  (a fixture)
    each_size,
    the_tier,
)
from tests.tolerances import assert_gdn_close

Make = Callable[..., Maker]


@the_tier
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", POOL_CASES)
def test_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, tier: str, maker: Make, must_run: Must
) -> None:
    check_or_skip(POOL_CASES[name](maker(dtype)), tier, must_run)


@the_tier
@each_size
@pytest.mark.parametrize("pool", [torch.float32, *HALVES])
def test_bits_are_those_of_the_default_overload(
    pool: torch.dtype, heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    writes = [4, 2, 6, -1, 1]
    call = pooled(
        maker(torch.bfloat16), [130, 0, 64, 5, 200], [0, 3, -1, 5, 1], writes, P=8, pool=pool,
        Hq=heads[0], Hv=heads[1], K=128, V=128,
    )  # fmt: skip
    call.require(tier, must_run)
    out, final_state = call.gathered().run(tier)
    got = call.with_(pool=copy_with_storage(call.pool))
    assert same_bits(got.run(tier), out)
    for i, place in enumerate(writes):
        assert place < 0 or same_bits(got.pool[place], final_state[i].to(pool))


@the_tier
@each_size
def test_replays_follow_lengths_and_indices_that_change(
    heads: tuple[int, int], tier: str, maker: Make, must_run: Must
) -> None:
    m = maker(torch.float16)
    call = pooled(
        m, [70, 200, 30], [0] * 3, [-1] * 3, P=9, T=320, Hq=heads[0], Hv=heads[1], K=128, V=128,
        qk_l2norm=True,
    )  # fmt: skip
    ready(call, tier, must_run)
    names = ("cu_seqlens", "read_indices", "write_indices")
    steps = (
        ([0, 320, 320, 320], [1, 2, -1], [0, 2, 3]),
        ([0, 0, 64, 128], [-1, -1, 5], [6, 7, 5]),
        ([0, 1, 2, 3], [8, 8, 8], [-1, 0, 99]),
        ([0, 0, 0, 0], [-1, -1, -1], [-1, -1, -1]),
        ([0, 64, 193, 320], [3, 4, 5], [3, 4, 5]),
    )
    check_pool_replays(call, tier, m, names, steps)


@the_tier
def test_the_host_does_not_wait(
    tier: str, maker: Make, must_run: Must, request: pytest.FixtureRequest
) -> None:
    call = pooled(maker(torch.float16), [70, 200], [0, -1], [1, 2], Hq=2, Hv=4, K=128, V=128)
    ready(call, tier, must_run)
    call.run(tier)
    request.getfixturevalue("no_host_sync")
    call.run(tier)


@the_tier
def test_place_beyond_2_to_the_31_elements(tier: str, maker: Make, must_run: Must) -> None:
    """Place 4099 of states of 32 x 128 x 128: elements from 2^31 on."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    m = maker(torch.bfloat16)
    call = pooled(m, [130, 65], [2, 0], [1, -1], P=3, Hq=16, Hv=32, K=128, V=128)
    call.require(tier, must_run)
    expected = call.expected()
    pool = torch.empty(4100, 32, 128, 128, device="cuda")
    places = m.integers([4098, 1, 4099], torch.int64)
    pool[places] = call.pool.mT
    large = {
        name: torch.where(index >= 0, places[index.clamp(min=0)], -1)
        for name in ("read_indices", "write_indices")
        if (index := call.tensors[name]) is not None
    }
    out = call.with_(pool=pool.mT, **large).run(tier)
    assert_gdn_close(out, expected.out, inputs=torch.bfloat16, what="out")
    for place, wanted in expected.written.items():
        got = pool[places[place]].mT
        assert_gdn_close(got, wanted, inputs=torch.bfloat16, what=f"state {place}")
