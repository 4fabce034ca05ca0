"""Triton's interpreter with a check of every address: each lies in a tensor that was passed.

The interpreter reads and writes raw memory, so that an access past a tensor goes unseen, or ends
the process. `check_memory()` makes it an error that says which access, how far and by whom. A
tensor's memory is from its first to its last element; what lies between (the gaps of a strided
view) counts as its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel touched memory that belongs to none of its tensors."""


Extent = tuple[int, int]


def extent(tensor: torch.Tensor) -> Extent:
    """[first, one past the last) byte of a tensor's elements; empty if it has none."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * tensor.element_size()


def outside(addresses: np.ndarray, size: int, extents: list[Extent]) -> np.ndarray:
    """Which accesses of `size` bytes lie in none of the extents."""
    addresses = addresses.astype(np.int64)
    inside = np.zeros(addresses.shape, dtype=bool)
    for first, end in extents:
        inside |= (addresses >= first) & (addresses + size <= end)
    return ~inside


class _Checked:
    """The interpreter's builder and executor, with the check in front of them."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.kernel = ""
        self.builder = interpreter.interpreter_builder

    def check(self, what: str, ptrs: Any, mask: np.ndarray | None) -> None:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        bad = outside(ptrs.data, size, self.extents)
        if mask is not None:
            bad &= mask.astype(bool)
        if bad.any():
            address = int(ptrs.data[bad].flat[0])
            raise OutOfBounds(
                f"{self.kernel} {what} {int(bad.sum())} of {bad.size} elements outside of its "
                f"tensors, {self._where(address)}, in program {self.builder.grid_idx}"
            )

    def _where(self, address: int) -> str:
        def distance(one: Extent) -> int:
            return max(one[0] - address, address - one[1] + 1)

        near = min(range(len(self.extents)), key=lambda i: distance(self.extents[i]))
        return f"{distance(self.extents[near])} bytes from tensor argument {near}"


@contextlib.contextmanager
def check_memory() -> Iterator[None]:
    """Every kernel that the interpreter runs within this block is checked."""
    state = _Checked()
    builder, executor = type(state.builder), interpreter.GridExecutor
    original = {
        name: getattr(builder, name)
        for name in (
            "create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw"
        )
    }  # fmt: skip
    to_host = executor._init_args_hst

    def init_args(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = to_host(self, args_dev, kwargs)
        given = [getattr(one, "base", one) for one in (*args, *named.values())]  # of descriptors
        tensors = [one for one in given if hasattr(one, "data_ptr")]
        state.extents = [extent(interpreter._unwrap_tensor(one)) for one in tensors]
        state.kernel = self.fn.__name__
        return args, named

    def mask_of(mask: Any) -> np.ndarray:
        if not isinstance(mask, np.ndarray):
            return mask.data
        # A tile of a descriptor's matrix. Hopper traps where all of it is outside.
        if not mask.any():
            raise OutOfBounds(
                f"{state.kernel} copies a tile that lies wholly outside of its matrix, in program "
                f"{state.builder.grid_idx}"
            )
        return mask

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        state.check("reads", ptrs, mask_of(mask))
        return original["create_masked_load"](self, ptrs, mask, *rest, **named)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        state.check("writes", ptrs, mask_of(mask))
        return original["create_masked_store"](self, ptrs, value, mask, *rest)

    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        state.check("adds to", ptr, mask.data)
        return original["create_atomic_rmw"](self, op, ptr, val, mask, *rest)

    def atomic_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        state.check("swaps", ptr, None)
        return original["create_atomic_cas"](self, ptr, *rest)

    # Loads and stores without a mask end in the masked ones.
    executor._init_args_hst = init_args
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.create_atomic_rmw = atomic_rmw
    builder.create_atomic_cas = atomic_cas
    try:
        yield
    finally:
        executor._init_args_hst = to_host
        for name, function in original.items():
            setattr(builder, name, function)
