"""`bench decode`: one decode step of `attn_tiers::decode` beside the public kernels.

Every side of a case runs over the same inputs, in turns, as a captured graph that rotates over
enough caches to leave the L2. The JSON of `--out` holds every repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench import peers as peer_module
from torch_attn_tiers.cli.bench.cases import CASES, QUICK_CASES, Case, Inputs, relative_error
from torch_attn_tiers.cli.bench.clock import Clock, Recording, clock_for
from torch_attn_tiers.cli.bench.report import judge_case, print_report, summarize
from torch_attn_tiers.cli.bench.running import free, in_words, names, say, write
from torch_attn_tiers.cli.bench.sides import Side, our_side
from torch_attn_tiers.tier import tier_names

_REPEATS = 5
_QUICK_REPEATS = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("decode", help="one decode step", description=__doc__)
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        default="",
        metavar="NAMES",
        help=f"measure others too: all, or some of {', '.join(peer_module.PEERS)}",
    )
    parser.add_argument("--cases", default=None, metavar="NAMES", help=", ".join(CASES))
    parser.add_argument(
        "--tiers",
        default="auto",
        metavar="NAMES",
        help="our sides: auto is the package's own choice, a tier's name forces it;"
        " the first one is compared with the peers",
    )
    parser.add_argument(
        "--layout",
        choices=("hnd", "nhd"),
        default="hnd",
        help="our caches: [B,Hkv,T,D], or views of [B,T,Hkv,D]",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float8_e4m3fn",),
        default=None,
        help="of our caches, with scales, beside the same case over bfloat16 caches; no peers",
    )
    parser.add_argument(
        "--repeats", type=int, default=None, help=f"of every side, in turns; default {_REPEATS}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"for tuning: {', '.join(QUICK_CASES)}, {_QUICK_REPEATS} repeats, no host times",
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", default=None, metavar="FILE", help="write the results as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the tables, writes the JSON; 1 if a side of ours failed or was wrong."""
    device = environment.parse_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cases = [CASES[name] for name in names(args.cases, CASES, "--cases", _default_cases(args))]
    peers = names(args.peers or None, peer_module.PEERS, "--peers", ())
    if args.kv_dtype and peers:
        raise SystemExit(f"--kv-dtype {args.kv_dtype}: peers read other caches, leave --peers out")
    repeats = args.repeats
    if repeats is None:
        repeats = _QUICK_REPEATS if args.quick else _REPEATS
    if repeats < 1:
        raise SystemExit(f"--repeats {repeats}: it must be at least 1")
    known_tiers = dict.fromkeys(("auto", *tier_names("decode")))
    result = bench(
        cases,
        clock_for(device),
        device,
        peers=peers,
        tiers=names(args.tiers, known_tiers, "--tiers", ()),
        layout=args.layout,
        repeats=repeats,
        host_times=not args.quick,
        out=args.out,
        kv_dtype=torch.float8_e4m3fn if args.kv_dtype else None,
    )
    print_report(result)
    ours = [side for case in result["cases"] for side in case["sides"] if side["peer"] is None]
    return 0 if all(side["right"] for side in ours) else 1


def _default_cases(args: argparse.Namespace) -> Sequence[str]:
    return QUICK_CASES if args.quick else tuple(CASES)


def bench(
    cases: Sequence[Case],
    clock: Clock,
    device: torch.device,
    *,
    peers: Sequence[str] = (),
    tiers: Sequence[str] = ("auto",),
    layout: str = "hnd",
    repeats: int = _REPEATS,
    host_times: bool = True,
    out: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Runs the cases and returns what `--out` writes.

    With `kv_dtype` our caches have it, and a last side of each case is the first over caches in
    `dtype`.
    """
    started = time.perf_counter()
    result: dict[str, Any] = {
        "what": "bench decode",
        "command": environment.command("python -m torch_attn_tiers", sys.argv[1:]),
        "date": environment.now(),
        "commit": environment.commit(),
        "device": environment.device_report(device),
        "versions": environment.versions(),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype or dtype).removeprefix("torch."),
        "clock": clock.name,
        "repeats": repeats,
        "peers": list(peers),
        "peer_labels": {peer.name: peer.label for peer in peer_module.PEERS.values()},
        "complete": False,
        "cases": [],
    }
    with torch.no_grad():
        if peers:
            say("compiling the peers that need it")
            chosen = [peer_module.PEERS[name] for name in peers]
            peer_module.compile_ahead(chosen, cases, dtype, device)
            result["compile_s"] = round(time.perf_counter() - started, 1)
        rate = clock.copy_rate()
        result["copy_tb_per_s"] = round(rate / 1e12, 4)
        for case in cases:
            since = time.perf_counter()
            inputs = Inputs(case, dtype, device, clock.l2_bytes, kv_dtype)
            row = _run_case(inputs, clock, peers, tiers, layout, repeats, host_times)
            row["seconds"] = round(time.perf_counter() - since, 1)
            judge_case(row, rate)
            result["cases"].append(row)
            say(_one_line(row))
            write(result, out)
            del inputs
            free(device)
    result["summary"] = summarize(result["cases"])
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["complete"] = True
    write(result, out)
    return result


def _run_case(
    inputs: Inputs,
    clock: Clock,
    peers: Sequence[str],
    tiers: Sequence[str],
    layout: str,
    repeats: int,
    host_times: bool,
) -> dict[str, Any]:
    """Builds, records, times in turns and checks every side of one case."""
    case = inputs.case
    rows: list[dict[str, Any]] = []
    gaps: dict[str, str] = {}
    recorded: list[tuple[Side, Inputs, Recording, dict[str, Any]]] = []

    def add(side: Side, inputs: Inputs = inputs) -> None:
        row = {"side": side.name, "peer": side.peer, "us": [], "right": False, **side.notes}
        try:
            recording = clock.record(side.calls, side.context)
        except Exception as error:
            row["failure"] = in_words(error)
        else:
            recorded.append((side, inputs, recording, row))
        rows.append(row)

    def add_ours(name: str, tier: str, inputs: Inputs, **notes: str) -> None:
        try:
            side = our_side(inputs, tier, layout)
        except Exception as error:
            failed = {"us": [], "right": False, "failure": in_words(error)}
            rows.append({"side": name, "peer": None, **failed, **notes})
        else:
            side.name = name
            side.notes.update(notes)
            add(side, inputs)

    for tier in tiers:
        add_ours("ours" if tier == "auto" else f"ours:{tier}", tier, inputs)
    if inputs.kv_dtype is not inputs.dtype:
        wider = Inputs(case, inputs.dtype, inputs.device, clock.l2_bytes)
        caches = str(inputs.dtype).removeprefix("torch.")
        add_ours(f"{caches} caches", tiers[0], wider, caches=caches)
    for name in peers:
        peer = peer_module.PEERS[name]
        if name not in peer_module.listed(case):
            continue
        gap = peer.gap()
        if gap is not None:
            gaps[name] = gap
            continue
        try:
            for side in peer.build(inputs):
                add(side)
        except Exception as error:
            gaps[name] = in_words(error)

    for _ in range(repeats):
        for _side, _inputs, recording, row in recorded:
            row["us"].append(round(recording.measure(), 3))
    for side, its_inputs, recording, row in recorded:
        _check(side, recording, row, its_inputs)
        if host_times and row["right"]:
            with contextlib.suppress(Exception):
                row["host_us"] = round(clock.host_us(side.calls[0], side.context), 1)
        row["calls"] = recording.calls
    return {
        "case": case.name,
        "batch": case.batch,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "capacity": case.capacity,
        "lengths": case.lengths,
        "valid_bytes": inputs.valid_bytes,
        "moved_bytes": inputs.moved_bytes,
        "sets": inputs.sets,
        "listed_peers": peer_module.listed(case),
        "gaps": gaps,
        "sides": rows,
    }


def _check(side: Side, recording: Recording, row: dict[str, Any], inputs: Inputs) -> None:
    """Runs what was timed once more over a poisoned output and compares it with float32."""
    try:
        recording.output.fill_(float("nan"))
        recording.run()
        error = relative_error(side.to_bhsd(recording.output), inputs.reference)
    except Exception as failure:
        row["failure"] = in_words(failure)
        return
    row["right"] = error <= side.tolerance
    if error == error:
        row["error"] = round(error, 6)
    if not row["right"]:
        row["failure"] = f"wrong: relative error {error:.2g}, at most {side.tolerance} is right"


def _one_line(row: dict[str, Any]) -> str:
    medians = [
        f"{side['side']} {statistics.median(side['us']):.1f}" + ("" if side["right"] else " WRONG")
        for side in row["sides"]
        if side["us"]
    ]
    return f"{row['case']} ({row['seconds']} s): " + ", ".join(medians)
