"""`pool_` in the tier `flashinfer` of `gdn_chunk_prefill`, without the library: by a stand-in."""

# ruff: noqa: F811  (fixtures that are imported)

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests.conformance.calls import Maker, same_bits
from tests.conformance.gdn_decode_calls import copy_with_storage
from tests.conformance.gdn_pool_calls import PoolCall
from tests.fake_gdn_library import FakeGdn
from tests.gdn_library_cases import POOL_CASES, wide_pool
from tests.test_predicates import DEVICES
from tests.test_tier_flashinfer import (  # noqa: F401  (fixtures)
    TAKES,
    _fresh,
    capturing,
    module,
    runs,
)

pytest.importorskip("triton")


def _call(*args: Any, **options: Any) -> PoolCall:
    return wide_pool(Maker(torch.float16), *args, **options)


def _prepare(call: PoolCall) -> torch_attn_tiers.Explanation:
    return torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)


def _ran(call: PoolCall, **scalars: Any) -> str:
    with torch_attn_tiers.record_dispatch() as records:
        call.op()(*call.args(), **call.scalars, **scalars)
    return records[0].tier


def _reasons(call: PoolCall, device: str) -> str:
    explanation = torch_attn_tiers.explain(
        call.op(), *call.args(), device=DEVICES[device], tier="flashinfer", **call.scalars
    )
    return "; ".join(explanation.verdicts[0].reasons)


# ------------------------------------------------------------------------------ what it takes


@pytest.mark.parametrize("device", TAKES)
def test_takes_pools_without_tracked_states(device: str, module: Any) -> None:
    assert _reasons(_call([70, 5], [0, 1]), device) == ""
    tracked = _call([70, 5], [0, 1], None, [(64, 2), (0, 0)])
    assert "a state inside a sequence by writing one for every 64 tokens" in _reasons(
        tracked, device
    )


def test_pools_in_16_bits_are_not_for_compute_capability_10(module: Any) -> None:
    call = _call([70, 5], [0, 1], pool=torch.bfloat16)
    assert _reasons(call, "sm_90") == ""
    assert "pool must be float32 on compute capability 10.x" in _reasons(call, "sm_100")


# ------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("name", POOL_CASES)
def test_agrees_with_the_oracle(name: str, runs: FakeGdn) -> None:
    POOL_CASES[name](Maker(torch.float16)).check("flashinfer")


@pytest.mark.parametrize("state", [torch.float32, torch.float16])  # bfloat16 is cut off here
def test_bits_are_those_of_the_default_overload(state: torch.dtype, runs: FakeGdn) -> None:
    writes = [4, 2, 5, -1]
    call = _call([130, 0, 64, 5], [0, 3, -1, 1], writes, pool=state)
    out, final_state = call.gathered().run("flashinfer")
    got = call.with_(pool=copy_with_storage(call.pool))
    assert same_bits(got.run("flashinfer"), out)
    for i, place in enumerate(writes):
        assert place < 0 or same_bits(got.pool[place], final_state[i].to(state))


def test_the_library_gets_dense_states_and_no_indices(runs: FakeGdn) -> None:
    call = _call([70, 5], [-1, 3], [-1, 2])
    call.run("flashinfer")
    given = runs.calls[-1]
    assert given["state_indices"] is None and given["state_checkpoints"] is None
    assert given["initial_state"].shape == given["output_state"].shape == (2, 2, 128, 128)
    assert not given["initial_state"][0].any()


def test_indices_changed_in_place_are_seen(runs: FakeGdn) -> None:
    call = _call([70, 130], [0, 1], [2, 3])
    call.check("flashinfer")
    for name, values in (
        ("read_indices", [5, -1]),
        ("write_indices", [-1, 0]),
        ("cu_seqlens", [0, 100, 200]),
    ):
        call.tensors[name].copy_(torch.tensor(values))  # type: ignore[union-attr]
    call.check("flashinfer")


@pytest.mark.parametrize("bounds", [[0, 9, 5], [0, 5, 200], [-7, 5, 9], [150, 0, 64]])
def test_bounds_that_break_the_rules_touch_no_other_state(bounds: list[int], runs: FakeGdn) -> None:
    call = _call([64, 86], [0, -1], [2, 3])
    call = call.with_(cu_seqlens=torch.tensor(bounds))
    before = call.pool.clone()
    call.run("flashinfer")
    for place in (0, 1, 4, 5):
        assert same_bits(call.pool[place], before[place])


# -------------------------------------------------------------------------- builds and captures


def test_a_variant_serves_dense_states_and_pools(runs: FakeGdn) -> None:
    call = _call([70, 5], [0, 1])
    assert _ran(call) == "reference" and not runs.kernels
    dense = call.gathered()
    torch_attn_tiers.prepare(dense.op(), *dense.args())
    kernels = set(runs.kernels)
    assert _ran(call) == _ran(_call([3, 200, 1], [0, -1, 2], [5, 4, 3])) == "flashinfer"
    assert runs.kernels == kernels


def test_is_ready_in_a_capture_once_it_is_prepared(runs: FakeGdn, capturing: Any) -> None:
    call = _call([70, 5], [0, 1])
    capturing()
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match=r"prepare\('gdn_chunk_prefill.po"):
        _ran(call, tier="flashinfer")
    capturing(False)
    assert _prepare(call).chosen == "flashinfer"
    capturing()
    known = set(runs.kernels)
    assert _ran(call) == _ran(_call([6, 7, 8], [0, 1, -1])) == "flashinfer"
    assert runs.kernels == known
