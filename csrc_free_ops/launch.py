"""A Triton kernel with all its arguments but the tensors: what a plan compiles and launches."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from csrc_free_ops.facts import DeviceFacts


class Pointer(NamedTuple):
    """What the compiler knows of a tensor argument."""

    dtype: torch.dtype
    aligned: bool  # to 16 bytes


_COMPILED: dict[Any, Any] = {}  # (device index, specialization) -> Triton's compiled kernel
_COMPILE_LOCKS: dict[Any, threading.Lock] = {}  # of each kernel: different ones may compile at once
# Triton loads each kernel's launcher as a module of one name, and looks its function up by it: of
# two threads that do so at once one can get the other's.
_LOAD_LOCK = threading.Lock()
_TRITON_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.uint16: "u16",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]

_Launcher = Callable[[int, Sequence[torch.Tensor]], None]
_Arguments = Callable[[Sequence[torch.Tensor]], Iterable[Any]]
_data_ptr = torch.Tensor.data_ptr


class Launch:
    """One launch, worked out. Safe to share between threads; holds no tensor.

    Args:
        kernel: the Triton function; its pointers come first.
        grid: how many programs, in one dimension.
        pointers: what the compiler knows of the tensors (see ``Pointer``), in the kernel's order.
        scalars: its numbers, by name.
        constants: its ``tl.constexpr`` arguments, by name.
        options: Triton's, such as ``num_warps``.
        boxes: of tensors that the kernel gets as descriptors for Hopper's copies of whole tiles:
            the shape of a tile, by name. These tensors are matrices, rows 16-byte aligned.
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
        boxes: Mapping[str, tuple[int, int]] = types.MappingProxyType({}),
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1)
        self.pointers = pointers
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self.boxes = boxes
        self._boxes = [boxes.get(name) for name in pointers]
        # The interpreter's functions have no such list, and nothing is compiled there.
        unspecialized = {p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize}
        self._types = {n: _scalar_type(v, n not in unspecialized) for n, v in scalars.items()}
        values = {**scalars, **constants}
        self._tail = tuple(values[name] for name in kernel.arg_names[len(pointers) :])
        self._launch: _Launcher | None = None  # compiled and loaded
        #: Hashable; equal for launches that one compiled kernel serves.
        self.specialization = (
            (kernel.fn.__module__, kernel.fn.__qualname__),
            tuple(pointers.values()),
            tuple(self._types.values()),
            tuple(constants.values()),
            tuple(options.values()),
            tuple(self._boxes) if boxes else (),
        )

    def __call__(self, device_index: int, *tensors: torch.Tensor) -> None:
        """Launches on the current stream of a CUDA device; in Triton's interpreter, runs."""
        launch = self._launch
        if launch is None:
            if tensors[0].device.type == "cpu":
                self.kernel[self.grid](*self._described(tensors), *self._tail, **self.options)
                return
            self.compile(device_index)
            launch = self._launch
            assert launch is not None
        launch(device_index, tensors)

    def is_compiled(self, device_index: int) -> bool:
        """Whether some launch of this specialization has been compiled and loaded."""
        return (device_index, self.specialization) in _COMPILED

    def compile(self, device_index: int) -> None:
        """Compiles and loads the kernel on a CUDA device, unless that is done."""
        key = (device_index, self.specialization)
        examples = self._described([_StandIn(*pointer) for pointer in self.pointers.values()])
        compiled = _COMPILED.get(key)
        if compiled is None:
            with _COMPILE_LOCKS.setdefault(self.kernel, threading.Lock()):
                compiled = _COMPILED.get(key)
                if compiled is None:
                    with torch.cuda.device(device_index):
                        compiled = self.kernel.warmup(
                            *examples, *self._tail, grid=self.grid, **self.options
                        )
                        with _LOAD_LOCK:
                            compiled._init_handles()  # loads the module: not for captures
                    _COMPILED[key] = compiled
        arguments_of: _Arguments = _addresses
        if self.boxes:
            arguments_of = functools.partial(_with_descriptors, examples)
        self._launch = _launcher(compiled, self.grid, self._tail, arguments_of)

    def _described(self, tensors: Sequence[Any]) -> list[Any]:
        """The same, with descriptors in place of those that the kernel gets so."""
        return [x if box is None else _descriptor(x, box) for x, box in zip(tensors, self._boxes)]

    def compile_for(self, target: Any) -> Any:
        """The kernel compiled for a ``triton.backends.compiler.GPUTarget``, with or without a GPU.

        As a launch would have it compiled: Triton takes the same facts from the arguments.
        """
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for position, name in enumerate(self.kernel.arg_names):
            at = (position,)
            if name in self.constants:
                signature[name] = "constexpr"
                constants[at] = self.constants[name]
                continue
            if name in self.pointers:
                dtype, divisible = self.pointers[name]
                signature[name] = "*" + _TRITON_TYPES[dtype]
                if name in self.boxes:
                    signature[name] = f"tensordesc<{_TRITON_TYPES[dtype]}{list(self.boxes[name])}>"
                    divisible = False
            else:
                signature[name], divisible = self._types[name]
                if signature[name] == "constexpr":
                    constants[at] = self.scalars[name]
            if divisible:
                attributes[at] = _DIVISIBLE_BY_16
        options = dict(self.options)
        if target.backend != "cuda":
            options = {n: options[n] for n in ("num_warps", "num_stages") if n in options}
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options)


def _addresses(tensors: Sequence[torch.Tensor]) -> Iterable[Any]:
    return map(_data_ptr, tensors)


def _descriptor(x: torch.Tensor | _StandIn, box: tuple[int, int]) -> Any:
    """Triton's descriptor of a matrix, or one to compile with."""
    shape, strides = (box, (box[1], 1)) if isinstance(x, _StandIn) else (x.shape, x.stride())
    return TensorDescriptor(x, list(shape), list(strides), list(box))


def _with_descriptors(examples: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Iterable[Any]:
    """Addresses, and descriptors where the examples have one.

    Triton's own way to make one takes longer than a launch: it checks what the plan has.
    """
    for example, x in zip(examples, tensors):
        if isinstance(example, _StandIn):
            yield _data_ptr(x)
        else:
            one = object.__new__(type(example))
            one.__dict__.update(example.__dict__, base=x, shape=x.shape, strides=x.stride())
            yield one


def _launcher(
    compiled: Any,
    grid: tuple[int, int, int],
    tail: tuple[Any, ...],
    arguments_of: _Arguments = _addresses,
) -> _Launcher:
    """What launches a loaded kernel, given the device's index and its tensors.

    The compiled kernel's own launcher does: binding sixty arguments by name takes Triton longer
    than the launch, and so does calling the hooks of a profiler that is not there.
    """
    middle = (compiled.function, compiled.packed_metadata, None, None, None)
    by_wrapper = _Call(compiled.run, grid, middle, spread=True)
    run, head, middle, spread = _without_wrapper(by_wrapper, tail) or by_wrapper
    stream_of = driver.active.get_current_stream
    runtime = knobs.runtime

    def launch(device_index: int, tensors: Sequence[torch.Tensor]) -> None:
        arguments = arguments_of(tensors)
        # What is no chain of hooks is left to Triton.
        if getattr(runtime.launch_enter_hook, "calls", True) or getattr(
            runtime.launch_exit_hook, "calls", True
        ):
            compiled[grid](*arguments, *tail, stream=stream_of(device_index))
        elif spread:
            run(*head, stream_of(device_index), *middle, *arguments, *tail)
        else:
            run(*head, stream_of(device_index), *middle, (*arguments, *tail))

    return launch


class _Call(NamedTuple):
    """A launch: ``run(*head, stream, *middle, *arguments)``."""

    run: Callable[..., None]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    spread: bool  # or the kernel's arguments are one tuple


def _without_wrapper(call: _Call, tail: tuple[Any, ...]) -> _Call | None:
    """How Triton's launcher in Python calls the native one; None if that cannot be told.

    It adds the same to every launch, at some cost each time. Versions of Triton differ in what it
    adds, so a copy of it is asked once, with a native function that only looks.
    """
    wrapper: Any = call.run
    native = getattr(wrapper, "launch", None)
    scratch = ("global_scratch_size", "profile_scratch_size")
    if not isinstance(native, types.BuiltinFunctionType) or any(
        getattr(wrapper, name, 1) != 0 for name in scratch
    ):
        return None  # it does more than to hand on: tensor descriptors, memory for each launch
    seen: list[tuple[Any, ...]] = []
    stream, argument = object(), object()
    arguments = (argument, *tail)
    try:
        looking = copy.copy(wrapper)
        looking.launch = lambda *args: seen.append(args)
        looking(*call.head, stream, *call.middle, *arguments)
        (args,) = seen
        at = next(i for i, one in enumerate(args) if one is stream)
    except Exception:
        return None
    head, rest = args[:at], args[at + 1 :]
    if rest and _are(rest[-1], arguments):
        return _Call(native, head, rest[:-1], spread=False)
    if _are(rest[-len(arguments) :], arguments):
        return _Call(native, head, rest[: -len(arguments)], spread=True)
    return None


def _are(found: Any, wanted: tuple[Any, ...]) -> bool:
    """Whether ``found`` is a tuple of the very objects of ``wanted``."""
    if not isinstance(found, tuple) or len(found) != len(wanted):
        return False
    return all(one is other for one, other in zip(found, wanted))


def compile_together(launches: Sequence[Launch], device_index: int) -> None:
    """Compiles and loads launches, those that are missing at the same time.

    The compiler spends its time outside of Python: threads wait for the slowest of them only.
    """
    missing = [launch for launch in launches if not launch.is_compiled(device_index)]
    if len(missing) > 1:
        with ThreadPoolExecutor(len(missing), "attn_tiers-compile") as pool:
            list(pool.map(lambda launch: launch.compile(device_index), missing))  # raises errors
    for launch in launches:
        launch.compile(device_index)


class LaunchPlan:
    """One launch of one problem on one device. Safe to share between threads; holds no tensor."""

    def __init__(self, device: DeviceFacts, launch: Launch) -> None:
        self.device = device
        self.launch = launch
        #: What the kernel is compiled and loaded for.
        self.specialization = (device.index, launch.specialization)

    def is_compiled(self) -> bool:
        """Whether a run needs no compiler and no module load."""
        if self.device.interpret or self.launch.grid[0] == 0:
            return True
        return self.launch.is_compiled(self.device.index)

    def compile(self) -> None:
        """Compiles and loads the kernel; launches nothing. Not for use inside a capture."""
        if not self.device.interpret and self.launch.grid[0]:
            self.launch.compile(self.device.index)


class LaunchesPlan:
    """Several launches of one problem. Safe to share between threads; holds no tensor."""

    def __init__(self, device: DeviceFacts, launches: Sequence[Launch]) -> None:
        self.device = device
        self.launches = tuple(launches)

    def is_compiled(self) -> bool:
        """Whether a run needs no compiler and no module load."""
        if self.device.interpret:
            return True
        return all(launch.is_compiled(self.device.index) for launch in self.launches)

    def compile(self) -> None:
        """Compiles and loads the kernels; launches nothing. Not for use inside a capture."""
        if not self.device.interpret:
            compile_together(self.launches, self.device.index)


def _scalar_type(value: int | float, specialized: bool) -> tuple[str, bool]:
    """What Triton compiles a scalar as ("constexpr": a 1), and whether it relies on 16 | value."""
    if isinstance(value, float):
        return "fp32", False
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    if specialized and value == 1:
        return "constexpr", False
    return width, specialized and value % 16 == 0


class _StandIn:
    """A tensor as far as Triton's compiler looks at one: a dtype and an alignment."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if aligned else dtype.itemsize

    def data_ptr(self) -> int:
        return self._address
