"""Options and accounting shared by all tests: which tier ran, which was skipped, and why.

`--require-tiers flash,unfused`  fails the run when one of them did not run, or was skipped in a
                                 case that it is meant to take.
`--results FILE.json`            writes the counts by tier, what failed and whether the run was cut
                                 short, with device, versions, commit and date.
`--hypothesis-profile=more`      looks longer.

A test about a tier takes the parameter `tier`; the counts come from that parameter.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports triton: kernels are then run by its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the oracles of all workers together have no more cores than one

import collections
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # test_properties.py skips itself
    pass
else:
    _quiet: dict[str, Any] = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": list(HealthCheck),
    }
    settings.register_profile("few", max_examples=40, derandomize=True, **_quiet)
    settings.register_profile("more", max_examples=800, **_quiet)
    settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn_tiers")
    group.addoption(
        "--require-tiers",
        default="",
        metavar="NAMES",
        help="comma-separated tiers that must run; a case meant for one of them may not skip it",
    )
    group.addoption(
        "--results",
        default=None,
        metavar="FILE.json",
        help="write passed/failed/skipped by tier and what failed, with device, versions and date",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A row without a key is 0/0 before a select makes it zero; NumPy warns, a GPU does not.
    config.addinivalue_line(
        "filterwarnings",
        "ignore:invalid value encountered:RuntimeWarning:triton.runtime.interpreter",
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Accounts(config), "attn-tiers-accounts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and isinstance(callspec.params.get("tier"), str):
            item.user_properties.append(("tier", callspec.params["tier"]))


def required_tiers(config: pytest.Config) -> frozenset[str]:
    """The tiers named by --require-tiers."""
    names = config.getoption("--require-tiers").split(",")
    return frozenset(name.strip() for name in names if name.strip())


@pytest.fixture(scope="session")
def must_run(pytestconfig: pytest.Config) -> frozenset[str]:
    """The tiers that may not be skipped in a case that is meant for them."""
    return required_tiers(pytestconfig)


@pytest.fixture(autouse=True, scope="session")
def _checked_memory() -> Iterator[None]:
    """An interpreted kernel that touches memory outside of its tensors fails its test.

    The interpreter is also made right in bfloat16, and faster, for what it computes anew and need
    not.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    try:
        from tests.interpreted_memory import check_memory
        from tests.interpreter_bfloat16 import right_bfloat16
        from tests.interpreter_speed import without_repeated_work
    except ImportError:  # no Triton on this platform
        yield
        return
    with check_memory(), without_repeated_work(), right_bfloat16():
        yield


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`decode` has the tiers that need no other package: for tests of the mechanism."""
    from torch_attn_tiers import tier

    ours = [one for one in tier.tiers_of("decode") if one.name not in ("xqa", "cudnn")]
    with monkeypatch.context() as patch:
        patch.setitem(tier._cascades, "decode", ours)
        tier._changed()
        yield
    tier._changed()


@pytest.fixture
def tables(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder of the measured tables, empty: the cascades' orders hold unless a test writes one.

    Without it the order of the tiers is that of the machine, by the table of its device if there is
    one and its versions are those of the table.
    """
    from torch_attn_tiers import dispatch, ranking

    def forget() -> None:
        ranking.forget()
        dispatch._plans.forget_decisions()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "FOLDER", tmp_path)
        forget()
        yield tmp_path
    forget()


@pytest.fixture
def libraries_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers of libraries are named, and take nothing: for tests of texts."""
    from torch_attn_tiers.tiers.decode import cudnn, xqa

    for library in (cudnn.FRONTEND, xqa.FLASHINFER):
        words = f"the package {library.package} is not installed"
        monkeypatch.setattr(library, "_absence", words)
        monkeypatch.setattr(library, "_has_looked", True)


@pytest.fixture(autouse=True)
def _inference_and_seed() -> Iterator[None]:
    """Every test starts from one seed; the operators are inference-only, grad stays as it is."""
    torch.manual_seed(0)
    yield


class _Accounts:
    """Counts outcomes by tier (in the controller under xdist) and reports them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.total: collections.Counter[str] = collections.Counter()
        self.reasons: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.failures: dict[str, str] = {}
        self.reported: set[str] = set()
        self.collected = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.total[report.outcome] += 1
        self.reported.add(report.nodeid)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            self.failures[report.nodeid] = message[:1000]
        tier = dict(report.user_properties).get("tier")
        if tier is None:
            return
        self.counts[str(tier)][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[str(tier)][report.longrepr[2].removeprefix("Skipped: ")] += 1

    def missing(self) -> list[str]:
        ran = {t for t, c in self.counts.items() if c["passed"] + c["failed"]}
        return sorted(required_tiers(self.config) - ran)

    @pytest.hookimpl(tryfirst=True)  # to end workers takes longer than an impatient caller waits
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.collected = session.testscollected
        if self.missing() and not self.config.option.collectonly and exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self.config.getoption("--results")
        if path and not self.config.option.collectonly:
            target = pathlib.Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(self.results(), indent=2) + "\n")

    def results(self) -> dict[str, Any]:
        from torch_attn_tiers.cli import environment

        def tally(counter: collections.Counter[str]) -> dict[str, int]:
            return {outcome: counter[outcome] for outcome in ("passed", "failed", "skipped")}

        return {
            "what": "tests",
            "command": environment.command(
                "pytest", [*map(str, self.config.invocation_params.args)]
            ),
            "date": environment.now(),
            "commit": environment.commit(),
            "device": environment.device_report(environment.default_device()),
            "versions": environment.versions(),
            "required_tiers": sorted(required_tiers(self.config)),
            "cut_short": len(self.reported) < self.collected,
            "total": tally(self.total),
            "tiers": {tier: tally(self.counts[tier]) for tier in sorted(self.counts)},
            "skip_reasons": {
                tier: dict(sorted(self.reasons[tier].items())) for tier in sorted(self.reasons)
            },
            "failures": dict(sorted(self.failures.items())),
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.counts and not required_tiers(self.config):
            return
        terminalreporter.section("tiers")
        for tier in sorted(self.counts):
            c = self.counts[tier]
            terminalreporter.write_line(
                f"{tier:12} passed {c['passed']:5} failed {c['failed']:4} skipped {c['skipped']:5}"
            )
            for reason, times in self.reasons[tier].most_common(4):
                terminalreporter.write_line(f"{'':12} {times} x {reason}")
        for tier in self.missing():
            terminalreporter.write_line(f"{tier:12} REQUIRED, BUT DID NOT RUN", red=True)
