"""benchmarks/measure.py: its steps run what exists, one after the other, within their time."""

from __future__ import annotations

import importlib.util
import pathlib
import shlex
import sys
import time
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", ROOT / "benchmarks" / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_steps_name_exists(measure: ModuleType) -> None:
    for step in measure.STEPS.values():
        for word in shlex.split(step.command):
            path = word.removeprefix("--ignore=")
            if path.startswith(("tests/", "benchmarks/")):
                assert (ROOT / path).exists(), path


def test_every_gpu_test_is_in_a_step(measure: ModuleType) -> None:
    words = [set(shlex.split(step.command)) for step in measure.STEPS.values()]
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        name = str(path.relative_to(ROOT))
        rest = "tests/gpu"
        assert any(name in w or (rest in w and f"--ignore={name}" not in w) for w in words), name


def test_step_ends_by_itself_or_is_interrupted(
    measure: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    status, seconds = measure.run([sys.executable, "-c", "print(1); print(2); exit(3)"], 60, 1)
    assert status == 3 and seconds < 60 and capfd.readouterr().out == "  2\n"
    waits = (
        "import time\ntry:\n print('begun', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n print('interrupted')"
    )
    started = time.monotonic()
    status, _ = measure.run([sys.executable, "-c", waits], 5, 2)
    assert (status, capfd.readouterr().out) == (0, "  begun\n  interrupted\n")
    assert time.monotonic() - started < 300


def test_list_errors_and_no_gpu(
    measure: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    assert measure.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(measure.STEPS)
    monkeypatch.setattr(sys, "argv", ["measure.py", "gdn", "nothing"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "no such step: nothing; there are gdn_configs" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["measure.py", "gdn"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "no GPU is here" in capsys.readouterr().err
