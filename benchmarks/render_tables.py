"""Writes the measured tables of README.md and docs/ from benchmarks/results/*.json.

A region in a page is

    <!-- table:decode_h200 -->
    (written by this script)
    <!-- /table:decode_h200 -->

and comes from benchmarks/results/decode_h200.json; without that file it says "not measured yet".
`--check` writes nothing and fails when a page differs from its results.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from torch_attn_tiers.cli.bench.report import best_sides, floor_ratio, number, wider_side

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_MEASURED = "not measured yet"

_OPEN = re.compile(r"<!-- table:(.*?) -->")
_REGION = re.compile(
    r"(?P<open><!-- table:(?P<name>\w+) -->\n)(?P<body>.*?)(?P<close><!-- /table:(?P=name) -->)",
    re.DOTALL,
)


def decode_table(result: dict[str, Any]) -> str:
    """`bench decode`: microseconds of every side beside the floor."""
    labels: dict[str, str] = result["peer_labels"]
    measured = [name for name in labels if any(name in best_sides(row) for row in result["cases"])]
    header = ["case", "B, Hq/Hkv, D, T", "valid KV", "floor", "ours", "tier", "ours / floor"]
    header += [labels[name] for name in measured] + ["ours / best peer", "faster than all"]
    rows = []
    for row in result["cases"]:
        best = best_sides(row)
        cells = [
            f"`{row['case']}`",
            f"{row['batch']}, {row['q_heads']}/{row['kv_heads']}, {row['head_dim']},"
            f" {row['capacity']}",
            _bytes(row["valid_bytes"]),
            number(row["floor_us"], 1),
            number(row["our_us"], 1),
            row["our_tier"] or "-",
            floor_ratio(row),
        ]
        for name in measured:
            cell = number(best[name]["median_us"] if name in best else None, 1)
            cells.append(f"**{cell}**" if name == row["best_peer"] else cell)
        cells += [number(row["ratio"], 3), {True: "yes", False: "no"}.get(row["faster"], "-")]
        rows.append(cells)
    text = [_table(header, rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} interleaved repeats; the best peer is bold."
        f" The floor is the time to copy the valid bytes at the measured"
        f" {result['copy_tb_per_s']:.2f} TB/s; below 1 µs a ratio to it says nothing."
    )
    summary = result["summary"]
    if summary["rows_with_ratio"]:
        text.append(
            f"Ours / best peer: geometric mean {summary['geometric_mean']:.3f}, worst"
            f" {summary['worst_ratio']:.3f}; in {summary['faster_rows']} of"
            f" {summary['rows_with_ratio']} rows our slowest repeat beats every peer's fastest."
        )
    gaps = sorted({(name, why) for row in result["cases"] for name, why in row["gaps"].items()})
    if result["peers"] and gaps:
        text.append("Gaps: " + "; ".join(f"{labels[name]}: {why}" for name, why in gaps) + ".")
    text.append(_provenance(result))
    return "\n".join(text)


def decode_float8_table(result: dict[str, Any]) -> str:
    """`bench decode --kv-dtype float8_e4m3fn`: ours beside itself over wider caches."""
    dtype = result["dtype"]
    header = ["case", "B, Hq/Hkv, D, T", "valid KV", "floor", "ours", "tier", "ours / floor"]
    header += [f"over {dtype}", "times as fast", "error"]
    rows = []
    for row in result["cases"]:
        ours = next(side for side in row["sides"] if side["peer"] is None)
        wider = wider_side(row) or {}
        rows.append(
            [
                f"`{row['case']}`",
                f"{row['batch']}, {row['q_heads']}/{row['kv_heads']}, {row['head_dim']},"
                f" {row['capacity']}",
                _bytes(row["valid_bytes"]),
                number(row["floor_us"], 1),
                number(row["our_us"], 1),
                row["our_tier"] or "-",
                floor_ratio(row),
                number(wider.get("median_us"), 1),
                number(row.get("speedup"), 2),
                number(ours.get("error"), 4),
            ]
        )
    text = [_table(header, rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} interleaved repeats, over {result['kv_dtype']}"
        f" caches and over the same case in {dtype}. The floor is the time to copy the valid bytes"
        f" at the measured {result['copy_tb_per_s']:.2f} TB/s; the error is relative to float32"
        " over the same numbers."
    )
    summary = result["summary"]
    if "speedup" in summary:
        text.append(
            f"{summary['speedup']:.2f} times as fast in the geometric mean, at least"
            f" {summary['least_speedup']:.2f} times."
        )
    text.append(_provenance(result))
    return "\n".join(text)


def boundary_table(result: dict[str, Any]) -> str:
    """benchmarks/boundary.py: host microseconds of one call through the operator boundary."""
    rows = [[row["what"], number(row["us"], 2)] for row in result["rows"]]
    return "\n".join([_table(["call", "µs"], rows), "", _provenance(result)])


def tests_table(result: dict[str, Any]) -> str:
    """`pytest --results`: outcomes by tier."""
    counts = {**result["tiers"], "all tests": result["total"]}
    rows = [
        [name, *(str(tally[outcome]) for outcome in ("passed", "failed", "skipped"))]
        for name, tally in counts.items()
    ]
    header = ["tier", "passed", "failed", "skipped"]
    return "\n".join([_table(header, rows), "", _provenance(result)])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode_h200": decode_table,
    "decode_float8_h200": decode_float8_table,
    "boundary_cpu": boundary_table,
    "gpu_tests_h200": tests_table,
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def _bytes(count: int) -> str:
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.0f} MB"


def _provenance(result: dict[str, Any]) -> str:
    """One line: where, with what, which commit, when, by which command."""
    device = result["device"]
    name = device["name"] if isinstance(device, dict) else device
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if v)
    return (
        f"{name}; {versions}; commit `{result['commit'][:12]}`; {result['date'][:10]}."
        f" Made by `{result['command']}`."
    )


def render(text: str, results: pathlib.Path) -> str:
    """Returns a page's text with every region written anew.

    Raises ValueError for a region of an unknown name, or one that is not closed.
    """
    opened = _OPEN.findall(text)
    regions = [match["name"] for match in _REGION.finditer(text)]
    if opened != regions:
        raise ValueError(f"regions opened: {opened}, of these closed: {regions}")
    return _REGION.sub(lambda match: _region(match, results), text)


def _region(match: re.Match[str], results: pathlib.Path) -> str:
    name = match["name"]
    if name not in TABLES:
        raise ValueError(f"table {name!r} is none of {', '.join(TABLES)}")
    path = results / f"{name}.json"
    if not path.exists():
        body = f"*{NOT_MEASURED}*"
    else:
        body = TABLES[name](json.loads(path.read_text(encoding="utf-8")))
    return f"{match['open']}\n{body}\n\n{match['close']}"


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """README.md and every Markdown page of docs/."""
    built = root / "docs" / "_build"
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if page.exists() and built not in page.parents]


def main(argv: list[str] | None = None, root: pathlib.Path = ROOT) -> int:
    """Writes or checks all pages; 1 if `--check` finds a page that differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args(argv)
    status = 0
    for page in pages(root):
        before = page.read_text(encoding="utf-8")
        try:
            after = render(before, root / "benchmarks" / "results")
        except (KeyError, ValueError) as error:
            print(f"{page.relative_to(root)}: {error!r}", file=sys.stderr)
            status = 1
            continue
        if before == after:
            continue
        if args.check:
            print(
                f"{page.relative_to(root)}: differs from benchmarks/results; run"
                " python benchmarks/render_tables.py",
                file=sys.stderr,
            )
            status = 1
        else:
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(root)}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
