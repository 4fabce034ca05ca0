"""Options that describe one decode call, and the meta tensors made from them."""

from __future__ import annotations

import argparse
from typing import Any

import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def size(text: str) -> int:
    """A size of a tensor."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is no size; it must be between 0 and 2^63 - 1")
    return number


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Adds shapes, dtype, layout and the operator's scalars."""
    shapes = parser.add_argument_group("shapes")
    shapes.add_argument("--batch", type=size, default=1)
    shapes.add_argument("--q-heads", type=size, default=32)
    shapes.add_argument("--kv-heads", type=size, default=8)
    shapes.add_argument("--head-dim", type=size, default=128, help="D")
    shapes.add_argument("--value-head-dim", type=size, default=None, help="Dv, default D")
    shapes.add_argument("--query-length", type=size, default=1, help="Sq")
    shapes.add_argument("--capacity", type=size, default=4096, help="T, the length of the cache")
    shapes.add_argument("--dtype", choices=sorted(DTYPES), default=None)
    shapes.add_argument(
        "--kv-dtype", choices=("float8_e4m3fn",), default=None, help="of the cache, default --dtype"
    )
    shapes.add_argument(
        "--layout",
        choices=("hnd", "nhd"),
        default="hnd",
        help="memory order of the cache: [B,Hkv,T,D] or [B,T,Hkv,D]",
    )
    values = parser.add_argument_group("values")
    values.add_argument(
        "--lengths",
        choices=("int32", "int64", "none"),
        default="int32",
        help="dtype of nonpad_kv_seqlen, or none to leave it out",
    )
    values.add_argument(
        "--mask",
        choices=("none", "bool", "additive"),
        default="none",
        help="an attn_mask of [B,1,Sq,T]",
    )
    values.add_argument("--sinks", action="store_true")
    values.add_argument(
        "--scales",
        choices=("none", "one", "per-head"),
        default="none",
        help="k_scale and v_scale of a float8 cache",
    )
    values.add_argument("--causal", action="store_true")
    values.add_argument("--scale", type=float, default=None)
    values.add_argument("--softcap", type=float, default=0.0)
    values.add_argument("--left-window", type=int, default=-1)
    values.add_argument("--right-window", type=int, default=-1)
    values.add_argument("--batch-invariant", action="store_true")


def decode_call(
    args: argparse.Namespace, device_type: str
) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
    """Returns `decode`'s positional meta tensors and its keyword scalars."""
    default = "float32" if device_type == "cpu" else "bfloat16"
    if args.kv_dtype and device_type == "cpu":
        default = "float16"
    dtype = DTYPES[args.dtype or default]
    kv_dtype = torch.float8_e4m3fn if args.kv_dtype else dtype
    query_length, capacity = args.query_length, args.capacity
    value_dim = args.head_dim if args.value_head_dim is None else args.value_head_dim

    def cache(head_dim: int) -> torch.Tensor:
        shape = (args.batch, args.kv_heads, capacity, head_dim)
        if args.layout == "hnd":
            return torch.empty(shape, dtype=kv_dtype, device="meta")
        transposed = (args.batch, capacity, args.kv_heads, head_dim)
        return torch.empty(transposed, dtype=kv_dtype, device="meta").transpose(1, 2)

    query = torch.empty(
        (args.batch, args.q_heads, query_length, args.head_dim), dtype=dtype, device="meta"
    )
    lengths = mask = sinks = scale = None
    if args.lengths != "none":
        lengths_dtype = torch.int32 if args.lengths == "int32" else torch.int64
        lengths = torch.empty((args.batch,), dtype=lengths_dtype, device="meta")
    if args.mask != "none":
        mask_dtype = torch.bool if args.mask == "bool" else dtype
        mask_shape = (args.batch, 1, query_length, capacity)
        mask = torch.empty(mask_shape, dtype=mask_dtype, device="meta")
    if args.sinks:
        sinks = torch.empty((args.q_heads,), dtype=torch.float32, device="meta")
    if args.scales != "none":
        shape = () if args.scales == "one" else (args.kv_heads,)
        scale = torch.empty(shape, dtype=torch.float32, device="meta")
    scalars = {
        "is_causal": args.causal,
        "scale": args.scale,
        "softcap": args.softcap,
        "left_window_size": args.left_window,
        "right_window_size": args.right_window,
        "batch_invariant": args.batch_invariant,
    }
    caches = (cache(args.head_dim), cache(value_dim))
    return [query, *caches, lengths, mask, sinks, scale, scale], scalars
