"""`explain`: which tier a call of these shapes would run, and why the others would not."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import torch

from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.problem_args import add_problem_options, decode_call

#: Devices whose tables are part of the package, and their architectures.
_MEASURED = {"NVIDIA H200": "sm_90"}
_DEVICES = (
    f"{environment.DEVICE_HELP}, or a GPU that is not: an architecture, as sm_90, or one that has "
    f"a table, {' or '.join(map(repr, _MEASURED))}"
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", help="every tier's verdict on one decode call", description=__doc__
    )
    add_problem_options(parser)
    parser.add_argument("--tier", default=None, help="as the operator's tier= argument")
    parser.add_argument(
        "--device",
        default=None,
        help=f"{_DEVICES}; default: a GPU if any",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints `torch_attn_tiers.explain(...)`; 1 when the call would raise, 2 when it is illegal."""
    import torch_attn_tiers

    device: torch.device | torch_attn_tiers.DeviceFacts
    if args.device in _MEASURED:
        arch = _MEASURED[args.device]
        device = torch_attn_tiers.DeviceFacts.of(arch)._replace(name=args.device)
    elif re.match(r"sm_|gfx", args.device or ""):
        try:
            device = torch_attn_tiers.DeviceFacts.of(args.device)
        except ValueError as error:
            print(f"--device: {error}", file=sys.stderr)
            return 2
    else:
        device = environment.parse_device(args.device, _DEVICES)
    try:
        tensors, scalars = decode_call(args, device.type)
    except (RuntimeError, OverflowError) as error:  # beyond 64 bits, as a size or in bytes
        reason = str(error).splitlines()[0]
        print(f"there are no tensors of these shapes: {reason}", file=sys.stderr)
        return 2
    try:
        verdict = torch_attn_tiers.explain(
            "decode", *tensors, device=device, tier=args.tier, **scalars
        )
    except (TypeError, ValueError, OverflowError) as error:
        print(error, file=sys.stderr)
        return 2
    print(verdict)
    return 0 if verdict.error is None else 1
