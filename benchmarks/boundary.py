"""Host time of a call through the operator boundary, without the kernel behind it, on the CPU.

    python benchmarks/boundary.py [--out benchmarks/results/boundary_cpu.json]

Two costs: PyTorch's dispatcher with our registration (10 tensors and 8 scalars: at most 10 µs), and
choosing the tier of a problem that is known (at most 5 µs). A tier that does nothing stands behind.
Each figure is the median of the repeats, in grad mode (the slower one); the result file holds all.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch.library import custom_op

import torch_attn_tiers
from torch_attn_tiers.cli import environment
from torch_attn_tiers.ops import decode as decode_op
from torch_attn_tiers.ops.registration import define

CALLS = 5000
REPEATS = 15

_SCHEMA = (
    "(Tensor a, Tensor b, Tensor c, Tensor? d=None, Tensor? e=None, Tensor? f=None, "
    "Tensor? g=None, Tensor? h=None, Tensor? i=None, Tensor? j=None, *, bool k=False, "
    "float? l=None, float m=0.0, int n=-1, int o=-1, int? p=None, bool q=False, str? r=None) "
    "-> Tensor"
)
_SCALARS: dict[str, Any] = dict(k=True, l=0.1, m=50.0, n=3, o=4, p=8, q=True, r="flash")

_RESULT = torch.empty(1)


def _nothing(*tensors: Any, **scalars: Any) -> torch.Tensor:
    return _RESULT


def _write_nothing(*tensors: Any, **scalars: Any) -> None:
    return None


def _rows() -> list[tuple[str, float | None, Callable[[], Any]]]:
    """What is measured, its limit in µs, and the call."""
    tensor = torch.zeros(2, 2)
    ten = (tensor,) * 10

    custom_op("attn_tiers_bench::declared", mutates_args=(), schema=_SCHEMA)(_nothing)
    define("attn_tiers_bench::direct", _SCHEMA, _nothing, _nothing)
    mutating = _SCHEMA.replace("Tensor a, Tensor b", "Tensor(a!) a, Tensor(b!) b")
    mutating = mutating.replace("-> Tensor", "-> ()")
    define("attn_tiers_bench::write", mutating, _write_nothing, _write_nothing, ("a", "b"))
    bench = torch.ops.attn_tiers_bench

    y = torch.zeros(8, 32, 1, 128)  # of the right shape: the first result is looked at
    tier = torch_attn_tiers.Tier(
        op="decode", name="nothing", predicates=(), build=lambda problem: lambda *tensors: y
    )
    torch_attn_tiers.register_tier(tier, before="flash")
    query, cache = torch.zeros(8, 32, 1, 128), torch.zeros(8, 8, 64, 128)
    lengths = torch.zeros(8, dtype=torch.int32)
    few = (query, cache, cache, lengths)
    many = (*few, torch.zeros(64), torch.zeros(32))
    scalars: dict[str, Any] = dict(
        is_causal=True, scale=0.1, softcap=50.0, left_window_size=3, right_window_size=4
    )
    decode = torch.ops.attn_tiers.decode

    return [
        (
            "dispatcher, 10 tensors and 8 scalars, as registered here",
            10.0,
            lambda: bench.direct(*ten, **_SCALARS),
        ),
        (
            "dispatcher, 10 tensors and 8 scalars, two of them written",
            10.0,
            lambda: bench.write(*ten, **_SCALARS),
        ),
        (
            "dispatcher, 10 tensors and 8 scalars, custom_op alone",
            None,
            lambda: bench.declared(*ten, **_SCALARS),
        ),
        (
            "choosing, decode with lengths",
            5.0,
            lambda: decode_op._decode(*few),
        ),
        (
            "choosing, decode with lengths, mask, sinks and 5 scalars",
            5.0,
            lambda: decode_op._decode(*many, **scalars),
        ),
        ("whole call, decode with lengths", None, lambda: decode(*few)),
        (
            "whole call, decode with lengths, mask, sinks and 5 scalars",
            None,
            lambda: decode(*many, **scalars),
        ),
    ]


def measure(call: Callable[[], Any]) -> list[float]:
    """Microseconds a call, repeat by repeat."""
    for _ in range(CALLS):
        call()
    gc.collect()
    return [1e6 * t / CALLS for t in timeit.repeat(call, number=CALLS, repeat=REPEATS)]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON; 1 if a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="write the result as JSON")
    options = parser.parse_args(argv)

    rows = []
    with torch.enable_grad():
        for what, limit, call in _rows():
            repeats = measure(call)
            us = statistics.median(repeats)
            rows.append({"what": what, "us": us, "limit_us": limit, "repeats": repeats})
            shown = "" if limit is None else f"   (at most {limit:g})"
            print(f"{us:8.2f} µs  {what}{shown}", flush=True)

    if options.out is not None:
        result = {
            "what": "operator boundary",
            "command": "python benchmarks/boundary.py --out benchmarks/results/boundary_cpu.json",
            "date": environment.now(),
            "commit": environment.commit(),
            "device": environment.device_report(torch.device("cpu")),
            "versions": environment.versions(),
            "calls": CALLS,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(row["limit_us"] is not None and row["us"] > row["limit_us"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
