"""Without a CUDA device nothing below tests/gpu is collected; with one, makers are its makers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.conformance.calls import Maker

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def maker() -> Callable[..., Maker]:
    """Makes a `Maker` for the GPU, with sizes of a model."""

    def make(dtype: torch.dtype = torch.float16, seed: int = 0) -> Maker:
        return Maker(dtype, "cuda", real_sizes=True, seed=seed)

    return make


@pytest.fixture
def no_host_sync() -> Iterator[None]:
    """Any call that waits for the device, a read of a value above all, is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
