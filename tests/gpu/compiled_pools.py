"""A compiled step over pools that are buffers of a model: one CUDA graph, and no copy of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code


def check_compiled(
    model: torch.nn.Module, eager: torch.nn.Module, arguments: Callable[[int], tuple[Any, ...]]
) -> None:
    """Steps of a compiled `model` equal those of `eager`, and write its `pools [2,9,4,64,32]`."""
    torch._dynamo.reset()
    eager.load_state_dict(model.state_dict())
    address = model.pools.data_ptr()

    def run(i: int) -> None:
        args = arguments(i)
        expected = eager(*args)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(*args), expected, rtol=4e-3, atol=4e-3)

    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}), torch.no_grad():
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        _, codes = run_and_get_code(run, 0)
        code = "\n".join(codes)
        for shape in ("2, 9, 4, 64, 32", "9, 4, 64, 32"):
            assert f"empty_strided_cuda(({shape})" not in code, "a pool is cloned"
        for i in range(1, 5):
            run(i)
    assert model.pools.data_ptr() == address
    torch.testing.assert_close(model.pools, eager.pools, rtol=4e-3, atol=4e-3)
    torch._dynamo.reset()
