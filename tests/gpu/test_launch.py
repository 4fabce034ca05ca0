"""Launches by Triton's native function, and by Triton where a profiler hangs in its hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from csrc_free_ops import launch as launch_module

pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="launches as Triton does")


def _decode() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    kwargs: dict[str, Any] = dict(device="cuda", dtype=torch.float16, generator=generator)
    query, cache = torch.randn(2, 8, 1, 64, **kwargs), torch.randn(2, 2, 300, 64, **kwargs)
    lengths = torch.tensor([300, 7], device="cuda")
    return torch.ops.attn_tiers.decode(query, cache, cache, lengths, tier="flash")


def test_launches_go_past_the_launcher_in_python() -> None:
    """If this fails launches are right but slower: Triton's launcher has changed."""
    _decode()
    of_decode = [
        compiled
        for (_, ((module, _), *_)), compiled in launch_module._COMPILED.items()
        if module == "csrc_free_ops.decode.kernels"
    ]
    assert of_decode
    for compiled in of_decode:
        middle = (compiled.function, compiled.packed_metadata, None, None, None)
        call = launch_module._Call(compiled.run, (1, 1, 1), middle, True)
        assert launch_module._without_wrapper(call, (1, 2)) is not None, compiled.name


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_launches(name: str) -> None:
    before = _decode()
    seen: list[Any] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    chain = getattr(triton.knobs.runtime, name)
    chain.add(hook)
    try:
        hooked = _decode()
    finally:
        chain.remove(hook)
    after = _decode()
    assert len(seen) == 1 and seen[0]
    torch.testing.assert_close(hooked, before)
    torch.testing.assert_close(after, before)
