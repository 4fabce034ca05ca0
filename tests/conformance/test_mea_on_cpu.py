"""What the `mea` tier does around PyTorch's kernel, on a machine that cannot run that kernel.

The kernel is replaced by its definition; folding of the query heads, bias, causality, cut keys and
empty rows are the tier's own. The kernel itself runs in tests/gpu.
"""

from __future__ import annotations

import math

import pytest
import torch

import torch_attn_tiers
from tests import oracle
from tests.conformance.calls import Maker, poisoned_memory
from tests.conformance.cases import CASES, Case
from tests.tolerances import assert_close
from torch_attn_tiers.tiers.decode import mea

H200 = torch_attn_tiers.DeviceFacts.of("sm_90")


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Softmax attention with an additive bias and top-left causality; an empty row is NaN.

    With what PyTorch's kernel asserts of a bias, and in the layout that it returns.
    """
    assert key.shape[:2] == query.shape[:2] == value.shape[:2], "K and V are not expanded"
    scores = scale * query @ key.transpose(-1, -2)
    if bias is not None:
        assert bias.dtype == query.dtype and bias.shape == scores.shape
        assert bias.stride(3) == 1
        for size, stride in zip(bias.shape[:3], bias.stride()):
            assert size == 1 or stride * bias.itemsize % 16 == 0, "it reads 16 bytes at a time"
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous().transpose(1, 2)


def _taken() -> list[Case]:
    taken = []
    for case in CASES:
        if not case.everywhere or not case.is_legal_in(torch.float32):
            continue
        call = case.make(Maker(torch.float32))
        verdicts = torch_attn_tiers.explain(
            call.op(), *call.args(), device=H200, **call.scalars
        ).verdicts
        if any(verdict.name == "mea" and verdict.eligible for verdict in verdicts):
            taken.append(case)
    return taken


@pytest.mark.parametrize("case", _taken(), ids=lambda case: case.name)
def test_mea_around_its_kernel_agrees_with_the_oracle(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mea, "_attention", _kernel)
    call = case.make(Maker(torch.float32))
    problem = torch_attn_tiers.explain(call.op(), *call.args(), device=H200, **call.scalars).problem
    expected = call.expected()
    tensors = dict(call.tensors)
    if call.overload == "present":
        tensors["key"] = expected.present_key.contiguous()
        tensors["value"] = expected.present_value.contiguous()
    plan = mea.TIER.build(problem)
    with poisoned_memory():
        y = plan(
            tensors["query"], tensors["key"], tensors["value"], None, tensors.get("attn_mask"),
            None, None, None,
        )  # fmt: skip
    assert y.is_contiguous()
    assert_close(y, expected.y)


def test_keys_past_a_short_mask_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Maker(torch.float32)
    tensors = {**m.qkv(Sq=3), "attn_mask": torch.zeros(3, 5)}
    expected = oracle.decode(**tensors).y
    tensors["key"][:, :, 5:] = math.nan
    tensors["value"][:, :, 5:] = math.inf
    monkeypatch.setattr(mea, "_attention", _kernel)
    problem = torch_attn_tiers.explain("decode", **tensors).problem
    y = mea.TIER.build(problem)(
        tensors["query"], tensors["key"], tensors["value"], None, tensors["attn_mask"], *[None] * 3
    )
    assert_close(y, expected)
