"""`bench decode`: one decode step of `attn_tiers::decode` beside the public kernels.

Every side of a case runs over the same inputs, in turns, as a captured graph that rotates over
enough caches to leave the L2. The JSON of `--out` holds every repeat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from torch_attn_tiers.cli.bench import peers as peer_module
from torch_attn_tiers.cli.bench.cases import CASES, QUICK_CASES, Case, Inputs, relative_error
from torch_attn_tiers.cli.bench.clock import Clock, Recording, clock_for
from torch_attn_tiers.cli.bench.report import judge_case, print_report
from torch_attn_tiers.cli.bench.running import (
    REPEATS,
    HostSide,
    add_arguments,
    begin,
    check_repeats,
    chosen_device,
    exit_status,
    in_words,
    measure_host,
    names,
    one_line,
    run_cases,
    say,
)
from torch_attn_tiers.cli.bench.sides import Side, our_side
from torch_attn_tiers.errors import TierNotEligibleError
from torch_attn_tiers.tier import tier_names

_QUICK_REPEATS = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("decode", help="one decode step", description=__doc__)
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
        "--quick",
        action="store_true",
        help=f"for tuning: {', '.join(QUICK_CASES)}, {_QUICK_REPEATS} repeats, no host times",
    )
    add_arguments(parser, peer_module.PEERS, None)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the tables, writes the JSON; 1 if a side of ours failed or was wrong."""
    device = chosen_device(args.device)
    cases = [CASES[name] for name in names(args.cases, CASES, "--cases", _default_cases(args))]
    peers = names(args.peers or None, peer_module.PEERS, "--peers", ())
    if args.kv_dtype and peers:
        raise SystemExit(f"--kv-dtype {args.kv_dtype}: peers read other caches, leave --peers out")
    repeats = args.repeats
    if repeats is None:
        repeats = _QUICK_REPEATS if args.quick else REPEATS
    check_repeats(repeats)
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
    return exit_status(result)


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
    repeats: int = REPEATS,
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
    result = begin(
        "bench decode",
        clock,
        device,
        repeats,
        peers,
        peer_module.PEERS,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype or dtype).removeprefix("torch."),
    )
    with torch.no_grad():
        if peers:
            say("compiling the peers that need it")
            chosen = [peer_module.PEERS[name] for name in peers]
            peer_module.compile_ahead(chosen, cases, dtype, device)
            result["compile_s"] = round(time.perf_counter() - started, 1)

        def measure(case: Case) -> dict[str, Any]:
            inputs = Inputs(case, dtype, device, clock.l2_bytes, kv_dtype)
            return _run_case(inputs, clock, peers, tiers, layout, repeats, host_times)

        return run_cases(
            result, cases, measure, judge_case, one_line, clock, device, started=started, out=out
        )


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
            failed: dict[str, Any] = {"us": [], "right": False, "failure": in_words(error)}
            if tier != "auto" and isinstance(error, TierNotEligibleError):
                failed["eligible"] = False
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
        row["calls"] = recording.calls
    if host_times:
        measure_host(
            clock, [HostSide(row, side.calls[0], side.context) for side, _, _, row in recorded]
        )
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
