"""`bench decode` without a GPU: inputs, checks, verdicts, JSON, over invented peers and times."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from torch_attn_tiers.cli.bench import decode, peers, report, running
from torch_attn_tiers.cli.bench.cases import CASES, Case, Inputs, reference, relative_error
from torch_attn_tiers.cli.bench.clock import Call, Clock, Recording, WallClock
from torch_attn_tiers.cli.bench.sides import Side, bind_all

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
SMALL = Case("small", 2, 4, 2, 16, 64, "mixed")
FULL = Case("full", 1, 2, 2, 8, 32, "full")


class ScriptedRecording(Recording):
    def __init__(self, calls: Sequence[Call], times: list[float]) -> None:
        self.calls = len(calls)
        self._calls = calls
        self._times = iter(times)
        self.run()

    def run(self) -> None:
        for call in self._calls:
            self.output = call()

    def measure(self) -> float:
        return next(self._times)


class ScriptedClock(Clock):
    """Gives the sides, in the order they are recorded, these times."""

    name = "script"
    l2_bytes = 0

    def __init__(self, *times: list[float]) -> None:
        self._times = iter(times)

    def copy_rate(self) -> float:
        return 1e12

    def record(self, calls: Sequence[Call], context: Any = contextlib.nullcontext) -> Recording:
        return ScriptedRecording(calls, next(self._times))

    def host_us(self, call: Call, context: Any = contextlib.nullcontext) -> float:
        call()
        return 7.0


def plain(
    name: str, peer: str | None, inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]
) -> Side:
    """A side that computes the reference, then `change`s it."""

    def call(i: int) -> torch.Tensor:
        out = reference(
            inputs.query[i], inputs.key[i], inputs.value[i], inputs.host_lengths, inputs.case.scale
        )
        return change(out)

    return Side(name, bind_all(call, inputs.sets), peer)


def right(out: torch.Tensor) -> torch.Tensor:
    return out


def wrong(out: torch.Tensor) -> torch.Tensor:
    return out * 1.01


def missing(inputs: Inputs) -> list[Side]:
    raise ImportError("no such library")


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, peers.Peer]]:
    """Peers alpha (two sides) and beta, and a side of ours that computes the reference."""
    found = {
        "alpha": peers.Peer(
            "alpha",
            "Alpha",
            "torch",
            lambda inputs: [
                plain("alpha:x", "alpha", inputs, right),
                plain("alpha:y", "alpha", inputs, right),
            ],
        ),
        "beta": peers.Peer(
            "beta", "Beta", "torch", lambda inputs: [plain("beta", "beta", inputs, right)]
        ),
    }
    monkeypatch.setattr(peers, "PEERS", found)
    monkeypatch.setattr(report, "PEERS", found)
    monkeypatch.setattr(
        decode, "our_side", lambda inputs, tier, layout: plain("ours", None, inputs, right)
    )
    yield found


def run(clock: Clock, cases: Sequence[Case] = (SMALL,), **options: Any) -> dict[str, Any]:
    options.setdefault("peers", ["alpha", "beta"])
    options.setdefault("repeats", 2)
    return decode.bench(cases, clock, CPU, dtype=torch.float32, **options)


def test_ratio_is_over_the_best_side_of_every_listed_peer(invented: Any) -> None:
    clock = ScriptedClock([2.0, 2.2], [9.0, 9.0], [3.0, 3.2], [4.0, 4.0])
    row = run(clock)["cases"][0]
    assert row["our_us"] == 2.1 and row["best_peer"] == "alpha" and row["best_peer_us"] == 3.1
    assert row["ratio"] == round(2.1 / 3.1, 4) and row["faster"] is True
    assert row["gaps"] == {}


def test_faster_means_our_slowest_repeat_beats_their_fastest(invented: Any) -> None:
    clock = ScriptedClock([2.0, 3.1], [9.0, 9.0], [3.0, 5.2], [4.0, 4.0])
    result = run(clock)
    row = result["cases"][0]
    assert row["ratio"] < 1 and row["faster"] is False
    assert result["summary"]["faster_rows"] == 0


def test_missing_peer_is_a_named_gap_and_no_ratio(invented: dict[str, peers.Peer]) -> None:
    invented["beta"] = peers.Peer("beta", "Beta", "torch", missing)
    result = run(ScriptedClock([2.0, 2.0], [3.0, 3.0], [3.0, 3.0]))
    row = result["cases"][0]
    assert row["gaps"] == {"beta": "ImportError: no such library"}
    assert row["ratio"] is None and row["faster"] is None and row["best_peer"] == "alpha"
    assert result["summary"]["rows_with_ratio"] == 0


def test_peer_not_asked_for_is_a_gap(invented: Any) -> None:
    row = run(ScriptedClock([2.0, 2.0], [3.0, 3.0], [3.0, 3.0]), peers=["alpha"])["cases"][0]
    assert row["gaps"] == {"beta": "not asked for"} and row["ratio"] is None


def test_library_that_is_not_installed_is_a_gap(invented: dict[str, peers.Peer]) -> None:
    invented["beta"] = peers.Peer("beta", "Beta", "no_such_module_here", missing)
    row = run(ScriptedClock([2.0, 2.0], [3.0, 3.0], [3.0, 3.0]))["cases"][0]
    assert row["gaps"] == {"beta": "no_such_module_here is not installed"}


def test_wrong_peer_does_not_count(invented: dict[str, peers.Peer]) -> None:
    invented["beta"] = peers.Peer(
        "beta", "Beta", "torch", lambda inputs: [plain("beta", "beta", inputs, wrong)]
    )
    row = run(ScriptedClock([2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [1.0, 1.0]))["cases"][0]
    assert "wrong: relative error 0.01" in row["gaps"]["beta"]
    assert row["best_peer"] == "alpha" and row["ratio"] is None
    beta = row["sides"][-1]
    assert beta["right"] is False and "host_us" not in beta and beta["us"] == [1.0, 1.0]


def test_our_wrong_result_is_reported(
    invented: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        decode,
        "our_side",
        lambda inputs, tier, layout: plain(
            "ours", None, inputs, lambda out: torch.full_like(out, float("nan"))
        ),
    )
    result = run(ScriptedClock(*[[2.0, 2.0]] * 4))
    row = result["cases"][0]
    assert row["our_us"] is None and row["ratio"] is None
    report.print_report(result)
    assert "FAILED small ours: wrong: relative error nan" in capsys.readouterr().out


def test_repeats_are_taken_in_turns(invented: Any) -> None:
    order: list[int] = []

    class Turns(ScriptedClock):
        def __init__(self) -> None:
            super().__init__(*[[1.0] * 3] * 4)
            self._made = 0

        def record(self, calls: Sequence[Call], context: Any = None) -> Recording:
            number, self._made = self._made, self._made + 1
            recording = super().record(calls)
            measure = recording.measure
            recording.measure = lambda: (order.append(number), measure())[1]  # type: ignore
            return recording

    run(Turns(), repeats=3)
    assert order == [0, 1, 2, 3] * 3


def test_host_times_are_the_least_of_windows_in_turns() -> None:
    order: list[str] = []
    times = {"a": iter([9.0, 7.04, *[8.0] * 8]), "b": iter([3.0, 2.0]), "wrong": iter(())}

    class Windows(ScriptedClock):
        def host_us(self, call: Call, context: Any = contextlib.nullcontext) -> float:
            order.append(call())
            return next(times[order[-1]])  # of b the third one fails

    rows = {name: {"right": name != "wrong"} for name in times}
    sides = [running.HostSide(row, functools.partial(str, name)) for name, row in rows.items()]
    running.measure_host(Windows(), sides)
    assert order == ["a", "b"] * 3 + ["a"] * (running.HOST_WINDOWS - 3)
    assert rows["a"]["host_us"] == 7.0
    assert "host_us" not in rows["b"] and "host_us" not in rows["wrong"]


def test_report_and_json(
    invented: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "result.json"
    clock = ScriptedClock(*[[2.0, 2.0]] * 8)
    result = run(clock, cases=(SMALL, FULL), out=str(out))
    assert json.loads(out.read_text()) == result
    assert result["complete"] and result["repeats"] == 2 and len(result["cases"]) == 2
    for key in ("command", "date", "commit", "device", "versions", "copy_tb_per_s"):
        assert result[key], key
    assert all(len(side["us"]) == 2 for row in result["cases"] for side in row["sides"])
    assert result["cases"][0]["sides"][0]["host_us"] == 7.0
    report.print_report(result)
    printed = capsys.readouterr().out
    assert "geometric mean 1.000, worst 1.000" in printed
    assert "faster than every peer in 0 of 2 rows" in printed


def test_sdpa_is_listed_for_full_lengths_only() -> None:
    assert "sdpa_flash" in peers.listed(CASES["mha_b8_4k"])
    assert "sdpa_flash" not in peers.listed(CASES["llama8b_b16_8k_mixed"])


def test_peers_that_compile_nothing_here_are_gaps() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without the CUDA libraries")
    peers.compile_ahead(peers.PEERS.values(), [SMALL], torch.bfloat16, CPU)
    assert peers.PEERS["fa3"].gap() == "fa3_fwd_interface is not installed"


def test_sets_leave_the_l2() -> None:
    l2 = 1 << 19
    inputs = Inputs(Case("c", 4, 2, 2, 64, 1024, "full"), torch.float16, CPU, l2)
    assert inputs.sets * inputs.valid_bytes > 4 * l2
    assert Inputs(CASES["tiny"], torch.bfloat16, CPU, l2).sets > 1


def test_pages_without_a_copy_hold_the_cache() -> None:
    cache = torch.arange(2 * 3 * 64 * 4).view(2, 3, 64, 4)
    pages = peers._overlapping_pages(cache, 16)
    for b in range(2):
        for j in range(4):
            page = pages[b * 3 * 4 + j]
            assert torch.equal(page, cache[b, :, 16 * j : 16 * j + 16])


def test_reference_agrees_with_sdpa_on_full_lengths() -> None:
    inputs = Inputs(FULL, torch.float32, CPU, 0)
    query, key, value = inputs.query[0], inputs.key[0], inputs.value[0]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    out = reference(query, key, value, inputs.host_lengths, FULL.scale)
    assert relative_error(out, expected) < 1e-6
    assert not reference(query, key, value, [0], FULL.scale).any()


def test_wall_clock_measures_our_operator() -> None:
    result = decode.bench([FULL], WallClock(), CPU, tiers=["auto", "unfused"], repeats=2)
    ours, forced = result["cases"][0]["sides"]
    assert ours["right"] and forced["right"], (ours, forced)
    assert ours["side"] == "ours" and forced["tier"] == "unfused"
    assert ours["median_us"] > 0 and result["cases"][0]["floor_ratio"] > 0


def test_float8_caches_are_measured_beside_wider_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = ScriptedClock([2.0, 2.0], [9.0, 9.0], [3.0, 3.0])
    result = decode.bench(
        [FULL], clock, CPU, tiers=["unfused", "auto"], dtype=torch.float16, kv_dtype=FLOAT8,
        repeats=2,
    )  # fmt: skip
    row = result["cases"][0]
    sides = [(side["side"], side.get("caches"), side["right"]) for side in row["sides"]]
    assert sides == [
        ("ours:unfused", None, True), ("ours", None, True), ("float16 caches", "float16", True),
    ]  # fmt: skip
    assert row["sides"][2]["tier"] == "unfused"
    assert row["our_us"] == 2.0 and row["speedup"] == 1.5
    assert row["valid_bytes"] == 2 * 32 * 2 * 8
    assert result["summary"]["speedup"] == result["summary"]["least_speedup"] == 1.5
    report.print_report(result)
    printed = capsys.readouterr().out
    assert "decode, float16 over float8_e4m3fn, on" in printed
    assert "over float16 caches: 1.50 times as fast" in printed


def test_float8_inputs_stand_for_normal_numbers() -> None:
    inputs = Inputs(Case("c", 2, 4, 2, 32, 256, "full"), torch.float16, CPU, 0, FLOAT8)
    for cache, scale in zip((inputs.key[0], inputs.value[0]), inputs.scales, strict=True):
        assert cache.dtype is FLOAT8 and scale is not None
        numbers = cache.float() * scale
        assert abs(numbers.std().item() - 1) < 0.05 and cache.float().abs().max() < 448


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="--cases: 'no_case' is none of tiny"):
        running.names("no_case", CASES, "--cases", ())
    assert running.names("all", CASES, "--cases", ()) == list(CASES)
