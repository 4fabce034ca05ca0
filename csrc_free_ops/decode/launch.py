"""Split-KV decode attention: the host side. Shapes and strides in, a launch plan out; no tensor is read."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver

from csrc_free_ops.decode.kernels import split_kv_kernel
from csrc_free_ops.decode.scratch import counter_arena
from csrc_free_ops.facts import DeviceFacts, TensorFacts

MAX_HEAD_DIM = 256
MAX_BATCH = 8192  # every program adds up the lengths of the whole batch
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_DTYPES = (
    torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
_INT32_MAX = 2**31 - 1
_LOG2E = 1.4426950408889634


class SplitKVConfig(NamedTuple):
    """What the kernel is compiled for beyond the problem itself."""

    block_m: int  # query rows (group * query length) of one task
    block_n: int  # keys of one tile
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None  # a thread; fewer let more programs share a multiprocessor


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def default_config(
    rows: int,
    d: int,
    dv: int,
    itemsize: int,
    device: DeviceFacts,
    *,
    tasks: int | None,
    capacity: int,
) -> SplitKVConfig:
    """The tile shape for ``rows`` query rows per KV head; ``tasks`` of None: the same for every batch and capacity.

    The preferences were measured on an H200 (benchmarks/results/split_kv_configs_h200.json); the first that fits the
    device's shared memory is taken.
    """
    widest = _pow2(max(d, dv, 16))
    # Full float32 products run on the plain units, from registers: 16 rows are what these hold.
    block_m = min(max(_pow2(rows), 16), 64 if itemsize == 2 else 16)
    keys = max(8192 // widest, 16)  # 16 KiB of 16-bit keys
    if itemsize == 4:
        choices = [SplitKVConfig(block_m, keys // 2, 8, 2, 2)]
    elif block_m > 16:
        choices = [SplitKVConfig(block_m, keys, 4 if block_m * widest <= 4096 else 8, 2, 2)]
    elif tasks is None:
        choices = [SplitKVConfig(block_m, keys, 4, 3, 2)]
    elif tasks * capacity <= _SMALL:
        choices = [SplitKVConfig(block_m, keys, 4, 3, 1)]
    elif widest == 256:
        choices = [SplitKVConfig(block_m, 2 * keys, 8, 3, 1), SplitKVConfig(block_m, keys, 4, 3, 2)]
    elif 48 <= tasks < 96:
        # Often a large cache with short sequences in it: more, lighter programs lose less at their ends.
        choices = [SplitKVConfig(block_m, keys, 4, 2, 3, 168)]
    else:
        choices = [SplitKVConfig(block_m, 2 * keys, 8, 3, 1), SplitKVConfig(block_m, keys, 4, 3, 2)]
    if tasks is not None and capacity <= 2 * keys and block_m == 16:
        choices.insert(
            0, SplitKVConfig(block_m, 2 * keys if itemsize == 2 else keys, 4, 2, 1)
        )  # one tile: no merge
    for smaller in (
        dict(num_stages=2),
        dict(block_n=keys // 2),
        dict(block_n=16),
        dict(block_m=16),
        dict(num_stages=1),
    ):
        choices.append(choices[-1]._replace(**smaller))
    for config in choices:
        if shared_memory_bound(config, d, dv, itemsize) <= device.shared_memory:
            return config
    return choices[-1]


_SMALL = 8 * 4096  # tasks times keys below which one program a multiprocessor is enough


def shared_memory_bound(config: SplitKVConfig, d: int, dv: int, itemsize: int) -> int:
    """Bytes of shared memory that a program of this shape may take, from above."""
    block_d, block_dv = max(_pow2(d), 16), max(_pow2(dv), 16)
    if config.num_stages > 1:
        elements = (config.num_stages - 1) * (
            config.block_n * (block_d + block_dv) + config.block_m * block_d
        )
    else:
        elements = config.block_n * max(block_d, block_dv) + config.block_m * block_d
    # Changes of layout on the way from one matrix unit's result to the next one's operand.
    exchange = min(config.block_m * max(block_dv, config.block_n) * 4, 32768)
    return max(elements * itemsize + exchange, _MERGE_BYTES) + 512


_MERGE_BYTES = 32768  # of parts in flight while merging


def unsupported(
    query: TensorFacts,
    key: TensorFacts,
    value: TensorFacts,
    device: DeviceFacts,
    *,
    mask: TensorFacts | None = None,
    **_: Any,
) -> str | None:
    """Why the kernel cannot take a legal problem, in words; None if it can."""
    batch, _heads, q_len, d = query.shape
    kv_heads, capacity, dv = key.shape[1], key.shape[2], value.shape[3]
    if max(d, dv) > MAX_HEAD_DIM:
        return f"head sizes D={d}, Dv={dv} exceed {MAX_HEAD_DIM}"
    for name, facts in (("query", query), ("key", key), ("value", value)):
        if facts.shape[3] > 1 and facts.stride[3] != 1:
            return f"the last dimension of {name} has stride {facts.stride[3]}, not 1"
        if min(facts.stride) < 0:
            return f"{name} has a negative stride"
    if batch > MAX_BATCH:
        return f"batch {batch} exceeds {MAX_BATCH}"
    rows = (query.shape[1] // max(kv_heads, 1)) * q_len
    if batch * kv_heads * _cdiv(max(rows, 1), 16) * (_cdiv(capacity, 16) + 1) > _INT32_MAX:
        return "more than 2^31 tiles of work"
    if mask is not None and mask.dtype not in MASK_DTYPES:
        return f"attn_mask dtype {mask.dtype}"
    config = default_config(
        rows, d, dv, query.dtype.itemsize, device, tasks=None, capacity=capacity
    )
    if shared_memory_bound(config, d, dv, query.dtype.itemsize) > device.shared_memory:
        return f"needs more than the {device.shared_memory} bytes of shared memory of {device.arch}"
    return None


def plan_split_kv(
    query: TensorFacts,
    key: TensorFacts,
    value: TensorFacts,
    device: DeviceFacts,
    *,
    lengths_dtype: torch.dtype | None = None,
    mask: TensorFacts | None = None,
    sinks_dtype: torch.dtype | None = None,
    is_causal: bool = False,
    offset: int = 0,
    scale: float,
    softcap: float = 0.0,
    left_window: int = -1,
    right_window: int = -1,
    batch_invariant: bool = False,
    out_stride: tuple[int, int, int] | None = None,
    config: SplitKVConfig | None = None,
) -> SplitKVPlan:
    """A plan over the 4-D facts ``[B,Hq,Sq,D]``, ``[B,Hkv,T,D]``, ``[B,Hkv,T,Dv]`` of a legal problem.

    ``offset`` is the position of query row 0 where no lengths are given; with lengths it is ``n - Sq`` on the device.
    ``out_stride`` are the element strides (batch, head, query row) of the output, contiguous 4-D by default.
    """
    batch, q_heads, q_len, d = query.shape
    _, kv_heads, capacity, dv = value.shape
    group = q_heads // max(kv_heads, 1)
    rows = group * q_len
    if config is None:
        tasks = None if batch_invariant else batch * kv_heads
        config = default_config(
            rows, d, dv, query.dtype.itemsize, device, tasks=tasks, capacity=capacity
        )
    block_m, block_n = config.block_m, config.block_n
    block_dv = max(_pow2(dv), 16)
    row_tiles = _cdiv(rows, block_m)
    tasks = batch * kv_heads * row_tiles
    tiles = max(1, _cdiv(capacity, block_n))
    places = device.multiprocessors * config.programs_per_multiprocessor
    balanced = row_tiles == 1 and not batch_invariant
    split_tiles = 0
    if balanced:
        splits, programs = 1, _programs(tasks, tiles, places)
        slots, merges = 2 * programs, programs > 1
    else:
        if batch_invariant:
            # Key positions alone set the cuts. Many query rows keep the machine busy without any.
            split_tiles = (
                max(1, _INVARIANT_SPLIT_KEYS // block_n)
                if rows <= 64
                else _INT32_MAX // (2 * block_n)
            )
            splits = _cdiv(tiles, split_tiles)
        else:
            splits = min(max(places // max(tasks, 1), 1), tiles)
        programs = slots = tasks * splits
        merges = splits > 1
    part_rows = min(_pow2(rows), block_m)
    # Merging: four parts at a time if the registers hold them, and a bounded number of bytes in flight.
    part_bytes = part_rows * block_dv * 4
    many_parts = (
        batch_invariant or programs >= 8 * tasks
    )  # invariant: the order of sums may not follow the capacity
    unroll = 4 if many_parts and 4 * part_bytes <= _MERGE_BYTES else 1
    merge_stages = 1 + min(_MERGE_BYTES // (unroll * part_bytes), 2)

    # A window wider than the cache is no window; it must not overflow either.
    reach = capacity + q_len
    has_left = 0 <= left_window < reach
    has_right = 0 <= right_window < reach
    if q_len == 1 and lengths_dtype is not None:
        is_causal = False  # the only query row is the last one: it sees every valid key
    if is_causal:
        has_right = False  # causality is the narrower bound
    has_bias = mask is not None and mask.dtype != torch.bool
    natural = softcap > 0 or has_bias
    nvidia = device.type == "cuda" and device.arch.startswith("sm_")
    pdl = nvidia and device.capability is not None and device.capability >= (9, 0)
    options: dict[str, Any] = dict(num_warps=config.num_warps)
    if pdl:
        options["launch_pdl"] = True
    if nvidia and config.max_registers is not None:
        options["maxnreg"] = config.max_registers

    absent = (query.dtype, query.aligned)  # an unused pointer argument: the query stands in for it
    tensor_q, tensor_k, tensor_v = ((t.dtype, t.aligned) for t in (query, key, value))
    tensor_out = (query.dtype, True)
    tensor_lengths = absent if lengths_dtype is None else (lengths_dtype, False)
    tensor_sinks = absent if sinks_dtype is None else (sinks_dtype, False)
    tensor_mask = absent if mask is None else (_storage(mask.dtype), mask.aligned)
    tensor_partials = (torch.float32, True) if merges else tensor_out
    tensor_counters = (torch.int32, True) if merges else tensor_out

    o_strides = out_stride or (q_heads * q_len * dv, q_len * dv, dv)
    launch = Launch(
        split_kv_kernel,
        grid=(programs, 1, 1),
        pointers=dict(
            query=tensor_q, key=tensor_k, value=tensor_v, out=tensor_out, lengths=tensor_lengths, mask=tensor_mask,
            sinks=tensor_sinks, partials=tensor_partials, counters=tensor_counters,
        ),
        scalars=dict(
            batch=batch, kv_heads=kv_heads, group=group, q_len=q_len, capacity=capacity,
            mask_len=mask.shape[3] if mask is not None else 0, past=offset,
            left=left_window if has_left else 0, right=right_window if has_right else 0, splits=splits, slots=slots,
            scale=scale if natural else scale * _LOG2E, softcap=float(softcap) if softcap > 0 else 1.0,
            **_strides("q_stride_", "bhs", query), **_strides("k_stride_", "bht", key),
            **_strides("v_stride_", "bht", value), **dict(zip(_OUT_STRIDES, o_strides)),
            **_mask_strides(mask),
        ),
        constants=dict(
            D=d, DV=dv, BLOCK_D=max(_pow2(d), 16), BLOCK_DV=block_dv, BLOCK_B=_pow2(batch) if balanced else 1,
            BLOCK_M=block_m, BLOCK_N=block_n, ROWS=part_rows, UNROLL=unroll, MERGE_STAGES=merge_stages, BALANCED=balanced,
            SPLIT_TILES=split_tiles, MERGE=merges, SINGLE_QUERY=q_len == 1, HAS_LENGTHS=lengths_dtype is not None,
            HAS_BOOL_MASK=mask is not None and not has_bias, HAS_BIAS=has_bias, HAS_SINKS=sinks_dtype is not None,
            HAS_SOFTCAP=softcap > 0, IS_CAUSAL=is_causal, HAS_LEFT=has_left, HAS_RIGHT=has_right,
            DOT_PRECISION="ieee" if query.dtype == torch.float32 else "tf32", STAGES=config.num_stages,
            NARROW_ROWS=block_n * max(key.stride[2], value.stride[2]) <= _INT32_MAX, PDL=pdl,
        ),
        options=options,
    )  # fmt: skip
    return SplitKVPlan(
        device=device,
        launch=launch,
        scratch=slots * part_rows * (block_dv + 2) if merges else 0,
        counters=tasks if merges else 0,
        empty=batch * q_heads * q_len * dv * capacity == 0,
    )


_OUT_STRIDES = ("o_stride_b", "o_stride_h", "o_stride_s")
_INVARIANT_SPLIT_KEYS = 512


def _programs(tasks: int, tiles: int, places: int) -> int:
    """How many programs share the work: about as many as run at once.

    A number that divides the tasks, or that they divide, where that costs little: rows of equal length are then cut
    at their ends, or not at all.
    """
    if tasks * tiles <= places:
        return max(1, tasks * tiles)
    if tasks <= places:
        even = places // tasks * tasks
    else:
        rounds = -(-tasks // places)
        even = tasks // rounds if tasks % rounds == 0 else 0
    return even if even >= 0.9 * places else places


def _strides(prefix: str, dims: str, facts: TensorFacts) -> dict[str, int]:
    return {prefix + dim: stride for dim, stride in zip(dims, facts.stride)}


def _mask_strides(mask: TensorFacts | None) -> dict[str, int]:
    if mask is None:
        return dict.fromkeys(
            ("mask_stride_b", "mask_stride_h", "mask_stride_s", "mask_stride_t"), 0
        )
    return _strides("mask_stride_", "bhst", mask)


def _storage(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype


class SplitKVPlan:
    """One launch, worked out. Safe to share between threads; holds no tensor."""

    def __init__(
        self, *, device: DeviceFacts, launch: Launch, scratch: int, counters: int, empty: bool
    ) -> None:
        self.device = device
        self.launch = launch
        self.scratch = scratch  # float32 elements for parts
        self.counters = counters  # zeroed int32 counters, one a task
        self.empty = empty  # no output or no key: nothing to launch
        self.specialization = (device.index, launch.specialization)

    def is_compiled(self) -> bool:
        """Whether a run needs no compiler and no module load."""
        return self.empty or self.device.interpret or self.launch.is_compiled(self.device.index)

    def compile(self) -> None:
        """Compiles and loads the kernel and sets counters aside; launches nothing. Not for use inside a capture."""
        if self.empty or self.device.interpret:
            return
        self.launch.compile(self.device.index)
        if self.counters:
            counter_arena(self.device.index).reserve(self.counters)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor | None,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the attention output to ``out`` and returns it. Only data pointers of the tensors are used."""
        if self.empty:
            return out.zero_()
        if mask is None:
            mask = query
        elif mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        if lengths is None:
            lengths = query
        if sinks is None:
            sinks = query
        index = self.device.index
        if self.counters:
            partials = torch.empty(self.scratch, dtype=torch.float32, device=out.device)
            counters = self._counters(out.device)
            self.launch(index, query, key, value, out, lengths, mask, sinks, partials, counters)
        else:
            self.launch(index, query, key, value, out, lengths, mask, sinks, out, out)
        return out

    def _counters(self, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return torch.zeros(self.counters, dtype=torch.int32)
        arena = counter_arena(self.device.index)
        if torch.cuda.is_current_stream_capturing():
            return arena.for_captured_call(self.counters)
        return arena.for_stream(driver.active.get_current_stream(self.device.index), self.counters)


_COMPILED: dict[Any, Any] = {}  # (device index, specialization) -> Triton's compiled kernel
_COMPILE_LOCK = threading.Lock()


class Launch:
    """A kernel with its grid and every argument but the tensors, in the kernel's order."""

    def __init__(
        self,
        kernel: Any,
        *,
        grid: tuple[int, int, int],
        pointers: Mapping[str, tuple[torch.dtype, bool]],
        scalars: Mapping[str, int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.pointers = pointers
        self.scalars = scalars
        self.constants = constants
        self.options = options
        values = {**scalars, **constants}
        self._tail = tuple(values[name] for name in kernel.arg_names[len(pointers) :])
        self._compiled: Any = None
        self.specialization = (
            kernel.fn.__name__,
            tuple(pointers.values()),
            tuple(_specialization(name, value) for name, value in scalars.items()),
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
        # The compiled kernel itself: binding sixty arguments by name takes Triton longer than the launch.
        stream = driver.active.get_current_stream(device_index)
        self._compiled(*[tensor.data_ptr() for tensor in tensors], *self._tail, stream=stream)

    def is_compiled(self, device_index: int) -> bool:
        return (device_index, self.specialization) in _COMPILED

    def compile(self, device_index: int) -> None:
        key = (device_index, self.specialization)
        with _COMPILE_LOCK:
            compiled = _COMPILED.get(key)
            if compiled is None:
                with torch.cuda.device(device_index):
                    heads = [_Pointer(dtype, aligned) for dtype, aligned in self.pointers.values()]
                    compiled = self.kernel.warmup(
                        *heads, *self._tail, grid=self.grid, **self.options
                    )
                    compiled._init_handles()  # loads the module, which a capture may not do
                _COMPILED[key] = compiled
        self._compiled = compiled[self.grid]

    def compile_for(self, target: Any) -> Any:
        """The kernel compiled for a ``triton.backends.compiler.GPUTarget``, with or without a GPU."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for position, name in enumerate(self.kernel.arg_names):
            at = (position,)
            if name in self.pointers:
                dtype, aligned = self.pointers[name]
                signature[name] = "*" + _TRITON_TYPES[dtype]
                if aligned:
                    attributes[at] = [["tt.divisibility", 16]]
                continue
            if name in self.constants:
                signature[name] = "constexpr"
                constants[at] = self.constants[name]
                continue
            value = self.scalars[name]
            kind = _specialization(name, value)
            if kind == (False, True, False):
                signature[name] = "constexpr"
                constants[at] = value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                wide, divisible = kind if len(kind) == 2 else (kind[0], kind[2])
                signature[name] = "i64" if wide else "i32"
                if divisible:
                    attributes[at] = [["tt.divisibility", 16]]
        options = dict(self.options)
        if target.backend != "cuda":
            options = dict(num_warps=options["num_warps"])
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options)


_UNSPECIALIZED = frozenset(
    ("batch", "kv_heads", "group", "q_len", "capacity", "mask_len", "past", "left", "right", "splits", "slots")
)  # fmt: skip
_TRITON_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def _specialization(name: str, value: int | float) -> tuple[bool, ...]:
    """What Triton's compiler sees of a scalar: (64-bit, is 1, divisible by 16), (64-bit, False) unspecialized."""
    if isinstance(value, float):
        return ()
    wide = not -(2**31) <= value < 2**31
    if name in _UNSPECIALIZED:
        return (wide, False)
    return (wide, value == 1, value % 16 == 0)


class _Pointer:
    """Stands for a tensor when compiling: a dtype and an alignment."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if aligned else dtype.itemsize

    def data_ptr(self) -> int:
        return self._address
