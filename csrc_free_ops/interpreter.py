"""What Triton's interpreter makes of bfloat16, found out by running it.

It keeps bfloat16 numbers as their bits. In Triton 3.7 it multiplies those as integers, and rounds
float32 to bfloat16 towards zero.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

_LOCK = threading.Lock()  # the interpreter runs one kernel at a time


class Bfloat16(NamedTuple):
    """What the interpreter of this process does rightly."""

    multiplies: bool  # matrices
    rounds: bool  # float32 to the nearest, ties to even


def bfloat16() -> Bfloat16:
    """What the interpreter does rightly: two small kernels, run at the first call in a process.

    Takes some milliseconds, and the import of Triton. Any thread may ask, with interpretation on or
    off, under any mode of PyTorch.
    """
    with _LOCK:
        return _found()


@functools.cache
def _found() -> Bfloat16:
    # In a thread of its own there are no fake tensors, default devices or inference mode.
    with ThreadPoolExecutor(1, "attn_tiers-interpreter") as pool:
        return pool.submit(lambda: Bfloat16(_is_right(_multiplies), _is_right(_rounds))).result()


def _is_right(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except InterpreterError:  # it does not do that at all
        return False


def _multiplies() -> bool:
    numbers = torch.arange(512, dtype=torch.float32, device="cpu").view(2, 16, 16) % 23 / 8 - 1
    a, b = numbers.bfloat16()
    products = torch.empty(16, 16, dtype=torch.float32, device="cpu")
    _run(_multiply_kernel, a, b, products)
    return torch.equal(products, a.float() @ b.float())


def _rounds() -> bool:
    # Numbers from 1 on: a bfloat16 one is every eighth, halfway between two every fourth.
    numbers = 1 + torch.arange(256, dtype=torch.float32, device="cpu") / 1024
    rounded = torch.empty(256, dtype=torch.bfloat16, device="cpu")
    _run(_round_kernel, numbers, rounded)
    return torch.equal(rounded, numbers.bfloat16())


def _run(kernel: Callable[..., None], *tensors: torch.Tensor) -> None:
    """Interprets one program of a kernel, whatever ``triton.jit`` would make of it."""
    InterpretedFunction(kernel).run(*tensors, grid=(1,), warmup=False)


def _multiply_kernel(a: Any, b: Any, products: Any) -> None:
    r = tl.arange(0, 16)
    at = r[:, None] * 16 + r[None, :]
    tl.store(products + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def _round_kernel(numbers: Any, rounded: Any) -> None:
    r = tl.arange(0, 256)
    tl.store(rounded + r, tl.load(numbers + r).to(tl.bfloat16))
