"""`bench gdn` without a GPU: cases, checks, verdicts, JSON, over invented peers and times."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import gdn_oracle
from tests.test_bench import CPU, ScriptedClock
from torch_attn_tiers.cli import main
from torch_attn_tiers.cli.bench import gdn, gdn_cases, gdn_sides, running
from torch_attn_tiers.cli.bench.clock import WallClock
from torch_attn_tiers.cli.bench.gdn_cases import CASES, GdnCase, GdnInputs
from torch_attn_tiers.cli.bench.gdn_sides import GdnPeer, GdnSide

SMALL = GdnCase("small", 1, 2, (70, 1))


@pytest.fixture(autouse=True)
def _narrow_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gdn_cases, gdn_sides):
        monkeypatch.setattr(module, "HEAD_SIZE", 16)


def right(name: str, inputs: GdnInputs, factor: float = 1.0) -> GdnSide:
    """A side that gives the reference of the last set, times a factor."""

    def function(i: int) -> tuple[torch.Tensor, ...]:
        out, state = inputs.reference
        return (out * factor).float(), state.float()

    return gdn_sides._side(name, function, inputs, peer=name)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> dict[str, GdnPeer]:
    peers = {
        name: GdnPeer(name, name.upper(), "torch", lambda inputs, name=name: [right(name, inputs)])
        for name in ("fla", "beta")
    }
    monkeypatch.setattr(gdn_sides, "PEERS", peers)
    return peers


def run(clock: Any, **options: Any) -> dict[str, Any]:
    options.setdefault("peers", ["fla", "beta"])
    options.setdefault("repeats", 2)
    return gdn.bench([SMALL], clock, CPU, dtype=torch.float32, **options)


def scripted(*medians: float) -> ScriptedClock:
    return ScriptedClock(*[[us, us] for us in medians])


def test_ratios_and_the_cost_of_checkpoints(invented: Any) -> None:
    # ours, .h_fla, .h_compact, .pool, .pool_tracked, fla, beta, fill h of fla and compact
    row = run(scripted(6.0, 10.0, 9.0, 6.0, 7.0, 12.0, 5.0, 2.0, 1.5))["cases"][0]
    assert row["our_us"] == 6.0 and row["our_tier"] == "reference"
    assert row["best_peer"] == "beta" and row["ratio"] == 1.2 and row["fla_ratio"] == 0.5
    assert row["faster"] is False and row["h_cost"] == {"fla": 2.0, "compact": 2.0}
    assert row["gaps"] == {}


def test_side_that_leaves_work_out_is_never_compared(invented: dict[str, GdnPeer]) -> None:
    def two(inputs: GdnInputs) -> list[GdnSide]:
        alone = right("beta", inputs)
        alone.name, alone.compared = "beta:kernel", False
        return [right("beta", inputs), alone]

    invented["beta"] = GdnPeer("beta", "BETA", "torch", two)
    row = run(scripted(6.0, 12.0, 8.0, 1.0, 2.0), forms=[None])["cases"][0]
    assert row["best_peer_us"] == 8.0


def test_missing_and_wrong_peers_are_named_gaps(invented: dict[str, GdnPeer]) -> None:
    invented["fla"] = GdnPeer("fla", "FLA", "no_such_module_here", lambda inputs: [])
    invented["beta"] = GdnPeer("beta", "BETA", "torch", lambda inputs: [right("beta", inputs, 1.1)])
    result = run(scripted(6.0, 1.0, 2.0), forms=[None])
    row = result["cases"][0]
    assert row["gaps"]["fla"] == "no_such_module_here is not installed"
    assert "wrong: relative errors out 0.1" in row["gaps"]["beta"]
    assert row["ratio"] is None and result["summary"]["rows_with_ratio"] == 0


def test_report_and_json(
    invented: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "result.json"
    result = run(scripted(6.0, 10.0, 9.0, 6.0, 7.0, 12.0, 5.0, 2.0, 1.5), out=str(out))
    assert json.loads(out.read_text()) == result and result["complete"]
    gdn.print_report(result)
    assert "1.200" in capsys.readouterr().out


def test_wall_clock_measures_our_operator() -> None:
    forms = [None, "fla", "tracked"]
    row = gdn.bench([SMALL], WallClock(), CPU, repeats=1, dtype=torch.float32, forms=forms)
    row = row["cases"][0]
    assert [side["side"] for side in row["sides"]] == ["ours", "ours.h_fla", "ours.pool_tracked"]
    assert "tracked" in row["sides"][-1]["errors"] and "tracked" not in row["sides"][-2]["errors"]
    assert all(side["right"] for side in row["sides"]), row["sides"]
    assert row["our_us"] > 0 and row["gaps"] == dict.fromkeys(gdn_sides.PEERS, "not asked for")


def test_our_sides_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that compiles for seconds waits for it: `--tier auto` is to measure that one."""
    prepared = []
    real = torch_attn_tiers.prepare
    monkeypatch.setattr(
        torch_attn_tiers,
        "prepare",
        lambda op, *args, **named: prepared.append(str(op)) or real(op, *args, **named),
    )
    run(scripted(*[1.0] * 7), peers=[])
    names = [name.removeprefix("attn_tiers.gdn_chunk_prefill.") for name in prepared]
    assert names == ["default", "h_fla", "h_compact", "pool_", "pool_"]


def test_kept_state_that_is_wrong_is_seen() -> None:
    inputs = GdnInputs(SMALL, torch.float32, CPU, 0)
    side = gdn_sides.ours(inputs, "reference", "tracked")
    side.calls[-1]()
    assert all(error < 1e-5 for error in side.errors(inputs).values())
    side.results[2].mul_(1.1)
    assert side.errors(inputs)["tracked"] > 0.09


@pytest.mark.parametrize("layout", ["fla", "compact"])
def test_checkpoint_that_is_wrong_is_seen(layout: str) -> None:
    inputs = GdnInputs(SMALL, torch.float32, CPU, 0)
    side = gdn_sides.ours(inputs, "reference", layout)
    side.calls[-1]()
    assert all(error < 1e-5 for error in side.errors(inputs).values())
    rows = SMALL.rows_of_h(layout)
    assert rows == {"fla": 3, "compact": 1}[layout]
    side.results[2].flatten(0, -4)[rows - 1].mul_(1.1)
    assert side.errors(inputs)["h"] > 0.01
    assert any(one is side.results[2] for one in side.checked)


def test_prompts_without_a_complete_chunk_have_no_checkpoint_to_be_wrong() -> None:
    inputs = GdnInputs(GdnCase("short", 1, 2, (63, 1)), torch.float32, CPU, 0)
    side = gdn_sides.ours(inputs, "reference", "compact")
    side.calls[-1]()
    assert set(side.errors(inputs)) == {"out", "state"}


def test_forced_tier_that_does_not_take_a_case_is_no_failure() -> None:
    result = run(scripted(1.0), peers=[], forms=["compact"], tier="flashinfer")
    (side,) = result["cases"][0]["sides"]
    assert side["eligible"] is False and "TierNotEligibleError" in side["failure"]
    assert running.exit_status(result) == 0
    side.pop("eligible")
    assert running.exit_status(result) == 1


def test_interrupted_run_leaves_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(
        running, "free", lambda device: (_ for _ in ()).throw(KeyboardInterrupt("enough"))
    )
    with pytest.raises(KeyboardInterrupt, match="enough"):
        run(scripted(1.0), peers=[], forms=[None], out=str(out))
    result = json.loads(out.read_text())
    assert len(result["cases"]) == 1 and result["summary"]["rows"] == 1
    assert not result["complete"]


def test_reference_is_the_recurrence() -> None:
    inputs = GdnInputs(SMALL, torch.float32, CPU, 0)
    last = inputs.sets - 1
    tensors = (x[last] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    expected = gdn_oracle.gdn_chunk_prefill(
        *tensors, inputs.initial_state, inputs.cu_seqlens, scale=inputs.scale, qk_l2norm=True,
        state_v_first=True,
    )  # fmt: skip
    out, state = inputs.reference
    torch.testing.assert_close(out, expected.out, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.mT, expected.final_state, rtol=1e-6, atol=1e-7)


def test_cases_are_chosen_by_name_or_group() -> None:
    assert [case.name for case in gdn.chosen_cases("1x8k,2/8_1x2k")] == ["1x8k", "2/8_1x2k"]
    assert len(gdn.chosen_cases("model")) == 6 and len(gdn.chosen_cases("heads")) == 15
    assert gdn.chosen_cases("all") == list(CASES.values())
    with pytest.raises(SystemExit, match="--cases: 'no_case' is none of model, heads"):
        gdn.chosen_cases("no_case")


def test_cases_count_their_chunks() -> None:
    mixed = CASES["mixed"]
    assert mixed.sequences == 10 and mixed.tokens == sum(mixed.lengths)
    assert mixed.checkpoints == 202 and mixed.complete_chunks == 195
    assert mixed.checkpoint_rows >= mixed.checkpoints
    assert mixed.track_lens == (960, 0, 4032, 0, 0, 64, 1984, 256, 4992, 0)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "gdn", "--help"])
    assert "--peers" in capsys.readouterr().out
