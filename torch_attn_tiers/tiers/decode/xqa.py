"""FlashInfer's XQA kernel, by ``flashinfer.xqa`` of the package ``flashinfer-python``.

One query row over caches of either layout, seen as pages without a copy. Each combination of dtype,
head size, group, page size and window is a kernel of its own that nvcc builds in some ten seconds:
by ``prepare``, ``tier=`` or ``ATTN_TIERS_JIT=1`` only.

Float8 caches are for compute capabilities 10.x and 12.x: on 9.0 the library runs another kernel for
them, which rounds the query and the probabilities to float8.

The library takes raw pointers. It reads 32-bit counts and page numbers whatever it is given,
applies the strides of K to V, in units of the head size, and leaves an empty row NaN or unwritten.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.cache.lengths import RowGuard
from csrc_free_ops.facts import DeviceFacts, TensorFacts, contiguous_facts, is_capturing
from csrc_free_ops.pools import outside_pools
from csrc_free_ops.sizes import next_power_of_2
from torch_attn_tiers.problem import DecodeProblem, dtype_name
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.decode import single_row
from torch_attn_tiers.tiers.decode.device_memory import PlanTensors, current_stream
from torch_attn_tiers.tiers.decode.layout import output_shape
from torch_attn_tiers.tiers.decode.library import Library

FLASHINFER = Library("flashinfer-python", "flashinfer.xqa", oldest=(0, 6))

#: Compute capabilities that the library has the kernel for, by their major number.
_MAJORS = (9, 10, 12)
_HEAD_SIZES = (64, 128, 256)
_GROUPS = (1, 2, 4, 5, 8, 16)
#: Tokens of a page, the largest that divides the capacity.
_PAGE_SIZES = (128, 64, 32, 16)
_MAX_GRID = 65535
#: Before it, windows had a race and some releases were wrong for groups of more than 8.
_MENDED = (0, 6, 17)


class Kernel(NamedTuple):
    """What the library compiles a kernel for."""

    dtype: torch.dtype
    head_size: int
    group: int
    page_size: int
    has_window: bool
    is_float8: bool = False  # the caches

    def __str__(self) -> str:
        float8 = " over float8_e4m3fn" if self.is_float8 else ""
        window = " with a window" if self.has_window else ""
        return (
            f"{dtype_name(self.dtype)}{float8}, head size {self.head_size}, group {self.group}, "
            f"pages of {self.page_size}{window}"
        )


class Pages(NamedTuple):
    """A cache ``[B,Hkv,T,D]`` of any outer strides as overlapping pages, without a copy.

    Page ``p`` begins ``p * stride[0]`` elements into the cache: one stride reaches the beginning of
    each page of each batch row, so it is their greatest common divisor.
    """

    size: tuple[int, int, int, int]  # pages, tokens, heads, D
    stride: tuple[int, int, int, int]
    #: Page of (b, j): b * batch_step + j * page_step.
    batch_step: int
    page_step: int
    per_row: int


def page_size_of(capacity: int) -> int | None:
    """The largest page that divides the capacity, None if none does."""
    return next((size for size in _PAGE_SIZES if capacity % size == 0), None)


def pages_of(cache: TensorFacts, page_size: int) -> Pages:
    """The pages of a cache."""
    B, heads, T, D = cache.shape
    batch, head, token, _ = cache.stride
    per_row = T // page_size
    stride = math.gcd(batch, page_size * token)
    batch_step, page_step = batch // stride, page_size * token // stride
    last = (B - 1) * batch_step + (per_row - 1) * page_step
    return Pages(
        (last + 1, page_size, heads, D), (stride, token, head, 1), batch_step, page_step, per_row
    )


def kernel_of(problem: DecodeProblem) -> Kernel:
    """The kernel that a problem which all predicates pass runs."""
    page_size = page_size_of(problem.T)
    assert page_size is not None
    has_window = problem.left_window >= 0
    return Kernel(
        problem.query.dtype, problem.D, problem.G, page_size, has_window, problem.is_float8
    )


# ---------------------------------------------------------------------------------------------
# Predicates. None imports the library, which takes seconds: building does
# ---------------------------------------------------------------------------------------------


def _library(problem: DecodeProblem) -> str | None:
    return FLASHINFER.known_failure()


def _device(problem: DecodeProblem) -> str | None:
    capability = problem.device.capability
    if not problem.device.is_nvidia or capability is None:
        return "needs an NVIDIA GPU of compute capability 9.0, 10.x or 12.x"
    if capability[0] not in _MAJORS:
        major, minor = capability
        return f"needs compute capability 9.0, 10.x or 12.x, the device has {major}.{minor}"
    return None


def _float8(problem: DecodeProblem) -> str | None:
    if not problem.is_float8:
        return None
    capability = problem.device.capability
    if capability is not None and capability[0] == 9:
        return (
            "rounds the query too to float8 on compute capability 9.0, where only caches may be: "
            "results are far outside the tolerance"
        )
    for name, scale in (("k_scale", problem.k_scale), ("v_scale", problem.v_scale)):
        if scale:
            return f"takes one {name} for all heads, not one for each"
    return None


def _heads(problem: DecodeProblem) -> str | None:
    if problem.D != problem.Dv:
        return f"takes one head size for key and value, not {problem.D} and {problem.Dv}"
    if problem.D not in _HEAD_SIZES:
        return f"takes head sizes {_words(_HEAD_SIZES)}, not {problem.D}"
    if problem.G not in _GROUPS:
        return f"takes {_words(_GROUPS)} query heads for each KV head, not {problem.G}"
    if problem.D == 64 and problem.query.dtype == torch.bfloat16:
        return (
            "in bfloat16 with head size 64 rows are off by up to 6.6e-3 of their norm, 5e-3 being "
            "what a tier may be"
        )
    if problem.G > 8 and FLASHINFER.version and FLASHINFER.version < _MENDED:
        return "groups of more than 8 are wrong in some releases before flashinfer-python 0.6.17"
    return None


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _grid(problem: DecodeProblem) -> str | None:
    if max(problem.B, problem.Hkv) > _MAX_GRID:
        return f"takes at most {_MAX_GRID} batch rows and KV heads"
    return None


def _features(problem: DecodeProblem) -> str | None:
    return single_row.missing_features(problem)


def _windows(problem: DecodeProblem) -> str | None:
    if problem.left_window < 0 and problem.right_window < 0:
        return None
    if problem.lengths_dtype is None:
        return "takes windows with nonpad_kv_seqlen only"
    if FLASHINFER.version and FLASHINFER.version < _MENDED:
        return "its windows have a race before flashinfer-python 0.6.17"
    return None


def _caches(problem: DecodeProblem) -> str | None:
    if problem.key.shape != problem.value.shape:
        return None  # another predicate says so
    if problem.key.stride != problem.value.stride:
        return "reads value by the strides of key, which differ"
    for stride in problem.key.stride[:3]:
        if stride % max(problem.D, 1):
            return f"takes cache strides that are multiples of the head size, not {stride}"
    return None


def _pages(problem: DecodeProblem) -> str | None:
    page_size = page_size_of(problem.T)
    if page_size is None:
        return f"takes capacities that are a multiple of 16, not {problem.T}"
    capability = problem.device.capability
    if capability is not None and capability[0] == 12 and problem.D == 256 and page_size < 64:
        return f"head size 256 with pages of {page_size} is wrong on compute capability 12.x"
    if 0 in problem.key.stride or 0 in problem.key.shape:
        return None  # other predicates say so
    if pages_of(problem.key, page_size).size[0] > single_row.INT32_MAX:
        return "its page numbers have 32 bits, which this cache exceeds"
    return None


_BASICS = (
    _library,
    _device,
    single_row.query_dtype,
    _float8,
    single_row.rows,
    single_row.sizes,
    _heads,
    _grid,
    _features,
    single_row.causality,
    _windows,
    single_row.batch_invariance,
    single_row.alignment,
    _caches,
    _pages,
)


def _loaded_kernel(problem: DecodeProblem) -> str | None:
    """What stands in the way of the kernel itself: where it is loaded, or who would build it."""
    if any(basic(problem) is not None for basic in _BASICS):
        return None
    at = KERNELS.loaded_on(kernel_of(problem))
    if at is not None:
        if at != problem.device.index:
            return (
                f"the library sets this kernel up for one device in a process, which is "
                f"{problem.device.type}:{at}"
            )
        return None
    if not (_has_nvcc() or _has_built_kernels()):
        return "needs nvcc to build its kernel, which is not found: install it or set CUDA_HOME"
    return None


@functools.cache
def _has_nvcc() -> bool:
    """Whether the library would find a compiler."""
    if os.environ.get("FLASHINFER_NVCC"):
        return True
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [os.path.join(home, "bin", "nvcc") for home in homes if home]
    return shutil.which("nvcc") is not None or any(os.path.exists(path) for path in found)


@functools.cache
def _has_built_kernels() -> bool:
    """Whether kernels that others have built are installed."""
    return importlib.util.find_spec("flashinfer_jit_cache") is not None


# ---------------------------------------------------------------------------------------------
# Kernels, and the memory that they work in
# ---------------------------------------------------------------------------------------------


class Kernels:
    """The kernels that this process has built and run once, each on one device.

    The library sets a kernel's shared memory for the device that is current when it loads it, so
    that a launch on another one fails.
    """

    def __init__(self) -> None:
        self._loaded: dict[Kernel, int] = {}
        self._lock = threading.Lock()

    def loaded_on(self, kernel: Kernel) -> int | None:
        """The index of its device, None if it is not loaded."""
        return self._loaded.get(kernel)

    def load(self, kernel: Kernel, device: DeviceFacts) -> None:
        """Build the kernel by running it on one page of ones. Not for use inside a capture."""
        if kernel in self._loaded:  # without the lock: another thread may be compiling
            return
        with self._lock:
            if kernel not in self._loaded:
                outside_pools(device, functools.partial(_try, kernel, device))
                self._loaded[kernel] = device.index

    def forget(self) -> None:
        """Know of none. For tests."""
        self._loaded.clear()


KERNELS = Kernels()


def _try(kernel: Kernel, device: DeviceFacts) -> list[Tensor]:
    """Run the kernel on two keys that are alike: any weights add up to their value, 1."""
    where = torch.device(device.type, device.index)

    def new(*shape: int, dtype: torch.dtype = kernel.dtype, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=where)

    out = new(1, 1, kernel.group, kernel.head_size)
    cache = new(1, kernel.page_size, 1, kernel.head_size, fill=1)
    if kernel.is_float8:
        cache = cache.to(torch.float8_e4m3fn)
    FLASHINFER.module().xqa(
        new(1, 1, kernel.group, kernel.head_size, fill=1),
        cache,
        cache,
        new(1, 1, dtype=torch.int32),
        new(1, 1, dtype=torch.int32, fill=2).view(torch.uint32),
        out,
        new(scratch_bytes(device), dtype=torch.uint8),
        new(32, dtype=torch.int32).view(torch.uint32),
        1,
        kernel.page_size,
        sliding_win_size=kernel.page_size if kernel.has_window else 0,
        kv_layout="NHD",
        sm_count=device.multiprocessors,
    )
    if not torch.allclose(
        out.float(), torch.ones((), dtype=torch.float32, device=where), atol=0.02
    ):
        raise RuntimeError(f"flashinfer.xqa is wrong for equal keys ({kernel})")
    return []


def scratch_bytes(device: DeviceFacts) -> int:
    """Bytes for the partial results of a launch, four times over.

    It has at most one block for each multiprocessor if a row is split at all, and each of them
    leaves 16 rows of at most 256 half-precision numbers with two float32 each.
    """
    return 4 * device.multiprocessors * (16 * 256 * 2 + 1024)


class WorkingMemory:
    """Semaphores and scratch of one device.

    A launch leaves the semaphores at zero, as it found them, and reads no scratch that it has not
    written. Launches that may run at the same time share neither: a stream owns a pair, and so does
    every captured call, whose scratch is the graph's.
    """

    def __init__(self, device: DeviceFacts) -> None:
        self.device = device
        self.where = torch.device(device.type, device.index)
        self._by_stream: dict[int, tuple[Tensor, Tensor]] = {}
        self._lock = threading.Lock()
        self._arena: Any = None
        if device.type == "cuda":
            from csrc_free_ops.decode.scratch import CounterArena

            self._arena = CounterArena(self.where)

    def reserve(self, count: int) -> None:
        """See that a captured call finds ``count`` semaphores. Not for use inside a capture."""
        if self._arena is not None:
            self._arena.reserve(count)

    def for_stream(self, stream: int, count: int) -> tuple[Tensor, Tensor]:
        """At least ``count`` semaphores, and scratch, of a stream."""
        pair = self._by_stream.get(stream)
        if pair is None or pair[0].numel() < count:
            pair = self._add(stream, count)
        return pair

    def for_captured_call(self, count: int) -> tuple[Tensor, Tensor]:
        """``count`` semaphores, and scratch, of one call in the capture under way."""
        scratch = torch.empty(scratch_bytes(self.device), dtype=torch.uint8, device=self.where)
        if self._arena is not None:
            semaphores = self._arena.for_captured_call(count)
        else:
            semaphores = torch.zeros(count, dtype=torch.int32)
        return semaphores.view(torch.uint32), scratch

    def release_captured(self) -> None:
        """Forget what captured calls use. Their graphs must not run again."""
        if self._arena is not None:
            self._arena.release_captured()

    def _add(self, stream: int, count: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            old = self._by_stream.get(stream)
            if self._arena is not None:
                semaphores = self._arena.for_stream(stream, count)
            else:
                semaphores = torch.zeros(count, dtype=torch.int32)
            scratch = old[1] if old is not None else self._new_scratch()
            pair = self._by_stream[stream] = (semaphores.view(torch.uint32), scratch)
            return pair

    def _new_scratch(self) -> Tensor:
        def make() -> list[Tensor]:
            return [torch.zeros(scratch_bytes(self.device), dtype=torch.uint8, device=self.where)]

        return outside_pools(self.device, make)[0]


_MEMORY: dict[tuple[str, int], WorkingMemory] = {}
_MEMORY_LOCK = threading.Lock()


def working_memory(device: DeviceFacts) -> WorkingMemory:
    """The working memory of a device."""
    place = (device.type, device.index)
    with _MEMORY_LOCK:
        if place not in _MEMORY:
            _MEMORY[place] = WorkingMemory(device)
        return _MEMORY[place]


def _release() -> None:
    for memory in list(_MEMORY.values()):
        memory.release_captured()


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


class PageTables:
    """Page tables ``[rows, pages]`` of layouts, as long as a plan has them: 16 pages of a row take
    64 bytes, and batch sizes that change would have one each."""

    def __init__(self) -> None:
        self._tables: weakref.WeakValueDictionary[Any, PlanTensors] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def rows_of(self, device: DeviceFacts, pages: Pages, batch: int) -> PlanTensors:
        """A table of at least ``batch`` rows."""
        layout = (device.index, pages.per_row, pages.batch_step, pages.page_step)
        with self._lock:
            table = self._tables.get(layout)
            if table is None or table.tensors[0].shape[0] < batch:
                rows = next_power_of_2(batch)
                make = functools.partial(_page_table, device, pages, rows)
                table = self._tables[layout] = PlanTensors(device, make)
            return table


def _page_table(device: DeviceFacts, pages: Pages, rows: int) -> list[Tensor]:
    where = torch.device(device.type, device.index)
    first = torch.arange(rows, device=where)[:, None] * pages.batch_step
    table = first + torch.arange(pages.per_row, device=where) * pages.page_step
    return [table.to(torch.int32).contiguous()]


PAGE_TABLES = PageTables()


class _Run:
    """One problem, with its page table and all that the library wants to know."""

    def __init__(self, problem: DecodeProblem) -> None:
        device = problem.device
        self.kernel = kernel_of(problem)
        KERNELS.load(self.kernel, device)
        self.xqa = FLASHINFER.module().xqa
        self.problem = problem
        self.pages = pages_of(problem.key, self.kernel.page_size)
        self.shape = output_shape(problem)
        self.kv_heads = problem.Hkv
        self.heads_shape = (problem.B, 1, problem.Hq, problem.D)
        facts = problem.query
        self.is_dense = facts.stride == contiguous_facts(facts.shape, facts.dtype).stride
        # The library multiplies by 1/sqrt(D).
        self.q_scale = float(problem.scale * math.sqrt(problem.D))
        # It counts the current key too.
        self.window = problem.left_window + 1 if problem.left_window >= 0 else 0
        self.memory = working_memory(device)
        self.semaphores = problem.B * problem.Hkv
        self.memory.reserve(self.semaphores)
        self.table = PAGE_TABLES.rows_of(device, self.pages, problem.B)
        self.table_rows = self.table.tensors[0][: problem.B]
        self.constants = PlanTensors(device, self._make_constants)
        self.guard: RowGuard | None = None
        if problem.lengths_dtype is not None:
            self.guard = RowGuard(
                device,
                batch=problem.B,
                capacity=problem.T,
                width=problem.Hq * problem.D,
                out_dtype=problem.query.dtype,
                lengths_dtype=problem.lengths_dtype,
            )
            self.guard.compile()

    def _make_constants(self) -> list[Tensor]:
        """Counts of keys ``[B,1]`` for when there are no lengths."""
        problem = self.problem
        where = torch.device(problem.device.type, problem.device.index)
        counts = torch.full(
            (problem.B, 1), single_row.known_count(problem), dtype=torch.int32, device=where
        )
        return [counts.view(torch.uint32)]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor:
        problem, guard = self.problem, self.guard
        size, stride = self.pages.size, self.pages.stride
        stream = current_stream(problem.device)
        self.table.used_on(stream)
        self.constants.used_on(stream)
        (counts,) = self.constants.tensors
        out = query.new_empty(*self.shape)  # faster than with a tuple, as views are
        if guard is not None and nonpad_kv_seqlen is not None:
            counts = torch.empty_like(counts)
            guard.count(nonpad_kv_seqlen, counts)
        if is_capturing(problem.device):
            semaphores, scratch = self.memory.for_captured_call(self.semaphores)
        else:
            semaphores, scratch = self.memory.for_stream(stream, self.semaphores)
        if sinks is not None:
            sinks = sinks.to(torch.float32).view(problem.Hkv, problem.G)
        self.xqa(
            query.view(*self.heads_shape) if self.is_dense else self._copy(query),
            key.as_strided(size, stride),
            value.as_strided(size, stride),
            self.table_rows,
            counts,
            out.view(*self.heads_shape),
            scratch,
            semaphores,
            self.kv_heads,
            self.kernel.page_size,
            sinks=sinks,
            q_scale=self.q_scale if k_scale is None else self._q_scale(k_scale),
            sliding_win_size=self.window,
            kv_layout="NHD",
            sm_count=problem.device.multiprocessors,
        )
        if v_scale is not None:
            # With a dimension, so that the product is float32's.
            torch.mul(out, v_scale.view(1), out=out)
        if guard is not None:
            # Afterwards: an empty row is left as it was, or is NaN if many programs shared it.
            guard.zero(counts, out)
        return out

    def _q_scale(self, k_scale: Tensor) -> Tensor:
        """What the library multiplies logits by; a tensor is read by its kernel.

        The scale that it has for the caches is one for keys and values alike, and is left at 1.
        """
        return k_scale if self.q_scale == 1.0 else k_scale * self.q_scale

    def _copy(self, query: Tensor) -> Tensor:
        """A slice of something as a new ``[B,1,Hq,D]``."""
        if query.dim() == 4:
            return query.transpose(1, 2).contiguous()
        return query.reshape(self.heads_shape).contiguous()


def _ready(problem: DecodeProblem) -> bool:
    """Whether building compiles nothing. In a capture it would still make a page table."""
    return not problem.capturing and KERNELS.loaded_on(kernel_of(problem)) == problem.device.index


def _build(problem: DecodeProblem) -> Plan:
    return _Run(problem)


TIER = Tier(
    op="decode",
    name="xqa",
    predicates=(*_BASICS, _loaded_kernel),
    build=_build,
    ready=_ready,
    slow_build=True,
    release=_release,
)
