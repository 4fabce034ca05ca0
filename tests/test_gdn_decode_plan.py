"""What the recurrent step is compiled for: by the shapes of a call, or by a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from csrc_free_ops.facts import DeviceFacts, TensorFacts, contiguous_facts

pytest.importorskip("triton")

from csrc_free_ops.gdn.decode import (
    GdnDecodePlan,
    RecurrentConfig,
    default_config,
    plan_gdn_decode,
)

H200 = DeviceFacts.of("sm_90")


def facts(B: int, K: int = 128, dtype: torch.dtype = torch.float32) -> tuple[TensorFacts, ...]:
    """Of q, v, gates and states with 16 and 32 heads, one token a row."""
    return (
        contiguous_facts((B, 1, 16, K), torch.bfloat16),
        contiguous_facts((B, 1, 32, 128), torch.bfloat16),
        contiguous_facts((B, 1, 32), torch.float32),
        contiguous_facts((B, 32, 128, K), dtype),
    )


def plan(
    config: RecurrentConfig, B: int = 8, K: int = 128, device: DeviceFacts = H200, **changes: Any
) -> GdnDecodePlan:
    q, v, gate, state = facts(B, K)
    inputs = {"state": state, **changes}
    return plan_gdn_decode(q, q, v, gate, gate, device=device, scale=1.0, config=config, **inputs)


@pytest.mark.parametrize(
    ("B", "dtype", "changes"),
    [
        (1, torch.float32, {}),
        (1, torch.bfloat16, {}),
        (2, torch.float32, {"bv": 64}),  # 4 MiB
        (15, torch.float32, {"bv": 64}),
        (16, torch.float32, {"lanes": 16}),  # 32 MiB
        (31, torch.bfloat16, {"bv": 64}),
        (32, torch.bfloat16, {"load_policy": "evict_first", "store_policy": "evict_first"}),
    ],
)
def test_configuration_goes_by_the_bytes_of_the_states(
    B: int, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    q, _, _, state = facts(B, dtype=dtype)
    assert default_config(q, state) == RecurrentConfig(32, 8, 4)._replace(**changes)


def test_states_are_asked_for_ahead() -> None:
    made = plan(RecurrentConfig(32, 8, 4, prefetch=True))
    assert made.launch.constants["PREFETCH"] is True


INDICES = contiguous_facts((8,), torch.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"read_indices": INDICES, "write_indices": INDICES},
        {"device": DeviceFacts.of("sm_80")},
        {"state": contiguous_facts((8, 32, 128, 128), torch.float32)._replace(
            stride=(32 * 128 * 128, 128 * 128, 1, 128))},
        {"K": 80},
        {"K": 192},  # no power of two of lines
    ],
    ids=str,
)  # fmt: skip
def test_states_that_cannot_be_asked_for_ahead(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="config.prefetch is True; it must be False with indices"):
        plan(RecurrentConfig(32, 8, 4, prefetch=True), **changes)


def test_states_are_asked_for_ahead_where_that_was_faster() -> None:
    """Many in 16 bits, on Hopper, and without indices."""
    tokens = {
        n: contiguous_facts((64, 1, h, 128), torch.bfloat16) for n, h in (("q", 16), ("v", 32))
    }
    gate = contiguous_facts((64, 1, 32), torch.float32)
    state = contiguous_facts((64, 32, 128, 128), torch.bfloat16)

    def constants(device: str, indices: TensorFacts | None = None) -> Any:
        plan = plan_gdn_decode(
            tokens["q"], tokens["q"], tokens["v"], gate, gate, state, DeviceFacts.of(device),
            read_indices=indices, write_indices=indices, scale=1.0,
        )  # fmt: skip
        return plan.launch.constants["PREFETCH"], plan.launch.constants["BV"]

    assert constants("sm_90") == (True, 64)
    assert constants("sm_80") == (False, 32)
    assert constants("sm_90", contiguous_facts((64,), torch.int32)) == (False, 32)
