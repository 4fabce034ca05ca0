"""Verdicts over measured sides, and their tables."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.table import Table

from torch_attn_tiers.cli.bench.peers import PEERS
from torch_attn_tiers.cli.console import console, print_table

_LEAST_FLOOR_US = 1.0


def judge_case(row: dict[str, Any], copy_rate: float) -> None:
    """Adds floor, medians, the best peer and the ratio to one case's row.

    The ratio (our median over the best peer's) needs a right result of every listed peer; `faster`
    says that our slowest repeat beats the fastest repeat of all of them. The first side of ours
    counts. Where there is a side over wider caches, `speedup` is its median over ours.
    """
    row["floor_us"] = round(row["moved_bytes"] / copy_rate * 1e6, 3)
    for side in row["sides"]:
        if side["us"]:
            side["median_us"] = round(statistics.median(side["us"]), 3)
    ours = next((side for side in row["sides"] if side["peer"] is None), None)
    row["our_us"] = ours["median_us"] if ours and ours["right"] else None
    row["our_tier"] = ours.get("tier") if ours else None
    row["floor_ratio"] = _ratio(row["our_us"], row["floor_us"])

    best = best_sides(row)
    for name in row["listed_peers"]:
        if name not in best:
            row["gaps"].setdefault(name, _why_missing(row, name))
    winner = min(best.values(), key=lambda side: side["median_us"], default=None)
    row["best_peer"] = winner["peer"] if winner else None
    row["best_peer_us"] = winner["median_us"] if winner else None
    row["ratio"] = row["faster"] = None
    if ours and row["our_us"] is not None and not row["gaps"]:
        row["ratio"] = _ratio(row["our_us"], row["best_peer_us"])
        fastest = min(min(s["us"]) for s in row["sides"] if s["peer"] is not None and s["right"])
        row["faster"] = max(ours["us"]) < fastest

    wider = wider_side(row)
    if wider is not None:
        row["speedup"] = _ratio(wider["median_us"], row["our_us"]) if wider["right"] else None


def wider_side(row: dict[str, Any]) -> dict[str, Any] | None:
    """Our side over caches in the query's dtype, where ours is over narrower ones."""
    return next((side for side in row["sides"] if "caches" in side), None)


def best_sides(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fastest right side of each peer that has one."""
    best: dict[str, dict[str, Any]] = {}
    for side in row["sides"]:
        name = side["peer"]
        if name is None or not side["right"]:
            continue
        if name not in best or side["median_us"] < best[name]["median_us"]:
            best[name] = side
    return best


def floor_ratio(row: dict[str, Any]) -> str:
    """How many times the floor ours takes; a dash where the floor is far below one launch."""
    return number(row["floor_ratio"], 2) if row["floor_us"] >= _LEAST_FLOOR_US else "-"


def _why_missing(row: dict[str, Any], name: str) -> str:
    failures = [s["failure"] for s in row["sides"] if s["peer"] == name and "failure" in s]
    return "; ".join(failures) or "not asked for"


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else round(a / b, 4)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean, worst ratio and number of faster rows, over rows that have a ratio.

    And, where there are speedups, their geometric mean and the least.
    """
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    speedups = [row["speedup"] for row in rows if row.get("speedup") is not None]
    over_wider: dict[str, Any] = {}
    if speedups:
        over_wider = {"speedup": _geometric_mean(speedups), "least_speedup": min(speedups)}
    return {
        **over_wider,
        "rows": len(rows),
        "rows_with_ratio": len(ratios),
        "geometric_mean": _geometric_mean(ratios),
        "worst_ratio": max(ratios, default=None),
        "faster_rows": sum(row["faster"] is True for row in rows),
    }


def _geometric_mean(values: list[float]) -> float | None:
    if not values:
        return None
    return round(math.exp(sum(math.log(v) for v in values) / len(values)), 4)


def print_report(result: dict[str, Any]) -> None:
    """Prints our table, the peers' table and the gaps."""
    out = console()
    rows = result["cases"]
    caches = "" if result["kv_dtype"] == result["dtype"] else f" over {result['kv_dtype']}"
    title = (
        f"decode, {result['dtype']}{caches}, on {result['device']['name']}: medians of"
        f" {result['repeats']}, {result['clock']}; copy {result['copy_tb_per_s']:.2f} TB/s"
    )
    print_table(out, title, _our_table(result))
    if result["peers"] or any(len(row["sides"]) > 1 for row in rows):
        title = "Median us a call, each peer by its fastest way (host us of an eager call)"
        print_table(out, title, _side_table(rows))
    for row in rows:
        for side in row["sides"]:
            if side["peer"] is None and "failure" in side:
                out.print(f"FAILED {row['case']} {side['side']}: {side['failure']}", soft_wrap=True)
        if result["peers"]:
            for name, why in row["gaps"].items():
                out.print(f"gap {row['case']} {name}: {why}", soft_wrap=True)
    summary = result["summary"]
    if "speedup" in summary:
        out.print(
            f"over {result['dtype']} caches: {summary['speedup']:.2f} times as fast in the"
            f" geometric mean, at least {summary['least_speedup']:.2f} times",
            soft_wrap=True,
        )
    if summary["rows_with_ratio"]:
        out.print(
            f"ratio to the best peer: geometric mean {summary['geometric_mean']:.3f},"
            f" worst {summary['worst_ratio']:.3f}, faster than every peer in"
            f" {summary['faster_rows']} of {summary['rows_with_ratio']} rows",
            soft_wrap=True,
        )


def _our_table(result: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("case")
    for heading in (
        "KV MB", "sets", "floor us", "ours us", "tier", "x floor",
        "best peer us", "peer", "ratio", "faster", "host us", "error",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("tier", "peer") else "right")
    for row in result["cases"]:
        ours: dict[str, Any] = next((s for s in row["sides"] if s["peer"] is None), {})
        table.add_row(
            row["case"],
            f"{row['valid_bytes'] / 1e6:.1f}",
            str(row["sets"]),
            number(row["floor_us"], 1),
            number(row["our_us"], 2),
            row["our_tier"] or "-",
            floor_ratio(row),
            number(row["best_peer_us"], 2),
            row["best_peer"] or "-",
            number(row["ratio"], 3),
            {True: "yes", False: "no", None: "-"}[row["faster"]],
            number(ours.get("host_us"), 1),
            number(ours.get("error"), 4),
        )
    return table


def _side_table(rows: list[dict[str, Any]]) -> Table:
    """Median microseconds of our sides and of the fastest right side of each peer."""
    ours = list(dict.fromkeys(s["side"] for r in rows for s in r["sides"] if s["peer"] is None))
    table = Table()
    table.add_column("case")
    for name in ours:
        table.add_column(name, justify="right")
    for peer in PEERS.values():
        table.add_column(peer.label, justify="right")
    for row in rows:
        best = best_sides(row)
        mine = {s["side"]: s for s in row["sides"] if s["peer"] is None}
        cells = [_side_cell(mine.get(name)) for name in ours]
        cells += [_side_cell(best.get(name)) for name in PEERS]
        table.add_row(row["case"], *cells)
    return table


def _side_cell(side: dict[str, Any] | None) -> str:
    if side is None or not side["right"]:
        return "-"
    host = f" ({side['host_us']:.0f})" if "host_us" in side else ""
    variant = "" if ":" not in side["side"] or side["peer"] is None else side["side"].split(":")[1]
    return f"{side['median_us']:.2f}{host} {variant}".strip()


def number(value: float | None, digits: int) -> str:
    """A cell of a table; None is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
