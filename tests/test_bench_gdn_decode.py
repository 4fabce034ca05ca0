"""`bench gdn_decode` without a GPU: checks, verdicts and JSON, over invented peers and times."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from tests import gdn_decode_oracle
from tests.test_bench import CPU, ScriptedClock
from torch_attn_tiers.cli import main
from torch_attn_tiers.cli.bench import gdn_decode, gdn_decode_sides
from torch_attn_tiers.cli.bench.clock import WallClock
from torch_attn_tiers.cli.bench.gdn_decode_sides import CASES, StepCase, StepInputs, StepPeer

SMALL = StepCase("small", 2, torch.float32, 1, 2, 16)


@pytest.fixture(autouse=True)
def _few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_decode_sides, "_LEAST_BYTES", 2e4)


def peer(name: str, factor: float = 1.0, **rest: Any) -> StepPeer:
    """A peer that computes what ours does, times a factor."""

    def build(inputs: StepInputs) -> list[Any]:
        (side, _) = gdn_decode_sides.ours(inputs, "reference")
        side.name = side.peer = name
        side.calls = [lambda call=call: call().mul_(factor) for call in side.calls]
        return [side]

    return StepPeer(name, name.upper(), "torch", build, **rest)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> dict[str, StepPeer]:
    peers = {"alpha": peer("alpha", float32_only=True), "beta": peer("beta")}
    monkeypatch.setattr(gdn_decode_sides, "PEERS", peers)
    return peers


def run(clock: Any, case: StepCase = SMALL, **options: Any) -> dict[str, Any]:
    options.setdefault("peers", ["alpha", "beta"])
    return gdn_decode.bench([case], clock, CPU, repeats=2, **options)


def scripted(*medians: float) -> ScriptedClock:
    return ScriptedClock(*[[us, us] for us in medians])


def test_ratio_is_that_to_the_best_peer(invented: Any) -> None:
    row = run(scripted(6.0, 7.0, 12.0, 8.0))["cases"][0]  # ours, ours.pool, alpha, beta
    assert row["our_us"] == 6.0 and row["our_tier"] == "reference"
    assert row["best_peer"] == "beta" and row["ratio"] == 0.75 and row["faster"] is True
    assert row["gaps"] == {} and row["state_bytes"] == 2 * 2 * 16 * 16 * 4
    assert row["moved_bytes"] == 2 * row["state_bytes"] + 2 * 2 * 16 * (1 + 1 + 2 + 2)


def test_wrong_peers_are_named_gaps(invented: dict[str, StepPeer]) -> None:
    invented["beta"] = peer("beta", 1.1)
    row = run(scripted(6.0, 7.0, 12.0, 8.0))["cases"][0]
    assert "wrong: relative errors out 0.1" in row["gaps"]["beta"] and row["ratio"] is None


def test_peer_of_float32_states_is_not_asked_about_others(invented: Any) -> None:
    case = StepCase("narrow", 2, torch.bfloat16, 1, 2, 16)
    row = run(scripted(6.0, 7.0, 8.0), case)["cases"][0]
    assert row["listed_peers"] == ["beta"] and row["ratio"] == 0.75


def test_report_and_json(
    invented: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "result.json"
    result = run(scripted(6.0, 7.0, 12.0, 8.0), out=str(out))
    assert json.loads(out.read_text()) == result and result["complete"]
    gdn_decode.print_report(result)
    assert "0.750" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wall_clock_measures_our_operator(dtype: torch.dtype) -> None:
    case = StepCase("small", 3, dtype, 2, 4, 16)
    row = gdn_decode.bench([case], WallClock(), CPU, repeats=1)["cases"][0]
    assert [side["side"] for side in row["sides"]] == ["ours", "ours.pool"]
    assert all(side["right"] for side in row["sides"]), row["sides"]
    assert row["our_us"] > 0 and set(row["gaps"].values()) == {"not asked for"}


def test_expected_steps_are_the_recurrence() -> None:
    inputs = StepInputs(SMALL, CPU)
    g, beta = gdn_decode_oracle.gates(inputs.a, inputs.b, inputs.A_log, inputs.dt_bias)
    state = inputs.first.double()
    for _ in range(3):
        result = gdn_decode_oracle.gdn_decode(
            inputs.q, inputs.k, inputs.v, g, beta, state, qk_l2norm=True, state_v_first=True
        )
        state = torch.stack([result.written[b] for b in range(SMALL.batch)]).mT
    out, got = inputs.expected(3)
    torch.testing.assert_close(out.double(), result.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.double(), state, rtol=1e-5, atol=1e-6)


def test_cases_are_the_eight_of_the_goal() -> None:
    assert [(case.batch, case.dtype) for case in CASES.values()] == [
        (batch, dtype) for dtype in (torch.float32, torch.bfloat16) for batch in (1, 8, 64, 256)
    ]


def test_unknown_names_are_an_error() -> None:
    with pytest.raises(SystemExit, match="--cases: 'x' is none of b1_float32"):
        main(["bench", "gdn_decode", "--cases", "x"])
