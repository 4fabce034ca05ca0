"""A Triton kernel with all its arguments but the tensors: what a plan compiles and launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from triton.runtime import driver

_compiled: dict[tuple[Any, ...], Any] = {}
_compile_lock = threading.Lock()

_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Launch:
    """One launch, worked out. Safe to share between threads; holds no tensor.

    Args:
        kernel: the Triton function. Its pointers come first, in the order of ``pointers``.
        grid: number of programs.
        pointers: dtype of each tensor, and whether its address is a multiple of 16.
        scalars: numbers, by name. Triton compiles again for a number that is 1, a multiple of 16 or
            wider than 32 bits, but for those in ``unspecialized`` (the kernel's
            ``do_not_specialize``), where only the width counts.
        constants: the ``constexpr`` arguments.
        options: ``num_warps`` and the like.
    """

    def __init__(
        self,
        kernel: Any,
        *,
        grid: int,
        pointers: Mapping[str, tuple[torch.dtype, bool]],
        scalars: Mapping[str, int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        unspecialized: frozenset[str] = frozenset(),
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1)
        self.pointers = pointers
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self.kinds = {name: _kind(value, name in unspecialized) for name, value in scalars.items()}
        values = {**scalars, **constants}
        self._tail = tuple(values[name] for name in kernel.arg_names[len(pointers) :])
        self._compiled: Any = None
        self.specialization = (
            kernel.fn.__name__,
            tuple(pointers.values()),
            tuple(self.kinds.values()),
            tuple(constants.values()),
            tuple(options.values()),
        )

    def __call__(self, device_index: int, *tensors: torch.Tensor) -> None:
        """Launches on the current stream of a CUDA device; in Triton's interpreter, runs."""
        if self._compiled is None:
            if tensors[0].device.type == "cpu":
                self.kernel[self.grid](*tensors, *self._tail, **self.options)
                return
            self.compile(device_index)
        # The compiled kernel itself: binding arguments by name takes longer than the launch.
        stream = driver.active.get_current_stream(device_index)
        self._compiled(*[tensor.data_ptr() for tensor in tensors], *self._tail, stream=stream)

    def is_compiled(self, device_index: int) -> bool:
        """Whether a launch needs no compiler and no module load."""
        return (device_index, self.specialization) in _compiled

    def compile(self, device_index: int) -> None:
        """Compiles and loads the kernel; launches nothing. Not for use inside a capture."""
        key = (device_index, self.specialization)
        with _compile_lock:
            compiled = _compiled.get(key)
            if compiled is None:
                with torch.cuda.device(device_index):
                    heads = [_Pointer(dtype, aligned) for dtype, aligned in self.pointers.values()]
                    compiled = self.kernel.warmup(
                        *heads, *self._tail, grid=self.grid, **self.options
                    )
                    compiled._init_handles()  # loads the module, which a capture may not do
                _compiled[key] = compiled
        self._compiled = compiled[self.grid]

    def compile_for(self, target: Any) -> Any:
        """The kernel compiled for a ``GPUTarget`` of Triton, with or without a GPU."""
        from triton.compiler import ASTSource
        from triton.compiler import compile as compile_source

        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for position, name in enumerate(self.kernel.arg_names):
            at = (position,)
            if name in self.pointers:
                dtype, aligned = self.pointers[name]
                signature[name] = "*" + _TYPES[dtype]
                if aligned:
                    attributes[at] = [["tt.divisibility", 16]]
            elif name in self.constants:
                signature[name] = "constexpr"
                constants[at] = self.constants[name]
            else:
                wide, is_one, divisible = self.kinds[name]
                signature[name] = "constexpr" if is_one else "i64" if wide else "i32"
                if isinstance(self.scalars[name], float):
                    signature[name] = "fp32"
                elif is_one:
                    constants[at] = 1
                elif divisible:
                    attributes[at] = [["tt.divisibility", 16]]
        options = dict(self.options)
        if target.backend != "cuda":
            options = {n: options[n] for n in ("num_warps", "num_stages") if n in options}
        source = ASTSource(self.kernel, signature, constants, attributes)
        return compile_source(source, target=target, options=options)


def _kind(value: int | float, unspecialized: bool) -> tuple[bool, bool, bool]:
    """What Triton's compiler sees of a number: (64-bit, is 1, divisible by 16)."""
    if isinstance(value, float):
        return (False, False, False)
    wide = not -(2**31) <= value < 2**31
    if unspecialized:
        return (wide, False, False)
    return (wide, value == 1, value % 16 == 0)


class _Pointer:
    """Stands for a tensor when compiling: a dtype and an alignment."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if aligned else dtype.itemsize

    def data_ptr(self) -> int:
        return self._address
