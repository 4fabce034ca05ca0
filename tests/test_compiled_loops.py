"""What is read from a listing of machine instructions, and that of a compiled kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests import compiled_loops
from tests.compile_only import TARGETS
from torch_attn_tiers.cli.bench.gdn_cases import CASES

OUTER, INNER = "0010", "0030"
LISTING = f"""\
0000 MOV R1, c[0x0][0x28]
0010 IADD3 R2, R2, 0x1, RZ
0020 @!P0 BRA 0x0090
0030 @!P1 LDG.E.128 R8, desc[UR4][R8.64]
0040 HGMMA.64x64x16.F32.BF16 R24, R156, gdesc[UR28], R24
0050 PRMT R5, R4, 0x5410, R10
0060 STG.E desc[UR4][R2.64], R5
0070 @P0 BRA 0x{INNER}
0080 @P2 BRA 0x{OUTER}
0090 @!P3 BRA 0x0090
00a0 BRA 0x{INNER}
""".splitlines()


def test_innermost_loops_with_products_are_found() -> None:
    (loop,) = compiled_loops.loops(LISTING)
    assert (loop[0].split()[0], loop[-1].split()[0]) == ("0030", "0070")
    assert compiled_loops.first_uses(loop) == [2]


def test_what_is_stored_is_used() -> None:
    loop = ["0030 LDG.E.128.CONSTANT R8, desc[UR4][R8.64]", "0040 STS.128 [R2+0x10], R8"]
    assert compiled_loops.first_uses(loop) == [1]
    assert compiled_loops.first_uses(loop[:1]) == []


@pytest.mark.parametrize("form", compiled_loops.FORMS)
def test_plans_are_those_of_calls(form: str) -> None:
    device = TARGETS["sm_90"].device("sm_90")
    plan = compiled_loops.plan_for(CASES["2/8_1x2k"], form, device)
    constants = plan.scan.constants
    assert constants["BV"] == 16
    assert constants["H_LAYOUT"] == {"fla": 1, "compact": 2}.get(form, 0)
    assert (constants["HAS_POOL"], constants["TRACK"]) == (
        form in ("pool", "tracked"),
        int(form == "tracked"),
    )


def test_a_row_for_each_loop() -> None:
    command = [sys.executable, "-m", "tests.compiled_loops", "--cases", "2/8_1x2k"]
    done = subprocess.run(
        [*command, "--forms", "none"], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pattern = r"2/8_1x2k none: 16 columns, \d{3} instructions, \d+ barriers, 0 reloads, .*\n"
    assert re.fullmatch(pattern, done.stdout)
