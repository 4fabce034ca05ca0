"""Operators: schema, checks, fake kernel. Importing this package registers them with PyTorch."""

from torch_attn_tiers.ops import (
    checkpoints,
    decode,
    gdn,
    gdn_decode,
    gdn_gates,
    gdn_pool,
    tensor_scatter,
)

__all__ = [
    "checkpoints",
    "decode",
    "gdn",
    "gdn_decode",
    "gdn_gates",
    "gdn_pool",
    "tensor_scatter",
]
