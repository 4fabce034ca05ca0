"""Split-KV decode attention: the host side. Facts in, a launch plan out; no tensor is read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from csrc_free_ops.decode.kernels import split_kv_kernel
from csrc_free_ops.decode.scratch import counter_arena
from csrc_free_ops.facts import DeviceFacts, TensorFacts
from csrc_free_ops.launch import Launch, Pointer
from csrc_free_ops.sizes import next_power_of_2

MAX_HEAD_DIM = 256
MAX_BATCH = 8192  # every program adds up the lengths of the whole batch
MAX_KEYS = 2**30  # positions and window bounds are 32-bit in the kernel
MASK_DTYPES = (
    torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip

_INT32_MAX = 2**31 - 1
_SMALL = 8 * 4096  # tasks times keys up to which one program a multiprocessor is enough
_KEY_ELEMENTS = 8192  # of the keys in a tile of middling size: 16 KiB if they have 16 bits
_INVARIANT_SPLIT_KEYS = 512  # keys of one split where the batch may not matter
_MERGE_BYTES = 32768  # of parts that a program holds while merging


# ---- Tile shapes


class SplitKVConfig(NamedTuple):
    """What the kernel is compiled for beyond the problem itself."""

    block_m: int  # query rows (group * query length) of one task
    block_n: int  # keys of one tile
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None  # a thread; fewer let more programs share a multiprocessor
    balanced: bool | None = None  # the schedule (see the kernel); None for what shapes suggest


def default_config(
    rows: int,
    d: int,
    dv: int,
    itemsize: int,
    device: DeviceFacts,
    *,
    tasks: int | None,
    capacity: int,
    cache_itemsize: int | None = None,
    mask_itemsize: int = 0,
) -> SplitKVConfig:
    """The tile shape for ``rows`` query rows per KV head and ``capacity`` keys.

    The preferences were measured on an H200 (``benchmarks/split_kv_configs.py``; what was learned
    is in docs/performance/notes.md); the first that fits the device's shared memory is taken, or
    else the smallest shape there is.

    Args:
        rows: heads in a group times query length.
        d, dv: head sizes of keys and of values.
        itemsize: bytes of an element of the query.
        device: where the kernel will run.
        tasks: batch rows times KV heads; None for a shape that depends on neither batch nor
            capacity.
        capacity: keys in the cache.
        cache_itemsize: bytes of an element of key and value, by default as of the query.
        mask_itemsize: of the mask, where its tiles count (see `shared_memory_bound`).
    """
    widest = _block(max(d, dv))
    if cache_itemsize == 1:
        choices = _float8_preferences(rows, widest, tasks, capacity)
    else:
        choices = _preferences(rows, widest, itemsize, tasks, capacity)
    steps: tuple[dict[str, Any], ...] = (
        dict(num_stages=2),
        dict(block_n=_KEY_ELEMENTS // widest // 2),
        dict(block_n=16),
        dict(block_m=16),
        dict(num_stages=1),
    )
    for smaller in steps:
        choices.append(choices[-1]._replace(**smaller))
    for config in choices:
        bound = shared_memory_bound(config, d, dv, itemsize, cache_itemsize, mask_itemsize)
        if bound <= device.shared_memory:
            return config
    return choices[-1]


def _preferences(
    rows: int, widest: int, itemsize: int, tasks: int | None, capacity: int
) -> list[SplitKVConfig]:
    """Tile shapes for heads that fit ``widest`` columns, the fastest first."""
    # Full float32 products run on the plain units, from registers: 16 rows are what these hold.
    block_m = min(max(next_power_of_2(rows), 16), 64 if itemsize == 2 else 16)
    keys = _KEY_ELEMENTS // widest
    light = SplitKVConfig(block_m, keys, 4, 3, 2)
    heavy = SplitKVConfig(block_m, 2 * keys, 8, 3, 1)
    full_precision = SplitKVConfig(block_m, keys // 2, 8, 2, 2)
    if block_m > 16:
        return [SplitKVConfig(block_m, keys, 4 if block_m * widest <= 4096 else 8, 2, 2)]
    if tasks is None:
        return [full_precision if itemsize == 4 else light]
    if itemsize == 4:
        return [full_precision]
    one_tile = []
    if capacity <= 2 * keys:  # nothing to merge
        one_tile = [SplitKVConfig(block_m, keys if capacity <= keys else 2 * keys, 4, 2, 1)]
    if tasks * capacity <= _SMALL:
        return [*one_tile, light._replace(programs_per_multiprocessor=1)]
    if 48 <= tasks < 96 and widest < 256:
        # Often a large cache with short sequences in it: more, lighter programs lose less at
        # their ends.
        return [*one_tile, SplitKVConfig(block_m, keys, 4, 2, 3, max_registers=168)]
    return [*one_tile, heavy, light]


def _float8_preferences(
    rows: int, widest: int, tasks: int | None, capacity: int
) -> list[SplitKVConfig]:
    """`_preferences` for float8 caches, from what the compiled kernels show; not measured yet.

    A byte brings twice the numbers, each to be converted, so that instructions weigh more: tiles
    have twice the keys, and as many warps share a multiprocessor as registers let without spills.
    """
    block_m = min(max(next_power_of_2(rows), 16), 64)
    keys = 2 * _KEY_ELEMENTS // widest if widest >= 64 else 128
    light = SplitKVConfig(block_m, keys, 4, 3, 2)
    full = SplitKVConfig(block_m, keys, 4, 2, 3, max_registers=168)
    if widest >= 256:
        full = SplitKVConfig(block_m, 2 * keys, 8, 2, 2, max_registers=128)
    if block_m > 16:
        return [SplitKVConfig(block_m, keys // 2, 4 if block_m * widest <= 4096 else 8, 2, 2)]
    if tasks is None:
        return [light]
    one_tile = []
    if capacity <= keys:  # nothing to merge
        one_tile = [SplitKVConfig(block_m, keys // 2 if capacity <= keys // 2 else keys, 4, 2, 1)]
    if tasks * capacity <= _SMALL:
        return [*one_tile, light._replace(programs_per_multiprocessor=1)]
    return [*one_tile, full, light]


def shared_memory_bound(
    config: SplitKVConfig,
    d: int,
    dv: int,
    itemsize: int,
    cache_itemsize: int | None = None,
    mask_itemsize: int = 0,
) -> int:
    """Bytes of shared memory that a program of this shape may take, from above.

    Tiles of a mask are hidden in what is above for 16-bit caches; float8 tiles have twice the keys,
    and theirs are counted.
    """
    cache_itemsize = cache_itemsize or itemsize
    block_d, block_dv = _block(d), _block(dv)
    rows = config.block_m * (block_d * itemsize + config.block_n * mask_itemsize)
    if config.num_stages > 1:
        tile = config.block_n * (block_d + block_dv) * cache_itemsize + rows
        tiles = (config.num_stages - 1) * tile
    else:
        tiles = config.block_n * max(block_d, block_dv) * cache_itemsize + rows
    # Changes of layout on the way from one matrix unit's result to the next one's operand.
    exchange = min(config.block_m * max(block_dv, config.block_n) * 4, 32768)
    return tiles + exchange + 512


def _block(size: int) -> int:
    """Columns of a tile of rows of ``size`` elements; matrix units take no fewer than 16."""
    return max(next_power_of_2(size), 16)


def _cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


# ---- Planning


def unsupported(
    query: TensorFacts,
    key: TensorFacts,
    value: TensorFacts,
    device: DeviceFacts,
    *,
    mask: TensorFacts | None = None,
    batch_invariant: bool = False,
    **_: Any,
) -> str | None:
    """Why the kernel cannot take a legal problem, in words; None if it can.

    Takes what ``plan_split_kv`` takes; no limit depends on the other arguments.
    """
    batch, q_heads, q_len, d = query.shape
    kv_heads, capacity, dv = value.shape[1:]
    if max(d, dv) > MAX_HEAD_DIM:
        return f"head sizes D={d}, Dv={dv} exceed {MAX_HEAD_DIM}"
    for name, facts in (("query", query), ("key", key), ("value", value)):
        if facts.shape[3] > 1 and facts.stride[3] != 1:
            return f"the last dimension of {name} has stride {facts.stride[3]}, not 1"
    if batch > MAX_BATCH:
        return f"batch {batch} exceeds {MAX_BATCH}"
    rows = q_heads // max(kv_heads, 1) * q_len
    if batch * kv_heads * _cdiv(max(rows, 1), 16) * (_cdiv(capacity, 16) + 1) > _INT32_MAX:
        return "more than 2^31 tiles of work"
    if capacity + q_len > MAX_KEYS:
        return f"{capacity} keys and {q_len} query rows exceed {MAX_KEYS} positions"
    if mask is not None and mask.dtype not in MASK_DTYPES:
        return f"attn_mask dtype {mask.dtype}"
    itemsize, sizes = query.dtype.itemsize, _other_sizes(key, mask)
    config = default_config(rows, d, dv, itemsize, device, tasks=None, capacity=capacity, **sizes)
    if shared_memory_bound(config, d, dv, itemsize, **sizes) > device.shared_memory:
        return f"needs more than the {device.shared_memory} bytes of shared memory of {device.arch}"
    if batch_invariant and rows <= 64:
        parts = (
            batch * kv_heads * _cdiv(rows, config.block_m) * _cdiv(capacity, _INVARIANT_SPLIT_KEYS)
        )
        if parts * min(next_power_of_2(rows), config.block_m) * (_block(dv) + 2) > _INT32_MAX:
            return "batch_invariant would need more than 2^31 elements of scratch"
    return None


def _other_sizes(key: TensorFacts, mask: TensorFacts | None) -> dict[str, int]:
    """Bytes of an element of the caches and of a mask, as ``default_config`` takes them."""
    sizes = dict(cache_itemsize=key.dtype.itemsize)
    if mask is not None and key.dtype == torch.float8_e4m3fn:
        sizes["mask_itemsize"] = mask.dtype.itemsize
    return sizes


def plan_split_kv(
    query: TensorFacts,
    key: TensorFacts,
    value: TensorFacts,
    device: DeviceFacts,
    *,
    lengths_dtype: torch.dtype | None = None,
    mask: TensorFacts | None = None,
    sinks_dtype: torch.dtype | None = None,
    k_scale: tuple[int, ...] | None = None,
    v_scale: tuple[int, ...] | None = None,
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
    """The launch plan of a legal problem that ``unsupported`` has nothing against.

    Args:
        query: ``[B,Hq,Sq,D]``, float16, bfloat16 or float32.
        key: ``[B,Hkv,T,D]``, the query's dtype or float8_e4m3fn. ``Hkv`` divides ``Hq``.
        value: ``[B,Hkv,T,Dv]``, the key's dtype.
        device: where the plan will run.
        lengths_dtype: of the counts n of valid keys, a dense ``[B]``; None if every key is valid.
        mask: ``[B,Hq,Sq,Tm]``, bool (True is visible) or added to the logits, stride 0 where it is
            broadcast; keys from ``Tm`` on are hidden.
        sinks_dtype: of the sink logits, a dense ``[Hq]``; None if there are none.
        k_scale, v_scale: shapes of dense float32 scales of float8 caches, ``()`` or ``(Hkv,)``;
            None for 1.
        is_causal: a query row sees no key past its own position.
        offset: the key position of query row 0 without lengths; with them it is ``n - Sq``.
        scale: factor of the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 leaves them.
        left_window, right_window: how many keys a row sees before and after its own position; -1
            for no bound.
        batch_invariant: a row's bits depend neither on the rest of the batch nor on ``T``.
        out_stride: element strides (batch, head, query row) of the output; None for contiguous
            ``[B,Hq,Sq,Dv]``.
        config: the tile shape, by default ``default_config``.

    Raises:
        ValueError: ``config.balanced`` is True where ``batch_invariant`` or the number of query
            rows rules that schedule out.
    """
    batch, q_heads, q_len, _d = query.shape
    _, kv_heads, capacity, dv = value.shape
    if q_len == 1 and lengths_dtype is not None:
        is_causal = False  # the only query row is the last one: it sees every valid key
    # A window wider than the cache is no window; it must not overflow either.
    reach = capacity + q_len
    problem = _Problem(
        query=query,
        key=key,
        value=value,
        lengths_dtype=lengths_dtype,
        mask=mask,
        sinks_dtype=sinks_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        is_causal=is_causal,
        offset=offset,
        left=left_window if 0 <= left_window < reach else None,
        # Causality is the narrower bound.
        right=right_window if 0 <= right_window < reach and not is_causal else None,
        scale=scale,
        softcap=softcap,
        batch_invariant=batch_invariant,
        out_stride=out_stride or (q_heads * q_len * dv, q_len * dv, dv),
    )
    config = config or _config_for(problem, device)
    schedule = _schedule(problem, config, device)
    merge = _merge(problem, config, schedule)
    launch = Launch(
        split_kv_kernel,
        grid=schedule.programs,
        pointers=_pointers(problem, schedule),
        scalars=_scalars(problem, schedule),
        constants=_constants(problem, device, config, schedule, merge),
        options=_options(device, config),
    )
    return SplitKVPlan(
        device=device,
        launch=launch,
        scratch=schedule.slots * merge.rows * (_block(dv) + 2) if schedule.merges else 0,
        counters=schedule.tasks if schedule.merges else 0,
        empty=batch * q_heads * q_len * dv * capacity == 0,
    )


class _Problem(NamedTuple):
    """The arguments of ``plan_split_kv``, without the bounds that bound nothing."""

    query: TensorFacts
    key: TensorFacts
    value: TensorFacts
    lengths_dtype: torch.dtype | None
    mask: TensorFacts | None
    sinks_dtype: torch.dtype | None
    k_scale: tuple[int, ...] | None
    v_scale: tuple[int, ...] | None
    is_causal: bool
    offset: int
    left: int | None
    right: int | None
    scale: float
    softcap: float
    batch_invariant: bool
    out_stride: tuple[int, int, int]

    @property
    def kv_tasks(self) -> int:
        """Batch rows times KV heads."""
        return self.value.shape[0] * self.value.shape[1]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.query.shape[1] // max(self.value.shape[1], 1)

    @property
    def rows(self) -> int:
        """Query rows of one KV head."""
        return self.group * self.query.shape[2]

    @property
    def is_float8(self) -> bool:
        """Whether the caches are float8_e4m3fn."""
        return self.key.dtype == torch.float8_e4m3fn

    @property
    def has_value_words(self) -> bool:
        """Whether float8 values lie so that two of a row are a 16-bit word."""
        value = self.value
        sizes = (value.shape[3], *value.stride[:3])
        return self.is_float8 and value.aligned and all(size % 2 == 0 for size in sizes)

    @property
    def has_bias(self) -> bool:
        """Whether the mask is added to the logits."""
        return self.mask is not None and self.mask.dtype != torch.bool


def _config_for(problem: _Problem, device: DeviceFacts) -> SplitKVConfig:
    """The default tile shape of a problem."""
    return default_config(
        problem.rows,
        problem.query.shape[3],
        problem.value.shape[3],
        problem.query.dtype.itemsize,
        device,
        tasks=None if problem.batch_invariant else problem.kv_tasks,
        capacity=problem.value.shape[2],
        **_other_sizes(problem.key, problem.mask),
    )


class _Schedule(NamedTuple):
    """How tiles are dealt out to programs; the kernel's docstring has the terms."""

    tasks: int
    programs: int
    slots: int  # parts that scratch has room for
    balanced: bool = False
    splits: int = 1  # programs a task, if not balanced
    split_tiles: int = 0  # tiles of a split that lies at a fixed position; 0 for equal splits
    one_row_tile: bool = True  # all query rows of a KV head are one task
    one_tile: bool = False  # a program is a task of one tile; never if balanced

    @property
    def merges(self) -> bool:
        """Whether any task may have several parts."""
        return (self.programs if self.balanced else self.splits) > 1


def _schedule(problem: _Problem, config: SplitKVConfig, device: DeviceFacts) -> _Schedule:
    """The schedule that fills the device, or that no neighbour changes if batch-invariant."""
    row_tiles = _cdiv(problem.rows, config.block_m)
    tasks = problem.kv_tasks * row_tiles
    tiles = max(1, _cdiv(problem.value.shape[2], config.block_n))
    places = device.multiprocessors * config.programs_per_multiprocessor
    can_balance = row_tiles == 1 and not problem.batch_invariant
    balanced = config.balanced
    if balanced is None:
        balanced = can_balance and not _splits_evenly(problem, tasks, tiles, places)
    if balanced:
        if not can_balance:
            raise ValueError("a balanced schedule takes one tile of rows, and no batch_invariant")
        programs = _programs(tasks, tiles, places)
        # A share has at most two parts of tasks that it does not finish: its first and its last.
        return _Schedule(tasks, programs, slots=2 * programs, balanced=True)
    if problem.batch_invariant:
        split_tiles = _invariant_split_tiles(problem.rows, config.block_n)
        splits = _cdiv(tiles, split_tiles)
    else:
        split_tiles = 0
        # The last bound is that of an exact division in the kernel (`_shares_by_reciprocal`).
        splits = min(max(places // max(tasks, 1), 1), tiles, _INT32_MAX // tiles)
    programs = tasks * splits
    return _Schedule(
        tasks,
        programs,
        slots=programs,
        splits=splits,
        split_tiles=split_tiles,
        one_row_tile=row_tiles == 1,
        one_tile=tiles == 1 and not problem.batch_invariant,
    )


def _splits_evenly(problem: _Problem, tasks: int, tiles: int, places: int) -> bool:
    """Whether shapes alone tell that equal splits of every task balance the work.

    That takes tasks of equally many tiles, whatever the lengths are. The largest split is then what
    the largest share would be, and which task it belongs to need not be found from the lengths.
    """
    is_equal = problem.value.shape[0] == 1 or problem.lengths_dtype is None or tiles == 1
    programs = _programs(tasks, tiles, places)
    return is_equal and tasks <= places and programs % max(tasks, 1) == 0


def _programs(tasks: int, tiles: int, places: int) -> int:
    """How many programs share the work: about as many as run at once.

    A number that divides the tasks, or that they divide, where that costs little: rows of equal
    length are then cut at their ends, or not at all.
    """
    if tasks * tiles <= places:
        return max(1, tasks * tiles)
    if tasks <= places:
        even = places // tasks * tasks
    else:
        rounds = _cdiv(tasks, places)
        even = tasks // rounds if tasks % rounds == 0 else 0
    return even if even >= 0.9 * places else places


def _invariant_split_tiles(rows: int, block_n: int) -> int:
    """Tiles of a split, from what neither batch nor capacity changes."""
    if rows <= 64:
        return max(1, _INVARIANT_SPLIT_KEYS // block_n)
    return _INT32_MAX // (2 * block_n)  # one split: many rows keep the machine busy without cuts


class _Merge(NamedTuple):
    """How parts are stored and merged."""

    rows: int  # of a part
    unroll: int  # parts added at a time


def _merge(problem: _Problem, config: SplitKVConfig, schedule: _Schedule) -> _Merge:
    """As many parts at a time as there may be in a task, and as the registers hold."""
    rows = min(next_power_of_2(problem.rows), config.block_m)
    part_bytes = rows * _block(problem.value.shape[3]) * 4
    # The order of sums may not follow the capacity if batch-invariant, nor may then this choice.
    parts = 8 if problem.batch_invariant else schedule.programs // max(schedule.tasks, 1)
    unroll = max(2, min(next_power_of_2(parts), 8, _MERGE_BYTES // part_bytes))
    return _Merge(rows, unroll)


def _pointers(problem: _Problem, schedule: _Schedule) -> dict[str, Pointer]:
    """What each tensor argument points to; see ``SplitKVPlan.run`` for those that are absent."""
    lengths_dtype, mask, sinks_dtype = problem.lengths_dtype, problem.mask, problem.sinks_dtype
    query, key, value = (
        Pointer(facts.dtype, facts.aligned) for facts in (problem.query, problem.key, problem.value)
    )
    if problem.is_float8:
        words = torch.uint16 if problem.has_value_words else torch.uint8
        key, value = key._replace(dtype=torch.uint8), value._replace(dtype=words)
    absent = query
    scales = Pointer(torch.float32, False)
    out = Pointer(query.dtype, True)
    return dict(
        query=query,
        key=key,
        value=value,
        out=out,
        lengths=absent if lengths_dtype is None else Pointer(lengths_dtype, False),
        mask=absent if mask is None else Pointer(_storage(mask.dtype), mask.aligned),
        sinks=absent if sinks_dtype is None else Pointer(sinks_dtype, False),
        partials=Pointer(torch.float32, True) if schedule.merges else out,
        counters=Pointer(torch.int32, True) if schedule.merges else out,
        k_scales=absent if problem.k_scale is None else scales,
        v_scales=absent if problem.v_scale is None else scales,
    )


def _storage(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which the kernel reads a mask."""
    return torch.uint8 if dtype == torch.bool else dtype


def _scalars(problem: _Problem, schedule: _Schedule) -> dict[str, int | float]:
    """The kernel's sizes, bounds, factors and strides by name."""
    batch, _q_heads, q_len, _d = problem.query.shape
    _, kv_heads, capacity, _dv = problem.value.shape
    mask = problem.mask
    natural = problem.softcap > 0 or problem.has_bias  # the kernel's NATURAL
    return dict(
        batch=batch,
        kv_heads=kv_heads,
        group=problem.group,
        q_len=q_len,
        capacity=capacity,
        mask_len=0 if mask is None else mask.shape[3],
        past=problem.offset,
        left=problem.left or 0,
        right=problem.right or 0,
        splits=schedule.splits,
        splits_reciprocal=_cdiv(2**31, schedule.splits) if schedule.splits > 1 else 0,
        slots=schedule.slots,
        scale=problem.scale if natural else problem.scale * math.log2(math.e),
        softcap=float(problem.softcap) if problem.softcap > 0 else 1.0,
        **_strides("q_stride_", "bhs", problem.query.stride),
        **_strides("k_stride_", "bht", problem.key.stride),
        **_strides("v_stride_", "bht", problem.value.stride),
        **_strides("o_stride_", "bhs", problem.out_stride),
        **_strides("mask_stride_", "bhst", (0, 0, 0, 0) if mask is None else mask.stride),
        k_scale_stride=1 if problem.k_scale else 0,
        v_scale_stride=1 if problem.v_scale else 0,
    )


def _strides(prefix: str, dims: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Strides by the kernel's names for them."""
    return {prefix + dim: stride for dim, stride in zip(dims, strides)}


def _constants(
    problem: _Problem,
    device: DeviceFacts,
    config: SplitKVConfig,
    schedule: _Schedule,
    merge: _Merge,
) -> dict[str, Any]:
    """The kernel's ``tl.constexpr`` arguments by name."""
    d, dv = problem.query.shape[3], problem.value.shape[3]
    widest_step = max(problem.key.stride[2], problem.value.stride[2])
    return dict(
        D=d,
        DV=dv,
        BLOCK_D=_block(d),
        BLOCK_DV=_block(dv),
        BLOCK_B=next_power_of_2(problem.query.shape[0]) if schedule.balanced else 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        BALANCED=schedule.balanced,
        SPLIT_TILES=schedule.split_tiles,
        ONE_ROW_TILE=schedule.one_row_tile,
        ONE_TILE=schedule.one_tile,
        MERGE=schedule.merges,
        ROWS=merge.rows,
        UNROLL=merge.unroll,
        SINGLE_QUERY=problem.query.shape[2] == 1,
        HAS_LENGTHS=problem.lengths_dtype is not None,
        HAS_BOOL_MASK=problem.mask is not None and not problem.has_bias,
        HAS_BIAS=problem.has_bias,
        HAS_SINKS=problem.sinks_dtype is not None,
        HAS_SOFTCAP=problem.softcap > 0,
        IS_CAUSAL=problem.is_causal,
        HAS_LEFT=problem.left is not None,
        HAS_RIGHT=problem.right is not None,
        FLOAT8=problem.is_float8,
        HAS_K_SCALE=problem.k_scale is not None,
        HAS_V_SCALE=problem.v_scale is not None,
        DOT_PRECISION="ieee" if problem.query.dtype == torch.float32 else "tf32",
        # Over few numbers the roundings of P do not average out, and may add to that of the output.
        TWO_TERMS=problem.query.dtype == torch.bfloat16 and dv <= 32 and not problem.is_float8,
        NARROW_ROWS=config.block_n * widest_step <= _INT32_MAX,
        PDL=device.has_pdl,
        NATIVE_FLOAT8=problem.is_float8 and _converts_float8(device),
        V_WORDS=problem.has_value_words,
    )


def _options(device: DeviceFacts, config: SplitKVConfig) -> dict[str, Any]:
    """Triton's options of compiling and launching."""
    options: dict[str, Any] = dict(num_warps=config.num_warps)
    if device.has_pdl:
        options["launch_pdl"] = True
    if device.is_nvidia and config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return options


def _converts_float8(device: DeviceFacts) -> bool:
    """Whether the device has instructions from float8_e4m3fn to float16 (since Ada)."""
    return device.is_nvidia and device.capability is not None and device.capability >= (8, 9)


class SplitKVPlan:
    """One launch, worked out. Safe to share between threads; holds no tensor."""

    def __init__(
        self, *, device: DeviceFacts, launch: Launch, scratch: int, counters: int, empty: bool
    ) -> None:
        self.device = device
        self.launch = launch
        self.scratch = scratch  # float32 elements for parts
        self.counters = counters  # zeroed int32 counters, one a task; 0 if nothing is merged
        self.empty = empty  # no output or no key: nothing to launch
        #: What the kernel is compiled and loaded for.
        self.specialization = (device.index, launch.specialization)

    def is_compiled(self) -> bool:
        """Whether a run needs no compiler and no module load."""
        return self.empty or self.device.interpret or self.launch.is_compiled(self.device.index)

    def compile(self) -> None:
        """Compiles and loads the kernel and sets counters aside; launches nothing.

        Not for use inside a capture.
        """
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
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention output to ``out``, on the current stream, and returns it.

        The tensors must have the dtypes, layouts and alignments that were planned for, and be
        absent where they were: of the tensors themselves only the addresses are used.
        """
        if self.empty:
            return out.zero_()
        if lengths is None:
            lengths = query
        if mask is None:
            mask = query
        elif mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        if sinks is None:
            sinks = query
        if k_scale is None:
            k_scale = query
        if v_scale is None:
            v_scale = query
        if self.counters:
            partials = torch.empty(self.scratch, dtype=torch.float32, device=out.device)
            counters = self._counters()
        else:
            partials = counters = out
        if self.device.interpret:  # a GPU is given addresses, the interpreter tensors with dtypes
            pointers = self.launch.pointers
            key = _as(key, pointers["key"][0])
            value = _as(value, pointers["value"][0])
        index = self.device.index
        self.launch(
            index, query, key, value, out, lengths, mask, sinks, partials, counters,
            k_scale, v_scale,
        )  # fmt: skip
        return out

    def _counters(self) -> torch.Tensor:
        """Zeroed counters that no launch running at the same time uses."""
        if self.device.type == "cpu":
            return torch.zeros(self.counters, dtype=torch.int32)
        arena = counter_arena(self.device.index)
        if torch.cuda.is_current_stream_capturing():
            return arena.for_captured_call(self.counters)
        return arena.for_stream(driver.active.get_current_stream(self.device.index), self.counters)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same memory in another dtype, also where an open stride (of size 1) does not divide."""
    if tensor.dtype is dtype:
        return tensor
    stride = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride())]
    return tensor.as_strided(tensor.shape, [*stride[:-1], 1]).view(dtype)
