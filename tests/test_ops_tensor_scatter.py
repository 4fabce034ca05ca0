"""How the cache writes behave as PyTorch operators: mutation, compile without a copy, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import torch_attn_tiers  # noqa: F401  registers the operators

tensor_scatter_ = torch.ops.attn_tiers.tensor_scatter_
kv_scatter_ = torch.ops.attn_tiers.kv_scatter_
decode = torch.ops.attn_tiers.decode

B, HKV, T, S, D, DV = 3, 2, 8, 2, 4, 6
INDICES = torch.tensor([0, 7, -1])


def _caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, HKV, T, D), torch.randn(B, HKV, T, DV)


def _updates() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, DV)


SCATTERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "linear": ((_caches()[0], _updates()[0], INDICES), {}),
    "from the start": ((_caches()[0], _updates()[0]), {}),
    "circular": ((_caches()[0], _updates()[0], INDICES.int()), {"write_mode": "circular"}),
    "strided": ((_caches()[0].transpose(1, 2), _updates()[0].transpose(1, 2)), {"axis": 1}),
    "rank 2": ((torch.zeros(B, T), torch.ones(B, S), INDICES), {"axis": -1}),
    "nothing": ((_caches()[0], _updates()[0][:, :, :0], INDICES), {}),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_opcheck_tensor_scatter(name: str) -> None:
    args, scalars = SCATTERS[name]
    opcheck(tensor_scatter_.default, args, scalars)


def test_opcheck_kv_scatter() -> None:
    opcheck(kv_scatter_.default, (*_caches(), *_updates(), INDICES))
    opcheck(kv_scatter_.default, (*_caches(), *_updates()), {"write_mode": "circular"})


def test_autograd_is_told_of_the_write() -> None:
    """A value saved for a backward pass and then overwritten must be noticed."""
    (cache, _), (update, _) = _caches(), _updates()
    weight = torch.ones(D, requires_grad=True)
    loss = (cache * weight).sum()
    tensor_scatter_(cache, update, INDICES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_can_be_written() -> None:
    with torch.inference_mode():
        (cache, _), (update, _) = _caches(), _updates()
        tensor_scatter_(cache, update, INDICES)
    assert torch.equal(cache[0, :, :S], update[0])


def test_input_that_requires_grad_is_an_error() -> None:
    caches, updates = _caches(), _updates()
    updates[1].requires_grad_()
    with pytest.raises(RuntimeError, match="inference-only"):
        kv_scatter_(*caches, *updates)
    with torch.no_grad():
        kv_scatter_(*caches, *updates)


def _serving_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    kv_scatter_(key_cache, value_cache, key * 2, value, lengths)
    return decode(query * 2, key_cache, value_cache, lengths + 1)


def _serving_args() -> list[torch.Tensor]:
    query = torch.randn(B, HKV * 2, 1, D)
    return [query, *(u[:, :, :1] for u in _updates()), *_caches(), torch.tensor([0, 3, 7])]


def test_compiled_write_is_in_place_and_clones_no_cache() -> None:
    torch._dynamo.reset()
    args = _serving_args()
    expected_args = [t.clone() for t in args]
    expected = _serving_step(*expected_args)
    result, (code, *_) = run_and_get_code(torch.compile(_serving_step, fullgraph=True), *args)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(args[3:5], expected_args[3:5])
    for cache in args[3:5]:
        assert f"empty_strided_cpu({tuple(cache.shape)}" not in code
    assert "copy_" not in code.split("def call")[1].split("runner")[0]


def test_compiled_writes_of_layers_into_slices_of_one_cache() -> None:
    """Per-layer caches taken as views inside the graph: the usual form of a model."""

    def step(cache: torch.Tensor, update: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in cache.unbind(0):
            tensor_scatter_(layer, update, lengths)
        return cache.sum()

    torch._dynamo.reset()
    cache = torch.zeros(2, B, HKV, T, D)
    update, lengths = torch.randn(B, HKV, 1, D), torch.tensor([0, 3, 7])
    expected_cache = cache.clone()
    expected = step(expected_cache, update, lengths)
    result = torch.compile(step, fullgraph=True)(cache, update, lengths)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(cache, expected_cache)


def test_batch_sizes_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_serving_step, fullgraph=True, backend=counter)
    for batch in (1, 2, 8, 64):
        compiled(*(t[:1].repeat(batch, *(1,) * (t.dim() - 1)) for t in _serving_args()))
    assert counter.frame_count <= 2


def test_export_with_the_caches_as_buffers() -> None:
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("key_cache", torch.zeros(B, HKV, T, D))
            self.register_buffer("value_cache", torch.zeros(B, HKV, T, DV))

        def forward(self, query: Any, key: Any, value: Any, lengths: Any) -> Any:
            return _serving_step(query, key, value, self.key_cache, self.value_cache, lengths)

    query, key, value, _, _, lengths = _serving_args()
    module = Step()
    exported = torch.export.export(module, (query, key, value, lengths)).module()
    expected = module(query, key, value, lengths)
    torch.testing.assert_close(exported(query, key, value, lengths), expected)
    torch.testing.assert_close(exported.key_cache, module.key_cache)
