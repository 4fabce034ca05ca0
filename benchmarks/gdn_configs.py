"""Times configurations of the gdn kernels, each kernel alone, on one GPU.

    python benchmarks/gdn_configs.py --out benchmarks/results/gdn_configs_h200.json
    python benchmarks/gdn_configs.py --normalised --configs default
    python benchmarks/gdn_configs.py --cases 1x8k --configs default bv=32,scan_stages=2
    python benchmarks/gdn_configs.py --cases 2/8_1x8k,2/8_1x32k
    python benchmarks/gdn_configs.py --h compact --configs default h_pairs=0

A configuration is that of `default_config` in `csrc_free_ops/gdn/launch.py`, which was written from
such runs, with fields of `GdnConfig` replaced; `default` is what a call takes, which goes by the
number of programs as well. Kernels compile in parallel before anything is timed. One line a case
and kernel is printed: microseconds, the best first; a launch that several configurations share is
timed once. `run` is all launches together.
Cases of few heads and many tokens, whose sequences are split, have a list of configurations of
their own.
With `--h` the states inside prompts are written too, in float32.
With `--normalised` q and k are normalised beforehand, which shows what that costs inside.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from csrc_free_ops.facts import DeviceFacts, contiguous_facts, device_facts
from csrc_free_ops.gdn import GdnConfig, GdnPlan, plan_gdn
from csrc_free_ops.gdn.launch import default_config
from csrc_free_ops.reference.gdn import l2norm
from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.clock import Clock, clock_for
from torch_attn_tiers.cli.bench.gdn_cases import CASES, HEAD_SIZE, GdnCase, GdnInputs
from torch_attn_tiers.cli.bench.gdn_sides import LAYOUTS, GdnSide
from torch_attn_tiers.cli.bench.running import free

#: 64 columns of S a program as calls take them on Hopper (three stages).
_WIDE = "bv=64,bk=128,boxed=1,v_early=1"
PREPARE = [
    "default",
    "prepare_registers=128",
    "prepare_registers=168",
    "prepare_warps=8",
    "prepare_bk=64",
    "heads=1",
    "heads=1,prepare_registers=128",
    "heads=1,prepare_registers=168",
    "heads=1,prepare_warps=8",
]
SCAN = [
    "bk=128",
    "bk=128,scan_stages=2",
    "scan_stages=1",
    "scan_stages=2",
    "scan_stages=4",
    "scan_warps=8",
    _WIDE,
    f"{_WIDE},scan_stages=2",
    f"{_WIDE},scan_stages=2,h_pairs=0",
    "bv=128,bk=128,boxed=1,v_early=1,scan_warps=8",
    "bv=16",
    "bv=16,bk=128",
    "bv=16,scan_stages=4",
]
#: Where sequences are split.
SPLIT = [
    "default",
    "segment_chunks=0",
    f"{_WIDE},segment_chunks=0",
    f"{_WIDE},segment_chunks=32",
    f"{_WIDE},segment_chunks=48",
    f"{_WIDE},segment_chunks=64",
    f"{_WIDE},segment_chunks=103",
    f"{_WIDE},segment_chunks=128",
    f"{_WIDE},segment_chunks=256",
    f"{_WIDE},scan_stages=2,segment_chunks=32",
    "bv=16,segment_chunks=0",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cases", default="1x8k,1x32k,32x256,2/8_1x32k", help="names, comma-separated"
    )
    parser.add_argument("--configs", nargs="*", help="default: a list")
    parser.add_argument("--normalised", action="store_true", help="no l2norm inside")
    parser.add_argument("--h", choices=LAYOUTS, help="write states inside prompts; default: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    device = environment.default_device()
    if device.type != "cuda":
        raise SystemExit("needs a GPU")

    cases = [CASES[name] for name in options.cases.split(",")]
    texts = {case: options.configs or configs_for(case) for case in cases}
    form = Form(not options.normalised, options.h)
    jobs = [(case, text, form) for case in cases for text in texts[case]]
    failed = build_ahead(jobs)
    for (case, text), error in failed.items():
        print(f"{case.name} {text}: {error}")

    result: dict[str, Any] = {
        **environment.header(
            "configurations of the gdn kernels",
            "python benchmarks/gdn_configs.py",
            sys.argv[1:],
            device,
        ),
        "rows": [],
    }
    clock = clock_for(device)
    for case in cases:
        inputs = GdnInputs(case, torch.bfloat16, device, clock.l2_bytes)
        inputs.reference  # noqa: B018  (of q and k as they are now)
        if options.normalised:
            inputs.q, inputs.k = ([l2norm(x) for x in tensors] for tensors in (inputs.q, inputs.k))
        good = [text for text in texts[case] if (case, text) not in failed]
        result["rows"] += measure(inputs, good, clock, options.repeats, form)
        del inputs
        free(device)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


class Form(NamedTuple):
    """What the kernels do."""

    qk_l2norm: bool = True
    h_layout: str | None = None  # of states inside prompts that they write


def parse(case: GdnCase, text: str) -> GdnConfig | None:
    """The configuration that a text stands for; None is what the shapes of a case lead to."""
    if text == "default":
        return None
    facts = device_facts(environment.default_device())
    config = default_config(
        HEAD_SIZE, HEAD_SIZE, case.v_heads // case.q_heads, torch.bfloat16, facts
    )
    fields = dict(pair.split("=") for pair in text.split(","))
    return config._replace(**{name: int(value) for name, value in fields.items()})


def is_split(case: GdnCase) -> bool:
    """Whether the default configuration splits sequences."""
    return plan_for(case, parse(case, "default"), Form()).split is not None


def configs_for(case: GdnCase) -> list[str]:
    """The configurations to try where none are named."""
    return SPLIT if is_split(case) else [*PREPARE, *SCAN]


def plan_for(
    case: GdnCase,
    config: GdnConfig | None,
    form: Form,
    device: DeviceFacts | None = None,
    **changes: Any,
) -> GdnPlan:
    """As the bench calls it, on the device there is if none is given; ``changes`` are other
    arguments of `plan_gdn` than those of the bench."""
    device = device or device_facts(environment.default_device())
    T, Hq, Hv, D = case.tokens, case.q_heads, case.v_heads, HEAD_SIZE
    q = contiguous_facts((1, T, Hq, D), torch.bfloat16)
    v = contiguous_facts((1, T, Hv, D), torch.bfloat16)
    gate = contiguous_facts((1, T, Hv), torch.float32)
    options: dict[str, Any] = {
        "initial_state": contiguous_facts((case.sequences, Hv, D, D), torch.float32),
        "cu_seqlens_dtype": torch.int64,
        "sequences": case.sequences,
        "scale": D**-0.5,
        "qk_l2norm": form.qk_l2norm,
        "h_layout": form.h_layout,
        "h_rows": case.rows_of_h(form.h_layout) if form.h_layout else 0,
        "h_dtype": torch.float32 if form.h_layout else None,
        "config": config,
        **changes,
    }
    return plan_gdn(q, q, v, gate, gate, device, **options)


Job = tuple[GdnCase, str, Form]


def build_ahead(jobs: list[Job]) -> dict[tuple[GdnCase, str], str]:
    """Compiles what the jobs need, each kernel once; returns what went wrong where."""
    alike: dict[Any, list[Job]] = {}
    failed = {}
    for case, text, form in jobs:
        try:
            plan = plan_for(case, parse(case, text), form)
        except ValueError as error:
            failed[case, text] = str(error)
        else:
            alike.setdefault(plan.specialization, []).append((case, text, form))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        errors = pool.map(build, [those[0] for those in alike.values()])
        for those, error in zip(alike.values(), errors):
            if error:
                failed.update({(case, text): error for case, text, _ in those})
    return failed


def build(job: Job) -> str | None:
    """Compiles the kernels of a configuration into Triton's cache; returns what went wrong."""
    case, text, form = job
    try:
        plan_for(case, parse(case, text), form).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


class Prepared:
    """A configuration over all sets of inputs, with scratch and results of its own."""

    def __init__(self, inputs: GdnInputs, text: str, form: Form) -> None:
        self.text = text
        self.form = form
        plan = plan_for(inputs.case, parse(inputs.case, text), form)
        self.results: list[torch.Tensor] = []
        # Two take turns, as in a graph of calls.
        rows = inputs.case.rows_of_h(form.h_layout) if form.h_layout else 0
        shape = (rows, inputs.case.v_heads, HEAD_SIZE, HEAD_SIZE)
        self.h = [torch.empty(shape, device=inputs.device) for _ in range(2)]
        self.sets = [self._launches(plan, inputs, i) for i in range(inputs.sets)]
        # Equal for equal launches: of one specialization there may be several.
        self.launches = {
            launch.kernel.fn.__name__: (
                launch.specialization,
                launch.grid,
                tuple(launch.scalars.values()),
            )
            for launch in plan.launches
        }

    def _launches(self, plan: GdnPlan, inputs: GdnInputs, i: int) -> dict[str, Callable[[], None]]:
        out = torch.empty_like(inputs.v[i])
        state = torch.empty_like(inputs.initial_state)
        h = h_cu_starts = None
        if self.form.h_layout is not None:
            h = self.h[i % 2]
        if self.form.h_layout == "compact":
            h_cu_starts = torch.empty_like(inputs.cu_seqlens)
        self.results[:] = [x for x in (out, state, h) if x is not None]
        calls = plan.calls(
            inputs.q[i], inputs.k[i], inputs.v[i], inputs.g[i], inputs.beta[i],
            inputs.initial_state, inputs.cu_seqlens, out, state, h, h_cu_starts,
        )  # fmt: skip
        index = plan.device.index
        return {
            launch.kernel.fn.__name__: functools.partial(launch, index, *tensors)
            for launch, tensors in calls
        }

    def alone(self, kernel: str) -> list[Callable[[], torch.Tensor]]:
        return [functools.partial(self._run, (launches[kernel],)) for launches in self.sets]

    def together(self) -> list[Callable[[], torch.Tensor]]:
        return [functools.partial(self._run, tuple(launches.values())) for launches in self.sets]

    def _run(self, launches: tuple[Callable[[], None], ...]) -> torch.Tensor:
        for launch in launches:
            launch()
        return self.results[0]

    def errors(self, inputs: GdnInputs) -> dict[str, float]:
        for result in self.results:
            result.fill_(float("nan"))
        self.together()[-1]()
        return GdnSide("", [], self.results, form=self.form.h_layout).errors(inputs)


def measure(
    inputs: GdnInputs, texts: list[str], clock: Clock, repeats: int, form: Form
) -> list[dict[str, Any]]:
    """One row a kernel and configuration, all repeats of a kernel interleaved."""
    prepared = [Prepared(inputs, text, form) for text in texts]
    for one in prepared:
        one.together()[-1]()  # every kernel's scratch holds what it must
        for call in one.together():
            call()
    errors = {one.text: one.errors(inputs) for one in prepared}
    rows = []
    kernels = dict.fromkeys(kernel for one in prepared for kernel in one.launches)
    for kernel in [*kernels, "run"]:
        recordings, seen = {}, set()
        for one in prepared:
            key = one.text if kernel == "run" else one.launches.get(kernel)
            if key is not None and key not in seen:
                seen.add(key)
                calls = one.together() if kernel == "run" else one.alone(kernel)
                recordings[one.text] = clock.record(calls)
        times: dict[str, list[float]] = {text: [] for text in recordings}
        for _ in range(repeats):
            for text, recording in recordings.items():
                times[text].append(round(recording.measure(), 3))
        found = [
            {"case": inputs.case.name, "kernel": kernel, "config": text, "us": us, **errors[text]}
            for text, us in times.items()
        ]
        found.sort(key=lambda row: statistics.median(row["us"]))
        print(inputs.case.name, kernel, "  ".join(map(_short, found)), flush=True)
        rows += found
    return rows


def _short(row: dict[str, Any]) -> str:
    wrong = not all(row.get(name, 0) < 5e-3 for name in ("out", "state", "h"))  # NaN is
    text = f"{statistics.median(row['us']):.1f} ({row['config']})"
    return (
        text
        + f" WRONG out {row['out']:.2g} state {row['state']:.2g} h {row.get('h', 0):.2g}" * wrong
    )


if __name__ == "__main__":
    main()
