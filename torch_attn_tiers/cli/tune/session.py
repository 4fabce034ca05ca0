"""One tuning of one operator: what is measured, in which order, and the two files."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import torch_attn_tiers
from csrc_free_ops.facts import device_facts
from torch_attn_tiers import ranking
from torch_attn_tiers.cli import environment
from torch_attn_tiers.cli.bench.clock import CALLS_PER_GRAPH, Clock, Recording
from torch_attn_tiers.cli.bench.running import free, in_words, say
from torch_attn_tiers.cli.tune.building import Build, build_ahead, prepare
from torch_attn_tiers.cli.tune.order import fastest_first, worst_ratios
from torch_attn_tiers.cli.tune.points import Inputs, Memory, Point
from torch_attn_tiers.ranking import ProblemClass

#: Calls in a graph: fewer where they are long. 4 TB/s need only be right to a factor of a few.
_GRAPH_US = 2000.0
_FEWEST_CALLS = 4
_BYTES_PER_US = 4e6

#: Each has a context on the device, and a compiler.
_MOST_WORKERS = 12

#: What has to be equal for a file to be gone on with.
_SAME = ("op", "device", "versions", "table_versions", "commit")


class Work(NamedTuple):
    """A point with its class and the tiers that can be compared on it."""

    point: Point
    problem_class: ProblemClass
    tiers: tuple[str, ...]


class Session:
    """Measures points and writes what it has, batch by batch.

    Args:
        out: the file of all repeats; what it holds already is not measured again.
        table: the table that the package reads, made of what ``out`` holds.
        budget_s: seconds after which no further point is begun.
    """

    def __init__(
        self,
        op: str,
        device: torch.device,
        clock: Clock,
        out: pathlib.Path,
        table: pathlib.Path,
        *,
        repeats: int = 3,
        budget_s: float | None = None,
    ) -> None:
        self.op, self.device, self.clock = op, device, clock
        self.out, self.table = out, table
        self.repeats, self.budget_s = repeats, budget_s
        self.memory = Memory(device)
        self.workers = min(_MOST_WORKERS, os.cpu_count() or 1)
        #: Seconds by what they went to.
        self.spent: dict[str, float] = {}
        self._begin = time.perf_counter()
        self.result: dict[str, Any] = {
            **environment.header("tune", "python -m torch_attn_tiers", sys.argv[1:], device),
            "op": op,
            "table_versions": ranking.versions(op),
            "clock": clock.name,
            "repeats": repeats,
            "complete": False,
            "rows": [],
        }
        if out.exists():
            self.result["rows"] = self._rows_of(_read_json("--out", out))
        # Before anything is measured.
        if table.exists() and not isinstance(_read_json("--table", table).get("ops"), dict):
            raise SystemExit(f"--table {table}: it is no table of tiers; name another")
        for option, path in (("--out", out), ("--table", table)):
            _check_writable(option, path)

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return time.perf_counter() - self._begin

    @environment.arguments_hidden()
    def run(self, points: Sequence[Point]) -> dict[str, Any]:
        """Measures those that are not in the file yet; returns what is then in it."""
        measured = {row["class"] for row in self.result["rows"]}
        work = [one for one in self._work(points) if str(one.problem_class) not in measured]
        there = f", {len(measured)} are in {self.out}" if measured else ""
        say(f"{len(work)} classes to measure{there}")
        if self.device.type == "cuda" and work:
            with self._counted("build ahead"):
                self._build_ahead(work)
        left = len(work)
        try:
            with torch.no_grad():
                for _kind, group in itertools.groupby(work, lambda one: one.problem_class.kind):
                    if self._is_over():
                        break
                    left -= self._batch(list(group))
                    self._write(complete=False)
            free(self.device)
        finally:  # interrupted too: what is measured stays
            if self.result["rows"]:
                self._write(complete=left == 0)
        if self.spent:
            say(f"seconds: {', '.join(f'{name} {s:.1f}' for name, s in self.spent.items())}")
        if left:
            say(f"out of time: {left} classes are left; the same command goes on with them")
        return self.result

    def failures(self) -> list[str]:
        """What went wrong, a line for each tier and class."""
        return [failure for row in self.result["rows"] for failure in _failures(row)]

    def _is_over(self) -> bool:
        return self.budget_s is not None and self.seconds > self.budget_s

    def _work(self, points: Sequence[Point]) -> list[Work]:
        """The points on which at least two tiers can be compared, one for each class."""
        found: dict[ProblemClass, Work] = {}
        for point in points:
            problem_class, tiers = point.problem_class(self.device), point.takers(self.device)
            if len(tiers) > 1:
                found.setdefault(problem_class, Work(point, problem_class, tiers))
        return list(found.values())

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - begin

    def _build_ahead(self, work: Sequence[Work]) -> None:
        plans = [Build(tier, [one.point], self.device) for one in work for tier in one.tiers]
        for failure in build_ahead(_builds(work, self.device), plans, self.workers):
            say(f"not compiled: {failure}")
        say(f"[{self.seconds:4.0f} s] kernels compiled")

    def _batch(self, work: Sequence[Work]) -> int:
        """Measures the classes of one kind, as many as there is time for; returns how many."""
        firsts: collections.Counter[str] = collections.Counter()
        count = 0
        for one in work:
            if self._is_over():
                break
            row = self._measure(one)
            if len(_failures(row)) == len(one.tiers):  # the device is lost, most likely
                self._write(complete=False)
                raise RuntimeError(f"every tier failed: {'; '.join(_failures(row))}")
            self.result["rows"].append(row)
            firsts[row["order"][0]] += 1
            count += 1
        counts = ", ".join(f"{tier} {n}" for tier, n in firsts.most_common())
        kind = work[0].problem_class.kind_in_words()
        say(f"[{self.seconds:4.0f} s] {kind}: {count} classes, first {counts or '-'}")
        return count

    def _measure(self, one: Work) -> dict[str, Any]:
        """Times every tier at every length, in turns, and orders them."""
        point = one.point
        with self._counted("inputs"):
            inputs = point.inputs(self.memory, self.clock.l2_bytes)
        tiers: dict[str, dict[str, Any]] = {name: {"tier": name, "us": {}} for name in one.tiers}
        recordings: dict[str, Recording] = {}
        for name, tier in tiers.items():
            with self._counted("plans"):
                failure = prepare(point, name, self.device)
            try:
                if failure is None:
                    with self._counted("captures"):
                        recordings[name] = self.clock.record(
                            inputs.calls(name), calls_per_graph=_calls_per_graph(inputs)
                        )
            except Exception as error:
                failure = in_words(error)
            if failure is not None:
                tier["failure"] = failure
        for lengths in point.length_names:
            with self._counted("times"):
                inputs.set_lengths(lengths)
                for recording in recordings.values():
                    recording.settle()
                times: dict[str, list[float]] = {name: [] for name in recordings}
                for _ in range(self.repeats):
                    for name, recording in recordings.items():
                        times[name].append(round(recording.measure(), 3))
            for name in recordings:
                tiers[name]["us"][lengths] = times[name]
            with self._counted("checks"):
                _check(recordings, tiers, inputs, point.tolerance, lengths)
        recordings.clear()
        torch_attn_tiers.release_captured_plans()
        row = {
            "class": str(one.problem_class),
            "sets": inputs.sets,
            "bytes": inputs.moved_bytes,
            "tiers": list(tiers.values()),
        }
        row["order"] = order_of_row(row)
        return row

    # -------------------------------------------------------------------------------------- files

    def _rows_of(self, before: dict[str, Any]) -> list[dict[str, Any]]:
        """Rows without a failure of an earlier result, if nothing has changed since."""
        different = [name for name in _SAME if before.get(name) != self.result[name]]
        if different:
            say(f"{self.out} is of another {' and '.join(different)}: measured anew")
            return []
        return [row for row in before["rows"] if not _failures(row)]

    def _write(self, complete: bool) -> None:
        self.result["complete"] = complete
        self.result["seconds"] = round(self.seconds, 1)
        self.result["spent"] = {name: round(s, 1) for name, s in self.spent.items()}
        _write_whole(self.out, _dumped(self.result))
        write_table(self.table, self.result)


def _failures(row: dict[str, Any]) -> list[str]:
    return [
        f"{tier['tier']} on {row['class']}: {tier['failure']}"
        for tier in row["tiers"]
        if "failure" in tier
    ]


def order_of_row(row: dict[str, Any]) -> list[str]:
    """Its tiers, best first by their medians; those that failed or were wrong come last."""
    medians = {
        tier["tier"]: [statistics.median(us) for us in tier["us"].values()]
        for tier in row["tiers"]
        if "failure" not in tier
    }
    for tier in row["tiers"]:
        if tier["tier"] in medians:
            tier["worst"] = round(worst_ratios(medians)[tier["tier"]], 4)
    failed = [tier["tier"] for tier in row["tiers"] if "failure" in tier]
    return fastest_first(medians) + failed


def write_table(path: pathlib.Path, result: dict[str, Any]) -> None:
    """The table of a result: its operator's part is replaced, the others stay.

    Of a part that holds under the same versions the orders stay that a result in part does not
    have.
    """
    table: dict[str, Any] = {"device": result["device"]["name"], "ops": {}}
    if path.exists():
        table["ops"] = json.loads(path.read_text())["ops"]
    op = result["op"]
    orders = {ProblemClass.parse(op, row["class"]): row["order"] for row in result["rows"]}
    about = {name: result[name] for name in ("command", "commit", "date")}
    about["versions"] = result["table_versions"]
    before = table["ops"].get(op)
    if before and not result["complete"] and before["versions"] == about["versions"]:
        kept = ranking.orders_of(op, before)
        if kept.keys() - orders.keys():
            origin = {name: before.get(name) for name in ("commit", "date")}
            is_ours = all(origin[name] == about[name] for name in origin)  # of this very run
            about["before"] = before.get("before") if is_ours else origin
        orders = {**kept, **orders}
    table["ops"][op] = ranking.section(orders, about)
    _write_whole(path, json.dumps(table, indent=1) + "\n")


def _write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file that never is seen in part, not if this is interrupted either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    os.replace(part, path)


def _read_json(option: str, path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(
            f"{option} {path}: it is no JSON ({error}); remove it or name another"
        ) from None


def _check_writable(option: str, path: pathlib.Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SystemExit(f"{option} {path}: cannot be written ({error}); name another") from None


def _dumped(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({**result, "rows": []}, indent=1)
    return head.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n"


def _builds(work: Sequence[Work], device: torch.device) -> list[Build]:
    """What is to be built, by tier and kind."""
    points: dict[tuple[str, Any], list[Point]] = {}
    for one in work:
        for tier in one.tiers:
            points.setdefault((tier, one.problem_class.kind), []).append(one.point)
    return [Build(tier, those, device) for (tier, _), those in points.items()]


def _calls_per_graph(inputs: Inputs) -> int:
    calls = round(_GRAPH_US * _BYTES_PER_US / inputs.moved_bytes)
    return min(CALLS_PER_GRAPH, max(_FEWEST_CALLS, calls))


def _check(
    recordings: dict[str, Recording],
    tiers: dict[str, dict[str, Any]],
    inputs: Inputs,
    tolerance: float,
    lengths: str,
) -> None:
    """Runs what was timed over a poisoned output; a wrong result counts as a failure."""
    for name, recording in recordings.items():
        _poison(recording.output)
        recording.run()
        error = inputs.error(recording.output)
        if not error <= tolerance:
            tiers[name]["failure"] = f"wrong at {lengths} lengths: relative error {error:.2g}"


def _poison(output: Any) -> None:
    """Makes a result NaN, or all tensors of one that can be."""
    for tensor in output if isinstance(output, tuple) else (output,):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def device_table(device: torch.device) -> str:
    """Name of the table of a device, without its folder and ending."""
    return ranking.table_name(device_facts(device))
