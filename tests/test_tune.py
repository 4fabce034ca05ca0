"""`tune` without a GPU: grid, inputs, order, files, over invented tiers and times."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests import fake_libraries
from tests.test_dispatch import Invented
from torch_attn_tiers import explain, ranking, register_tier
from torch_attn_tiers.cli import environment, main
from torch_attn_tiers.cli.bench.cases import CASES
from torch_attn_tiers.cli.bench.clock import CALLS_PER_GRAPH, Call, Clock, Recording, WallClock
from torch_attn_tiers.cli.tune import building, decode, session
from torch_attn_tiers.cli.tune.building import Build
from torch_attn_tiers.cli.tune.decode import DecodePoint, grid
from torch_attn_tiers.cli.tune.order import fastest_first, worst_ratios
from torch_attn_tiers.cli.tune.points import Memory, spread
from torch_attn_tiers.cli.tune.session import Session
from torch_attn_tiers.tier import tiers_of

pytest.importorskip("triton")

CPU = torch.device("cpu")
H200 = DeviceFacts.of("sm_90")._replace(name="NVIDIA H200")
#: Times of a tier at full, uniform and short lengths.
Times = dict[str, tuple[float, float, float]]

#: Of a dtype that no kernel of ours takes, by the interpreter neither.
POINTS = [
    DecodePoint(1, 7, 2, 16, 16, dtype=torch.float64, cache_dtype=torch.float64),
    DecodePoint(3, 7, 2, 16, 16, dtype=torch.float64, cache_dtype=torch.float64),
    DecodePoint(1, 8, 1, 16, 8, dtype=torch.float64, cache_dtype=torch.float64),
]


# --------------------------------------------------------------------------------------- the grid


def _class(point: DecodePoint) -> ranking.ProblemClass:
    tensors, scalars = point.call()
    return ranking.class_of(explain("decode", *tensors, device=H200, **scalars).problem)


def _is_measured(table: ranking._Table, one: ranking.ProblemClass) -> bool:
    return table.order(one.kind, one.sizes, ()).source.startswith("measured")


def test_grid_contains_none_of_the_benchs_rows() -> None:
    rows = {(c.batch, c.q_heads, c.kv_heads, c.head_dim, c.capacity) for c in CASES.values()}
    assert not rows & {(p.B, p.Hkv * p.G, p.Hkv, p.D, p.T) for p in grid()}
    by_bytes = {(c.group, c.head_dim, c.batch * c.kv_heads, c.capacity) for c in CASES.values()}
    assert not by_bytes & {(p.G, p.D, p.B * p.Hkv, p.T) for p in grid()}


def test_grid_has_each_class_once_and_no_point_outside_its_class() -> None:
    points = grid()
    classes = [_class(point) for point in points]
    assert len(set(classes)) == len(points)
    for point, found in zip(points, classes):
        assert found.sizes == (point.rows, point.octave)
        assert found == ranking.ProblemClass.parse("decode", str(found))


def test_grid_has_a_class_near_every_row_of_the_bench(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ranking.section({_class(p): ["flash"] for p in grid()}, {"versions": {}})
    table = ranking._Table(tmp_path / "nvidia_h200.json", "decode", part)
    for case in CASES.values():
        shapes = [(case.q_heads, 1), *((case.kv_heads, case.capacity),) * 2]
        tensors = [
            torch.empty(case.batch, *shape, case.head_dim, dtype=torch.bfloat16, device="meta")
            for shape in shapes
        ]
        problem = explain("decode", *tensors, device=H200).problem
        assert _is_measured(table, ranking.class_of(problem)), case.name


def test_grid_has_kinds_for_every_group_head_size_and_windows() -> None:
    kinds = {(p.G, p.D, p.Dv, p.window >= 0) for p in grid()}
    for G, D in itertools.product((1, 2, 4, 8, 16), (64, 128, 256)):
        assert (G, D, D, False) in kinds
    assert (1, 192, 128, False) in kinds
    assert any(has_window for *_, has_window in kinds)


def test_grid_begins_with_sizes_near_all_others_of_every_group_and_head_size(
    tmp_path: pathlib.Path,
) -> None:
    kinds = set(itertools.product((1, 2, 4, 8, 16), (64, 128, 256)))
    first = grid()[:88]
    assert {(p.G, p.D) for p in first} == kinds and (first[0].G, first[0].D) == (4, 128)
    part = ranking.section({_class(p): ["flash"] for p in first}, {"versions": {}})
    table = ranking._Table(tmp_path / "nvidia_h200.json", "decode", part)
    for point in grid():
        is_first_kind = point.D == point.Dv and point.window < 0 and not point.is_float8
        if is_first_kind and 2 <= point.rows <= 8 and point.octave < 17:
            assert _is_measured(table, _class(point)), point


def test_grid_has_a_few_classes_of_float8_caches_that_only_some_devices_can_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    float8 = [point for point in grid() if point.is_float8]
    assert 0 < len(float8) <= 30 and grid().index(float8[0]) > 250
    assert {str(_class(p)).split(" G=")[0] for p in float8} == {
        "query=bfloat16 cache=float8_e4m3fn"
    }
    fake_libraries.install_xqa(monkeypatch)
    for arch, takers in (("sm_90", ("flash",)), ("sm_100", ("xqa", "flash"))):
        facts = DeviceFacts.of(arch)
        assert {point.takers(facts) for point in float8} == {takers}
    fake_libraries.forget()


def test_points_take_no_more_memory_than_two_sets_of_two_gib() -> None:
    assert max(point.cache_bytes for point in grid()) <= 1 << 31


def test_capacities_are_multiples_of_128_near_a_power_of_two_but_not_on_it() -> None:
    capacities = {point.octave: point.T for point in grid()}
    assert capacities[7] == 128 and capacities[8] == 256
    for octave, T in capacities.items():
        assert T % 128 == 0 and ranking._octave(T) == octave
        assert octave < 9 or T & (T - 1)


def test_lengths_are_full_evenly_spread_and_short() -> None:
    point = DecodePoint(7, 12, 4, 128, 128)
    T = point.T
    assert point.lengths("full") == [T] * 16 and point.lengths("short") == [T // 32] * 16
    spread = point.lengths("uniform")
    assert spread == point.lengths("uniform") and spread != sorted(spread)
    assert T // 16 <= min(spread) < T // 8 and T - T // 16 < max(spread) <= T
    steps = [b - a for a, b in itertools.pairwise(sorted(spread))]
    assert max(steps) - min(steps) <= 1
    assert DecodePoint(1, 12, 4, 128, 128).lengths("uniform") == [T // 16 + (T - T // 16) // 2]


# ------------------------------------------------------------------------------------------ inputs


def test_memory_is_cut_into_aligned_pieces_and_filled_once() -> None:
    memory = Memory(CPU)
    a, b = memory.cut(torch.float16, [(3, 5), (7,)])
    assert a.shape == (3, 5) and a.is_contiguous() and b.data_ptr() % 64 == 0
    assert a.data_ptr() + a.numel() * 2 <= b.data_ptr()
    again, _ = memory.cut(torch.float16, [(3, 5), (7,)])
    assert again.data_ptr() == a.data_ptr()
    (large,) = memory.cut(torch.float16, [(4096, 8)])
    assert 0.9 < large.float().std() < 1.1


def test_inputs_rotate_over_caches_that_leave_the_l2_at_short_lengths() -> None:
    memory = Memory(CPU)
    point = DecodePoint(3, 10, 4, 64, 64)
    caches = point.cache_bytes
    assert caches > 1 << 20
    inputs = point.inputs(memory, l2_bytes=caches // 32)
    assert inputs.sets == 5 and len(inputs.calls("flash")) == 5
    assert point.inputs(memory, l2_bytes=1 << 40).sets == 64
    assert DecodePoint(1, 7, 4, 64, 64).inputs(memory, l2_bytes=1 << 40).sets == 8


def test_caches_have_a_dtype_of_their_own() -> None:
    point = DecodePoint(3, 10, 4, 64, 64, cache_dtype=torch.float8_e4m3fn)
    query, key, value, _, mask, sinks, k_scale, v_scale = point.call()[0]
    assert mask is sinks is None and k_scale is not None and v_scale is not None
    assert query is not None and query.dtype is torch.bfloat16
    assert key is not None and value is not None
    assert key.dtype is value.dtype is torch.float8_e4m3fn
    assert point.cache_bytes == key.numel() + value.numel()
    (call, *_) = point.inputs(Memory(CPU), 1).calls("flash")
    assert [t.dtype for t in call.args[:3]] == [query.dtype, key.dtype, key.dtype]  # type: ignore


def test_sets_are_as_many_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    point = DecodePoint(3, 10, 4, 64, 64)
    monkeypatch.setattr(Memory, "limit", 3 * point.cache_bytes)
    assert point.inputs(Memory(CPU), l2_bytes=1 << 40).sets == 3
    monkeypatch.setattr(Memory, "limit", point.cache_bytes // 2)
    assert point.inputs(Memory(CPU), l2_bytes=1 << 40).sets == 1


def test_calls_force_the_tier_over_each_set_and_see_lengths_that_change() -> None:
    point = DecodePoint(4, 7, 2, 16, 8, 20, torch.float32, torch.float32)
    inputs = point.inputs(Memory(CPU), 1)
    calls = inputs.calls("unfused")
    results = []
    for name in point.length_names:
        inputs.set_lengths(name)
        with torch_attn_tiers.record_dispatch() as records:
            out = calls[-1]()
        assert records[0].tier == "unfused" and records[0].problem.left_window == 20
        assert inputs.error(out) < 1e-6
        results.append(out)
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(calls[0](), calls[1]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_results_are_checked_over_some_rows_and_heads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows and heads among them; what is not a number is found anywhere."""
    point = DecodePoint(5, 7, 2, 16, 8, dtype=torch.float16, cache_dtype=dtype)
    assert (point.B, point.Hkv) == (4, 8)
    inputs = point.inputs(Memory(CPU), 1)
    out = inputs.calls("unfused")[-1]()
    whole = inputs.error(out)
    monkeypatch.setattr(decode, "_MOST_CHECKED", 3 * point.T * (16 + 8))
    with torch_attn_tiers.record_dispatch() as records:
        assert inputs.error(out) < 2e-3 and whole < 2e-3
    assert records[0].problem.key.shape[:2] == (1, 3)
    wrong = out.clone()
    wrong[0, -1] += 1
    assert inputs.error(wrong) > 0.1
    out[1, 1, 0, 0] = float("nan")
    assert not inputs.error(out) <= 1


def test_samples_are_spread_evenly_with_both_ends() -> None:
    assert spread(8, 3) == [0, 3, 7] and spread(5, 99) == [0, 1, 2, 3, 4]
    assert spread(5, 0) == [0] and spread(1, 4) == [0]


def test_graphs_hold_fewer_calls_where_they_are_long() -> None:
    memory = Memory(CPU)
    small = DecodePoint(1, 7, 4, 64, 64).inputs(memory, 1)
    assert session._calls_per_graph(small) == CALLS_PER_GRAPH
    small.moved_bytes = 1 << 29
    assert session._calls_per_graph(small) == 15
    small.moved_bytes = 1 << 31
    assert session._calls_per_graph(small) == 4


# --------------------------------------------------------------------------------------- the order


def test_worst_ratio_decides() -> None:
    times = {"steady": (12, 12, 12), "spiky": (10, 10, 20), "slow": (30, 30, 30)}
    assert worst_ratios(times) == {"steady": 1.2, "spiky": 20 / 12, "slow": 3.0}
    assert fastest_first(times) == ["steady", "spiky", "slow"]


def test_second_is_the_best_of_those_without_the_first() -> None:
    # Next to a, which is far ahead at short lengths, b looks better than c; without a it does not.
    times = {"a": (10, 10, 1), "b": (14, 14, 5), "c": (10, 10, 6)}
    assert [t for t, _ in sorted(worst_ratios(times).items(), key=lambda x: x[1])] == list("abc")
    assert fastest_first(times) == ["a", "c", "b"]


def test_tie_goes_to_the_smaller_sum() -> None:
    assert fastest_first({"a": (10, 20, 10), "b": (20, 10, 9)}) == ["b", "a"]
    assert fastest_first({}) == []


# ------------------------------------------------------------------------------------------- a run


class Script(Clock):
    """Runs the calls, and reports the times of the tier that they force."""

    name = "script"
    l2_bytes = 0

    def __init__(self, times: Callable[[str], Any]) -> None:
        self.times = times
        self.settled = 0

    def copy_rate(self) -> float:
        raise NotImplementedError

    def host_us(self, call: Call, context: Any = contextlib.nullcontext) -> float:
        raise NotImplementedError

    def record(
        self,
        calls: Sequence[Call],
        context: Any = contextlib.nullcontext,
        calls_per_graph: int = CALLS_PER_GRAPH,
    ) -> Recording:
        return ScriptedRecording(self, calls)


class ScriptedRecording(Recording):
    def __init__(self, clock: Script, calls: Sequence[Call]) -> None:
        self.clock, self._calls, self.calls = clock, calls, len(calls)
        self.tier = calls[0].keywords["tier"]  # type: ignore[attr-defined]
        self._at = -1
        self.run()

    def run(self) -> None:
        out = self._calls[-1]()
        if hasattr(self, "output"):
            outs = out if isinstance(out, tuple) else (out,)
            kept = self.output if isinstance(out, tuple) else (self.output,)
            for old, new in zip(kept, outs):
                old.copy_(new)  # a graph writes where it wrote before
        else:
            self.output = out

    def settle(self) -> None:
        self._at += 1
        self.clock.settled += 1

    def measure(self) -> float:
        return self.clock.times(self.tier)[self._at]


class Right(Invented):
    """A tier that computes what it should, times a factor."""

    factor = 1.0

    def _build(self, problem: Any) -> Any:
        super()._build(problem)
        (unfused,) = [t for t in tiers_of("decode") if t.name == "unfused"]
        plan = unfused.build(problem)
        return lambda *tensors: plan(*tensors) * self.factor


@pytest.fixture
def tiers() -> Iterator[dict[str, Right]]:
    invented = {name: Right(name) for name in "abc"}
    handles = [register_tier(one.tier, before="flash") for one in invented.values()]
    yield invented
    for handle in handles:
        handle.remove()


@pytest.fixture(autouse=True)
def folder(tables: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Tables are written and read here."""
    monkeypatch.setattr(environment, "commit", lambda: "abc123")
    monkeypatch.setenv("MAX_JOBS", "2")  # as `build_ahead` does, for good
    return tables


TIMES: Times = {"a": (12.0, 12.0, 12.0), "b": (10.0, 10.0, 20.0), "c": (30.0, 30.0, 30.0)}


def _session(folder: pathlib.Path, clock: Clock | None = None, **options: Any) -> Session:
    return Session(
        "decode",
        CPU,
        clock or Script(TIMES.__getitem__),
        folder / "result.json",
        folder / "cpu.json",
        **options,
    )


def test_run_writes_repeats_and_the_table_that_calls_then_follow(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    clock = Script(TIMES.__getitem__)
    result = _session(folder, clock, repeats=2).run(POINTS)
    assert result == json.loads((folder / "result.json").read_text())
    assert result["complete"] and result["commit"] == "abc123" and result["op"] == "decode"
    assert result["table_versions"] == ranking.versions("decode") and "python" in result["versions"]
    row = result["rows"][0]
    assert row["class"] == (
        "query=float64 cache=float64 G=2 D=64 Dv=64 window=no Sq=1 rows=2 T=128"
    )
    assert row["order"] == ["a", "b", "c"]
    assert row["tiers"][1] == {
        "tier": "b",
        "us": {"full": [10.0, 10.0], "uniform": [10.0, 10.0], "short": [20.0, 20.0]},
        "worst": 1.6667,
    }
    assert clock.settled == len(POINTS) * 3 * 3

    table = json.loads((folder / "cpu.json").read_text())["ops"]["decode"]
    assert table["versions"] == ranking.versions("decode") and table["commit"] == "abc123"
    ranking.forget()
    tensors, scalars = POINTS[0].call()
    explanation = explain("decode", *tensors, device="cpu", **scalars)
    assert explanation.order.startswith("measured, cpu.json: ")
    assert [v.name for v in explanation.verdicts if v.name in "abc"] == ["a", "b", "c"]


def test_slow_first_of_the_cascade_is_no_longer_first(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    times = {"a": (30.0,) * 3, "b": (20.0,) * 3, "c": (10.0,) * 3}
    _session(folder, Script(times.__getitem__)).run(POINTS[:1])
    ranking.forget()
    tensors, scalars = POINTS[0].call()
    assert explain("decode", *tensors, device="cpu", **scalars).chosen == "c"


def test_only_tiers_that_take_the_point_are_measured(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    tiers["b"].reason = "no"
    (row,) = _session(folder).run(POINTS[:1])["rows"]
    assert [tier["tier"] for tier in row["tiers"]] == ["a", "c"]
    tiers["c"].reason = "no"
    fresh = Session("decode", CPU, Script(TIMES.__getitem__), folder / "x", folder / "y")
    assert fresh.run(POINTS[:1])["rows"] == []  # nothing to compare
    assert not (folder / "x").exists() and not (folder / "y").exists()


def test_wrong_tier_comes_last_and_is_a_failure(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    tiers["a"].factor = 1.02
    one = _session(folder)
    (row,) = one.run(POINTS[:1])["rows"]
    assert row["order"] == ["b", "c", "a"]
    (failure,) = one.failures()
    assert failure.startswith("a on query=float64 ") and "relative error 0.02" in failure


def test_tier_that_fails_comes_last_and_is_a_failure(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    tiers["a"].failure = RuntimeError("no such instruction")
    one = _session(folder)
    (row,) = one.run(POINTS[:1])["rows"]
    assert row["order"] == ["b", "c", "a"] and "no such instruction" in one.failures()[0]


def test_run_in_which_every_tier_fails_stops_and_keeps_what_there_was(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    one = _session(folder)
    first = one.run(POINTS[:1])["rows"]
    for tier in tiers.values():
        tier.failure = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="every tier failed: a on .*: the device is lost"):
        _session(folder).run(POINTS)
    assert json.loads((folder / "result.json").read_text())["rows"] == first


def test_run_goes_on_where_an_earlier_one_stopped(
    folder: pathlib.Path, tiers: dict[str, Right], capsys: pytest.CaptureFixture[str]
) -> None:
    first = _session(folder, budget_s=0.0).run(POINTS)
    assert first["rows"] == [] and "out of time: 3 classes are left" in capsys.readouterr().err
    _session(folder).run(POINTS[:2])
    clock = Script(TIMES.__getitem__)
    result = _session(folder, clock).run(POINTS)
    assert len(result["rows"]) == 3 and clock.settled == 9
    assert "1 classes to measure, 2 are in" in capsys.readouterr().err


def test_budget_ends_within_a_kind(
    folder: pathlib.Path, tiers: dict[str, Right], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(Session, "seconds", property(lambda self: next(seconds)))
    result = _session(folder, budget_s=1).run(POINTS)
    assert len(result["rows"]) == 1 and not result["complete"]
    assert len(json.loads((folder / "cpu.json").read_text())["ops"]["decode"]["orders"]) == 1


@pytest.mark.parametrize("changed", ["commit", "versions"])
def test_result_of_another_commit_or_of_other_versions_is_measured_anew(
    changed: str, folder: pathlib.Path, tiers: dict[str, Right], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _session(folder).run(POINTS[:1])
    monkeypatch.setattr(environment, changed, lambda: {"commit": "def456"}.get(changed, {}))
    clock = Script(TIMES.__getitem__)
    _session(folder, clock).run(POINTS[:1])
    assert clock.settled == 9
    assert f"is of another {changed}: measured anew" in capsys.readouterr().err


def test_failures_are_measured_again(folder: pathlib.Path, tiers: dict[str, Right]) -> None:
    tiers["a"].factor = 2.0
    _session(folder).run(POINTS[:2])
    tiers["a"].factor = 1.0
    one = _session(folder)
    assert len(one.run(POINTS[:2])["rows"]) == 2 and not one.failures()


def test_table_keeps_the_orders_of_other_operators(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    other = {"versions": {}, "orders": {}}
    (folder / "cpu.json").write_text(json.dumps({"device": "x", "ops": {"other": other}}))
    _session(folder).run(POINTS[:1])
    ops = json.loads((folder / "cpu.json").read_text())["ops"]
    assert ops["other"] == other and ops["decode"]["orders"]


def test_part_of_a_run_leaves_what_else_the_table_orders(
    folder: pathlib.Path, tiers: dict[str, Right], monkeypatch: pytest.MonkeyPatch
) -> None:
    def table() -> dict[str, Any]:
        part: dict[str, Any] = json.loads((folder / "cpu.json").read_text())["ops"]["decode"]
        return part

    def orders() -> list[str]:
        return [names for sizes in table()["orders"].values() for names in sizes.values()]

    _session(folder).run(POINTS)
    assert orders() == ["a b c"] * 3
    (folder / "result.json").unlink()
    monkeypatch.setattr(environment, "commit", lambda: "def456")

    def run_in_part(clock: Clock | None = None) -> None:
        is_over = itertools.chain((False, False), itertools.repeat(True))  # after one class
        monkeypatch.setattr(Session, "_is_over", lambda self: next(is_over))
        assert not _session(folder, clock).run(POINTS)["complete"]

    times = {"a": (30.0,) * 3, "b": (20.0,) * 3, "c": (10.0,) * 3}
    run_in_part(Script(times.__getitem__))
    assert sorted(orders()) == ["a b c", "a b c", "c b a"]
    assert table()["commit"] == "def456" and table()["before"]["commit"] == "abc123"

    written = json.loads((folder / "cpu.json").read_text())
    written["ops"]["decode"]["versions"] = {"torch": "0.0"}
    (folder / "cpu.json").write_text(json.dumps(written))
    (folder / "result.json").unlink()
    run_in_part()
    assert orders() == ["a b c"] and "before" not in table()


def test_interrupted_run_leaves_what_it_has(
    folder: pathlib.Path, tiers: dict[str, Right], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    real = Session._measure

    def interrupted(self: Session, one: Any) -> dict[str, Any]:
        if measured:
            raise KeyboardInterrupt
        measured.append(one)
        return real(self, one)

    monkeypatch.setattr(Session, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _session(folder).run(POINTS)  # the second point is of the first one's kind
    result = json.loads((folder / "result.json").read_text())
    assert len(result["rows"]) == 1 and not result["complete"]


def test_files_that_cannot_be_written_are_said_before_anything_is_measured(
    folder: pathlib.Path, tiers: dict[str, Right]
) -> None:
    (folder / "file").write_text("")
    clock = Script(TIMES.__getitem__)
    for option, files in (
        ("--out", (folder / "file" / "x", folder / "y")),
        ("--table", (folder / "x", folder / "file" / "y")),
    ):
        with pytest.raises(SystemExit, match=f"{option} .*: cannot be written"):
            Session("decode", CPU, clock, *files)
    (folder / "cpu.json").write_text('{"rows": []}')
    with pytest.raises(SystemExit, match="--table .*: it is no table of tiers"):
        _session(folder)


def test_wall_clock_measures_too(folder: pathlib.Path, tiers: dict[str, Right]) -> None:
    (row,) = _session(folder, WallClock(), repeats=1).run(POINTS[:1])["rows"]
    assert all(us[0] > 0 for tier in row["tiers"] for us in tier["us"].values())
    assert sorted(row["order"]) == ["a", "b", "c"]


# -------------------------------------------------------------------------------------- building


def test_builds_are_by_tier_and_kind_and_not_of_what_a_process_keeps(
    tiers: dict[str, Right], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _session(folder)._work(POINTS)
    builds = session._builds(work, CPU)
    assert [(build.tier, len(build.points)) for build in builds] == [
        ("a", 2), ("b", 2), ("c", 2), ("a", 1), ("b", 1), ("c", 1)
    ]  # fmt: skip

    monkeypatch.setattr(building.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    tiers["c"].failure = RuntimeError("no such instruction")
    failures = building.build_ahead(builds, [], workers=2)
    assert [tier.builds for tier in tiers.values()] == [3, 3, 3]
    assert len(failures) == 2 and all("no such instruction" in failure for failure in failures)


def test_interrupted_builds_are_not_waited_for(
    tiers: dict[str, Right], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def prepare_all(build: Any) -> None:
        begun.set()
        may_end.wait(60)

    def interrupted(*args: Any) -> Any:
        begun.wait(60)
        may_end.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(building.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(building, "prepare_all", prepare_all)
    monkeypatch.setattr(building, "prepare", interrupted)
    monkeypatch.setattr(building, "_WITHIN_A_PROCESS", {("decode", "a")})
    builds = session._builds(_session(folder)._work(POINTS), CPU)
    with pytest.raises(KeyboardInterrupt):
        building.build_ahead(builds, builds, workers=1)


class InThisProcess(building.concurrent.futures.ThreadPoolExecutor):
    def __init__(self, workers: int, mp_context: Any) -> None:
        super().__init__(workers)


def test_slow_builds_are_the_first_that_other_processes_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(building.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(building, "prepare_all", lambda build: started.append(build.tier))
    builds = [Build(tier, POINTS, CPU) for tier in ("flash", "xqa", "unfused", "xqa")]
    assert building.build_ahead(builds, [], workers=1) == []
    assert started == ["xqa", "xqa", "flash", "unfused"]


def test_plans_that_only_this_process_can_use_are_made_while_others_compile(
    tiers: dict[str, Right], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(building, "_WITHIN_A_PROCESS", {("decode", "a")})
    made = threading.Event()

    def slow(build: Build) -> str | None:
        assert build.tier == "b" and made.wait(60)
        return None

    def prepare(point: DecodePoint, tier: str, device: torch.device) -> None:
        order.append((tier, point))
        if len(order) == 2:
            made.set()
            time.sleep(0.2)  # until the others see it

    order: list[tuple[str, DecodePoint]] = []
    monkeypatch.setattr(building, "prepare_all", slow)
    monkeypatch.setattr(building, "prepare", prepare)
    plans = [Build(tier, [point], CPU) for point in POINTS for tier in "ab"]
    builds = [Build("a", POINTS, CPU), Build("b", POINTS, CPU)]
    assert building.build_ahead(builds, plans, workers=1) == []
    assert order == [("a", POINTS[0]), ("a", POINTS[1])]


def test_result_says_what_the_time_went_to(folder: pathlib.Path, tiers: dict[str, Right]) -> None:
    result = _session(folder).run(POINTS[:1])
    assert result["spent"].keys() == {"inputs", "plans", "captures", "times", "checks"}
    assert sum(result["spent"].values()) <= result["seconds"] + 0.5


# -------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "options, words",
    [
        (["--repeats", "0"], "--repeats 0: it must be at least 1"),
        (["--budget-minutes", "0"], "--budget-minutes 0: it must be more than 0"),
        (["--classes", "G=7"], "--classes 'G=7': no class has these words; one is 'query=bfloat16"),
    ],
)
def test_command_refuses_what_it_cannot_do(options: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["tune", "--device", "cpu", *options])


def test_command_says_that_there_is_nothing_to_compare(
    capsys: pytest.CaptureFixture[str], folder: pathlib.Path
) -> None:
    out = ["--out", str(folder / "out.json"), "--table", str(folder / "table.json")]
    assert main(["tune", "--device", "cpu", "--classes", "rows=2 T=128 G=4 D=128", *out]) == 1
    assert "nothing to compare" in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_command_measures_the_classes_that_have_the_words(
    capsys: pytest.CaptureFixture[str],
    folder: pathlib.Path,
    tiers: dict[str, Right],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch_attn_tiers.cli import tune

    monkeypatch.setitem(tune.GRIDS, "decode", lambda: POINTS)
    monkeypatch.setattr(tune, "clock_for", lambda device: Script(TIMES.__getitem__))
    out = folder / "out.json"
    command = ["tune", "--device", "cpu", "--classes", "G=1,rows=8 G=2", "--out", str(out)]
    assert main(command) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["class"].split(" Sq=1 ")[1] for row in rows] == ["rows=8 T=128", "rows=2 T=256"]
    assert (folder / "cpu.json").exists()  # where the package reads it
    assert "2 classes in" in capsys.readouterr().out
    tiers["a"].factor = 2.0
    out.unlink()
    assert main(command) == 1
    assert "FAILED a on " in capsys.readouterr().out


# ------------------------------------------------------------------------------ what is committed

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_tune_*.json")), ids=lambda p: p.stem)
def test_committed_table_is_that_of_the_committed_result(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    result = json.loads(path.read_text())
    device = path.stem.partition("_tune_")[2]
    committed = pathlib.Path(ranking.__file__).parent / "tables" / f"{device}.json"
    for row in result["rows"]:
        assert session.order_of_row(row) == row["order"], row["class"]
    session.write_table(tmp_path / "table.json", result)
    written = json.loads((tmp_path / "table.json").read_text())["ops"][result["op"]]
    assert json.loads(committed.read_text())["ops"][result["op"]] == written


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "table.json"
    session._write_whole(file, "first")
    monkeypatch.setattr(session.os, "replace", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        session._write_whole(file, "second")
    assert file.read_text() == "first"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
