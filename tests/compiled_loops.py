"""What the compiler makes of the loops of the gdn scan, without a GPU.

    TRITON_INTERPRET=0 python -m tests.compiled_loops
    TRITON_INTERPRET=0 python -m tests.compiled_loops --cases 16/48_1x8k --forms none,tracked

A row is a loop over chunks as a call on an H200 runs it: its instructions for a warp, barriers,
reloads of registers that were spilled, products, stores to global memory, and after how many
instructions what was loaded ahead of the next chunk is used first. Reloads wait behind stores, and
what is used soon after it was asked for waits for the memory; a few more instructions are nothing
beside either. Another version of Triton may do otherwise: compare with the one that is measured.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

import torch

from benchmarks import gdn_configs
from csrc_free_ops.facts import DeviceFacts, PoolIndices, contiguous_facts
from csrc_free_ops.gdn import GdnPlan
from tests.compile_only import TARGETS, _compiled
from torch_attn_tiers.cli.bench.gdn_cases import CASES, HEAD_SIZE, GdnCase
from torch_attn_tiers.cli.bench.gdn_sides import LAYOUTS

FORMS = ("none", *LAYOUTS, "pool", "tracked")
COUNTED = {"barriers": "BAR.SYNC", "reloads": "LDL", "products": "HG?MMA", "stores": "STG"}


def plan_for(case: GdnCase, form: str, device: DeviceFacts) -> GdnPlan:
    """In bfloat16 with l2norm and states, as the bench calls it."""
    pool = {}
    if form in ("pool", "tracked"):
        state = (3 * case.sequences, case.v_heads, HEAD_SIZE, HEAD_SIZE)
        pool = {
            "initial_state": contiguous_facts(state, torch.float32),
            "pool": PoolIndices(*[torch.int64] * (4 if form == "tracked" else 2)),
        }
    h_layout = form if form in LAYOUTS else None
    return gdn_configs.plan_for(case, None, gdn_configs.Form(True, h_layout), device, **pool)


def disassembled(cubin: bytes) -> list[str]:
    """Instructions of the machine, a line each, their addresses in front."""
    import triton.backends.nvidia

    bin_ = pathlib.Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([bin_, "-sass", file.name], capture_output=True, text=True)
    done.check_returncode()
    found = re.findall(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;?\s*/\*", done.stdout, re.MULTILINE)
    return [f"{address} {text}" for address, text in found]


def loops(lines: list[str]) -> Iterator[list[str]]:
    """The innermost loops that have products. A loop ends with a branch back that is conditional;
    one that is not comes back from where a wait goes on."""
    addresses = [int(line.split()[0], 16) for line in lines]
    spans = []
    for end, line in enumerate(lines):
        branch = re.search(r" @\S+ BRA (?:\S+, )?0x([0-9a-f]+)", line)
        if branch and int(branch[1], 16) <= addresses[end]:
            start = addresses.index(int(branch[1], 16))
            if any(re.search(r"\bHG?MMA", inside) for inside in lines[start : end + 1]):
                spans.append((start, end))
    for start, end in spans:
        if not any((start, end) != one and start <= one[0] and one[1] <= end for one in spans):
            yield lines[start : end + 1]


def first_uses(loop: list[str]) -> list[int]:
    """After how many instructions of the loop what comes 16 bytes a thread from global memory is
    used."""
    uses = []
    for i, line in enumerate(loop):
        load = re.search(r"LDG\.E\.128\S* R(\d+),", line)
        if load:
            registers = {int(load[1]) + n for n in range(4)}
            for n, later in enumerate(loop[i + 1 :], i + 1):
                operands = later if re.search(r" ST[SGL]", later) else later.partition(",")[2]
                if registers & {int(r) for r in re.findall(r"\bR(\d+)\b", operands)}:
                    uses.append(n)
                    break
    return uses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, comma-separated")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated")
    options = parser.parse_args()
    target = TARGETS["sm_90"]
    seen = set()
    for case in options.cases.split(","):
        for form in options.forms.split(","):
            plan = plan_for(CASES[case], form, target.device("sm_90"))
            if plan.scan.specialization in seen:
                continue
            seen.add(plan.scan.specialization)
            for loop in loops(disassembled(_compiled(plan.scan, target).asm["cubin"])):
                counts = {
                    name: sum(bool(re.search(rf"\b{code}", line)) for line in loop)
                    for name, code in COUNTED.items()
                }
                print(
                    f"{case} {form}: {plan.config.bv} columns, {len(loop)} instructions,",
                    ", ".join(f"{count} {name}" for name, count in counts.items())
                    + f"; first uses {first_uses(loop)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
