"""How operators are hidden from Dynamo, and what stands in for PyTorch's private functions."""

from __future__ import annotations

import runpy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing

from csrc_free_ops import facts
from torch_attn_tiers.ops import registration


def _kernel() -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel with code of its own: marks stay on it."""
    source = "def helper(x):\n    return x + 1\n\n\ndef kernel(x):\n    return helper(x) * 2\n"
    names: dict[str, Any] = {}
    exec(compile(source, "kernel.py", "exec"), names)
    return names["kernel"]


def _frames_traced(kernel: Callable[..., Any], error: type[Exception] = ZeroDivisionError) -> int:
    """Frames that Dynamo traces of a kernel whose caller is not traced, and after it."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def after(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    def caller(x: torch.Tensor) -> torch.Tensor:
        try:
            y = kernel(x)
        except error:
            y = x
        return after(y)

    untraced = torch._dynamo.disable(caller, recursive=False)
    torch.compile(lambda x: untraced(x), backend=counter)(torch.ones(2))
    return counter.frame_count


def test_a_marked_kernel_is_the_function_itself() -> None:
    kernel = _kernel()
    assert registration._untraced(kernel) is kernel


def test_a_marked_kernel_and_what_it_calls_are_not_traced() -> None:
    assert _frames_traced(_kernel()) == 2  # the kernel with its helper, and what comes after
    assert _frames_traced(registration._untraced(_kernel())) == 1


def test_dynamo_goes_on_after_a_marked_kernel_that_raised() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    assert _frames_traced(registration._untraced(kernel)) == 1


@pytest.mark.parametrize("hook_is_on", [False, True])
def test_a_marked_kernel_may_call_what_is_compiled(hook_is_on: bool) -> None:
    """A tier of another package, perhaps."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    outer = torch._dynamo.testing.CompileCounter()
    helper = torch.compile(lambda x: x + 1, backend=counter)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * 2

    call = registration._untraced(kernel)
    if hook_is_on:
        untraced = torch._dynamo.disable(lambda x: kernel(x), recursive=False)
        call = torch.compile(lambda x: untraced(x), backend=outer)
    for _ in range(2):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 4.0))
    assert (counter.frame_count, outer.frame_count) == (1, 0)


def test_a_reset_of_dynamo_leaves_the_mark() -> None:
    kernel = registration._untraced(_kernel())
    assert _frames_traced(kernel) == 1
    torch._dynamo.reset()
    torch.compiler.reset()
    assert _frames_traced(kernel) == 1


@pytest.mark.parametrize("missing", ["function", "action", "other arguments", "code"])
def test_without_the_mark_a_wrapper_hides_kernels(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = _kernel()
    if missing == "function":
        monkeypatch.delattr("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    elif missing == "action":
        monkeypatch.setattr("torch._dynamo.types.FrameAction", types.SimpleNamespace())
    elif missing == "other arguments":
        monkeypatch.setattr("torch._C._dynamo.eval_frame.set_code_exec_strategy", lambda code: None)
    else:
        function = kernel

        class Wrapped:
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return function(x)

        kernel = Wrapped()
    untraced = registration._untraced(kernel)
    assert untraced is not kernel
    assert torch.equal(untraced(torch.ones(2)), torch.full((2,), 4.0))
    monkeypatch.undo()
    assert _frames_traced(untraced) == 1


def test_the_current_device_where_pytorch_has_no_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Any:
        return runpy.run_path(facts.__file__)["current_cuda_device"]

    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    assert found() is torch.cuda.current_device
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    assert found()() == 3
