"""`explain`: which tier a call of these shapes would run, and why the others would not."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import torch

from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.problem_args import add_problem_options, decode_call


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", help="every tier's verdict on one decode call", description=__doc__
    )
    add_problem_options(parser)
    parser.add_argument("--tier", default=None, help="as the operator's tier= argument")
    parser.add_argument(
        "--device",
        default=None,
        help="cpu, cuda, cuda:1, or a GPU that is not here, as sm_90; default: a GPU if any",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints `torch_attn_tiers.explain(...)`; 2 when the call itself is not legal."""
    import torch_attn_tiers

    device: torch.device | torch_attn_tiers.DeviceFacts
    if re.match(r"sm_|gfx", args.device or ""):
        try:
            device = torch_attn_tiers.DeviceFacts.of(args.device)
        except ValueError as error:
            print(f"--device: {error}", file=sys.stderr)
            return 2
    else:
        device = environment.parse_device(args.device)
    tensors, scalars = decode_call(args, device.type)
    try:
        verdict = torch_attn_tiers.explain(
            "decode", *tensors, device=device, tier=args.tier, **scalars
        )
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(verdict)
    return 0
