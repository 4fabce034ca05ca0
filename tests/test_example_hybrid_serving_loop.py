"""examples/hybrid_serving_loop.py: what it serves from kept states is what PyTorch computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo

import torch_attn_tiers

PATH = Path(__file__).parents[1] / "examples" / "hybrid_serving_loop.py"
CAPACITY = 256


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hybrid_serving_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_serving_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_server(example: ModuleType, dtype: torch.dtype, prefixes: int = 4) -> Any:
    """On the CPU, through a compiled step, with memories that start as NaN."""
    torch._dynamo.reset()
    config = example.Config(width=64, hidden=96, K=16, V=24)
    server = example.Server(example.Decoder(config, dtype), 3, prefixes, CAPACITY, "eager")
    store = server.store
    tensors = [*store.pools.values(), *store.windows.values()]
    for tensor in (*tensors, *(cache for pair in store.caches.values() for cache in pair)):
        tensor.fill_(torch.nan)
    server.warm_up(graph=False)
    return server


def two_rounds(example: ModuleType, server: Any, count: int = 4) -> list:
    first = example.make_requests(count, CAPACITY, 512, seed=1)
    server.serve(first)
    second = example.follow_up(first, 512)
    server.serve(second)
    return [*first, *second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_served_requests_match_plain_pytorch(example: ModuleType, dtype: torch.dtype) -> None:
    server = make_server(example, dtype)
    requests = two_rounds(example, server)
    assert example.check(server.model, requests).startswith("ok")
    resumed = [request.resumed for request in requests]
    assert all(resumed[4:]), "each second round goes on from a state that the first one kept"
    assert any(resumed[:4]) and not all(resumed[:4])


@pytest.mark.parametrize("prefixes", [0, 1, 2])
def test_few_places_for_prefixes(example: ModuleType, prefixes: int) -> None:
    """With one place a prompt resumes from the state that its own then takes the place of."""
    server = make_server(example, torch.float32, prefixes)
    requests = two_rounds(example, server)
    assert example.check(server.model, requests).startswith("ok")
    assert any(request.resumed for request in requests) == (prefixes > 0)
    assert len(server.prefixes.kept) <= prefixes


def test_prompt_that_ends_at_a_page_is_kept_by_its_last_state(example: ModuleType) -> None:
    server = make_server(example, torch.float32)
    page = list(range(64))
    requests = [example.Request(0, page * 2, 3), example.Request(9, [*page * 2, 7], 3)]
    server.serve(requests)
    assert [request.resumed for request in requests] == [0, 128]
    assert example.check(server.model, requests).startswith("ok")


def test_whole_prompt_that_is_kept_leaves_a_page_to_compute(example: ModuleType) -> None:
    """The first token needs the output of the prompt's last one, which a state alone has not."""
    server = make_server(example, torch.float32)
    page = list(range(64))
    requests = [example.Request(9 * i, page * (1 + i % 2), 3) for i in range(4)]
    server.serve(requests)
    assert [request.resumed for request in requests] == [0, 64, 0, 64]
    assert example.check(server.model, requests).startswith("ok")


def test_prefixes_used_the_longest_ago_make_room(example: ModuleType) -> None:
    prefixes = example.Prefixes([5, 6])
    a, b, c = [[n] * 64 for n in range(3)]
    assert prefixes.longest([*a, 9]) == (-1, 0)
    assert {prefixes.place_for(a), prefixes.place_for(b)} == {5, 6}
    place, tokens = prefixes.longest([*a, 9])
    assert tokens == 64 and prefixes.place_for(a) == place
    assert prefixes.place_for(c) != place  # b's
    assert prefixes.longest([*b, 9]) == (-1, 0)
    assert prefixes.longest([*a, *a, 9]) == (place, 64)
    assert prefixes.longest(a) == (-1, 0), "one token is left to compute"


@pytest.mark.parametrize("what", ["state", "prefix"])
def test_the_check_notices_wrong_states(
    example: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding without the prompt's state, or resuming from a state a page too early."""
    right = torch.ops.attn_tiers.gdn_chunk_prefill.pool_

    def wrong(*args: Any, **scalars: Any) -> torch.Tensor:
        *front, write, track, dst, bounds = args
        if what == "state":
            return right(*front, write - 1 - write, track, dst, bounds, **scalars)
        return right(*front, write, (track - 64).clamp(min=0), dst, bounds, **scalars)

    server = make_server(example, torch.float32)
    for pool in server.store.pools.values():
        pool.zero_()
    real = torch.ops.attn_tiers
    ops = type("Ops", (), {})()
    for name in ("decode", "kv_scatter_", "gdn_gates", "gdn_decode_"):
        setattr(ops, name, getattr(real, name))
    ops.gdn_chunk_prefill = type("Overloads", (), {"pool_": staticmethod(wrong)})
    monkeypatch.setattr(example, "ops", ops)
    requests = two_rounds(example, server)
    with pytest.raises(SystemExit, match="FAILED"):
        example.check(server.model, requests)


def test_a_request_that_does_not_fit_is_refused(example: ModuleType) -> None:
    server = make_server(example, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        server.serve([example.Request(0, [1] * 250, budget=10)])


@pytest.mark.parametrize("checked", [3, 0])
def test_the_program_says_which_tier_ran_and_what_was_resumed(
    checked: int, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    with torch_attn_tiers.options(force="decode:unfused"):
        options = f"--device cpu --dtype float32 --requests 2 --backend eager --check {checked}"
        example.main(options.split())
    printed = capsys.readouterr().out
    assert "prompts resumed from a kept state" in printed
    assert "gdn_chunk_prefill.pool_: reference, gdn_decode_.raw: reference" in printed
    assert "check      ok" in printed and f"tokens of {checked} requests" in printed
    with pytest.raises(SystemExit):
        example.main(["--capacity", "128"])
