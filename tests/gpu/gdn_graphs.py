"""What the GPU tests of `gdn_chunk_prefill` and of its pool share: ready calls, replayed graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch_attn_tiers
from tests.conformance.calls import Maker
from tests.conformance.gdn_calls import GdnCall
from tests.conformance.gdn_pool_calls import PoolCall
from tests.gpu.capturing import capture

#: Bytes for each token and value head at K = 128 with two of them for each head of q, in 16 bits:
#: W and U, factors in fours, keys.
SCRATCH = 2 * 2 * 64 + 4 * 4 + 2 * 128 // 2
#: Bytes for each segment and value head at K = V = 128: the state that it begins with, and M.
SEGMENT_SCRATCH = 4 * 128 * (128 + 128)


def ready(call: GdnCall | PoolCall, tier: str, must_run: frozenset[str]) -> None:
    """Skips what the tier does not take; else compiles it, so that the call can be captured."""
    call.require(tier, must_run)
    torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars, tier=tier)


def check_replays(call: GdnCall, tier: str, m: Maker) -> None:
    """Captures the call, of three sequences in 320 tokens, and replays it with other lengths."""
    graph, result = capture(lambda: call.run(tier))
    bounds = call.tensors["cu_seqlens"]
    assert bounds is not None
    for values in (
        [0, 320, 320, 320],
        [0, 0, 64, 64],
        [0, 1, 2, 3],
        [0, 0, 0, 0],
        [0, 64, 129, 320],
    ):
        bounds.copy_(m.integers(values))
        for tensor in result:
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        graph.replay()
        expected = call.expected()
        call.compare(result, expected)
        if call.overload != "default":
            h = result[2][0] if call.overload == "h_fla" else result[2]
            assert len(h) >= len(expected.fla if call.overload == "h_fla" else expected.compact)


def check_pool_replays(
    call: PoolCall, tier: str, m: Maker, names: Sequence[str], steps: Sequence[Sequence[list[int]]]
) -> None:
    """Captures the call and replays it, with the values of each step in the tensors named."""
    graph, out = capture(lambda: call.run(tier))
    first = call.pool.clone()
    for step in steps:
        call.pool.copy_(first)
        for name, values in zip(names, step, strict=True):
            call.tensors[name].copy_(m.integers(values))  # type: ignore[union-attr]
        expected = call.expected()
        out.fill_(math.nan)
        graph.replay()
        call.compare(out, expected, before=first)
