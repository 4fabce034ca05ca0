"""Times configurations of the recurrent kernel over the cases of `bench gdn_decode`, on one GPU.

    python benchmarks/gdn_decode_configs.py --out benchmarks/results/gdn_decode_configs_h200.json
    python benchmarks/gdn_decode_configs.py --cases b64_float32 --configs bv=64,num_warps=8 bv=32

A configuration is the case's default one with fields of `RecurrentConfig` replaced; `default` is
that. `default_config` in `csrc_free_ops/gdn/decode.py` was written from such runs. The kernel
alone is timed: no operator, no choice of tiers. Kernels compile in parallel before anything is
timed. One line a case is printed: microseconds, the best first.
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

from csrc_free_ops.facts import contiguous_facts, device_facts, tensor_facts
from csrc_free_ops.gdn.decode import (
    GdnDecodePlan,
    RecurrentConfig,
    default_config,
    plan_gdn_decode,
)
from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.clock import Clock, clock_for
from torch_attn_tiers.cli.bench.gdn_decode_sides import CASES, StepCase, StepInputs, StepSide
from torch_attn_tiers.cli.bench.running import free

STREAM = "load_policy=evict_first,store_policy=evict_first"
CONFIGS = [
    "default",
    "prefetch=1",
    "store_policy=evict_first",
    STREAM,
    "max_registers=64",
    "max_registers=80",
    "lanes=4",
    "lanes=16",
    "bv=8,num_warps=2,lanes=4",
    "bv=16,num_warps=2,lanes=4",
    "bv=16",
    "bv=16,prefetch=1",
    "bv=32,num_warps=8",
    "bv=32,num_warps=8,lanes=4",
    "bv=64",
    "bv=64,prefetch=1",
    "bv=64,num_warps=8",
    f"bv=64,num_warps=8,{STREAM}",
    "bv=64,num_warps=8,lanes=4",
    "bv=128,num_warps=8",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, comma-separated")
    parser.add_argument("--configs", nargs="*", default=CONFIGS, help="default: a list")
    parser.add_argument("--pool", action="store_true", help="the form with indices")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    device = environment.default_device()
    if device.type != "cuda":
        raise SystemExit("needs a GPU")

    cases = [CASES[name] for name in options.cases.split(",")]
    jobs = [(case, text, options.pool) for case in cases for text in options.configs]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        built = dict(zip([(case.name, text) for case, text, _ in jobs], pool.map(build, jobs)))
    for (name, text), error in built.items():
        if error:
            print(f"{name} {text}: {error}")

    result: dict[str, Any] = {
        **environment.header(
            "configurations of the recurrent gdn kernel",
            "python benchmarks/gdn_decode_configs.py",
            sys.argv[1:],
            device,
        ),
        "rows": [],
    }
    clock = clock_for(device)
    rate = clock.copy_rate()
    result["copy_tb_per_s"] = round(rate / 1e12, 4)
    print(f"copy {rate / 1e12:.3f} TB/s")
    for case in cases:
        texts = [text for text in options.configs if not built[case.name, text]]
        inputs = StepInputs(case, device)
        print(f"floor {case.moved_bytes / rate * 1e6:.2f}", end=" ")
        result["rows"] += measure(inputs, texts, options.pool, clock, options.repeats)
        del inputs
        free(device)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def parse(case: StepCase, text: str, in_pool: bool) -> RecurrentConfig:
    """The configuration that a text stands for."""
    q, _, _, state = facts(case)
    device = device_facts(environment.default_device())
    config = default_config(q, state, None if in_pool else device)
    if text == "default":
        return config
    fields: dict[str, Any] = dict(pair.split("=") for pair in text.split(","))
    for name, value in fields.items():
        is_text = name.endswith("policy")
        fields[name] = value if is_text else int(value)
    return config._replace(**fields)


def facts(case: StepCase) -> tuple[Any, Any, Any, Any]:
    """Facts of q and k, of v, of a and b, and of the states of one set."""
    B, Hq, Hv, D = case.batch, case.q_heads, case.v_heads, case.head_size
    return (
        contiguous_facts((B, 1, Hq, D), torch.bfloat16),
        contiguous_facts((B, 1, Hv, D), torch.bfloat16),
        contiguous_facts((B, 1, Hv), torch.bfloat16),
        contiguous_facts((B, Hv, D, D), case.dtype),
    )


def plan_for(case: StepCase, text: str, in_pool: bool) -> GdnDecodePlan:
    q, v, gate, state = facts(case)
    head = contiguous_facts((case.v_heads,), torch.float32)
    indices = contiguous_facts((case.batch,), torch.int32) if in_pool else None
    return plan_gdn_decode(
        q, q, v, gate, gate, state, device_facts(environment.default_device()), A_log=head,
        dt_bias=head, read_indices=indices, write_indices=indices, scale=case.head_size**-0.5,
        qk_l2norm=True, config=parse(case, text, in_pool),
    )  # fmt: skip


def build(job: tuple[StepCase, str, bool]) -> str | None:
    """Compiles one kernel into Triton's cache; returns what went wrong."""
    try:
        plan_for(*job).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def measure(
    inputs: StepInputs, texts: list[str], in_pool: bool, clock: Clock, repeats: int
) -> list[dict[str, Any]]:
    """One row a configuration, all repeats interleaved; a wrong result is printed as such."""
    case = inputs.case
    indices = torch.arange(case.batch, device=inputs.device, dtype=torch.int32)
    at = indices if in_pool else None
    sides = []
    for text in texts:
        plan = plan_for(case, text, in_pool)
        out = torch.empty_like(inputs.v)
        assert tensor_facts(inputs.states[0]) == facts(case)[3]

        def call(i: int, plan: GdnDecodePlan = plan, out: torch.Tensor = out) -> torch.Tensor:
            state = inputs.states[i]
            plan.run(
                inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias,
                state, state, at, at, out,
            )  # fmt: skip
            return out

        calls = [functools.partial(call, i) for i in range(inputs.sets)]
        sides.append((text, StepSide(text, calls), clock.record(calls)))
    times: dict[str, list[float]] = {text: [] for text in texts}
    for _ in range(repeats):
        for text, _, recording in sides:
            times[text].append(round(recording.measure(), 3))
    rows = []
    for text, side, recording in sides:
        inputs.reset()
        recording.output.fill_(float("nan"))
        recording.run()
        errors = side.errors(inputs, recording.output, recording.calls // inputs.sets)
        rows.append({"case": case.name, "config": text, "us": times[text], **errors})
    rows.sort(key=lambda row: statistics.median(row["us"]))
    print(case.name, "  ".join(map(_short, rows)), flush=True)
    return rows


def _short(row: dict[str, Any]) -> str:
    wrong = not (row["out"] < 5e-3 and row["state"] < 5e-3)  # NaN is
    text = f"{statistics.median(row['us']):.2f} ({row['config']})"
    return text + f" WRONG out {row['out']:.2g} state {row['state']:.2g}" * wrong


if __name__ == "__main__":
    main()
