"""`bench gdn_decode`: one decode step under the gated delta rule beside the public kernels.

The heads of Qwen3-Next, bfloat16 tokens, states in float32 and bfloat16. Every side starts from
what a model projects (the gates before their formula, q and k before their l2norm) and leaves the
new states; it runs as a captured graph that rotates over at least 128 MB of states, all sides in
turns. The JSON of `--out` holds every repeat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from torch_attn_tiers.cli.bench import gdn_decode_sides
from torch_attn_tiers.cli.bench.clock import Clock, Recording, clock_for
from torch_attn_tiers.cli.bench.gdn_decode_sides import CASES, StepCase, StepInputs, StepSide
from torch_attn_tiers.cli.bench.report import best_sides, judge_case, number
from torch_attn_tiers.cli.bench.running import (
    REPEATS,
    HostSide,
    add_arguments,
    begin,
    check_repeats,
    chosen_device,
    exit_status,
    in_words,
    judge_errors,
    measure_host,
    names,
    one_line,
    run_cases,
)
from torch_attn_tiers.cli.console import console, print_table
from torch_attn_tiers.tier import tier_names


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "gdn_decode", help="one step under the gated delta rule", description=__doc__
    )
    parser.add_argument("--cases", default=None, metavar="NAMES", help=", ".join(CASES))
    parser.add_argument(
        "--tier", default="auto", choices=("auto", *tier_names("gdn_decode")), help="of our sides"
    )
    add_arguments(parser, gdn_decode_sides.PEERS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the JSON; 1 if a side of ours failed or was wrong."""
    device = chosen_device(args.device)
    repeats = check_repeats(args.repeats)
    result = bench(
        [CASES[name] for name in names(args.cases, CASES, "--cases", tuple(CASES))],
        clock_for(device),
        device,
        peers=names(args.peers or None, gdn_decode_sides.PEERS, "--peers", ()),
        tier=args.tier,
        repeats=repeats,
        out=args.out,
    )
    print_report(result)
    return exit_status(result)


def bench(
    cases: Sequence[StepCase],
    clock: Clock,
    device: torch.device,
    *,
    peers: Sequence[str] = (),
    tier: str = "auto",
    repeats: int = REPEATS,
    out: str | None = None,
) -> dict[str, Any]:
    """Runs the cases and returns what `--out` writes."""
    started = time.perf_counter()
    result = begin(
        "bench gdn_decode",
        clock,
        device,
        repeats,
        peers,
        gdn_decode_sides.PEERS,
    )
    with torch.no_grad():
        return run_cases(
            result,
            cases,
            lambda case: _run_case(case, clock, device, peers, tier, repeats),
            judge_case,
            lambda row: one_line(row, 2),
            clock,
            device,
            started=started,
            out=out,
        )


def _run_case(
    case: StepCase,
    clock: Clock,
    device: torch.device,
    peers: Sequence[str],
    tier: str,
    repeats: int,
) -> dict[str, Any]:
    """Builds, records, times in turns and checks every side of one case."""
    inputs = StepInputs(case, device)
    rows: list[dict[str, Any]] = []
    gaps: dict[str, str] = {}
    recorded: list[tuple[StepSide, Recording, dict[str, Any]]] = []
    listed = gdn_decode_sides.listed(case)

    def add(sides: list[StepSide]) -> None:
        for side in sides:
            row = {"side": side.name, "peer": side.peer, "us": [], "right": False, **side.notes}
            rows.append(row)
            try:
                recorded.append((side, clock.record(side.calls), row))
            except Exception as error:
                row["failure"] = in_words(error)

    try:
        add(gdn_decode_sides.ours(inputs, tier))
    except Exception as error:
        failed: dict[str, Any] = {"side": "ours", "peer": None, "us": [], "right": False}
        rows.append({**failed, "failure": in_words(error)})
    for name in peers:
        peer = gdn_decode_sides.PEERS[name]
        if name not in listed:
            continue
        gap = peer.gap()
        if gap is None:
            try:
                add(peer.build(inputs))
            except Exception as error:
                gap = in_words(error)
        if gap is not None:
            gaps[name] = gap

    for _ in range(repeats):
        for _side, recording, row in recorded:
            row["us"].append(round(recording.measure(), 3))
    for side, recording, row in recorded:
        row["calls"] = recording.calls
        _check(side, recording, row, inputs)
    measure_host(clock, [HostSide(row, side.calls[0]) for side, _, row in recorded])
    return {
        "case": case.name,
        "batch": case.batch,
        "state_dtype": str(case.dtype).removeprefix("torch."),
        "q_heads": case.q_heads,
        "v_heads": case.v_heads,
        "head_size": case.head_size,
        "state_bytes": case.state_bytes,
        "moved_bytes": case.moved_bytes,
        "sets": inputs.sets,
        "listed_peers": listed,
        "gaps": gaps,
        "sides": rows,
    }


def _check(side: StepSide, recording: Recording, row: dict[str, Any], inputs: StepInputs) -> None:
    """Runs what was timed once more from the first states and compares the last set with float32.

    A side that works in place makes as many steps of a set as its recording holds.
    """
    try:
        inputs.reset()
        recording.output.fill_(float("nan"))
        recording.run()
        steps = recording.calls // len(side.calls) if side.in_place else 1
        errors = side.errors(inputs, recording.output, steps)
    except Exception as failure:
        row["failure"] = in_words(failure)
        return
    judge_errors(row, errors, side.tolerance)


def print_report(result: dict[str, Any]) -> None:
    """Prints the table and what is missing from it."""
    out = console()
    title = (
        f"gdn_decode on {result['device']['name']}: medians of {result['repeats']},"
        f" {result['clock']}; copy {result['copy_tb_per_s']:.2f} TB/s"
    )
    print_table(out, title, _table(result["cases"]))
    for row in result["cases"]:
        for side in row["sides"]:
            if "failure" in side:
                text = f"FAILED {row['case']} {side['side']}: {side['failure']}"
                out.print(text, soft_wrap=True, markup=False)
        if result["peers"]:
            for name, why in row["gaps"].items():
                out.print(f"gap {row['case']} {name}: {why}", soft_wrap=True, markup=False)
    summary = result["summary"]
    if summary["rows_with_ratio"]:
        out.print(
            f"ratio to the best peer: geometric mean {summary['geometric_mean']:.3f},"
            f" worst {summary['worst_ratio']:.3f}, faster than every peer in"
            f" {summary['faster_rows']} of {summary['rows_with_ratio']} rows",
            soft_wrap=True,
        )


def _table(rows: list[dict[str, Any]]) -> Table:
    mine = dict.fromkeys(s["side"] for r in rows for s in r["sides"] if s["peer"] is None)
    peers = dict.fromkeys(s["peer"] for r in rows for s in r["sides"] if s["peer"] is not None)
    table = Table()
    table.add_column("case")
    for heading in (
        "state MB", "sets", "floor us", "copy rate", "ratio", "faster", "host us", *mine, *peers,
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        by_name = {side["side"]: side for side in row["sides"] if side["right"]}
        best = best_sides(row)
        ours: dict[str, Any] = next((s for s in row["sides"] if s["peer"] is None), {})
        share = row["floor_ratio"] and 100 / row["floor_ratio"]
        table.add_row(
            row["case"],
            f"{row['state_bytes'] / 1e6:.1f}",
            str(row["sets"]),
            number(row["floor_us"], 1),
            "-" if share is None else f"{share:.0f} %",
            number(row["ratio"], 3),
            {True: "yes", False: "no", None: "-"}[row["faster"]],
            number(ours.get("host_us"), 1),
            *[number(by_name.get(name, {}).get("median_us"), 2) for name in mine],
            *[_peer_cell(best.get(name)) for name in peers],
        )
    return table


def _peer_cell(side: dict[str, Any] | None) -> str:
    if side is None:
        return "-"
    return f"{side['median_us']:.2f} {side['side'].partition(':')[2]}".strip()
