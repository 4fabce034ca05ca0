"""The tier `mea` as far as it goes without a GPU: what it hands to PyTorch's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_attn_tiers import DeviceFacts, explain
from torch_attn_tiers.tiers.decode import mea


def _one_key() -> tuple[torch.Tensor, torch.Tensor]:
    """[2,4,1,512] with a stride of 1 between keys."""
    return tuple(torch.randn(2, 4, 512, 1).half().transpose(2, 3) for _ in range(2))  # type: ignore


def _one_head() -> tuple[torch.Tensor, torch.Tensor]:
    """Slices [2,1,16,512] and [2,1,16,64] of one cache, with a stride of 1 between heads."""
    both = torch.randn(2, 16, 576).half().unsqueeze(-1).permute(0, 3, 1, 2)
    return both[..., :512], both[..., 512:]


def _problem(**scalars: Any) -> Any:
    query, key, value = (torch.randn(2, 8, n, 64).half() for n in (3, 20, 20))
    device = DeviceFacts.of("sm_90")
    return explain("decode", query, key, value, device=device, **scalars).problem


def test_batch_invariance_is_not_promised() -> None:
    assert mea.TIER.reasons(_problem()) == []
    (reason,) = mea.TIER.reasons(_problem(batch_invariant=True))
    assert "batch_invariant" in reason


@pytest.mark.parametrize("past", [0, 5])
def test_its_own_causality_is_top_left(past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[tuple[bool, bool]] = []

    def attention(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        flags.append((rest[2] is not None, rest[3]))  # a bias, its flag
        return query.clone()

    monkeypatch.setattr(mea, "_attention", attention)
    tensors = [torch.randn(2, 8, 3, 64).half() for _ in range(3)]
    caches = [torch.randn(2, 8, past, 64).half() for _ in range(2)]
    op = "decode.present" if past else "decode"
    args = [*tensors, *caches] if past else tensors
    problem = explain(op, *args, device=DeviceFacts.of("sm_90"), is_causal=True).problem
    key, value = (torch.cat(pair, 2) for pair in zip(caches, tensors[1:]))
    mea.TIER.build(problem)(tensors[0], key, value, None, None, None, None, None)
    assert flags == [(past > 0, past == 0)]


@pytest.mark.parametrize("caches", [_one_key, _one_head])
def test_strides_that_were_checked_are_those_that_the_kernel_sees(
    caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
        seen.extend((key, value))
        return query.new_zeros(*query.shape[:3], value.shape[3])

    monkeypatch.setattr(mea, "_attention", attention)
    key, value = caches()
    query = torch.randn(2, 8, 1, 512).half()
    problem = explain("decode", query, key, value, device=DeviceFacts.of("sm_90")).problem
    assert mea.TIER.reasons(problem) == []
    mea.TIER.build(problem)(query, key, value, None, None, None, None, None)
    for given, handed in zip((key, value), seen, strict=True):
        assert torch.equal(given, handed)
        assert all(stride % 8 == 0 for stride in handed.stride()[:3]), handed.stride()
