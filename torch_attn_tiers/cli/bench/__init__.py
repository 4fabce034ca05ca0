"""`bench`: measures the operators beside the public kernels for the same work."""

from __future__ import annotations

from typing import Any

from torch_attn_tiers.cli.bench import decode, gdn, gdn_decode


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure, beside others", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    decode.add_parser(what)
    gdn.add_parser(what)
    gdn_decode.add_parser(what)
