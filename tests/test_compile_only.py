"""Every Triton kernel, compiled for six GPUs on a machine that has none: `make compile-only`.

For the shapes of real models the specialisation that a call would launch is compiled, and what it
asks of shared memory is held against the GPU's limit. The compiler needs the interpreter off, so
that each GPU's share runs in a process of its own: `python -m tests.compile_only sm_90`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.compile_only import KERNELS, TARGETS

pytest.importorskip("triton")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit_into_shared_memory(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_only", target],
        cwd=pathlib.Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    limit = TARGETS[target].shared_memory
    for group in KERNELS:
        ours = [one for one in found if one["group"] == group]
        assert ours, f"nothing of {group} was compiled"
        for one in ours:
            assert one["shared"] <= limit, f"{one['name']}: {one['shared']} bytes of {limit}"
        largest = max(ours, key=lambda one: one["shared"])
        print(
            f"{target} {group}: {len(ours)} kernels, at most {largest['shared'] / 1024:.0f} of "
            f"{limit // 1024} KiB of shared memory ({largest['name']})"
        )
