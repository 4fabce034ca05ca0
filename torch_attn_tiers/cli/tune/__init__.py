"""`tune`: measures the tiers over a grid of problem classes, and writes the order of each class.

Every tier that can take a point is forced in turn, over the same inputs, as a captured graph that
rotates over several sets of them; what it does around its kernel is in the time. The order of a
class is by the worst ratio to the best over several lengths. Of a cache: full, evenly from T/16 to
T, and T/32. Of prompts: alike, evenly from a 16th of the mean to nearly twice it, and half as long
as the memory for them.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_attn_tiers import ranking
from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.clock import clock_for
from torch_attn_tiers.cli.tune import decode, gdn
from torch_attn_tiers.cli.tune.points import Point
from torch_attn_tiers.cli.tune.session import Session, device_table

#: Operators, and what they are measured on.
GRIDS: dict[str, Callable[[], Sequence[Point]]] = {
    "decode": decode.grid,
    "gdn_chunk_prefill": gdn.grid,
}
_REPEATS = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="measure which tier is fastest, class by class", description=__doc__
    )
    parser.add_argument("--op", choices=sorted(GRIDS), default="decode")
    parser.add_argument(
        "--classes",
        default=None,
        metavar="WORDS",
        help="only classes that have all of these words, as 'G=4 D=128'; commas separate"
        " alternatives",
    )
    parser.add_argument(
        "--out",
        default=None,
        metavar="FILE",
        help="all repeats, as JSON; a file of this commit and these versions is gone on with;"
        " default OP_tune_DEVICE.json in the current folder",
    )
    parser.add_argument(
        "--table",
        default=None,
        metavar="FILE",
        help="the table made of it; default: where this installation of the package reads it, or in"
        " the folder $ATTN_TIERS_TABLES",
    )
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=None,
        metavar="N",
        help="begin no further class after that; the files hold what there is",
    )
    parser.add_argument(
        "--repeats", type=int, default=_REPEATS, help=f"of every tier, in turns; default {_REPEATS}"
    )
    parser.add_argument(
        "--device", default=None, help=f"{environment.DEVICE_HELP}; default: a GPU if any"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and writes; 1 if a tier failed or was wrong, or there was nothing to compare."""
    device = environment.parse_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.repeats < 1:
        raise SystemExit(f"--repeats {args.repeats}: it must be at least 1")
    if args.budget_minutes is not None and not args.budget_minutes > 0:
        raise SystemExit(f"--budget-minutes {args.budget_minutes:g}: it must be more than 0")
    name = device_table(device)
    table = pathlib.Path(args.table or ranking.folders()[0] / f"{name}.json")
    session = Session(
        args.op,
        device,
        clock_for(device),
        pathlib.Path(args.out or f"{args.op}_tune_{name}.json"),
        table,
        repeats=args.repeats,
        budget_s=None if args.budget_minutes is None else 60 * args.budget_minutes,
    )
    result = session.run(_chosen(GRIDS[args.op](), args.classes, device))
    for failure in session.failures():
        print(f"FAILED {failure}")
    if not result["rows"]:
        print(f"nothing to compare: no class is taken by two kernel tiers on {device}")
        return 1
    print(f"{len(result['rows'])} classes in {session.out}, their orders in {table}")
    return 1 if session.failures() else 0


def _chosen(points: Sequence[Point], text: str | None, device: torch.device) -> list[Point]:
    """The points whose class is among those asked for."""
    if text is None:
        return list(points)
    wanted = [set(words.split()) for words in text.split(",")]
    chosen = [
        point
        for point in points
        if any(words <= set(str(point.problem_class(device)).split()) for words in wanted)
    ]
    if not chosen:
        example = points[0].problem_class(device)
        raise SystemExit(f"--classes {text!r}: no class has these words; one is {str(example)!r}")
    return chosen
