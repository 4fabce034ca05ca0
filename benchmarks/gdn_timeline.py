"""When and where the programs of prepare and of a scan beside it run, on one GPU.

    python -m benchmarks.gdn_timeline
    python -m benchmarks.gdn_timeline --case 1x32k --config bv=64,scan_stages=2

The functions that both kernels call as they begin, count, wait and end are replaced by ones that
also store the time (`%globaltimer`) and the multiprocessor. Printed are microseconds since the
first program began, and how many programs of either kernel each multiprocessor had: the scan
beside prepare is as fast as it can be only where there is at most one of its programs. Storing
takes time itself: figures come from `gdn_configs.py`.
"""

from __future__ import annotations

import argparse
import collections
import statistics

import torch
import triton
import triton.language as tl

from csrc_free_ops.gdn import chunk_map, prepare, scan
from torch_attn_tiers.cli import environment

PROGRAMS = 512  # of a kernel at most, where both run at once
#: The PTX of a stamp: address of the first program's in, time and multiprocessor out.
_STAMP = tl.constexpr(
    "{ .reg .u32 program, place; .reg .u64 time, address; "
    "mov.u32 program, %ctaid.x; mov.u32 place, %smid; mov.u64 time, %globaltimer; "
    "mad.wide.u32 address, program, 16, $1; "
    "st.global.u64 [address], time; st.global.u32 [address+8], place; mov.u32 $0, 0; }"
)
_STAMPS = ("prepare begins", "prepare counts", "scan begins", "scan waits", "scan has waited")
_STAMPS += ("scan ends",)
#: Where the stamps of each kind lie; set before anything is compiled.
_AT = [tl.constexpr(0) for _ in _STAMPS]
_PREPARE_BEGINS, _PREPARE_COUNTS, _SCAN_BEGINS, _SCAN_WAITS, _SCAN_HAS_WAITED, _SCAN_ENDS = _AT

_wait_for_earlier_kernels = chunk_map.wait_for_earlier_kernels
_let_next_kernel_start = chunk_map.let_next_kernel_start
_wait_for_count = chunk_map.wait_for_count
_count_chunk = prepare._count_chunk


@triton.jit
def _stamp(at: tl.constexpr):
    at = tl.zeros((), tl.int64) + at
    tl.inline_asm_elementwise(_STAMP, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _prepare_begins(PDL: tl.constexpr):
    _stamp(_PREPARE_BEGINS)
    _let_next_kernel_start(PDL)


@triton.jit
def _prepare_counts(counter):
    _count_chunk(counter)
    _stamp(_PREPARE_COUNTS)


@triton.jit
def _scan_begins(PDL: tl.constexpr):
    _stamp(_SCAN_BEGINS)
    _let_next_kernel_start(PDL)


@triton.jit
def _scan_waits(counter, target, NVIDIA: tl.constexpr):
    _stamp(_SCAN_WAITS)
    _wait_for_count(counter, target, NVIDIA)
    _stamp(_SCAN_HAS_WAITED)


@triton.jit
def _scan_ends(PDL: tl.constexpr):
    _stamp(_SCAN_ENDS)
    _wait_for_earlier_kernels(PDL)


def main() -> None:
    from benchmarks.gdn_configs import (
        CASES,
        GdnInputs,
        Prepared,
        clock_for,
        parse,
        plan_for,
    )

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="1x8k", choices=CASES)
    parser.add_argument("--config", default="default", help="as in gdn_configs.py")
    options = parser.parse_args()
    device = environment.default_device()
    if device.type != "cuda":
        raise SystemExit("needs a GPU")
    case = CASES[options.case]
    plan = plan_for(case, parse(options.config))
    if not plan.counters:
        raise SystemExit(f"in {case.name} the scan does not run beside prepare")

    stamps = torch.zeros(len(_STAMPS), PROGRAMS, 2, dtype=torch.int64, device=device)
    install(stamps.data_ptr())
    clock = clock_for(device)
    inputs = GdnInputs(case, torch.bfloat16, device, clock.l2_bytes)
    recording = clock.record(Prepared(inputs, options.config, True).together())
    recording.measure()
    us = recording.measure()
    report(stamps.cpu(), us)


def install(address: int) -> None:
    """Has the kernels store their stamps there; none of them may have been compiled before."""
    names = [name for name in globals() if name.startswith(("_PREPARE_", "_SCAN_"))]
    for i, name in enumerate(names):
        globals()[name] = tl.constexpr(address + i * PROGRAMS * 16)
    prepare.let_next_kernel_start = _prepare_begins
    prepare._count_chunk = _prepare_counts
    scan.let_next_kernel_start = _scan_begins
    scan.wait_for_count = _scan_waits
    scan.wait_for_earlier_kernels = _scan_ends


def report(stamps: torch.Tensor, us: float) -> None:
    """Prints the last call's times and places."""
    times, places = stamps[..., 0], stamps[..., 1] & 0xFFFFFFFF
    ran = times > 0
    first = int(times[0][ran[0]].min())
    print(f"{us:.1f} us a call")
    for i, name in enumerate(_STAMPS):
        found = sorted((int(t) - first) / 1e3 for t in times[i][ran[i]])
        if found:
            middle = statistics.median(found)
            print(
                f"{name:16} {found[0]:8.1f} {middle:8.1f} {found[-1]:8.1f}  (first, median, last)"
            )
    of_prepare, of_scan = (
        collections.Counter(places[_STAMPS.index(name)][ran[_STAMPS.index(name)]].tolist())
        for name in ("prepare begins", "scan begins")
    )
    shared = collections.Counter(
        (of_prepare[place], of_scan[place]) for place in {*of_prepare, *of_scan}
    )
    for (prepares, scans), count in sorted(shared.items()):
        print(f"{count} multiprocessors had {prepares} programs of prepare, {scans} of the scan")


if __name__ == "__main__":
    main()
