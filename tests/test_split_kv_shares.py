"""How the split-KV kernel deals tiles out to programs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from csrc_free_ops.decode import SplitKVConfig, plan_split_kv
from csrc_free_ops.facts import device_facts, tensor_facts
from tests import oracle
from tests.tolerances import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = {
    "all full": [256, 256, 256],
    "mixed": [256, 0, 201],
    "one long": [0, 256, 1],
    "fewer tiles than programs": [17, 1, 0],
    "nothing": [0, 0, 0],
}


def _decode(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel gives, what is right)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 32, generator=generator)
    key = torch.randn(3, 2, 256, 32, generator=generator)
    value = torch.randn(3, 2, 256, 16, generator=generator)
    for b, n in enumerate(lengths):
        key[b, :, n:] = value[b, :, n:] = float("nan")
    counts = torch.tensor(lengths, dtype=torch.int32)
    expected = oracle.decode(query, key, value, nonpad_kv_seqlen=counts)
    query, key, value, counts = (x.to(DEVICE) for x in (query, key, value, counts))
    plan = plan_split_kv(
        tensor_facts(query), tensor_facts(key), tensor_facts(value), device_facts(DEVICE),
        lengths_dtype=torch.int32, scale=32**-0.5, config=SplitKVConfig(16, 16, 4, 2, 1),
    )  # fmt: skip
    out = torch.full((3, 4, 1, 16), float("nan"), device=DEVICE)
    plan.run(query, key, value, counts, None, None, out)
    return out, expected.y


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_shares_of_any_size_give_the_same_attention(lengths: list[int]) -> None:
    out, expected = _decode(lengths)
    assert_close(out, expected, tier="flash")
