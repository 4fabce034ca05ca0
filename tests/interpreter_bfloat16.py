"""Triton's interpreter with a bfloat16 that computes right.

It keeps the bits as uint16. Triton 3.7 multiplies, adds and compares these as integers, has no
constants of that dtype, and rounds float32 towards zero. `right_bfloat16()` widens operands to
float32, which is exact, and rounds results to the nearest, ties to even, as a GPU does: of one
operation of two bfloat16 numbers that is the correctly rounded result. What no kernel here does
(reductions, scans and atomics in bfloat16, conversions to and from float8) is an error within the
block, not a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from csrc_free_ops import interpreter as ours


def is_bfloat16(dtype: Any) -> bool:
    """Whether a type of Triton's, of an element or of a block, is bfloat16."""
    return dtype.scalar.name == "bf16"


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers."""
    copy = np.array(numbers, dtype=np.float32)  # broadcast ones are read-only
    return torch.from_numpy(copy).bfloat16().view(torch.uint16).numpy()


def _in_float32(handle: TensorHandle) -> TensorHandle:
    if not is_bfloat16(handle.dtype):
        return handle
    return TensorHandle(widened(handle.data), tl.float32)


def _rounding(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The operation done in float32 where the first operand is bfloat16; conditions stay bool."""

    def operation(self: Any, *operands: Any) -> TensorHandle:
        if not is_bfloat16(operands[0].dtype):
            return original(self, *operands)
        wide = [_in_float32(one) if isinstance(one, TensorHandle) else one for one in operands]
        result = original(self, *wide).data
        if result.dtype == bool:
            return TensorHandle(result, tl.int1)
        return TensorHandle(rounded(result), tl.bfloat16)

    return operation


def _cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast_impl(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
        source = _in_float32(source)
        if is_bfloat16(dtype):
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return original(self, source, dtype)

    return cast_impl


def _dot(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return original(self, _in_float32(a), _in_float32(b), *rest)

    return create_dot


def _constant(self: Any, value: float) -> TensorHandle:
    return TensorHandle(rounded(np.array([value])), tl.bfloat16)


def _refused(original: Callable[..., Any], of: Callable[..., list[Any]]) -> Callable[..., Any]:
    """The function, with an error where one of the types that `of` finds is bfloat16."""

    def function(self: Any, *args: Any) -> Any:
        if any(is_bfloat16(dtype) for dtype in of(*args)):
            raise NotImplementedError(f"{original.__name__} of bfloat16 in Triton's interpreter")
        return original(self, *args)

    return function


@contextlib.contextmanager
def right_bfloat16() -> Iterator[None]:
    """Kernels that the interpreter runs within this block compute right with bfloat16."""
    builder = interpreter.InterpreterBuilder
    replaced: list[tuple[Any, str, Any]] = [
        (builder, "binary_op", _rounding(builder.binary_op)),
        (builder, "create_clampf", _rounding(builder.create_clampf)),
        (builder, "create_fma", _rounding(builder.create_fma)),
        (builder, "cast_impl", _cast(builder.cast_impl)),
        (builder, "create_dot", _dot(builder.create_dot)),
    ]
    refused: list[tuple[Any, str, Callable[..., list[Any]]]] = [
        (builder, "create_atomic_rmw", lambda op, pointer, value, *rest: [value.dtype]),
        (builder, "create_fp_to_fp", lambda source, dtype, rounding: [source.dtype, dtype]),
        (interpreter.ReduceOps, "apply_impl", lambda operands: [one.dtype for one in operands]),
        (interpreter.ScanOps, "apply_impl", lambda operands: [one.dtype for one in operands]),
    ]
    for owner, name, of in refused:
        replaced.append((owner, name, _refused(getattr(owner, name), of)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(builder, "get_bf16", _constant, create=True))
        ours._found.cache_clear()
        stack.callback(ours._found.cache_clear)
        yield
