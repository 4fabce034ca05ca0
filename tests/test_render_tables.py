"""benchmarks/render_tables.py: the pages say what the result files say, and --check proves it."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "render_tables.py"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "before\n<!-- table:gpu_tests_h200 -->\nstale\n<!-- /table:gpu_tests_h200 -->\nafter\n"
    )
    return tmp_path


def counts_result() -> dict[str, Any]:
    tally = {"passed": 7, "failed": 0, "skipped": 2}
    return {
        "command": "pytest tests/gpu",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "device": "Some GPU",
        "versions": {"torch": "2.11.0", "triton": None},
        "total": tally,
        "tiers": {"flash": tally},
    }


def decode_result() -> dict[str, Any]:
    sides = [
        {"side": "ours", "peer": None, "us": [4.0, 4.2], "median_us": 4.1, "right": True},
        {"side": "a:x", "peer": "a", "us": [6.0, 6.2], "median_us": 6.1, "right": True},
        {"side": "a:y", "peer": "a", "us": [5.0, 5.2], "median_us": 5.1, "right": True},
        {"side": "b", "peer": "b", "us": [1.0, 1.0], "median_us": 1.0, "right": False},
    ]
    row = {
        "case": "one", "batch": 1, "q_heads": 8, "kv_heads": 1, "head_dim": 64, "capacity": 128,
        "valid_bytes": 32768, "floor_us": 0.01, "our_us": 4.1, "our_tier": "flash",
        "floor_ratio": 410.0, "best_peer": "a", "best_peer_us": 5.1, "ratio": None, "faster": None,
        "gaps": {"b": "wrong | result"}, "sides": sides,
    }  # fmt: skip
    summary = {"rows": 1, "rows_with_ratio": 0, "geometric_mean": None, "faster_rows": 0}
    return {
        "command": "python -m torch_attn_tiers bench decode --peers",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "device": {"name": "Some GPU"},
        "versions": {"torch": "2.11.0"},
        "peer_labels": {"a": "Peer A", "b": "Peer B", "c": "Peer C"},
        "peers": ["a", "b"],
        "repeats": 2,
        "copy_tb_per_s": 4.2,
        "cases": [row],
        "summary": summary,
    }


def write(root: pathlib.Path, name: str, result: dict[str, Any]) -> None:
    (root / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(result))


def test_missing_result_says_so(tables: ModuleType, root: pathlib.Path) -> None:
    assert tables.main(["--check"], root) == 1
    assert tables.main([], root) == 0
    page = (root / "README.md").read_text()
    assert "not measured yet" in page and "stale" not in page
    assert page.startswith("before\n") and page.endswith("\nafter\n")
    assert tables.main(["--check"], root) == 0


def test_check_fails_when_a_result_changes(
    tables: ModuleType, root: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = counts_result()
    write(root, "gpu_tests_h200", result)
    tables.main([], root)
    assert tables.main(["--check"], root) == 0
    result["tiers"]["flash"] = {"passed": 6, "failed": 1, "skipped": 2}
    write(root, "gpu_tests_h200", result)
    capsys.readouterr()
    assert tables.main(["--check"], root) == 1
    assert "README.md: differs" in capsys.readouterr().err
    assert "| flash | 7 | 0 | 2 |" in (root / "README.md").read_text()


def test_counts_and_provenance(tables: ModuleType, root: pathlib.Path) -> None:
    write(root, "gpu_tests_h200", counts_result())
    tables.main([], root)
    page = (root / "README.md").read_text()
    assert "| all tests | 7 | 0 | 2 |" in page
    assert "Some GPU; torch 2.11.0; commit `0123456789ab`; 2026-01-02." in page
    assert "`pytest tests/gpu`" in page


def test_decode_row_takes_each_peers_best_right_side(tables: ModuleType) -> None:
    text = tables.decode_table(decode_result())
    header, _, row = text.splitlines()[:3]
    assert "Peer A" in header and "Peer B" not in header and "Peer C" not in header
    assert "**5.1**" in row and "6.1" not in row
    assert row.endswith("| - | - |")
    assert "Gaps: Peer B: wrong" in text


def test_ratio_to_a_floor_below_a_microsecond_is_not_shown(tables: ModuleType) -> None:
    result = decode_result()
    assert "| 0.0 | 4.1 | flash | - |" in tables.decode_table(result)
    result["cases"][0].update(floor_us=2.0, floor_ratio=2.05)
    assert "| 2.0 | 4.1 | flash | 2.05 |" in tables.decode_table(result)


def tiers_result() -> dict[str, Any]:
    """A result of `--tiers auto,flash,xqa`."""
    result = decode_result()
    ours = {"peer": None, "right": True, "layout": "hnd"}
    xqa = {"peer": "xqa", "right": True}
    result["peer_labels"] = {"xqa": "XQA"}
    result["cases"][0]["sides"] = [
        {**ours, "side": "ours", "tier": "flash", "median_us": 4.4, "host_us": 30.2},
        {**ours, "side": "ours:flash", "tier": "flash", "median_us": 4.0, "host_us": 31.0},
        {**ours, "side": "ours:xqa", "tier": "xqa", "median_us": 9.0, "host_us": 80.4},
        {**xqa, "side": "xqa:nhd", "layout": "nhd", "median_us": 5.0, "host_us": 20.0},
        {**xqa, "side": "xqa:hnd", "layout": "hnd", "median_us": 6.0, "host_us": 25.0},
    ]
    return result


def test_a_forced_tier_stands_beside_its_library_over_the_same_layout(tables: ModuleType) -> None:
    header, _, row = tables.decode_tiers_table(tiers_result()).splitlines()[:3]
    assert "| `flash` | `xqa` | XQA itself | chosen / fastest forced |" in header
    assert row == "| `one` | `flash` | 4.4 | 4.0 | 9.0 | 6.0 | 1.100 |"
    header, _, row = tables.decode_host_table(tiers_result()).splitlines()[:3]
    assert header == "| case | chosen | `flash` | `xqa` | XQA itself | more |"
    assert row == "| `one` | 30 | 31 | 80 | 25 | 55 |"


def test_host_times_say_how_they_were_taken(tables: ModuleType) -> None:
    result = tiers_result()
    assert "3 windows of 30 calls, one side after the other" in tables.decode_host_table(result)
    result["host_windows"] = 10
    assert "10 windows of 30 calls, which the sides take in" in tables.decode_host_table(result)


def test_a_tier_that_takes_no_call_has_no_time(tables: ModuleType) -> None:
    result = tiers_result()
    result["cases"][0]["sides"][2] = {
        "side": "ours:xqa", "peer": None, "right": False, "us": [], "failure": "not for it",
    }  # fmt: skip
    assert tables.decode_tiers_table(result).splitlines()[2].endswith("| 4.0 | - | 6.0 | 1.100 |")
    assert tables.decode_host_table(result).splitlines()[2].endswith("| 31 | - | 25 | - |")


def test_two_tables_of_one_file(tables: ModuleType, root: pathlib.Path) -> None:
    (root / "README.md").write_text(
        "<!-- table:decode_tiers_h200 -->\n<!-- /table:decode_tiers_h200 -->\n"
    )
    write(root, "decode_h200", tiers_result())
    assert tables.main([], root) == 0
    assert "XQA itself" in (root / "README.md").read_text()


def test_gdn_tables(tables: ModuleType) -> None:
    common = {key: counts_result()[key] for key in ("command", "date", "commit", "versions")}
    common["device"] = {"name": "Some GPU"}
    side = {
        "side": "ours:triton", "peer": None, "h": None, "right": True, "tier": "triton",
        "median_us": 20.04, "host_us": 9.0, "errors": {"out": 0.002, "state": 0.001},
        "compared": True,
    }  # fmt: skip
    fla = {**side, "side": "fla", "peer": "fla", "median_us": 40.0}
    wrong = {**fla, "side": "fla.h", "h": "compact", "right": False, "failure": "wrong: h 0.2"}
    alone = {**fla, "side": "fla:kernel", "compared": False}
    with_h = {**side, "h": "compact", "median_us": 30.0}
    row = {"case": "1x8k", "q_heads": 1, "v_heads": 2, "floor_us": 3.0, "ratio": 0.501,
           "faster": True, "sides": [side, fla, wrong, alone, with_h],
           "gaps": {"qla": "not installed"}}  # fmt: skip
    result = {**common, "cases": [row], "peer_labels": {"fla": "FLA", "qla": "QLA"},
              "repeats": 3, "peers": ["fla"], "complete": True,
              "copy_tb_per_s": 4.2, "summary": {"rows_with_ratio": 0}}  # fmt: skip
    lines = tables.gdn_table(result).splitlines()
    assert lines[0] == (
        "| case | Hq/Hv | floor | ours | FLA | ours, compact | FLA, compact | ours / best peer | "
        "faster than all | ours, host |"
    )
    assert lines[2] == "| `1x8k` | 1/2 | 3.0 | 20.0 | 40.0 | 30.0 | - | 0.501 | yes | 9 |"
    assert "Gaps: QLA: not installed." in lines
    assert "Failed: `1x8k` fla.h: wrong: h 0.2." in lines
    ended = tables.gdn_table({**result, "complete": False}).splitlines()
    assert [line for line in ended if line not in lines] == ["The run was ended after `1x8k`."]
    result["cases"].append({**row, "case": "2/8_1x8k", "ratio": 2.0})
    row["fill_h_us"] = {"fla": [5.0, 4.0, 9.0], "compact": [4.0]}
    lines = tables.gdn_checkpoints_table({**result, "cases": [row]}).splitlines()
    assert lines[:3] == [
        "| case | fill, fla | compact | ours, compact |",
        "| --- | --- | --- | --- |",
        "| `1x8k` | 5.0 | 4.0 | 2.49 |",  # that of FLA is wrong, of which no time is told
    ]
    lines = tables.gdn_model_table(result).splitlines()
    assert len([line for line in lines if line.startswith("| `")]) == 1
    assert "geometric mean 0.501, worst row 0.501" in "\n".join(lines)

    times = [
        ("prepare_kernel", "default", 5.0), ("scan_kernel", "default", 7.0),
        ("run", "default", 13.0), ("scan_kernel", "bv=32", 4.0), ("run", "bv=32", 10.0),
    ]  # fmt: skip
    right = {"out": 0.003, "state": 0.001}
    rows = [
        {"case": "1x8k", "kernel": k, "config": c, "us": [us] * 3, **right} for k, c, us in times
    ]
    rows.append({**rows[-1], "config": "bv=16", "us": [1.0], "state": 0.1})  # wrong
    lines = tables.gdn_configs_table({**common, "rows": rows}).splitlines()
    assert lines[2:4] == [
        "| `1x8k` | `bv=32` | - | 4 | 10 |",
        "| `1x8k` | `default` | 5 | 7 | 13 |",
    ]
    rows.append({**rows[0], "kernel": "segment_kernel", "us": [2.0]})
    lines = tables.gdn_configs_table({**common, "rows": rows}).splitlines()
    assert lines[0] == (
        "| case | configuration | prepare | segments | chain | scan | all launches |"
    )
    assert lines[3] == "| `1x8k` | `default` | 5 | 2 | - | 7 | 13 |"


def step_result() -> dict[str, Any]:
    """A result of `bench gdn_decode --peers`: one case in float32, one in bfloat16."""
    ours = {"peer": None, "right": True, "tier": "triton"}
    a, b = {"peer": "a", "right": True}, {"peer": "b", "right": True}
    common = {"gaps": {}, "faster": True}
    result = decode_result()
    result["cases"] = [
        {
            **common, "case": "b8_float32", "state_bytes": 16777216, "floor_us": 8.0,
            "our_us": 10.04, "floor_ratio": 1.25, "best_peer": "b", "ratio": 0.9001,
            "sides": [
                {**ours, "side": "ours", "median_us": 10.04},
                {**ours, "side": "ours.pool", "median_us": 10.5},
                {**a, "side": "a:k_first", "median_us": 12.0},
                {**a, "side": "a:v_first", "median_us": 11.6},
                {**b, "side": "b", "median_us": 11.0},
                {**b, "side": "b:pool", "median_us": 3.0, "right": False},
            ],
        },
        {
            **common, "case": "b1_bfloat16", "state_bytes": 1048576, "floor_us": 0.5,
            "our_us": 2.4, "floor_ratio": 4.8, "best_peer": "b", "ratio": 1.2, "faster": False,
            "sides": [
                {**ours, "side": "ours:triton", "median_us": 2.4},
                {**ours, "side": "ours:triton.pool", "right": False, "us": []},
                {**b, "side": "b", "median_us": 4.0},
                {**b, "side": "b:pool", "median_us": 2.0},
            ],
        },
    ]  # fmt: skip
    result["summary"] = {
        "rows": 2, "rows_with_ratio": 2, "geometric_mean": 1.039, "worst_ratio": 1.2,
        "faster_rows": 1,
    }  # fmt: skip
    return result


def test_gdn_decode_table(tables: ModuleType) -> None:
    result = step_result()
    lines = tables.gdn_decode_table(result).splitlines()
    assert lines[0] == (
        "| case | state | floor | ours | copy rate | by indices | Peer A | Peer B"
        " | ours / best peer | faster than all |"
    )
    assert lines[2:4] == [
        "| `b8_float32` | 17 MB | 8.0 | 10.0 | 80 % | 10.5 | 11.6 `v_first` | **11.0** | 0.900"
        " | yes |",
        "| `b1_bfloat16` | 1 MB | 0.5 | 2.4 | - | - | - | **2.0** `pool` | 1.200 | no |",
    ]
    assert "4.20 TB/s" in lines[5]
    assert "geometric mean 1.039, worst 1.200; in 1 of 2 rows" in lines[6]
    assert "Some GPU; torch 2.11.0; commit `0123456789ab`; 2026-01-02." in lines[-1]


def test_gdn_decode_table_of_a_missing_peer_and_a_failure(tables: ModuleType) -> None:
    result = step_result()
    row = result["cases"][0]
    row["sides"] = [{"side": "ours", "peer": None, "us": [], "right": False, "failure": "no"}]
    row["gaps"] = {"a": "a is not installed", "b": "b is not installed"}
    row.update(our_us=None, floor_ratio=None, best_peer=None, ratio=None, faster=None)
    text = tables.gdn_decode_table(result)
    assert text.splitlines()[2] == "| `b8_float32` | 17 MB | 8.0 | - | - | - | - | - | - |"
    assert "Peer A" not in text.splitlines()[0]
    assert (
        "Gaps: Peer A: a is not installed (`b8_float32`); Peer B: b is not installed "
        "(`b8_float32`)." in text
    )


def test_gdn_decode_configs_table(tables: ModuleType) -> None:
    times = [
        ("b8_bfloat16", "bv=64", [5.0, 5.2, 9.0]), ("b8_bfloat16", "default", [6.6] * 3),
        ("b64_float32", "default", [68.0] * 3), ("b64_float32", "lanes=16", [68.9] * 3),
        ("b1_float32", "lanes=16", [3.0] * 3),
    ]  # fmt: skip
    rows = [
        {"case": case, "config": config, "us": us, "out": 0.002, "state": 1e-7}
        for case, config, us in times
    ]
    rows.append({**rows[0], "config": "bv=16", "us": [1.0], "out": float("nan")})  # wrong
    result = {**counts_result(), "rows": rows, "copy_tb_per_s": 4.0}
    lines = tables.gdn_decode_configs_table(result).splitlines()
    assert lines[2:5] == [  # 2 x 8 MiB of states and 0.2 MB of tokens at 4 TB/s
        "| `b8_bfloat16` | 4.2 | 6.6 | 5.2 | `bv=64` |",
        "| `b64_float32` | 67.5 | 68.0 | 68.0 | `default` |",
        "| `b1_float32` | 1.1 | - | 3.0 | `lanes=16` |",
    ]
    assert "4.00 TB/s" in "".join(lines[5:])


def test_docs_pages_are_written_and_builds_are_not(tables: ModuleType, root: pathlib.Path) -> None:
    region = "<!-- table:decode_h200 -->\n<!-- /table:decode_h200 -->\n"
    (root / "docs" / "guide" / "speed.md").write_text(region)
    (root / "docs" / "_build").mkdir()
    (root / "docs" / "_build" / "copy.md").write_text(region)
    write(root, "decode_h200", decode_result())
    tables.main([], root)
    assert "| `one` |" in (root / "docs" / "guide" / "speed.md").read_text()
    assert (root / "docs" / "_build" / "copy.md").read_text() == region


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:no_such_table -->\n<!-- /table:no_such_table -->\n",
        "<!-- table:decode_h200 -->\nnever closed\n",
        "<!-- table:decode_h200 -->\n<!-- /table:boundary_cpu -->\n",
    ],
)
def test_bad_region_fails(tables: ModuleType, root: pathlib.Path, text: str) -> None:
    (root / "README.md").write_text(text)
    assert tables.main([], root) == 1
    assert (root / "README.md").read_text() == text


def test_pages_of_this_project_render(tables: ModuleType) -> None:
    for page in tables.pages(tables.ROOT):
        tables.render(page.read_text(encoding="utf-8"), tables.ROOT / "benchmarks" / "results")
