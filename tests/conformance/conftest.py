"""The conformance tests of this folder run on the CPU; tests/gpu collects them again on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conformance.calls import Maker


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def maker() -> Callable[..., Maker]:
    """Makes a `Maker` for the device under test."""

    def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> Maker:
        return Maker(dtype, "cpu", seed=seed)

    return make
