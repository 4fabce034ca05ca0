"""`python -m torch_attn_tiers`: doctor, explain and a bench that fits a CPU."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from torch_attn_tiers import ranking
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


@pytest.mark.parametrize("device", ["foo", "cuda:x", "meta"])
@pytest.mark.parametrize("command", [["explain"], ["tune"], ["bench", "decode"]], ids=str)
def test_a_device_that_is_none_is_refused_in_words(command: list[str], device: str) -> None:
    with pytest.raises(SystemExit, match=f"--device {device}: it must be cpu, cuda or"):
        main([*command, "--device", device])


def test_tune_measures_no_gpu_that_is_not_here() -> None:
    with pytest.raises(SystemExit, match="--device sm_90: it must be cpu, cuda or"):
        main(["tune", "--device", "sm_90"])


@pytest.mark.parametrize("size", ["-1", "1" + 21 * "0", "many"])
def test_explain_refuses_what_is_no_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["explain", "--device", "cpu", "--batch", size])
    assert raised.value.code == 2
    assert "argument --batch: " in capsys.readouterr().err


def test_explain_refuses_tensors_that_no_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--batch", str(10**15)]) == 2
    assert "there are no tensors of these shapes" in capsys.readouterr().err


def test_explain_exits_with_1_if_the_call_would_raise(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a tier that is not eligible here")
    assert main(["explain", "--device", "cpu", "--tier", "mea"]) == 1
    assert "this call would raise" in capsys.readouterr().out


def test_each_table_of_the_package_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [json.loads(path.read_text()) for path in ranking.FOLDER.glob("*.json")]
    assert {table["device"] for table in tables} >= {"NVIDIA H200"}
    for table in tables:
        assert main(["explain", "--device", table["device"]]) == 0
        order = capsys.readouterr().out.split("order: ")[1]
        assert "no table" not in order


@pytest.mark.parametrize("option", ["--out", "--table"])
def test_tune_refuses_a_file_that_was_cut(tmp_path: pathlib.Path, option: str) -> None:
    files = {"--out": tmp_path / "out.json", "--table": tmp_path / "table.json"}
    files[option].write_text('{"op": "decode", "rows": [')
    words = [word for name, file in files.items() for word in (name, str(file))]
    with pytest.raises(SystemExit, match=f"{option} .*: it is no JSON .*; remove it"):
        main(["tune", "--device", "cpu", *words])


def test_doctor_says_which_tiers_a_library_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    versions = capsys.readouterr().out.split("Devices")[0]
    assert "tier cudnn" in versions and "tiers xqa and flashinfer" in versions
