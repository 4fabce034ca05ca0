"""What the `mea` tier does around PyTorch's kernel, on a machine that cannot run that kernel.

The kernel is replaced by its definition; folding of the query heads, bias, causality, cut keys and
empty rows are the tier's own. The kernel itself runs in tests/gpu.
"""

from __future__ import annotations

import math

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests.conformance.calls import Maker, poisoned_memory
from tests.conformance.cases import CASES, Case
from tests.tolerances import assert_close

H200 = DeviceFacts("cuda", 0, (9, 0), "sm_90", 132, 227 * 1024, 50 << 20, False)
mea = pytest.importorskip("torch_attn_tiers.tiers.decode.mea")


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Softmax attention with an additive bias and top-left causality; an empty row is NaN."""
    assert key.shape[:2] == query.shape[:2] == value.shape[:2], "K and V are not expanded"
    scores = scale * query @ key.transpose(-1, -2)
    if bias is not None:
        assert bias.dtype == query.dtype and bias.shape == scores.shape
        assert bias.stride(-2) % 16 == 0 or bias.shape[-2] == 1, "the kernel needs aligned rows"
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ value


def _taken() -> list[Case]:
    taken = []
    for case in CASES:
        if not case.everywhere:
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
        tensors["key"], tensors["value"] = expected.present_key, expected.present_value
        if problem.rank == 3:
            for name in ("key", "value"):
                tensors[name] = tensors[name].transpose(1, 2).flatten(2)
    plan = mea.TIER.build(problem)
    with poisoned_memory():
        y = plan(
            tensors["query"], tensors["key"], tensors["value"], None, tensors.get("attn_mask"),
            None, None, None,
        )  # fmt: skip
    assert y.is_contiguous()
    assert_close(y, expected.y)
