"""Makes the files of benchmarks/results again on one GPU, one after the other, within a time.

    python benchmarks/measure.py                            the steps, and about how long each takes
    python benchmarks/measure.py gdn gdn_fla --minutes 9    these, in this order

Results name the commit: without a git repository, the environment's GIT_COMMIT has to say it.
Each step runs a command of this project, which its result file names as well; `tune` writes its
table where the package reads it, too. A step that time runs out for is interrupted as by Ctrl+C,
and its file holds what it had. The last lines that a step prints are printed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[1]
#: A step gets no less: its imports alone take a part of this.
_LEAST_SECONDS = 20
#: For an interrupted step to write what it has.
_GRACE_SECONDS = 40


class Step(NamedTuple):
    """What makes one result file."""

    seconds: int  # about, on an H200 with 16 CPU cores and empty caches
    command: str  # after `python`
    result: str = "{name}_{gpu}.json"  # as in "h200"; {device} is "nvidia_h200"


_GDN_TESTS = "tests/gpu/test_gdn.py tests/gpu/test_gdn_pool.py"
_OTHER_TESTS = (
    "test_library_tiers test_flashinfer_gdn test_flashinfer_gdn_pool test_gdn test_gdn_pool "
    "test_gdn_columns test_gdn_split test_gdn_decode test_checkpoints test_tune"
)
_WIDE = "bv=64,bk=128,boxed=1,v_early=1"
_COLUMNS = (
    "benchmarks/gdn_configs.py --cases 1x512,1x8k,1x32k,32x256,2/8_1x2k,16/16_1x2k,2/8_1x32k,"
    "16/48_1x8k --repeats 3 --configs default segment_chunks=0 bv=16,segment_chunks=0 "
    f"{_WIDE},segment_chunks=0 {_WIDE},scan_stages=2,segment_chunks=0 "
    f"{_WIDE},segment_chunks=64 {_WIDE},segment_chunks=256"
)
_BENCH = "-m torch_attn_tiers bench"
_TUNED = "{name}_{device}.json"
_TESTS = "-m pytest -q"
STEPS = {
    "gdn_configs": Step(
        60,
        "benchmarks/gdn_configs.py --configs default "
        "--cases 1x8k,1x32k,32x256,mixed,2/8_1x2k,2/8_1x32k,4/16_1x32k,16/48_1x8k",
    ),
    # How many columns of S a program has, and whether sequences are split.
    "gdn_columns": Step(60, _COLUMNS),
    "gdn_columns_compact": Step(60, f"{_COLUMNS} --h compact"),
    "gdn": Step(240, f"{_BENCH} gdn --tier triton --peers flashinfer --cases all --repeats 3"),
    "gdn_fla": Step(110, f"{_BENCH} gdn --tier triton --h none --peers fla"),
    "gdn_flashinfer_tier": Step(
        60,
        f"{_BENCH} gdn --tier flashinfer --h none,compact,pool --peers flashinfer",
    ),
    "gpu_tests_gdn": Step(
        245,
        f"{_TESTS} -n 16 {_GDN_TESTS} tests/gpu/test_gdn_columns.py tests/gpu/test_gdn_split.py "
        "-k 'not flashinfer' --require-tiers triton",
    ),
    "gpu_tests_gdn_decode": Step(
        150,
        f"{_TESTS} -n 16 tests/gpu/test_gdn_decode.py tests/gpu/test_checkpoints.py "
        "tests/gpu/test_launch.py --require-tiers triton",
    ),
    "gpu_tests_gdn_flashinfer": Step(
        125,
        f"{_TESTS} -n 6 tests/gpu/test_flashinfer_gdn.py tests/gpu/test_flashinfer_gdn_pool.py "
        f"{_GDN_TESTS} -k flashinfer --require-tiers flashinfer",
    ),
    "gdn_chunk_prefill_tune": Step(
        110,
        "-m torch_attn_tiers tune --op gdn_chunk_prefill",
        _TUNED,
    ),
    "gdn_decode": Step(60, f"{_BENCH} gdn_decode --peers"),
    "decode_tune": Step(220, "-m torch_attn_tiers tune", _TUNED),
    "decode": Step(120, f"{_BENCH} decode --peers --tiers auto,flash,xqa,cudnn"),
    "split_kv_float8_configs": Step(120, "benchmarks/split_kv_configs.py --kv-dtype float8_e4m3fn"),
    "decode_float8": Step(40, f"{_BENCH} decode --kv-dtype float8_e4m3fn"),
    "gpu_tests": Step(
        500,
        f"{_TESTS} -n 14 tests/gpu --require-tiers flash,mea,unfused "
        + " ".join(f"--ignore=tests/gpu/{name}.py" for name in _OTHER_TESTS.split()),
    ),
    # With the kernels of `python -m tests.gpu.prebuild_xqa`; else it takes twice as long.
    "gpu_tests_libraries": Step(
        200, f"{_TESTS} -n 14 tests/gpu/test_library_tiers.py --require-tiers xqa,cudnn"
    ),
    "gpu_tests_tune": Step(90, f"{_TESTS} tests/gpu/test_tune.py"),
}


def run(words: list[str], seconds: float, lines: int) -> tuple[int, float]:
    """Exit status of a command that is interrupted after so long, and how long it took."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            words, cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:  # fmt: skip
            for patience, sent in ((seconds, signal.SIGINT), (_GRACE_SECONDS, signal.SIGKILL)):
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    # Workers of tests are left to their controller, which has results to collect.
                    if sent == signal.SIGKILL:
                        os.killpg(process.pid, sent)
                    else:
                        process.send_signal(sent)
        log.seek(0)
        for line in log.read().splitlines()[-lines:]:
            print(f"  {line[:200]}")
    return process.returncode, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--out", type=pathlib.Path, default=_ROOT / "benchmarks/results")
    parser.add_argument("--lines", type=int, default=6, help="printed of each step; default 6")
    args = parser.parse_args()
    if not args.names:
        for name, step in STEPS.items():
            print(f"{name:26}{step.seconds:4} s  python {step.command}")
        return 0
    if unknown := [name for name in args.names if name not in STEPS]:
        parser.error(f"no such step: {', '.join(unknown)}; there are {', '.join(STEPS)}")

    sys.path.insert(0, str(_ROOT))
    from csrc_free_ops.facts import device_facts
    from torch_attn_tiers.cli import environment
    from torch_attn_tiers.ranking import table_name

    facts = device_facts(environment.default_device())
    if facts.type == "cpu":
        parser.error("no GPU is here")
    if environment.commit() == "unknown":
        parser.error("the commit is not known: set GIT_COMMIT")
    device = table_name(facts)
    # What a shell runs in the background ignores it, and so would the children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in args.names:
        left = end - time.monotonic() - _GRACE_SECONDS
        if left < _LEAST_SECONDS:
            print(f"{name}: NOT RUN, no time is left", flush=True)
            failed = True
            continue
        step = STEPS[name]
        file = step.result.format(name=name, device=device, gpu=device.removeprefix("nvidia_"))
        option = "--results" if "pytest" in step.command else "--out"
        words = [sys.executable, *shlex.split(step.command), option, str(args.out / file)]
        print(f"{name}:", flush=True)
        status, seconds = run(words, left, args.lines)
        failed = failed or status != 0
        print(f"{name}: exit status {status}, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
