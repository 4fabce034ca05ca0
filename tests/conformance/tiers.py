"""The names of the tiers to loop over, as the package itself reports them."""

from __future__ import annotations

import torch

import torch_attn_tiers


def _names() -> tuple[str, ...]:
    query = torch.empty(1, 1, 1, 16, device="meta")
    explanation = torch_attn_tiers.explain("decode", query, query, query, device="cpu")
    return tuple(verdict.name for verdict in explanation.verdicts)


DECODE_TIERS = _names()
