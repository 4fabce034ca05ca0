"""The command line: `python -m torch_attn_tiers {doctor,explain,bench,tune}`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_attn_tiers.cli import bench, doctor, explain, tune


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_attn_tiers",
        description="What can run here, what would run and why, and how fast it is.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, explain, bench, tune):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    return args.run(args)
