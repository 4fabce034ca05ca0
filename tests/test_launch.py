"""Launches: how a compiled kernel is launched, and kernels that are compiled beside each other."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from csrc_free_ops import launch as launch_module
from csrc_free_ops.launch import Launch, compile_together


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


def test_compiled_kernel_does_not_wait_for_another_of_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @triton.jit
    def kernel(x, n):
        pass

    one = Launch(
        kernel, grid=1, pointers={"x": (torch.float32, True)}, scalars={"n": 3}, constants={},
        options={},
    )  # fmt: skip
    monkeypatch.setattr(launch_module, "_launcher", lambda compiled, *_: compiled)
    monkeypatch.setitem(launch_module._COMPILED, (0, one.specialization), "compiled")
    lock = threading.Lock()
    monkeypatch.setitem(launch_module._COMPILE_LOCKS, one.kernel, lock)
    with lock:  # another thread compiles
        one.compile(0)
    assert one._launch == "compiled"


def test_an_error_of_one_is_raised() -> None:
    launches = [Fake(None), Fake(None, MemoryError("no room"))]
    with pytest.raises(MemoryError, match="no room"):
        compile_together(launches, 3)  # type: ignore[arg-type]


def test_launchers_are_loaded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both_compiled = threading.Barrier(2)
    loading: list[int] = []
    most = 0

    class Loaded:
        run, function, packed_metadata = None, 5, (4, 1, 0)

        def _init_handles(self) -> None:
            nonlocal most
            loading.append(1)
            most = max(most, len(loading))
            time.sleep(0.05)
            loading.pop()

    class Kernel:
        arg_names: list[str] = []

        def __init__(self, name: str) -> None:
            self.fn = types.SimpleNamespace(__module__="tests", __qualname__=name)

        def warmup(self, **_: Any) -> Loaded:
            both_compiled.wait(timeout=10)
            return Loaded()

    monkeypatch.setattr("torch.cuda.device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(launch_module, "_COMPILED", {})
    monkeypatch.setattr(launch_module, "driver", types.SimpleNamespace(active=_Active()))
    nothing: dict[str, Any] = dict(grid=1, pointers={}, scalars={}, constants={}, options={})
    compile_together([Launch(Kernel("one"), **nothing), Launch(Kernel("two"), **nothing)], 3)
    assert most == 1


class _Active:
    get_current_stream = None


class Compiled:
    """Triton's compiled kernel, as far as a launch goes."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.runs.append(args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args, stream: self.by_triton.append((grid, stream, *args))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 3 has the current stream 103, and a tensor is its address."""
    monkeypatch.setattr(launch_module, "_data_ptr", lambda address: address)
    active = types.SimpleNamespace(get_current_stream=lambda index: 100 + index)
    monkeypatch.setattr(launch_module, "driver", types.SimpleNamespace(active=active))


def test_launch_without_hooks_goes_to_the_launcher(streams: None) -> None:
    compiled = Compiled()
    launch_module._launcher(compiled, (7, 1, 1), (128, 2))(3, [16, 32])
    head = (7, 1, 1, 103, compiled.function, compiled.packed_metadata, None, None, None)
    assert compiled.runs == [(*head, 16, 32, 128, 2)] and not compiled.by_triton


class Wrapper:
    """Triton's launcher in Python: what it adds, and where it puts a kernel's arguments."""

    def __init__(self, launch: Any, as_tuple: bool, **sizes: int) -> None:
        self.launch = launch
        self.as_tuple = as_tuple
        self.global_scratch_size = self.profile_scratch_size = 0
        self.__dict__.update(sizes)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        head = (x, y, z, stream, function, False, True)
        if self.as_tuple:
            self.launch(*head, *args[:4], None, None, b"types", args[4:])
        else:
            self.launch(*head, None, None, *args)


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("tail", [(128, 2, 0.5), (), (128, (1, 2))])
def test_launch_goes_past_the_wrapper(
    as_tuple: bool, tail: tuple[Any, ...], streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native function is given what the wrapper would give it."""
    native: list[tuple[Any, ...]] = []
    wrapped: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch_module.types, "BuiltinFunctionType", types.FunctionType)
    compiled = Compiled()
    compiled.run = Wrapper(lambda *args: native.append(args), as_tuple)  # type: ignore
    launch = launch_module._launcher(compiled, (7, 1, 1), tail)
    assert not native
    Wrapper(lambda *args: wrapped.append(args), as_tuple)(
        7, 1, 1, 103, compiled.function, compiled.packed_metadata, None, None, None, 16, 32, *tail
    )
    with monkeypatch.context() as patch:
        patch.setattr(Wrapper, "__call__", None)
        launch(3, [16, 32])
    assert native == wrapped and not compiled.by_triton


class Unfit(Wrapper):
    """Launchers that no call of the native function by itself stands for."""

    def __init__(self, launch: Any, way: str) -> None:
        super().__init__(launch, as_tuple=False)
        self.way = way
        if way == "no size":  # as Triton's launcher for AMD
            del self.global_scratch_size
        if way == "size unknown":
            self.profile_scratch_size = None  # type: ignore[assignment]

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        middle, arguments = args[:4], list(args[4:])
        if self.way == "looks at arguments":
            arguments = [int(argument) for argument in arguments]
        if self.way == "adds behind":
            arguments.append(0)
        if self.way == "stream in a structure":
            stream = (stream,)  # type: ignore[assignment]
        if self.way != "does not launch":
            self.launch(x, y, z, stream, function, *middle, *arguments)
        if self.way == "twice":
            self.launch(x, y, z, stream, function, *middle, *arguments)


UNFIT = [
    "no size", "size unknown", "looks at arguments", "adds behind", "stream in a structure",
    "does not launch", "twice",
]  # fmt: skip


@pytest.mark.parametrize("way", UNFIT)
def test_launchers_of_another_kind_are_called_as_they_are(
    way: str, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module.types, "BuiltinFunctionType", types.FunctionType)
    native: list[tuple[Any, ...]] = []
    expected: list[tuple[Any, ...]] = []
    compiled = Compiled()
    compiled.run = Unfit(lambda *args: native.append(args), way)  # type: ignore
    launch = launch_module._launcher(compiled, (7, 1, 1), (128,))
    assert not native  # finding out launches nothing
    Unfit(lambda *args: expected.append(args), way)(
        7, 1, 1, 103, compiled.function, compiled.packed_metadata, None, None, None, 16, 32, 128
    )
    calls: list[tuple[Any, ...]] = []
    wrapper_call = Unfit.__call__
    monkeypatch.setattr(
        Unfit, "__call__", lambda self, *args: (calls.append(args), wrapper_call(self, *args))
    )
    launch(3, [16, 32])
    assert len(calls) == 1 and native == expected


def test_a_launcher_around_the_native_function_is_called_as_it_is() -> None:
    """One that makes tensor descriptors is a Python function, and is not left out."""
    wrapper = Wrapper(lambda *args: None, True)
    call = launch_module._Call(wrapper, (7, 1, 1), (5, (), None, None, None), True)
    assert launch_module._without_wrapper(call, ()) is None


def test_launches_go_past_the_launcher_of_this_triton() -> None:
    """If this fails launches are right but slower: Triton's launcher has changed."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    wrapper = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligns = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    facts = dict(num_ctas=1, launch_cooperative_grid=False, launch_pdl=True)
    layout = dict(arg_annotations=[None], kernel_signature=b"signature")
    # Of a native function, never called; the launcher makes a copy with another one.
    wrapper.__dict__.update(sizes, **aligns, **facts, **layout, launch=print)
    middle = (5, (4, 1, 0), None, None, None)
    call = launch_module._without_wrapper(
        launch_module._Call(wrapper, (7, 1, 1), middle, True), (128, 0.5, None)
    )
    assert call is not None and call.run is print and wrapper.launch is print
    wanted: list[tuple[Any, ...]] = []
    wrapper.launch = lambda *args: wanted.append(args)
    wrapper(7, 1, 1, 103, *middle, 16, 128, 0.5, None)
    arguments = (16, 128, 0.5, None)
    given = (*call.head, 103, *call.middle, *(arguments if call.spread else (arguments,)))
    assert [given] == wanted


@pytest.mark.parametrize("sizes", [{"global_scratch_size": 64}, {"profile_scratch_size": 64}])
def test_launches_with_memory_of_their_own_keep_the_wrapper(
    sizes: dict[str, int], streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module.types, "BuiltinFunctionType", types.FunctionType)
    seen: list[tuple[Any, ...]] = []
    wrapper = Wrapper(lambda *args: seen.append(args), True, **sizes)
    call = launch_module._Call(wrapper, (7, 1, 1), (5, (), None, None, None), True)
    assert launch_module._without_wrapper(call, ()) is None and not seen


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_launches(
    name: str, past: bool, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler may hang them in and out at any time, also of launches past the wrapper."""
    compiled = Compiled()
    if past:
        monkeypatch.setattr(launch_module.types, "BuiltinFunctionType", types.FunctionType)
        compiled.run = Wrapper(lambda *args: compiled.runs.append(args), True)  # type: ignore
    launch = launch_module._launcher(compiled, (7, 1, 1), (128,))
    if past:
        monkeypatch.setattr(Wrapper, "__call__", None)
    launch(3, [16])
    chain, hook = getattr(triton.knobs.runtime, name), lambda metadata: None
    chain.add(hook)
    try:
        launch(3, [16])
    finally:
        chain.remove(hook)
    launch(3, [16])
    assert compiled.by_triton == [((7, 1, 1), 103, 16, 128)] and len(compiled.runs) == 2


@pytest.mark.parametrize("hook", [None, print])
def test_what_is_no_chain_of_hooks_is_left_to_triton(
    hook: Any, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    compiled = Compiled()
    launch_module._launcher(compiled, (7, 1, 1), ())(3, [16])
    assert compiled.by_triton and not compiled.runs


def test_descriptors_are_made_anew_of_each_tensor(streams: None) -> None:
    """Without Triton's checks, which would take longer than the launch; with all that it sets."""
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    example = launch_module._descriptor(launch_module._StandIn(torch.bfloat16, True), (4, 32))
    plain = launch_module._StandIn(torch.bfloat16, True)
    address, made = launch_module._with_descriptors([plain, example], [16, x])  # type: ignore
    assert address == 16
    wanted = launch_module._descriptor(x, (4, 32))
    assert type(made) is type(wanted) and made.base is x
    for name, value in vars(wanted).items():
        if name != "base":
            found = getattr(made, name)
            assert (list(found) if isinstance(value, list) else found) == value
    assert example.base is not x
