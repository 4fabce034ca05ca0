"""Writes the measured tables of README.md and docs/ from benchmarks/results/*.json.

A region in a page is

    <!-- table:decode_h200 -->
    (written by this script)
    <!-- /table:decode_h200 -->

and comes from benchmarks/results/decode_h200.json, or from the file that FILES has for its name;
without that file it says "not measured yet".
`--check` writes nothing and fails when a page differs from its results.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from torch_attn_tiers.cli.bench.gdn_cases import MODEL_CASES
from torch_attn_tiers.cli.bench.gdn_decode_sides import CASES as STEP_CASES
from torch_attn_tiers.cli.bench.gdn_sides import LAYOUTS, OUR_TOLERANCE
from torch_attn_tiers.cli.bench.report import (
    best_sides,
    floor_ratio,
    number,
    summarize,
    wider_side,
)

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
        cells += [number(row["ratio"], 3), _faster(row)]
        rows.append(cells)
    text = [_table(header, rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} interleaved repeats; the best peer is bold."
        f" The floor is the time to copy the valid bytes at the measured"
        f" {result['copy_tb_per_s']:.2f} TB/s; below 1 µs a ratio to it says nothing."
    )
    text += _verdict(result)
    text.append(_provenance(result))
    return "\n".join(text)


def _verdict(result: dict[str, Any]) -> list[str]:
    """Ours against the best peers over all rows, and which peers are missing from which why."""
    text = []
    summary = result["summary"]
    if summary["rows_with_ratio"]:
        text.append(
            f"Ours / best peer: geometric mean {summary['geometric_mean']:.3f}, worst"
            f" {summary['worst_ratio']:.3f}; in {summary['faster_rows']} of"
            f" {summary['rows_with_ratio']} rows our slowest repeat beats every peer's fastest."
        )
    return text + _gaps(result)


def _gaps(result: dict[str, Any]) -> list[str]:
    """Which peers are missing from which rows, and why."""
    labels, count = result["peer_labels"], len(result["cases"])
    rows: dict[tuple[str, str], list[str]] = {}
    for row in result["cases"]:
        for name, why in row["gaps"].items():
            rows.setdefault((name, why), []).append(f"`{row['case']}`")
    if not result["peers"] or not rows:
        return []
    told = []
    for (name, why), cases in sorted(rows.items()):
        where = "" if len(cases) == count else f" ({', '.join(cases)})"
        told.append(f"{labels[name]}: {why}{where}")
    return ["Gaps: " + "; ".join(told) + "."]


def _failures(result: dict[str, Any]) -> list[str]:
    """Sides whose results were wrong, or that did not run: a dash in the table."""
    told = [
        f"`{row['case']}` {side['side']}: {side['failure']}"
        for row in result["cases"]
        for side in row["sides"]
        if "failure" in side
    ]
    return ["Failed: " + "; ".join(told) + "."] if told else []


#: Tiers that run a library's kernel, and what `bench decode` calls the library by itself.
_LIBRARIES = {"cudnn": "cudnn_fe", "xqa": "xqa"}


def decode_tiers_table(result: dict[str, Any]) -> str:
    """`bench decode --tiers auto,...`: the tier chosen, each one forced, and the libraries."""
    labels = result["peer_labels"]
    forced = _forced_tiers(result)
    header = ["case", "chosen", "time"]
    for tier in forced:
        header.append(f"`{tier}`")
        if tier in _LIBRARIES:
            header.append(f"{labels[_LIBRARIES[tier]]} itself")
    rows, ratios = [], []
    for row in result["cases"]:
        sides = _our_sides(row)
        chosen = sides["ours"]
        cells = [f"`{row['case']}`", f"`{chosen['tier']}`", _side_us(chosen)]
        for tier in forced:
            cells.append(_side_us(sides[f"ours:{tier}"]))
            if tier in _LIBRARIES:
                cells.append(_side_us(_library_side(row, tier)))
        fastest = min(
            side["median_us"] for name, side in sides.items() if name != "ours" and side["right"]
        )
        ratios.append(chosen["median_us"] / fastest)
        rows.append([*cells, number(ratios[-1], 3)])
    text = [_table([*header, "chosen / fastest forced"], rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} repeats in a captured graph, guards included;"
        " the libraries by themselves over caches of the same layout, without guards. The chosen"
        f" tier takes at most {max(ratios):.3f} times the fastest one."
    )
    text.append(_provenance(result))
    return "\n".join(text)


def decode_host_table(result: dict[str, Any]) -> str:
    """`bench decode --tiers auto,...`: host microseconds of an eager call."""
    labels = result["peer_labels"]
    forced = _forced_tiers(result)
    header = ["case", "chosen"]
    for tier in forced:
        header.append(f"`{tier}`")
        if tier in _LIBRARIES:
            header += [f"{labels[_LIBRARIES[tier]]} itself", "more"]
    rows = []
    for row in result["cases"]:
        sides = _our_sides(row)
        cells = [f"`{row['case']}`", number(sides["ours"].get("host_us"), 0)]
        for tier in forced:
            ours = sides[f"ours:{tier}"].get("host_us")
            cells.append(number(ours, 0))
            if tier in _LIBRARIES:
                own = (_library_side(row, tier) or {}).get("host_us")
                more = None if ours is None or own is None else ours - own
                cells += [number(own, 0), number(more, 0)]
        rows.append(cells)
    text = [_table(header, rows), ""]
    windows = result.get("host_windows")
    how = "3 windows of 30 calls, one side after the other"  # results from before
    if windows is not None:
        how = f"{windows} windows of 30 calls, which the sides take in turns"
    text.append(
        "Microseconds of the host for one eager call, in the run of the table above: the least of "
        f"{how}. The device is not waited for."
    )
    return "\n".join(text)


def _our_sides(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {side["side"]: side for side in row["sides"] if side["peer"] is None}


def _forced_tiers(result: dict[str, Any]) -> list[str]:
    names = (name for row in result["cases"] for name in _our_sides(row) if ":" in name)
    return list(dict.fromkeys(name.partition(":")[2] for name in names))


def _library_side(row: dict[str, Any], tier: str) -> dict[str, Any] | None:
    """The library by itself, over caches of the layout that ours has in this row."""
    layout = _our_sides(row)["ours"]["layout"]
    peer = _LIBRARIES[tier]
    found = (s for s in row["sides"] if s["peer"] == peer and s["right"] and s["layout"] == layout)
    return next(found, None)


def _side_us(side: dict[str, Any] | None) -> str:
    return number(side["median_us"] if side is not None and side["right"] else None, 1)


def gdn_table(result: dict[str, Any]) -> str:
    """`bench gdn`: a row a case, a column for each side that was compared."""
    labels = result["peer_labels"]
    # Not FlashInfer's kernel without its norms.
    compared = [[s for s in row["sides"] if s["compared"]] for row in result["cases"]]
    names = dict.fromkeys((s["peer"], s["h"]) for sides in compared for s in sides)
    forms = list(dict.fromkeys(h for _, h in names))
    columns = sorted(names, key=lambda one: (forms.index(one[1]), one[0] is not None))
    header = ["case", "Hq/Hv", "floor"]
    for peer, h in columns:
        header.append((labels[peer] if peer else "ours") + (f", {h}" if h else ""))
    header += ["ours / best peer", "faster than all", "ours, host"]
    rows = []
    for row, sides in zip(result["cases"], compared):
        found = {(side["peer"], side["h"]): side for side in sides}
        plain = found.get((None, None), {})
        rows.append(
            [
                f"`{row['case']}`",
                f"{row['q_heads']}/{row['v_heads']}",
                number(row["floor_us"], 1),
                *(_side_us(found.get(column)) for column in columns),
                number(row["ratio"], 3),
                _faster(row),
                number(plain.get("host_us"), 0),
            ]
        )
    ours = [s["errors"] for sides in compared for s in sides if s["peer"] is None and s["right"]]
    errors = [
        number(max((one[name] for one in ours), default=None), 4) for name in ("out", "state")
    ]
    text = [_table(header, rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} interleaved repeats, with l2norm and exp in"
        f" all of them. The floor is the time to copy the bytes in and out at the measured"
        f" {result['copy_tb_per_s']:.2f} TB/s. Our largest relative errors: {errors[0]} (out) and"
        f" {errors[1]} (state)."
    )
    summary = result["summary"]
    if summary["rows_with_ratio"]:
        text.append(
            f"Ours / best peer of those measured: geometric mean {summary['geometric_mean']:.3f},"
            f" worst row {summary['worst_ratio']:.3f}."
        )
    text += [*_gaps(result), *_failures(result)]
    if not result["complete"]:
        text.append(f"The run was ended after `{result['cases'][-1]['case']}`.")
    text.append(_provenance(result))
    return "\n".join(text)


def gdn_model_table(result: dict[str, Any]) -> str:
    """The same for the heads of one model."""
    cases = [row for row in result["cases"] if row["case"] in {c.name for c in MODEL_CASES}]
    complete = len(cases) == len(MODEL_CASES)
    return gdn_table({**result, "cases": cases, "summary": summarize(cases), "complete": complete})


def gdn_checkpoints_table(result: dict[str, Any]) -> str:
    """`bench gdn`: what states inside prompts cost, in times of filling them with a number."""
    labels = result["peer_labels"]
    peers = {s["peer"] for row in result["cases"] for s in row["sides"]} - {None}
    columns = [(peer, layout) for layout in LAYOUTS for peer in (None, *sorted(peers))]
    rows, shown = [], set()
    for row in result["cases"]:
        right = [s for s in row["sides"] if s["compared"] and s["right"]]
        us = {(s["peer"], s["h"]): s["median_us"] for s in right}
        costs = {}
        for peer, layout in columns:
            fill = row["fill_h_us"].get(layout)
            if None not in (fill, us.get((peer, None)), us.get((peer, layout))):
                more = us[peer, layout] - us[peer, None]
                costs[peer, layout] = more / statistics.median(fill)
        shown |= set(costs)
        rows.append((row, costs))
    columns = [column for column in columns if column in shown]
    header = ["case", "fill, fla", "compact"]
    header += [f"{labels[peer] if peer else 'ours'}, {layout}" for peer, layout in columns]
    cells = [
        [
            f"`{row['case']}`",
            *(number(statistics.median(row["fill_h_us"][layout]), 1) for layout in LAYOUTS),
            *(number(costs.get(column), 2) for column in columns),
        ]
        for row, costs in rows
    ]
    return "\n".join([_table(header, cells), "", _provenance(result)])


def _is_right(row: dict[str, Any]) -> bool:
    """Whether what a configuration computed was right."""
    return all(row.get(name, 0) <= OUR_TOLERANCE for name in ("out", "state", "h"))  # not NaN


def gdn_configs_table(result: dict[str, Any]) -> str:
    """benchmarks/gdn_configs.py: each kernel by itself, and all of them."""
    times = {
        (row["case"], row["config"], row["kernel"]): statistics.median(row["us"])
        for row in result["rows"]
        if row.get("us") and _is_right(row)
    }
    labels = {"prepare_kernel": "prepare"}
    if any(kernel == "segment_kernel" for _, _, kernel in times):  # of split sequences
        labels |= {"segment_kernel": "segments", "chain_kernel": "chain"}
    labels |= {"scan_kernel": "scan", "run": "all launches"}
    found = sorted(
        {(case, config) for case, config, _ in times},
        key=lambda one: (one[0], times.get((*one, "run"), 0.0)),
    )
    rows = [
        [f"`{case}`", f"`{config}`"]
        + [number(times.get((case, config, kernel)), 0) for kernel in labels]
        for case, config in found
    ]
    header = ["case", "configuration", *labels.values()]
    return "\n".join(
        [
            _table(header, rows),
            "",
            "Median microseconds, the fastest first; - where a kernel is another row's, timed there"
            + (", or there is none as nothing is split." if "chain_kernel" in labels else "."),
            _provenance(result),
        ]
    )


def gdn_decode_table(result: dict[str, Any]) -> str:
    """`bench gdn_decode`: ours, by rows and by indices, and the best variant of each peer."""
    labels: dict[str, str] = result["peer_labels"]
    measured = [name for name in labels if any(name in best_sides(row) for row in result["cases"])]
    header = ["case", "state", "floor", "ours", "copy rate", "by indices"]
    header += [labels[name] for name in measured] + ["ours / best peer", "faster than all"]
    rows = []
    for row in result["cases"]:
        best = best_sides(row)
        by_indices = (side for name, side in _our_sides(row).items() if name.endswith(".pool"))
        ratio = row["floor_ratio"]
        says_nothing = floor_ratio(row) == "-"
        cells = [
            f"`{row['case']}`",
            _bytes(row["state_bytes"]),
            number(row["floor_us"], 1),
            number(row["our_us"], 1),
            "-" if says_nothing else f"{100 / ratio:.0f} %",
            _side_us(next(by_indices, None)),
        ]
        for name in measured:
            cell = _side_us(best.get(name))
            if name == row["best_peer"]:
                cell = f"**{cell}**"
            variant = best[name]["side"].partition(":")[2] if name in best else ""
            cells.append(f"{cell} `{variant}`" if variant else cell)
        rows.append([*cells, number(row["ratio"], 3), _faster(row)])
    text = [_table(header, rows), ""]
    text.append(
        f"Median microseconds of {result['repeats']} interleaved repeats; of each peer its fastest"
        " variant, and the best peer is bold. The floor is the time to copy the bytes in and out at"
        f" the measured {result['copy_tb_per_s']:.2f} TB/s, the copy rate the share of that which"
        " ours reaches; with a floor below 1 µs it says nothing."
    )
    text += _verdict(result)
    text.append(_provenance(result))
    return "\n".join(text)


def gdn_decode_configs_table(result: dict[str, Any]) -> str:
    """benchmarks/gdn_decode_configs.py: the default configuration and the fastest of each case."""
    times: dict[str, dict[str, float]] = {}
    for row in filter(_is_right, result["rows"]):
        times.setdefault(row["case"], {})[row["config"]] = statistics.median(row["us"])
    rows = []
    for case, configs in times.items():
        fastest = min(configs, key=lambda config: configs[config])
        floor = STEP_CASES[case].moved_bytes / result["copy_tb_per_s"] / 1e6
        cells = [f"`{case}`", number(floor, 1), number(configs.get("default"), 1)]
        rows.append([*cells, number(configs[fastest], 1), f"`{fastest}`"])
    text = [_table(["case", "floor", "`default`", "fastest", "configuration"], rows), ""]
    text.append(
        "Median microseconds. The floor is the time to copy the bytes in and out at the measured"
        f" {result['copy_tb_per_s']:.2f} TB/s."
    )
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
    """`pytest --results`: outcomes by tier, and what failed."""
    counts = {**result["tiers"], "all tests": result["total"]}
    rows = [
        [name, *(str(tally[outcome]) for outcome in ("passed", "failed", "skipped"))]
        for name, tally in counts.items()
    ]
    lines = [_table(["tier", "passed", "failed", "skipped"], rows), ""]
    if failures := result.get("failures"):
        lines += ["Failed: " + ", ".join(f"`{test}`" for test in failures) + ".", ""]
    if result.get("cut_short"):
        lines += ["The run was cut short: not every test was run.", ""]
    return "\n".join([*lines, _provenance(result)])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode_h200": decode_table,
    "decode_flash_h200": decode_table,
    "decode_tiers_h200": decode_tiers_table,
    "decode_host_h200": decode_host_table,
    "decode_host_part_h200": decode_host_table,
    "decode_float8_h200": decode_float8_table,
    "gdn_h200": gdn_table,
    "gdn_model_h200": gdn_model_table,
    "gdn_checkpoints_h200": gdn_checkpoints_table,
    "gdn_fla_h200": gdn_table,
    "gdn_flashinfer_tier_h200": gdn_table,
    "gdn_configs_h200": gdn_configs_table,
    "gdn_decode_h200": gdn_decode_table,
    "gdn_decode_configs_h200": gdn_decode_configs_table,
    "boundary_cpu": boundary_table,
    "gpu_tests_h200": tests_table,
    "gpu_tests_libraries_h200": tests_table,
    "gpu_tests_gdn_h200": tests_table,
    "gpu_tests_gdn_decode_h200": tests_table,
    "gpu_tests_gdn_flashinfer_h200": tests_table,
}
#: Result files of the tables that are not named after theirs.
FILES = {
    "decode_tiers_h200": "decode_h200",
    "decode_host_h200": "decode_h200",
    "decode_host_part_h200": "decode_part_h200",
    "gdn_checkpoints_h200": "gdn_h200",
    "gdn_model_h200": "gdn_h200",
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def _faster(row: dict[str, Any]) -> str:
    return {True: "yes", False: "no"}.get(row["faster"], "-")


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
    path = results / f"{FILES.get(name, name)}.json"
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
