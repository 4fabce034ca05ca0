"""`doctor`: what is installed, which devices there are, which tiers are usable and why not."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.table import Table

from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.console import console, print_table
from torch_attn_tiers.cli.problem_args import add_problem_options, decode_call


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="versions, devices, usable tiers", description=__doc__
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints three tables and returns 0: a missing library is a fact, not a failure."""
    out = console()
    print_table(out, "Versions", _versions())
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    print_table(out, "Devices", _devices(devices))
    for device in devices:
        print_table(out, *_tiers(device))
    return 0


def _versions() -> Table:
    table = Table()
    table.add_column("package")
    table.add_column("version")
    table.add_column("used for")
    for name, found in environment.versions().items():
        table.add_row(name, found or "not found", environment.PACKAGES.get(name, ""))
    return table


def _devices(devices: list[torch.device]) -> Table:
    table = Table()
    table.add_column("device")
    table.add_column("what it is")
    for device in devices:
        report = environment.device_report(device)
        facts = ", ".join(f"{key} {value}" for key, value in report.items() if key != "type")
        table.add_row(str(device), facts)
    return table


def _tiers(device: torch.device) -> tuple[str, Table]:
    """A title and the verdicts on one plain decode step, a batch of one over 4096 keys."""
    import torch_attn_tiers

    parser = argparse.ArgumentParser()
    add_problem_options(parser)
    tensors, scalars = decode_call(parser.parse_args([]), device.type)
    query = tensors[0]
    assert query is not None
    dtype = str(query.dtype).removeprefix("torch.")
    table = Table()
    table.add_column("tier")
    table.add_column("usable")
    table.add_column("why not")
    explanation = torch_attn_tiers.explain("decode", *tensors, device=device, **scalars)
    title = (
        f"Tiers of decode on {device} (one {dtype} query row over 4096 keys of 8 heads), "
        f"order: {explanation.order}"
    )
    for verdict in explanation.verdicts:
        usable = "yes" if verdict.eligible else "no"
        if verdict.name == explanation.chosen:
            usable += ", chosen"
        table.add_row(verdict.name, usable, "; ".join(verdict.reasons))
    return title, table
