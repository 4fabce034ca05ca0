"""`torch.compile(mode="reduce-overhead")`: one graph, no step outside it, no copy of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._inductor.config
from torch._inductor.utils import run_and_get_code

from tests import oracle
from tests.conformance.calls import Maker
from tests.tolerances import assert_close

MakeMaker = Callable[..., Maker]

B, HQ, HKV, T, D, LAYERS = 4, 8, 2, 512, 64, 2


@pytest.fixture(autouse=True)
def _strict_graphs() -> Iterator[None]:
    """A graph that Inductor skips is an error, not a warning."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}), torch.no_grad():
        yield
    torch._dynamo.reset()


class Layers(torch.nn.Module):
    """Two layers of cache write and attention; the caches lie in one of the supported forms."""

    def __init__(self, form: str, write: str, m: Maker) -> None:
        super().__init__()
        self.form, self.write = form, write
        if form == "buffers":
            for layer in range(LAYERS):
                for name in ("key", "value"):
                    self.register_buffer(f"{name}{layer}", m.normal(B, HKV, T, D))
        elif form == "stacked":
            self.register_buffer("keys", m.normal(LAYERS, B, HKV, T, D))
            self.register_buffer("values", m.normal(LAYERS, B, HKV, T, D))
        elif form == "positions_first":
            self.register_buffer("keys", m.normal(LAYERS, B, T, HKV, D))
            self.register_buffer("values", m.normal(LAYERS, B, T, HKV, D))

    def caches(self, layer: int, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.form == "buffers":
            return getattr(self, f"key{layer}"), getattr(self, f"value{layer}")
        if self.form == "stacked":
            return self.keys[layer], self.values[layer]
        if self.form == "positions_first":
            return self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)
        return given[2 * layer], given[2 * layer + 1]

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, *given: torch.Tensor
    ) -> torch.Tensor:
        for layer in range(LAYERS):
            key_cache, value_cache = self.caches(layer, given)
            key = x[:, :HKV] * 0.5
            value = x[:, HKV : 2 * HKV] + 1
            if self.write == "kv_scatter":
                torch.ops.attn_tiers.kv_scatter_(key_cache, value_cache, key, value, positions)
            else:
                torch.ops.attn_tiers.tensor_scatter_(key_cache, key, positions)
                torch.ops.attn_tiers.tensor_scatter_(value_cache, value, positions)
            x = x + torch.ops.attn_tiers.decode(x, key_cache, value_cache, lengths)
        return x


@pytest.mark.parametrize("write", ["kv_scatter", "tensor_scatter"])
@pytest.mark.parametrize("form", ["buffers", "stacked", "positions_first", "static_inputs"])
def test_compiled_step_is_one_graph_and_copies_no_cache(
    form: str, write: str, maker: MakeMaker
) -> None:
    m = maker()
    model = Layers(form, write, m)
    given: list[torch.Tensor] = []
    if form == "static_inputs":
        given = [m.normal(B, HKV, T, D) for _ in range(2 * LAYERS)]
        for cache in given:
            torch._dynamo.mark_static_address(cache)
    buffers = given or list(model.buffers())
    addresses = [b.data_ptr() for b in buffers]
    shadow = [b.clone() for b in buffers]
    eager = Layers(form, write, m)
    eager.load_state_dict(model.state_dict())
    positions, lengths = m.integers([0] * B), m.lengths([0] * B)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def step(i: int) -> None:
        x = m.normal(B, HQ, 1, D)
        positions.copy_(m.integers([i, 100 + i, -1, T - 2 + i]))
        lengths.copy_(m.lengths([i + 1, 101 + i, 0, T]))
        expected = eager(x, positions, lengths, *shadow)
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(x, positions, lengths, *given)
        # Fused elementwise steps round elsewhere than eager ones.
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)

    _, codes = run_and_get_code(step, 0)
    code = "\n".join(codes)
    cache_shapes = {tuple(b.shape) for b in buffers} | {(B, HKV, T, D), (B, T, HKV, D)}
    for shape in cache_shapes:
        text = ", ".join(map(str, shape))
        assert f"empty_strided_cuda(({text})" not in code, "a cache is cloned"
    assert code.count("attn_tiers.decode.default(") >= LAYERS
    for i in range(1, 6):
        step(i)
    assert [b.data_ptr() for b in buffers] == addresses
    for actual, expected in zip(buffers, shadow if given else eager.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


def test_compiled_decode_replays_with_other_lengths(maker: MakeMaker) -> None:
    m = maker()
    tensors = m.qkv(B=3, Sq=2, T=700)
    lengths = m.lengths([1, 2, 3])

    def attend(query: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.ops.attn_tiers.decode(
            query, tensors["key"], tensors["value"], lengths, is_causal=True
        ) * 1.0  # fmt: skip

    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for values in ([1, 2, 3], [700, 0, 5], [0, 0, 0], [33, 700, 1], [2, 1, 700]):
        lengths.copy_(m.lengths(values))
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(tensors["query"], lengths)
        assert_close(y, oracle.decode(**tensors, nonpad_kv_seqlen=lengths, is_causal=True).y)


def test_batches_of_1_2_8_64_recompile_at_most_once(maker: MakeMaker) -> None:
    m = maker()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def attend(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return torch.ops.attn_tiers.decode(query, key, value, lengths)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for batch in (1, 2, 8, 64):
        tensors = m.qkv(B=batch, T=130)
        lengths = m.lengths(list(range(batch)))
        y = compiled(*tensors.values(), lengths)
        assert_close(y, oracle.decode(**tensors, nonpad_kv_seqlen=lengths).y)
    assert counter.frame_count <= 2
