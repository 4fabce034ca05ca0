"""What every bench does around its measurements: names, words, memory, files."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.clock import Call, Clock
from torch_attn_tiers.cli.bench.report import summarize

REPEATS = 5
#: Windows of calls of which the least is a host time.
HOST_WINDOWS = 10


def add_arguments(
    parser: argparse.ArgumentParser, peers: Iterable[str], repeats: int | None = REPEATS
) -> None:
    """The options that every bench has; `repeats` is the default of its own."""
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        default="",
        metavar="NAMES",
        help=f"measure others too: all, or some of {', '.join(peers)}",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help=f"of every side, in turns; default {REPEATS}",
    )
    parser.add_argument(
        "--device", default=None, help=f"{environment.DEVICE_HELP}; default: a GPU if any"
    )
    parser.add_argument("--out", default=None, metavar="FILE", help="write the results as JSON")


def chosen_device(text: str | None) -> torch.device:
    """The device of `--device`, which becomes the current one."""
    device = environment.parse_device(text)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def check_repeats(repeats: int) -> int:
    """The repeats, of which there is one at least."""
    if repeats < 1:
        raise SystemExit(f"--repeats {repeats}: it must be at least 1")
    return repeats


def exit_status(result: dict[str, Any]) -> int:
    """1 if a side of ours failed or was wrong, else 0. A forced tier need not take every case."""
    sides = [side for row in result["cases"] for side in row["sides"] if side["peer"] is None]
    return 0 if all(side["right"] or not side.get("eligible", True) for side in sides) else 1


def names(
    text: str | None, known: dict[str, Any], option: str, default: Sequence[str]
) -> list[str]:
    """The names in a comma-separated option; "all" is every known one."""
    if text is None:
        return list(default)
    if text == "all":
        return list(known)
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def begin(
    what: str,
    clock: Clock,
    device: torch.device,
    repeats: int,
    peers: Sequence[str],
    known_peers: dict[str, Any],
    **facts: Any,
) -> dict[str, Any]:
    """A result without cases."""
    return {
        **environment.header(what, "python -m torch_attn_tiers", sys.argv[1:], device),
        **facts,
        "clock": clock.name,
        "repeats": repeats,
        "host_windows": HOST_WINDOWS,
        "peers": list(peers),
        "peer_labels": {peer.name: peer.label for peer in known_peers.values()},
        "complete": False,
        "cases": [],
    }


def run_cases(
    result: dict[str, Any],
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    judge: Callable[[dict[str, Any], float], None],
    tell: Callable[[dict[str, Any]], str],
    clock: Clock,
    device: torch.device,
    *,
    started: float,
    out: str | None,
) -> dict[str, Any]:
    """The result with a judged row for each case and a summary; says and writes each row."""
    rate = clock.copy_rate()
    result["copy_tb_per_s"] = round(rate / 1e12, 4)
    for case in cases:
        since = time.perf_counter()
        with environment.arguments_hidden():
            row = measure(case)
        row["seconds"] = round(time.perf_counter() - since, 1)
        judge(row, rate)
        result["cases"].append(row)
        result["summary"] = summarize(result["cases"])
        say(tell(row))
        write(result, out)
        free(device)
    result["summary"] = summarize(result["cases"])
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["complete"] = True
    write(result, out)
    return result


def one_line(row: dict[str, Any], digits: int = 1) -> str:
    """A case and the medians of its sides."""
    medians = [
        f"{side['side']} {statistics.median(side['us']):.{digits}f}"
        + ("" if side["right"] else " WRONG")
        for side in row["sides"]
        if side["us"]
    ]
    return f"{row['case']} ({row['seconds']} s): " + ", ".join(medians)


class HostSide(NamedTuple):
    """A side whose host time is wanted."""

    row: dict[str, Any]
    call: Call
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def measure_host(clock: Clock, sides: Iterable[HostSide]) -> None:
    """Puts ``host_us`` into the rows of sides that are right: the least of some windows of calls.

    The sides take turns, so that what else the machine does slows none of them more than another.
    A side that fails has no host time.
    """
    running = [side for side in sides if side.row["right"]]
    for _ in range(HOST_WINDOWS):
        for side in tuple(running):
            try:
                us = round(clock.host_us(side.call, side.context), 1)
            except Exception:
                side.row.pop("host_us", None)
                running.remove(side)
            else:
                side.row["host_us"] = min(us, side.row.get("host_us", us))


def judge_errors(row: dict[str, Any], errors: dict[str, float], tolerance: float) -> None:
    """Says in a side's row whether all its errors are within the tolerance."""
    row["errors"] = {name: round(e, 6) for name, e in errors.items() if e == e}
    row["right"] = all(error <= tolerance for error in errors.values())
    if not row["right"]:
        found = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        row["failure"] = f"wrong: relative errors {found}, at most {tolerance} is right"


def in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def write(result: dict[str, Any], out: str | None) -> None:
    """Writes after every case, so that an interrupted run leaves what it has."""
    if out is not None:
        path = pathlib.Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
