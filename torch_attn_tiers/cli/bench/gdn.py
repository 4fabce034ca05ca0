"""`bench gdn`: prefill by `attn_tiers::gdn_chunk_prefill` beside the public kernels.

bfloat16, head size 128, a float32 state in and out. Every side of a case runs over the same inputs,
in turns, as a captured graph that rotates over enough inputs to leave the L2; the l2norm of q and k
and the exp of the gate are inside every time. The JSON of `--out` holds every repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from torch_attn_tiers.cli.bench import gdn_sides
from torch_attn_tiers.cli.bench.clock import Clock, Recording, clock_for
from torch_attn_tiers.cli.bench.gdn_cases import CASES, HEADS_CASES, MODEL_CASES, GdnCase, GdnInputs
from torch_attn_tiers.cli.bench.gdn_sides import GdnSide
from torch_attn_tiers.cli.bench.report import number
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
from torch_attn_tiers.errors import TierNotEligibleError
from torch_attn_tiers.tier import tier_names

_OP = "gdn_chunk_prefill"
_FORMS: dict[str, str | None] = {"none": None, **{name: name for name in gdn_sides.FORMS}}
_GROUPS = {"model": MODEL_CASES, "heads": HEADS_CASES}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "gdn", help="prefill under the gated delta rule", description=__doc__
    )
    parser.add_argument(
        "--cases",
        default="model",
        metavar="NAMES",
        help=f"all, {', '.join(_GROUPS)} (default: model), or names: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--tier", default="auto", choices=("auto", *tier_names(_OP)), help="of our sides"
    )
    parser.add_argument(
        "--h",
        default="all",
        metavar="FORMS",
        help=f"what our sides do with states inside prompts, or with a pool (tracked: one state of"
        f" each prompt is kept in it): some of {', '.join(_FORMS)}; default all",
    )
    add_arguments(parser, gdn_sides.PEERS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the JSON; 1 if a side of ours failed or was wrong."""
    device = chosen_device(args.device)
    repeats = check_repeats(args.repeats)
    result = bench(
        chosen_cases(args.cases),
        clock_for(device),
        device,
        peers=names(args.peers or None, gdn_sides.PEERS, "--peers", ()),
        tier=args.tier,
        forms=[_FORMS[name] for name in names(args.h, _FORMS, "--h", ())],
        repeats=repeats,
        out=args.out,
    )
    print_report(result)
    return exit_status(result)


def chosen_cases(text: str) -> list[GdnCase]:
    """The cases of `--cases`: names, groups of them, or all."""
    known = {**_GROUPS, **CASES}
    chosen = list(CASES) if text == "all" else names(text, known, "--cases", ())
    cases = [case for name in chosen for case in _GROUPS.get(name) or (CASES[name],)]
    return list(dict.fromkeys(cases))


def bench(
    cases: Sequence[GdnCase],
    clock: Clock,
    device: torch.device,
    *,
    peers: Sequence[str] = (),
    tier: str = "auto",
    forms: Sequence[str | None] = (None, *gdn_sides.FORMS),
    repeats: int = REPEATS,
    out: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Runs the cases and returns what `--out` writes."""
    started = time.perf_counter()
    result = begin(
        "bench gdn",
        clock,
        device,
        repeats,
        peers,
        gdn_sides.PEERS,
        dtype=str(dtype).removeprefix("torch."),
    )
    with torch.no_grad():
        return run_cases(
            result,
            cases,
            lambda case: _run_case(case, clock, device, peers, tier, forms, repeats, dtype),
            judge,
            _one_line,
            clock,
            device,
            started=started,
            out=out,
        )


class _Sides:
    """The sides of one case as they are built: those that run, and a row of the report for each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: list[dict[str, Any]] = []
        self.gaps: dict[str, str] = {}
        self.recorded: list[tuple[GdnSide, Recording, dict[str, Any]]] = []

    def add(self, side: GdnSide) -> None:
        row = {
            "side": side.name, "peer": side.peer, "h": side.form, "compared": side.compared,
            "us": [], "right": False, **side.notes,
        }  # fmt: skip
        self.rows.append(row)
        try:
            since = time.perf_counter()
            recording = self.clock.record(side.calls)
            row["first_s"] = round(time.perf_counter() - since, 2)
        except Exception as error:
            row["failure"] = in_words(error)
        else:
            self.recorded.append((side, recording, row))

    def add_ours(self, inputs: GdnInputs, tier: str, form: str | None) -> None:
        try:
            self.add(gdn_sides.ours(inputs, tier, form))
        except Exception as error:
            row: dict[str, Any] = {
                "side": "ours", "peer": None, "h": form, "compared": True, "us": [],
                "right": False, "failure": in_words(error),
            }  # fmt: skip
            if tier != "auto" and isinstance(error, TierNotEligibleError):
                row["eligible"] = False
            self.rows.append(row)

    def add_peer(self, inputs: GdnInputs, name: str) -> None:
        peer = gdn_sides.PEERS[name]
        gap = peer.gap()
        if gap is None:
            try:
                for side in peer.build(inputs):
                    self.add(side)
            except Exception as error:
                gap = in_words(error)
        if gap is not None:
            self.gaps[name] = gap


def _run_case(
    case: GdnCase,
    clock: Clock,
    device: torch.device,
    peers: Sequence[str],
    tier: str,
    forms: Sequence[str | None],
    repeats: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Builds, records, times in turns and checks every side of one case."""
    inputs = GdnInputs(case, dtype, device, clock.l2_bytes)
    sides = _Sides(clock)
    for form in forms:
        sides.add_ours(inputs, tier, form)
    for name in peers:
        sides.add_peer(inputs, name)
    fills = {
        layout: clock.record(gdn_sides.fill_h(inputs, layout))
        for layout in gdn_sides.LAYOUTS
        if layout in forms and case.rows_of_h(layout)
    }
    fill_us: dict[str, list[float]] = {layout: [] for layout in fills}
    for _ in range(repeats):
        for _side, recording, row in sides.recorded:
            row["us"].append(round(recording.measure(), 3))
        for layout, fill in fills.items():
            fill_us[layout].append(round(fill.measure(), 3))
    for side, recording, row in sides.recorded:
        _check(side, recording, row, inputs)
        row["calls"] = recording.calls
    measure_host(clock, [HostSide(row, side.calls[-1]) for side, _, row in sides.recorded])
    return {
        "case": case.name,
        "q_heads": case.q_heads,
        "v_heads": case.v_heads,
        "lengths": list(case.lengths),
        "moved_bytes": inputs.moved_bytes,
        "checkpoint_bytes": inputs.checkpoint_bytes,
        "fill_h_us": fill_us,
        "sets": inputs.sets,
        "listed_peers": list(gdn_sides.PEERS),
        "gaps": sides.gaps,
        "sides": sides.rows,
    }


def _check(side: GdnSide, recording: Recording, row: dict[str, Any], inputs: GdnInputs) -> None:
    """Runs what was timed once more over poisoned results and compares them with float64."""
    try:
        for result in side.checked:
            result.fill_(float("nan"))
        recording.run()
        errors = side.errors(inputs)
    except Exception as failure:
        row["failure"] = in_words(failure)
        return
    judge_errors(row, errors, side.tolerance)


def judge(row: dict[str, Any], copy_rate: float) -> None:
    """Adds medians, floor, the best peer and the ratios to one case's row.

    `ratio` is our median without checkpoints over that of the best peer without them; `fla_ratio`
    over FLA's; `faster` says that our slowest repeat beats every peer's fastest. `h_cost` holds for
    each layout of checkpoints what they add to our time, in multiples of the time to fill them.
    """
    row["floor_us"] = round(row["moved_bytes"] / copy_rate * 1e6, 3)
    for side in row["sides"]:
        if side["us"]:
            side["median_us"] = round(statistics.median(side["us"]), 3)
    right = [side for side in row["sides"] if side["right"] and side["compared"]]
    plain = {s["peer"]: s for s in right if s["h"] is None}
    our = plain.pop(None, None)
    for name in row["listed_peers"]:
        if name not in plain:
            row["gaps"].setdefault(name, _why_missing(row, name))
    best = min(plain.values(), key=lambda side: side["median_us"], default=None)
    row["our_us"] = our["median_us"] if our else None
    row["our_tier"] = our.get("tier") if our else None
    row["best_peer"] = best["peer"] if best else None
    row["best_peer_us"] = best["median_us"] if best else None
    row["ratio"] = _ratio(row["our_us"], row["best_peer_us"])
    row["fla_ratio"] = _ratio(row["our_us"], plain.get("fla", {}).get("median_us"))
    row["floor_ratio"] = _ratio(row["our_us"], row["floor_us"])
    row["faster"] = None
    if our and plain:
        row["faster"] = max(our["us"]) < min(min(side["us"]) for side in plain.values())
    row["h_cost"] = {
        side["h"]: round(
            (side["median_us"] - our["median_us"]) / statistics.median(row["fill_h_us"][side["h"]]),
            3,
        )
        for side in right
        if our and side["peer"] is None and side["h"] in row["fill_h_us"]
    }


def _why_missing(row: dict[str, Any], name: str) -> str:
    failures = [s["failure"] for s in row["sides"] if s["peer"] == name and "failure" in s]
    return "; ".join(failures) or "not asked for"


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else round(a / b, 4)


def _one_line(row: dict[str, Any]) -> str:
    fills = [
        f", fill h {layout} {statistics.median(us):.1f}" for layout, us in row["fill_h_us"].items()
    ]
    return one_line(row) + "".join(fills)


def print_report(result: dict[str, Any]) -> None:
    """Prints the table and what is missing from it."""
    out = console()
    title = (
        f"gdn_chunk_prefill, {result['dtype']}, on {result['device']['name']}: medians of"
        f" {result['repeats']}, {result['clock']}; copy {result['copy_tb_per_s']:.2f} TB/s"
    )
    print_table(out, title, _table(result))
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
            f"ratio to the best peer that ran: geometric mean {summary['geometric_mean']:.3f},"
            f" worst {summary['worst_ratio']:.3f}, faster than every one of them in"
            f" {summary['faster_rows']} of {summary['rows_with_ratio']} rows",
            soft_wrap=True,
        )


def _table(result: dict[str, Any]) -> Table:
    headings = dict.fromkeys(side["side"] for row in result["cases"] for side in row["sides"])
    table = Table()
    table.add_column("case")
    for heading in (
        "floor", "ours / best", "ours / FLA", "h cost fla", "compact", "fill h fla", "compact",
        "host us",
        *headings,
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in result["cases"]:
        by_name = {side["side"]: side for side in row["sides"]}
        host = next((s.get("host_us") for s in row["sides"] if s["peer"] is None), None)
        table.add_row(
            row["case"],
            number(row["floor_us"], 1),
            number(row["ratio"], 3),
            number(row["fla_ratio"], 3),
            number(row["h_cost"].get("fla"), 2),
            number(row["h_cost"].get("compact"), 2),
            *(_fill(row, layout) for layout in gdn_sides.LAYOUTS),
            number(host, 0),
            *[_cell(by_name.get(name)) for name in headings],
        )
    return table


def _fill(row: dict[str, Any], layout: str) -> str:
    us = row["fill_h_us"].get(layout)
    return number(statistics.median(us) if us else None, 1)


def _cell(side: dict[str, Any] | None) -> str:
    return "-" if side is None or not side["right"] else number(side["median_us"], 1)
