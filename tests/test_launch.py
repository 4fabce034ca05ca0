"""Launches that are compiled beside each other."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("triton")

from csrc_free_ops.launch import compile_together


class Fake:
    """A launch whose compilation waits until ``together`` of them are under way."""

    def __init__(self, together: threading.Barrier | None, error: Exception | None = None) -> None:
        self.together = together
        self.error = error
        self.compiled = 0

    def is_compiled(self, device_index: int) -> bool:
        return self.compiled > 0

    def compile(self, device_index: int) -> None:
        assert device_index == 3
        if not self.compiled and self.together is not None:
            self.together.wait(timeout=10)
        if self.error is not None:
            raise self.error
        self.compiled += 1


def test_missing_kernels_compile_at_the_same_time() -> None:
    barrier = threading.Barrier(2)
    launches = [Fake(barrier), Fake(barrier), Fake(None)]
    launches[2].compiled = 1
    compile_together(launches, 3)  # type: ignore[arg-type]
    assert all(launch.compiled for launch in launches)


def test_an_error_of_one_is_raised() -> None:
    launches = [Fake(None), Fake(None, MemoryError("no room"))]
    with pytest.raises(MemoryError, match="no room"):
        compile_together(launches, 3)  # type: ignore[arg-type]
