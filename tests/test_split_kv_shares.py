"""How the split-KV kernel deals tiles out to programs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from csrc_free_ops.decode import SplitKVConfig, plan_split_kv
from csrc_free_ops.facts import DeviceFacts, contiguous_facts, device_facts, tensor_facts
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


DEVICE_FACTS = device_facts(DEVICE)
FEW = DEVICE_FACTS._replace(multiprocessors=8)  # so that splits have several tiles


def _decode(
    lengths: list[int],
    balanced: bool | None = None,
    capacity: int = 256,
    device: DeviceFacts = DEVICE_FACTS,
    rows: int = 1,
    block_n: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel gives, what is right)."""
    generator = torch.Generator().manual_seed(0)
    batch = len(lengths)
    query = torch.randn(batch, 4, rows, 32, generator=generator)
    key = torch.randn(batch, 2, capacity, 32, generator=generator)
    value = torch.randn(batch, 2, capacity, 16, generator=generator)
    for b, n in enumerate(lengths):
        key[b, :, n:] = value[b, :, n:] = float("nan")
    counts = torch.tensor(lengths, dtype=torch.int32)
    expected = oracle.decode(query, key, value, nonpad_kv_seqlen=counts, is_causal=rows > 1)
    query, key, value, counts = (x.to(DEVICE) for x in (query, key, value, counts))
    plan = plan_split_kv(
        tensor_facts(query), tensor_facts(key), tensor_facts(value), device,
        lengths_dtype=torch.int32, is_causal=rows > 1, scale=32**-0.5,
        config=SplitKVConfig(16, block_n, 4, 2, 1, balanced=balanced),
    )  # fmt: skip
    out = torch.full((batch, 4, rows, 16), float("nan"), device=DEVICE)
    plan.run(query, key, value, counts, None, None, out)
    return out, expected.y


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_shares_of_any_size_give_the_same_attention(lengths: list[int]) -> None:
    out, expected = _decode(lengths)
    assert_close(out, expected, tier="flash")


@pytest.mark.parametrize("balanced", [None, True, False])
@pytest.mark.parametrize("n", [0, 1, 16, 17, 63, 64, 65, 80, 255, 256])
def test_one_row_in_shares_or_splits(n: int, balanced: bool | None) -> None:
    """Four splits a head, of one to four tiles, some of them empty."""
    out, expected = _decode([n], balanced, device=FEW)
    assert_close(out, expected, tier="flash")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_splits_of_rows_of_any_length(lengths: list[int]) -> None:
    out, expected = _decode(lengths, balanced=False)
    assert_close(out, expected, tier="flash")


@pytest.mark.parametrize("rows", [1, 3, 24])
def test_rows_of_one_tile_each(rows: int) -> None:
    out, expected = _decode([20, 0, 13], capacity=20, block_n=32, rows=rows)
    assert_close(out, expected, tier="flash")


def _is_balanced(
    batch: int,
    heads: int,
    capacity: int,
    config: SplitKVConfig | None = None,
    lengths_dtype: torch.dtype | None = torch.int32,
    q_len: int = 1,
    batch_invariant: bool = False,
) -> bool:
    query = contiguous_facts((batch, 4 * heads, q_len, 128), torch.bfloat16)
    cache = contiguous_facts((batch, heads, capacity, 128), torch.bfloat16)
    plan = plan_split_kv(
        query, cache, cache, DeviceFacts.of("sm_90"), lengths_dtype=lengths_dtype, scale=1.0,
        config=config, batch_invariant=batch_invariant,
    )  # fmt: skip
    constants = plan.launch.constants
    assert not (constants["BALANCED"] and constants["ONE_TILE"])
    return constants["BALANCED"]


def test_tasks_of_equal_length_are_split_where_that_fills_the_device() -> None:
    assert not _is_balanced(1, 8, 4096)
    assert not _is_balanced(1, 8, 131072)
    assert _is_balanced(16, 8, 8192), "of any length each"
    assert not _is_balanced(16, 8, 8192, lengths_dtype=None), "all full"
    assert not _is_balanced(16, 8, 64), "one tile each, whatever the length"
    assert _is_balanced(32, 8, 64), "more tasks than places"
    assert _is_balanced(1, 100, 131072), "one split a head leaves a quarter of the device idle"
    assert not _is_balanced(1, 100, 131072, SplitKVConfig(16, 64, 4, 2, 1, balanced=False))
    assert _is_balanced(1, 8, 4096, SplitKVConfig(16, 64, 4, 2, 1, balanced=True))


@pytest.mark.parametrize("more", [{"q_len": 8}, {"batch_invariant": True}])
def test_a_balanced_schedule_is_refused_where_there_is_none(more: dict) -> None:
    with pytest.raises(ValueError, match="balanced"):
        _is_balanced(1, 8, 4096, SplitKVConfig(16, 64, 4, 2, 1, balanced=True), **more)


def test_the_reciprocal_divides_exactly() -> None:
    """As `_shares_by_reciprocal` does, next to the largest product that the plan allows."""
    for splits in range(2, 600):
        reciprocal = -(-(2**31) // splits)
        most = (2**31 - 1) // splits
        for tiles in (1, splits - 1, splits, most // splits * splits - 1, most - 1, most):
            assert (2 * tiles * reciprocal) >> 32 == tiles // splits
