"""Times tile shapes of the split-KV kernel over the decode cases of `bench decode`, on one GPU.

    python benchmarks/split_kv_configs.py --out benchmarks/results/split_kv_configs_h200.json
    python benchmarks/split_kv_configs.py --cases mha_b8_4k --configs 64,4,3,2 128,8,3,1
    python benchmarks/split_kv_configs.py --kv-dtype float8_e4m3fn

A shape is BLOCK_N, warps, stages, programs a multiprocessor and, if wanted, registers a thread;
"balanced" or "split" after them forces a schedule (see `csrc_free_ops/decode/kernels.py`).
`default_config` in `csrc_free_ops/decode/launch.py` was written from such runs. The kernel alone
is timed: no operator, no choice of tiers. Kernels compile in parallel before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from csrc_free_ops.decode import SplitKVConfig, SplitKVPlan, plan_split_kv
from csrc_free_ops.facts import contiguous_facts, device_facts
from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.cases import CASES, Case, Inputs, relative_error
from torch_attn_tiers.cli.bench.clock import clock_for

NARROW = [
    "64,4,3,1", "64,4,4,1", "64,4,3,2", "64,4,2,3", "64,4,2,3,168", "64,4,2,4,128",
    "128,4,3,1", "128,8,3,1", "128,8,4,1",
]  # fmt: skip
FLOAT8 = [
    "64,4,3,2", "64,4,2,3,168", "128,4,3,1", "128,4,3,2", "128,4,2,3,168", "128,4,3,3,168",
    "128,8,3,1", "128,8,2,2,128", "256,8,2,1", "256,8,3,1",
]  # fmt: skip
FLOAT8_WIDE = ["64,4,3,2", "64,8,2,2,128", "128,8,2,2,128", "128,8,2,1", "128,8,3,1", "64,8,3,1"]
SCHEDULES = {"balanced": True, "split": False}
WIDE = ["32,4,3,2", "32,4,4,1", "64,4,2,2", "64,8,2,2,128", "64,8,3,1", "64,4,3,1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, comma-separated")
    parser.add_argument("--configs", nargs="*", help="shapes; default: a list by head size")
    parser.add_argument(
        "--kv-dtype",
        choices=("bfloat16", "float8_e4m3fn"),
        default="bfloat16",
        help="of the caches",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    device = environment.default_device()
    if device.type != "cuda":
        raise SystemExit("needs a GPU")

    kv_dtype = getattr(torch, options.kv_dtype)
    work = {
        name: options.configs or shapes_for(CASES[name], kv_dtype)
        for name in options.cases.split(",")
    }
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        jobs = [(name, shape) for name, shapes in work.items() for shape in shapes]
        built = pool.map(functools.partial(build, kv_dtype=kv_dtype), jobs)
        failed = {job: error for job, error in zip(jobs, built) if error}
    for (name, shape), error in failed.items():
        print(f"{name} {shape}: {error}")

    result: dict[str, Any] = {
        **environment.header(
            "tile shapes of the split-KV kernel",
            "python benchmarks/split_kv_configs.py",
            sys.argv[1:],
            device,
        ),
        "kv_dtype": options.kv_dtype,
        "rows": [],
    }
    for name, shapes in work.items():
        good = [shape for shape in shapes if (name, shape) not in failed]
        result["rows"] += measure(CASES[name], good, device, options.repeats, kv_dtype)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def shapes_for(case: Case, kv_dtype: torch.dtype) -> list[str]:
    if kv_dtype == torch.float8_e4m3fn and case.head_dim > 64:
        return FLOAT8 if case.head_dim <= 128 else FLOAT8_WIDE
    if case.head_dim > 128:
        return WIDE
    return ["128,4,2,1", "128,8,2,1", "64,4,2,1"] if case.head_dim <= 64 else NARROW


def plan_for(case: Case, shape: str, kv_dtype: torch.dtype) -> SplitKVPlan:
    device = device_facts(environment.default_device())
    query = contiguous_facts((case.batch, case.q_heads, 1, case.head_dim), torch.bfloat16)
    cache = contiguous_facts((case.batch, case.kv_heads, case.capacity, case.head_dim), kv_dtype)
    scale: tuple[int, ...] | None = () if kv_dtype != torch.bfloat16 else None
    return plan_split_kv(
        query,
        cache,
        cache,
        device,
        lengths_dtype=torch.int32,
        k_scale=scale,
        v_scale=scale,
        scale=case.scale,
        config=config_of(shape),
    )


def config_of(shape: str) -> SplitKVConfig:
    """The configuration that a text stands for."""
    sizes = shape.split(",")
    balanced = SCHEDULES[sizes.pop()] if sizes[-1] in SCHEDULES else None
    return SplitKVConfig(16, *map(int, sizes), balanced=balanced)


def build(job: tuple[str, str], kv_dtype: torch.dtype) -> str | None:
    """Compiles one kernel into Triton's cache; returns what went wrong."""
    name, shape = job
    try:
        plan_for(CASES[name], shape, kv_dtype).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def measure(
    case: Case, shapes: list[str], device: torch.device, repeats: int, kv_dtype: torch.dtype
) -> list[dict[str, Any]]:
    """One row a shape, all repeats interleaved; a wrong result is reported with its error."""
    clock = clock_for(device)
    inputs = Inputs(case, torch.bfloat16, device, clock.l2_bytes, kv_dtype)
    out = torch.empty_like(inputs.query[0])
    recordings = []
    for shape in shapes:
        run = plan_for(case, shape, kv_dtype).run
        rest = (inputs.lengths, None, None, out, *inputs.scales)
        calls = [
            lambda q=q, k=k, v=v, run=run, rest=rest: run(q, k, v, *rest)
            for q, (k, v) in zip(inputs.query, inputs.pairs)
        ]
        recordings.append(clock.record(calls))
    times: list[list[float]] = [[] for _ in shapes]
    for _ in range(repeats):
        for recording, column in zip(recordings, times):
            column.append(recording.measure())
    rows = []
    for shape, recording, column in zip(shapes, recordings, times):
        out.fill_(float("nan"))
        recording.run()
        rows.append(
            {
                "case": case.name,
                "shape": shape,
                "us": [round(us, 3) for us in column],
                "error": relative_error(out, inputs.reference),
            }
        )
    rows.sort(key=lambda row: statistics.median(row["us"]))
    print(case.name, "  ".join(f"{statistics.median(r['us']):.2f} ({r['shape']})" for r in rows))
    return rows


if __name__ == "__main__":
    main()
