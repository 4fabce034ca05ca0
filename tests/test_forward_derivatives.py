"""Forward derivatives are an error in every operator, real or fake, and never lost in silence."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import torch_attn_tiers  # noqa: F401

ops = torch.ops.attn_tiers
OPERATORS = [
    getattr(getattr(ops, schema.name.partition("::")[2]), schema.overload_name or "default")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("attn_tiers::")
]
MESSAGE = "is inference-only and an input has a forward derivative"


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 1, 16), torch.randn(2, 2, 8, 16)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_each_operator_refuses_a_tangent(operator: Any, where: str) -> None:
    """Before it looks at anything else, so that any tensors will do."""
    arguments = [a for a in operator._schema.arguments if not a.kwarg_only]
    required = [a.name for a in arguments if not a.has_default_value()]
    mode = FakeTensorMode() if where == "fake" else contextlib.nullcontext()
    for dual in range(len(required)):
        with mode, forward_ad.dual_level():
            tensors = [torch.ones(2, device="cpu" if where == "fake" else where) for _ in required]
            tensors[dual] = forward_ad.make_dual(tensors[dual], tensors[dual].clone())
            with pytest.raises(RuntimeError, match=MESSAGE):
                operator(*tensors)


@pytest.mark.parametrize("tier", ["flash", "unfused"])
@pytest.mark.parametrize("which", ["query", "value", "sinks", "attn_mask"])
def test_a_tier_does_not_matter(tier: str, which: str) -> None:
    query, key = _inputs()
    inputs = dict(query=query, key=key, value=key, sinks=torch.zeros(4), attn_mask=torch.zeros(8))
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        query, key, value, sinks, mask = inputs.values()
        with pytest.raises(RuntimeError, match=MESSAGE):
            ops.decode(query, key, value, None, mask, sinks, tier=tier)
        with torch.no_grad(), pytest.raises(RuntimeError, match=MESSAGE):
            ops.decode(query, key, value, None, mask, sinks, tier=tier)
        with torch.inference_mode():  # turns forward derivatives off, no_grad does not
            ops.decode(query, key, value, None, mask, sinks, tier=tier)


def test_an_open_level_alone_is_no_error() -> None:
    query, key = _inputs()
    expected = ops.decode(query, key, key)
    cache = torch.zeros_like(key)
    with forward_ad.dual_level():
        taken = forward_ad.unpack_dual(forward_ad.make_dual(query, query)).primal
        ops.tensor_scatter_(cache, key)
        assert ops.decode(taken, cache, cache).equal(expected)


def test_linearize_is_an_error_and_a_call_that_takes_no_part_in_it_works() -> None:
    query, key = _inputs()
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.func.linearize(lambda x: ops.decode(x, key, key), query)
    output, tangent = torch.func.linearize(lambda x: x * ops.decode(query, key, key), query)
    expected = ops.decode(query, key, key)
    assert output.equal(query * expected)
    assert tangent(query).equal(query * expected)


@pytest.mark.parametrize("level", ["outside", "inside"])
def test_a_compiled_call_is_the_same_error(level: str) -> None:
    query, key = _inputs()

    def decode(query: torch.Tensor) -> torch.Tensor:
        return ops.decode(query, key, key)

    def with_level(query: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return decode(forward_ad.make_dual(query, query))

    if level == "inside":
        with pytest.raises(Exception, match=MESSAGE):
            torch.compile(with_level, backend="aot_eager", fullgraph=True)(query)
        return
    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True)
    with forward_ad.dual_level():
        with pytest.raises(Exception, match=MESSAGE):
            compiled(forward_ad.make_dual(query, query))
