"""What tier `mea` makes around PyTorch's kernel, with the kernel's contract played in PyTorch.

The kernel itself needs a GPU (tests/gpu). This holds what is ours: folded heads, the bias, short
masks, rows that see nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import oracle
from tests.tolerances import assert_close
from torch_attn_tiers.tiers.decode import mea

B, HQ, HKV, SQ, T, D, DV = 2, 6, 2, 3, 21, 8, 16


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """`_scaled_dot_product_efficient_attention`, with what it asserts and the layout it returns."""
    batch, heads, rows, _ = query.shape
    assert key.shape[:2] == value.shape[:2] == (batch, heads)
    logits = scale * query @ key.mT
    if bias is not None:
        assert bias.shape == (batch, heads, rows, key.shape[2]) and bias.dtype == query.dtype
        assert bias.stride(3) == 1
        assert all(s % 8 == 0 for s, n in zip(bias.stride()[:3], bias.shape) if n > 1)
        logits = logits + bias
    if is_causal:
        hidden = torch.ones(rows, key.shape[2], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    result = logits.softmax(3) @ value  # a row that sees nothing is NaN
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _qkv(**sizes: int) -> dict[str, torch.Tensor]:
    hq, sq = sizes.get("hq", HQ), sizes.get("sq", SQ)
    return {
        "query": torch.randn(B, hq, sq, D),
        "key": torch.randn(B, HKV, T, D),
        "value": torch.randn(B, HKV, T, DV),
    }


def _mask(*shape: int) -> dict[str, torch.Tensor]:
    mask = torch.randn(*shape)
    return {"attn_mask": mask.masked_fill(torch.rand(*shape) < 0.4, -torch.inf)}


def _rows_hidden(mask: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask["attn_mask"][..., 1, :] = -torch.inf
    return mask


def _rank_3() -> dict[str, torch.Tensor]:
    return {
        "query": torch.randn(B, SQ, HQ * D),
        "key": torch.randn(B, T, HKV * D),
        "value": torch.randn(B, T, HKV * DV),
    }


HEADS = {"q_num_heads": HQ, "kv_num_heads": HKV}
CASES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "plain": (_qkv(), {}),
    "single row": (_qkv(sq=1), {"scale": 0.3}),
    "no groups": (_qkv(hq=HKV), {}),
    "causal, no groups": (_qkv(hq=HKV), {"is_causal": True}),
    "causal, groups": (_qkv(), {"is_causal": True}),
    "causal, single row": (_qkv(sq=1), {"is_causal": True}),
    "windows": (_qkv(), {"left_window_size": 1, "right_window_size": 2}),
    "windows that leave rows empty": (
        {**_qkv(), "key": torch.randn(B, HKV, 1, D), "value": torch.randn(B, HKV, 1, DV)},
        {"left_window_size": 0},
    ),
    "query strided": (
        {**_qkv(), "query": torch.randn(B, SQ, HQ, D).transpose(1, 2)},
        {"is_causal": True},
    ),
    "rank 3": (_rank_3(), HEADS),
    "rank 3, causal": (_rank_3(), {**HEADS, "is_causal": True}),
    "mask of rank 1": ({**_qkv(), **_mask(T)}, {}),
    "mask of rank 2": ({**_qkv(), **_mask(SQ, T)}, {}),
    "mask of rank 3": ({**_qkv(), **_mask(HQ, SQ, T)}, {}),
    "mask of rank 4": ({**_qkv(), **_mask(B, HQ, SQ, T)}, {"is_causal": True}),
    "mask of a batch": ({**_qkv(), **_mask(B, 1, 1, T)}, {"left_window_size": 2}),
    "mask in float16": ({**_qkv(), "attn_mask": torch.randn(SQ, T).half()}, {}),
    "mask of lowest numbers": (
        {**_qkv(), "attn_mask": torch.full((SQ, T), torch.finfo(torch.float32).min)},
        {},
    ),
    "short mask": ({**_qkv(), **_mask(B, 1, SQ, 5)}, {}),
    "mask of one key": ({**_qkv(), "attn_mask": torch.zeros(SQ, 1)}, {}),
    "rows that see nothing": ({**_qkv(), **_rows_hidden(_mask(HQ, SQ, T))}, {}),
    "rows that see nothing, rank 3": (
        {**_rank_3(), **_rows_hidden(_mask(B, 1, SQ, T))},
        HEADS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mea_around_its_kernel_agrees_with_the_oracle(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, scalars = CASES[name]
    monkeypatch.setattr(mea, "_attention", _kernel)
    problem = torch_attn_tiers.explain("decode", **tensors, **scalars).problem
    assert [p(problem) for p in mea.TIER.predicates if p is not mea._device] == [None] * 6
    args = [tensors.get(n) for n in ("query", "key", "value", "nope", "attn_mask", "nope")]
    result = mea.TIER.build(problem)(*args, None, None)
    assert result.is_contiguous()
    assert_close(result, oracle.decode(**tensors, **scalars).y, tier="mea")


def test_keys_past_a_short_mask_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {**_qkv(), "attn_mask": torch.zeros(SQ, 5)}
    expected = oracle.decode(**tensors).y
    tensors["key"][:, :, 5:] = torch.nan
    tensors["value"][:, :, 5:] = torch.inf
    monkeypatch.setattr(mea, "_attention", _kernel)
    problem = torch_attn_tiers.explain("decode", **tensors).problem
    result = mea.TIER.build(problem)(
        tensors["query"], tensors["key"], tensors["value"], None, tensors["attn_mask"], *[None] * 3
    )
    assert_close(result, expected, tier="mea")
