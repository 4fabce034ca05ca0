"""`python -m torch_attn_tiers`: doctor, explain and a bench that fits a CPU."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from torch_attn_tiers.cli import environment, main


def test_doctor_names_versions_devices_and_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"torch +│ {re.escape(torch.__version__)}", printed)
    assert "Tiers of decode on cpu" in printed
    assert "unfused" in printed and "yes, chosen" in printed


def test_explain_prints_every_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--batch", "16", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    for tier in ("flash", "mea", "unfused"):
        assert tier in printed


@pytest.mark.parametrize(
    "options",
    [
        ["--mask", "bool", "--causal"],
        ["--mask", "additive", "--sinks", "--softcap", "30"],
        ["--lengths", "none", "--layout", "nhd", "--left-window", "100"],
        ["--lengths", "int64", "--value-head-dim", "64", "--query-length", "4"],
        ["--batch-invariant", "--scale", "0.5"],
        ["--kv-dtype", "float8_e4m3fn", "--scales", "per-head", "--layout", "nhd"],
        ["--kv-dtype", "float8_e4m3fn", "--scales", "one", "--dtype", "bfloat16"],
    ],
)
def test_explain_takes_the_operators_arguments(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--device", "cpu", *options]) == 0
    assert "unfused" in capsys.readouterr().out


def test_explain_asks_about_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "sm_90"]) == 0
    assert "bfloat16" in (printed := capsys.readouterr().out) and "cuda:0 (sm_90)" in printed
    assert main(["explain", "--device", "sm_75"]) == 2
    assert "it must be one of sm_80" in capsys.readouterr().err


def test_explain_reports_an_illegal_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--q-heads", "7", "--kv-heads", "2"]) == 2
    assert "7" in capsys.readouterr().err


def test_explain_describes_float8_caches(capsys: pytest.CaptureFixture[str]) -> None:
    float8 = ["explain", "--device", "sm_90", "--kv-dtype", "float8_e4m3fn"]
    assert main([*float8, "--scales", "per-head"]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16 " in printed and "caches=float8_e4m3fn k_scale=per head" in printed
    assert "-> flash" in printed
    assert main(["explain", "--device", "sm_90", "--scales", "one"]) == 2
    assert "k_scale is given and key is bfloat16" in capsys.readouterr().err
    assert main([*float8, "--dtype", "float32"]) == 2


def test_bench_writes_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    command = ["bench", "decode", "--device", "cpu", "--cases", "tiny", "--repeats", "2"]
    assert main([*command, "--out", str(out)]) == 0
    row = json.loads(out.read_text())["cases"][0]
    assert row["case"] == "tiny" and len(row["sides"][0]["us"]) == 2
    assert "tiny" in capsys.readouterr().out


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_attn_tiers", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert "doctor" in done.stdout and "explain" in done.stdout and "bench" in done.stdout


def test_unknown_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a CUDA device")
    with pytest.raises(SystemExit, match="no CUDA device"):
        environment.parse_device("cuda")


def test_cudnn_version_in_words() -> None:
    assert environment._cudnn(91900) == "9.19.0"
    assert environment._cudnn(None) is None


@pytest.mark.parametrize(
    "options, words",
    [
        (["--tiers", "auto,fast"], "--tiers: 'fast' is none of auto, "),
        (["--repeats", "0"], "--repeats 0: it must be at least 1"),
        (["--cases", "huge"], "--cases: 'huge' is none of"),
        (["--kv-dtype", "float8_e4m3fn", "--peers", "flex"], "leave --peers out"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(options: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["bench", "decode", "--device", "cpu", *options])
