"""examples/serving_loop.py: what it serves is what a plain PyTorch loop computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_attn_tiers

PATH = Path(__file__).parents[1] / "examples" / "serving_loop.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def serve(example: ModuleType, dtype: torch.dtype, requests: list) -> ModuleType:
    """Serves on the CPU, through a compiled step, in caches that start as NaN."""
    model = example.Decoder(example.Config(layers=2, width=64, hidden=96), dtype)
    server = example.Server(model, slots=3, capacity=96, backend="eager")
    for cache in (cache for pair in server.caches for cache in pair):
        cache.fill_(torch.nan)
    server.warm_up(graph=False)
    server.serve(requests)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_served_requests_match_a_plain_loop(example: ModuleType, dtype: torch.dtype) -> None:
    requests = example.make_requests(5, capacity=96, vocabulary=512, seed=1)
    model = serve(example, dtype, requests)
    assert example.check(model, requests).startswith("ok")


def test_slots_stand_empty_and_are_used_again(example: ModuleType) -> None:
    """The requests of the tests and of the demo do exercise empty slots and reused ones."""
    requests = example.make_requests(12, capacity=128, vocabulary=512)
    assert max(request.arrival for request in requests) > 20
    assert len({len(request.prompt) for request in requests}) > 6
    assert any(len(request.prompt) % example.PIECE for request in requests)
    assert any(len(request.prompt) > example.PIECE for request in requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_notices_wrong_attention(
    example: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key too few for each token: the self-check is not satisfied by anything plausible."""
    right = torch.ops.attn_tiers.decode

    def short(query, key, value, lengths, **options):
        return right(query, key, value, lengths - (lengths > 4).int(), **options)

    ops = type("Ops", (), {"decode": staticmethod(short)})
    ops.kv_scatter_ = torch.ops.attn_tiers.kv_scatter_
    monkeypatch.setattr(example, "ops", ops)
    requests = example.make_requests(3, capacity=96, vocabulary=512, seed=1)
    model = serve(example, dtype, requests)
    with pytest.raises(SystemExit, match="FAILED"):
        example.check(model, requests)


def test_a_request_that_does_not_fit_is_refused(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        serve(example, torch.float32, [example.Request(0, [1] * 90, budget=10)])


def test_the_program_says_which_tier_ran(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--device cpu --dtype float32 --requests 2 --capacity 32 --backend eager"
    with torch_attn_tiers.options(force="decode:unfused"):
        example.main(arguments.split())
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "decode Sq=1: unfused" in printed
    assert "check      ok" in printed
