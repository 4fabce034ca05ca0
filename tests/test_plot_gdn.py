"""`benchmarks/plot_gdn.py`: what it takes from a result, and that it draws."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "plot_gdn.py"


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_gdn", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(lengths: list[int], us: float, heads: tuple[int, int] = (16, 32)) -> dict[str, Any]:
    def side(name: str, us: float, h: str | None = None, right: bool = True) -> dict[str, Any]:
        return {"side": name, "h": h, "right": right, "median_us": us}

    return {
        "lengths": lengths,
        "q_heads": heads[0],
        "v_heads": heads[1],
        "floor_us": us / 10,
        "sides": [
            side("ours:triton", us),
            side("ours:triton:fla", 2 * us, "fla"),
            side("wrong", 1.0, right=False),
        ],
    }


RESULT = {
    "device": {"name": "NVIDIA H200"},
    "commit": "0123456789abcdef",
    "cases": [_row([8192], 400.0), _row([2048], 100.0), _row([5, 6], 7.0), _row([64], 9.0, (2, 8))],
}


def test_lines_are_those_of_one_sequence_without_checkpoints(plot: ModuleType) -> None:
    assert plot.panels(RESULT) == {
        (16, 32): {
            "floor": [(2048, 10.0), (8192, 40.0)],
            "ours:triton": [(2048, 100.0), (8192, 400.0)],
        },
        (2, 8): {"floor": [(64, 0.9)], "ours:triton": [(64, 9.0)]},
    }


def test_picture_is_the_same_for_the_same_result(plot: ModuleType, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra docs is not installed")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        plot.draw(RESULT, picture)
    assert pictures[0].read_text().startswith("<?xml")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_result_without_single_sequences_is_refused(
    plot: ModuleType, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra docs is not installed")
    with pytest.raises(SystemExit, match="no case of one sequence"):
        plot.draw({**RESULT, "cases": [_row([5, 6], 7.0)]}, tmp_path / "none.svg")
