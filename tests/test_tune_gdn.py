"""`tune --op gdn_chunk_prefill` without a GPU: grid, inputs, and runs over invented tiers."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests import fake_gdn_library, fake_libraries
from tests.fake_gdn_library import FakeGdn
from tests.test_tier_flashinfer import _fresh, module, runs  # noqa: F401
from tests.test_tune import CPU, Script, folder  # noqa: F401
from torch_attn_tiers import Tier, explain, options, ranking, register_tier
from torch_attn_tiers.cli import main, tune
from torch_attn_tiers.cli.bench.gdn_cases import CASES
from torch_attn_tiers.cli.tune import gdn
from torch_attn_tiers.cli.tune.gdn import GdnPoint, grid
from torch_attn_tiers.cli.tune.points import Memory
from torch_attn_tiers.cli.tune.session import Session
from torch_attn_tiers.tier import tiers_of

pytest.importorskip("triton")

OP = "gdn_chunk_prefill"
H200 = DeviceFacts.of("sm_90")._replace(name="NVIDIA H200", multiprocessors=132)
POINTS = [
    GdnPoint(1, 6, head_size=8),
    GdnPoint(6, 6, head_size=8),
    GdnPoint(6, 6, "compact", head_size=8),
]


# --------------------------------------------------------------------------------------- the grid


def _class(point: GdnPoint) -> ranking.ProblemClass:
    tensors, scalars = point.call()
    return ranking.class_of(explain(point.overload, *tensors, device=H200, **scalars).problem)


def test_grid_is_small_and_has_each_class_once() -> None:
    points = grid()
    assert 30 <= len(points) <= 40
    classes = [_class(point) for point in points]
    assert len(set(classes)) == len(points)
    for point, found in zip(points, classes):
        assert found.sizes == (point.rows, point.octave)
        assert found == ranking.ProblemClass.parse(OP, str(found))


def test_grid_contains_none_of_the_benchs_rows() -> None:
    rows = {(case.v_heads, case.sequences, case.tokens) for case in CASES.values()}
    assert not rows & {(point.Hv, point.N, point.T) for point in grid()}


@pytest.mark.parametrize("h", ["no", "compact"])
@pytest.mark.parametrize("batch_invariant", ["no", "yes"])
def test_grid_has_a_class_near_every_number_and_length_of_prompts(
    h: str, batch_invariant: str, tmp_path: pathlib.Path
) -> None:
    part = ranking.section({_class(p): ["triton"] for p in grid()}, {"versions": {}})
    table = ranking._Table(tmp_path / "nvidia_h200.json", OP, part)
    kind = ("bfloat16", 128, 128, h, batch_invariant)
    for sizes in itertools.product(range(14), range(20)):
        order = table.order(kind, sizes, ())
        assert order.source.startswith("measured"), sizes


def test_first_classes_serve_all_prompts_without_checkpoints(tmp_path: pathlib.Path) -> None:
    part = ranking.section({_class(p): ["triton"] for p in grid()[:8]}, {"versions": {}})
    table = ranking._Table(tmp_path / "nvidia_h200.json", OP, part)
    for point in grid():
        if point.h_layout is None and not point.batch_invariant:
            one = _class(point)
            assert table.order(one.kind, one.sizes, ()).source.startswith("measured")


def test_both_kernel_tiers_take_every_point_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gdn_library.install_gdn(monkeypatch)
    assert {point.takers(H200) for point in grid()} == {("flashinfer", "triton")}  # type: ignore
    fake_libraries.forget()


def test_lengths_are_alike_uneven_and_half() -> None:
    point = GdnPoint(9, 11)
    L, N = point.L, point.N
    assert (L, N, point.Hv, point.Hq, point.T) == (1792, 16, 32, 16, 16 * 1792)
    assert point.lengths("even") == [L] * N and point.lengths("half") == [L // 2] * N
    uneven = point.lengths("uneven")
    assert sum(uneven) == point.T and uneven == point.lengths("uneven") != sorted(uneven)
    assert L // 16 <= min(uneven) < L / 5 and 1.8 * L < max(uneven) <= 2 * L
    steps = [b - a for a, b in itertools.pairwise(sorted(uneven))]
    assert max(steps) - min(steps) <= 1
    assert point.length_names == ("even", "uneven", "half")
    assert GdnPoint(5, 11).length_names == ("even", "half")  # of one sequence there is no other


@pytest.mark.parametrize("N, rows", [(1, 0), (1, 3), (1, 5), (4, 7)])
def test_heads_are_shared_out_before_sequences(N: int, rows: int) -> None:
    point = GdnPoint(rows, 8)
    assert point.N == N and point.N * point.Hv == 1 << rows and point.Hv % point.Hq == 0


# ------------------------------------------------------------------------------------------ inputs


def test_inputs_rotate_over_prompts_that_leave_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    point = GdnPoint(2, 7, head_size=16)
    read = 2 * point.T * 16 * (2 * point.Hq + point.Hv) + 4 * (2 * point.T * 4 + 4 * 16 * 16)
    inputs = point.inputs(Memory(CPU), l2_bytes=read)
    assert inputs.sets == 5 == len(inputs.calls("triton"))
    assert inputs.moved_bytes == read + 2 * point.T * 16 * point.Hv + 4 * 4 * 16 * 16
    assert point.inputs(Memory(CPU), l2_bytes=1 << 40).sets == 24
    assert point.inputs(Memory(CPU), l2_bytes=0).sets == 2
    monkeypatch.setattr(Memory, "limit", read // 2)
    assert point.inputs(Memory(CPU), l2_bytes=1 << 40).sets == 1


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_calls_force_the_tier_over_each_set_and_see_bounds_that_change(point: GdnPoint) -> None:
    inputs = point.inputs(Memory(CPU), 1)
    calls = inputs.calls("reference")
    outs = []
    for name in point.length_names:
        inputs.set_lengths(name)
        with torch_attn_tiers.record_dispatch() as records:
            results = calls[-1]()
        (record,) = records
        problem = record.problem
        assert record.tier == "reference" and problem.call == point.overload
        assert problem.h_layout == point.h_layout and problem.qk_l2norm
        assert problem.initial_state.stride[-1] == 1  # V-first, as it lies in memory
        assert inputs.error(results) < 5e-3
        outs.append(results[0])
    assert not torch.equal(outs[0], outs[-1])
    assert not torch.equal(calls[0]()[0], calls[1]()[0])


@pytest.mark.parametrize("h_layout", [None, "compact"])
def test_library_takes_the_calls(
    h_layout: str | None,
    runs: FakeGdn,  # noqa: F811
) -> None:
    point = GdnPoint(3, 7, h_layout, dtype=torch.float16)
    inputs = point.inputs(Memory(CPU), 1)
    for name in point.length_names:
        inputs.set_lengths(name)
        assert inputs.error(inputs.calls("flashinfer")[-1]()) < point.tolerance
    call = runs.calls[-1]
    assert call["initial_state"].data_ptr() == inputs.calls("")[-1].args[5].data_ptr()  # type: ignore


def test_results_are_checked_over_some_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    point = GdnPoint(7, 6, head_size=8)
    inputs = point.inputs(Memory(CPU), 1)
    inputs.set_lengths("uneven")
    results = inputs.calls("reference")[-1]()
    monkeypatch.setattr(gdn, "_MOST_CHECKED", 2 * point.L)
    with torch_attn_tiers.record_dispatch() as records:
        assert inputs.error(results) < 5e-3
    assert records[0].problem.N == 2 < point.N

    def but(i: int, *place: Any, value: float) -> float:
        changed = [result.clone() for result in results]
        changed[i][place] = value
        return inputs.error(changed)

    assert but(0, 0, -1, value=3.0) > 0.01 < but(1, -1, 0, value=3.0)
    assert math.isnan(but(0, 0, point.T // 2, value=math.nan))
    assert math.isnan(but(1, 1, 0, value=math.nan))
    inputs.set_lengths("half")
    results = inputs.calls("reference")[-1]()
    assert inputs.error(results) < 5e-3
    assert but(0, 0, -1, value=1e-3) == math.inf  # a token of no sequence


# ------------------------------------------------------------------------------------------- a run


class Right:
    """A tier that computes what it should, times a factor."""

    def __init__(self, name: str) -> None:
        self.factor = 1.0
        self.state_factor = 1.0
        self.tier = Tier(op=OP, name=name, predicates=(), build=self._build)

    def _build(self, problem: Any) -> Any:
        (reference,) = [tier for tier in tiers_of(OP) if tier.name == "reference"]
        plan = reference.build(problem)

        def run(*tensors: Any) -> None:
            plan(*tensors)
            tensors[7].mul_(self.factor)
            tensors[8].mul_(self.state_factor)

        return run


@pytest.fixture
def tiers() -> Iterator[dict[str, Right]]:
    invented = {name: Right(name) for name in "ab"}
    handles = [register_tier(one.tier, before="triton") for one in invented.values()]
    with options(disable=f"{OP}:triton"):  # the interpreter would take minutes
        yield invented
    for handle in handles:
        handle.remove()


#: At even and half, or even, uneven and half lengths.
TIMES = {"a": (20.0, 20.0, 20.0), "b": (10.0, 10.0, 15.0)}


def _session(at: pathlib.Path) -> Session:
    return Session(
        OP, CPU, Script(TIMES.__getitem__), at / "result.json", at / "cpu.json", repeats=2
    )


def test_run_writes_repeats_and_the_table_that_calls_then_follow(
    folder: pathlib.Path,  # noqa: F811
    tiers: dict[str, Right],
) -> None:
    other = {"versions": {}, "orders": {}}
    (folder / "cpu.json").write_text(json.dumps({"device": "x", "ops": {"decode": other}}))
    session = _session(folder)
    result = session.run(POINTS)
    assert not session.failures() and result["complete"] and result["op"] == OP
    assert [row["class"] for row in result["rows"]] == [
        "dtype=bfloat16 K=8 V=8 h=no batch_invariant=no rows=2 tokens=64",
        "dtype=bfloat16 K=8 V=8 h=no batch_invariant=no rows=64 tokens=64",
        "dtype=bfloat16 K=8 V=8 h=compact batch_invariant=no rows=64 tokens=64",
    ]
    first, second, _ = result["rows"]
    assert first["tiers"][1]["us"] == {"even": [10.0, 10.0], "half": [10.0, 10.0]}
    assert second["tiers"][1]["us"] == {
        "even": [10.0, 10.0], "uneven": [10.0, 10.0], "half": [15.0, 15.0]
    }  # fmt: skip
    assert all(row["order"] == ["b", "a"] for row in result["rows"])
    ops = json.loads((folder / "cpu.json").read_text())["ops"]
    assert ops["decode"] == other and ops[OP]["versions"] == ranking.versions(OP)
    ranking.forget()
    for point in POINTS:
        tensors, scalars = point.call()
        explanation = explain(point.overload, *tensors, device="cpu", **scalars)
        assert explanation.chosen == "b" and explanation.order.startswith("measured, cpu.json: ")


@pytest.mark.parametrize("wrong", ["factor", "state_factor"])
def test_wrong_tier_comes_last_and_is_a_failure(
    wrong: str,
    folder: pathlib.Path,  # noqa: F811
    tiers: dict[str, Right],
) -> None:
    setattr(tiers["b"], wrong, 1.03)
    session = _session(folder)
    (row,) = session.run(POINTS[2:])["rows"]
    assert row["order"] == ["a", "b"]
    (failure,) = session.failures()
    assert failure.startswith("b on dtype=bfloat16 ") and "relative error 0.03" in failure


def test_command_measures_the_classes_that_have_the_words(
    capsys: pytest.CaptureFixture[str],
    folder: pathlib.Path,  # noqa: F811
    tiers: dict[str, Right],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tune.GRIDS, OP, lambda: POINTS)
    monkeypatch.setattr(tune, "clock_for", lambda device: Script(TIMES.__getitem__))
    out = folder / "out.json"
    command = ["tune", "--op", OP, "--device", "cpu", "--classes", "h=compact", "--out", str(out)]
    assert main(command) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert " h=compact " in row["class"] and "1 classes in" in capsys.readouterr().out


def test_command_says_that_there_is_nothing_to_compare(
    capsys: pytest.CaptureFixture[str],
    folder: pathlib.Path,  # noqa: F811
) -> None:
    assert main(["tune", "--op", OP, "--device", "cpu", "--out", str(folder / "out.json")]) == 1
    assert "nothing to compare" in capsys.readouterr().out
    assert not list(folder.iterdir())
