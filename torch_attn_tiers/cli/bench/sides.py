"""What a bench compares: sides, each a list of ready calls over the same inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_attn_tiers.cli.bench.cases import Inputs
from torch_attn_tiers.cli.bench.clock import Call

# Relative Frobenius error in bfloat16; above it a result is wrong and its time counts for nothing.
OUR_TOLERANCE = 3e-3
PEER_TOLERANCE = 5e-3
#: Tiers that run a peer's kernel.
LIBRARY_TIERS = ("xqa", "cudnn")


@dataclass
class Side:
    """One implementation, ready to run: everything that it may prepare is prepared."""

    name: str
    calls: list[Call]  # one for each set of inputs
    peer: str | None = None  # the peer it stands for; None is ours
    to_bhsd: Callable[[torch.Tensor], torch.Tensor] = lambda out: out  # output as [B,Hq,1,D]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        own_kernel = self.peer is None and self.notes.get("tier") not in LIBRARY_TIERS
        return OUR_TOLERANCE if own_kernel else PEER_TOLERANCE


def our_side(inputs: Inputs, tier: str, layout: str) -> Side:
    """`attn_tiers::decode` with lengths; tier "auto" leaves the choice to the package.

    Layout "nhd" gives it the caches as transposed views of `[B,T,Hkv,D]`.
    """
    import torch_attn_tiers

    key, value = inputs.key, inputs.value
    if layout == "nhd":
        key = [k.transpose(1, 2) for k in inputs.key_nhd]
        value = [v.transpose(1, 2) for v in inputs.value_nhd]
    decode = torch.ops.attn_tiers.decode.default
    forced: dict[str, Any] = {} if tier == "auto" else {"tier": tier}
    rest: tuple[torch.Tensor | None, ...] = (inputs.lengths,)
    if inputs.kv_dtype is not inputs.dtype:
        rest = (inputs.lengths, None, None, *inputs.scales)

    def call(i: int) -> torch.Tensor:
        return decode(inputs.query[i], key[i], value[i], *rest, **forced)

    tensors = (inputs.query[0], key[0], value[0], *rest)
    torch_attn_tiers.prepare("decode", *tensors, **forced)  # tiers of a slow build wait for it
    with torch_attn_tiers.record_dispatch() as records:
        call(0)
    return Side(
        name="ours" if tier == "auto" else f"ours:{tier}",
        calls=bind_all(call, inputs.sets),
        notes={"tier": records[-1].tier, "layout": layout},
    )


def bind_all(call: Callable[[int], torch.Tensor], sets: int) -> list[Call]:
    """One ready call for each set."""
    return [functools.partial(call, i) for i in range(sets)]
