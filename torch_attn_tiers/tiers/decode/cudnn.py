"""cuDNN's attention, through the graph API of ``nvidia-cudnn-frontend`` alone.

One query row over an external cache (``nonpad_kv_seqlen``), an internal one (``past_key``: the
length is one number) or all of ``T`` keys. cuDNN is always given lengths and never a causal flag,
which fails to build for one row in some versions and is wrong for grouped heads in others.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.cache.lengths import RowGuard
from csrc_free_ops.facts import is_capturing
from torch_attn_tiers.errors import ColdCaptureError
from torch_attn_tiers.problem import DecodeProblem
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.decode import single_row
from torch_attn_tiers.tiers.decode.device_memory import PlanTensors, current_stream
from torch_attn_tiers.tiers.decode.layout import output_shape
from torch_attn_tiers.tiers.decode.library import Library

FRONTEND = Library("nvidia-cudnn-frontend", "cudnn", oldest=(1, 24))

_OLDEST_BACKEND = (9, 3, 0)
#: Releases whose attention is unusable.
_BAD_BACKENDS = ((9, 10, 0), (9, 10, 1))
_MAX_HEAD_SIZE = 256
#: More batch rows or query heads fail when they run (pytorch/pytorch#181235).
_MAX_GRID = 65535
#: A release whose windows are wrong for more keys than that.
_BAD_WINDOWS, _BAD_WINDOWS_FROM = (9, 14, 0), 1024
#: Tensors of the graph.
_TENSORS = _QUERY, _KEY, _VALUE, _QUERY_COUNTS, _KEY_COUNTS, _OUT = tuple(range(1, 7))


def _absent(problem: DecodeProblem) -> str | None:
    return FRONTEND.absence()


def _device(problem: DecodeProblem) -> str | None:
    capability = problem.device.capability
    if not problem.device.is_nvidia or capability is None or capability < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    return None


def _head_sizes(problem: DecodeProblem) -> str | None:
    for name, size in (("key", problem.D), ("value", problem.Dv)):
        if size % 8 or size > _MAX_HEAD_SIZE:
            return (
                f"{name} has head size {size}; it must be a multiple of 8, at most {_MAX_HEAD_SIZE}"
            )
    return None


def _grid(problem: DecodeProblem) -> str | None:
    if max(problem.B, problem.Hq) > _MAX_GRID:
        return f"takes at most {_MAX_GRID} batch rows and query heads"
    return None


def _features(problem: DecodeProblem) -> str | None:
    return single_row.missing_features(problem, sinks=problem.sinks_dtype is not None)


def _windows(problem: DecodeProblem) -> str | None:
    if problem.left_window < 0 and problem.right_window < 0:
        return None
    if problem.lengths_dtype is None:
        return "takes windows with nonpad_kv_seqlen only"
    return None


_BASICS = (
    _absent,
    _device,
    single_row.query_dtype,
    single_row.cache_dtype,
    single_row.rows,
    single_row.sizes,
    _head_sizes,
    _grid,
    _features,
    single_row.causality,
    _windows,
    single_row.batch_invariance,
    single_row.alignment,
)


def _backend(problem: DecodeProblem) -> str | None:
    """What importing the library shows, where it could be used at all."""
    if any(basic(problem) is not None for basic in _BASICS):
        return None
    reason = FRONTEND.reason()
    if reason is not None:
        return reason
    version = _backend_version()
    words = ".".join(map(str, version))
    if version in _BAD_BACKENDS:
        return f"attention of cuDNN {words} is unusable, another version is needed"
    if version < _OLDEST_BACKEND:
        return f"needs cuDNN {'.'.join(map(str, _OLDEST_BACKEND))} or newer, {words} is loaded"
    if problem.left_window >= 0 and version == _BAD_WINDOWS and problem.T > _BAD_WINDOWS_FROM:
        return f"windows over more than {_BAD_WINDOWS_FROM} keys are wrong in cuDNN {words}"
    return None


def _backend_version() -> tuple[int, int, int]:
    """cuDNN 9.19.0 as ``(9, 19, 0)``: from 9 on its number is 91900."""
    number = int(FRONTEND.module().backend_version())
    return number // 10000, number // 100 % 100, number % 100


class Handles:
    """One cuDNN handle for each thread and device.

    A handle is not made within a capture, where its allocations would break it: a thread that comes
    there without one takes the spare that every build leaves behind. A thread that ends gives its
    handles to those that come after it.
    """

    class _Mine:
        def __init__(self) -> None:
            self.by_device: dict[int, Any] = {}

    def __init__(self) -> None:
        self._local = threading.local()
        # Without a lock: a thread's end, or the garbage collector, gives back at any moment.
        self._spare: defaultdict[int, deque[Any]] = defaultdict(deque)

    def own(self, problem: DecodeProblem) -> Any:
        """This thread's handle of the problem's device, which is the current one."""
        try:
            return self._local.mine.by_device[problem.device.index]
        except (AttributeError, KeyError):
            return self._first(problem)

    def _first(self, problem: DecodeProblem) -> Any:
        mine = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = self._Mine()
            weakref.finalize(mine, self._give_back, mine.by_device).atexit = False
        handle = mine.by_device[problem.device.index] = self._take(problem)
        return handle

    def keep_a_spare(self, problem: DecodeProblem) -> None:
        """Make sure that a thread may come without a handle within a capture."""
        spare = self._spare[problem.device.index]
        if not spare:
            spare.append(FRONTEND.module().create_handle())

    def forget(self) -> None:
        """Drop every handle. For tests."""
        self._local = threading.local()
        self._spare.clear()

    def _take(self, problem: DecodeProblem) -> Any:
        spare = self._spare[problem.device.index]
        capturing = is_capturing(problem.device)
        if len(spare) > (0 if capturing else 1):
            with contextlib.suppress(IndexError):  # another thread was faster
                return spare.pop()
        if capturing:
            raise ColdCaptureError(
                f"{problem.call}: a CUDA graph is being captured by a thread that has not used "
                "cuDNN on this device, and making a handle now would break the capture.\n"
                "Run the call once in this thread before the capture; prepare, in any thread, "
                "makes its plan only."
            )
        return FRONTEND.module().create_handle()

    def _give_back(self, by_device: dict[int, Any]) -> None:
        for index, handle in by_device.items():
            self._spare[index].append(handle)


HANDLES = Handles()
#: Graphs of plans that were dropped, until the next build: a plan may be dropped by a call within a
#: capture, which unloading a kernel would break.
_DROPPED: list[Any] = []


def _graph(problem: DecodeProblem, handle: Any) -> Any:
    """The built graph of one problem. Raises what cuDNN says if it has no kernel for it."""
    cudnn = FRONTEND.module()
    types = cudnn.data_type
    io = {torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}[problem.query.dtype]
    graph = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )

    def tensor(uid: int, name: str, shape: Any, stride: Any, dtype: Any) -> Any:
        made = graph.tensor(name=name, dim=list(shape), stride=list(stride), data_type=dtype)
        made.set_uid(uid)
        return made

    def counts(uid: int, name: str) -> Any:
        return tensor(uid, name, (problem.B, 1, 1, 1), (1, 1, 1, 1), types.INT32)

    query, key, value = problem.query, problem.key, problem.value
    window = {}
    if problem.left_window >= 0:  # cuDNN counts the current key too
        alignment = cudnn.diagonal_alignment.BOTTOM_RIGHT
        window = dict(
            diagonal_band_left_bound=problem.left_window + 1, diagonal_alignment=alignment
        )
    out, _ = graph.sdpa(
        name="decode",
        q=tensor(_QUERY, "query", query.shape, query.stride, io),
        k=tensor(_KEY, "key", key.shape, key.stride, io),
        v=tensor(_VALUE, "value", value.shape, value.stride, io),
        generate_stats=False,
        attn_scale=problem.scale,
        use_padding_mask=True,
        seq_len_q=counts(_QUERY_COUNTS, "query_counts"),
        seq_len_kv=counts(_KEY_COUNTS, "key_counts"),
        **window,
    )
    B, Hq, Dv = problem.B, problem.Hq, problem.Dv
    out.set_output(True).set_dim([B, Hq, 1, Dv]).set_stride([Hq * Dv, Dv, Dv, 1])
    out.set_uid(_OUT)

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph


def _executor(graph: Any) -> Callable[[tuple[Tensor, ...], Tensor, Any], None]:
    """What runs a graph on the buffers of `_TENSORS`, a workspace and a handle.

    Frontends that take buffers in an order ask Python less of each than those that take a mapping.
    """
    execute = graph.execute
    if "tensor_uids" in inspect.signature(execute).parameters:
        return lambda buffers, workspace, handle: execute(
            buffers, workspace, handle=handle, tensor_uids=_TENSORS
        )
    return lambda buffers, workspace, handle: execute(
        dict(zip(_TENSORS, buffers, strict=True)), workspace, handle=handle
    )


class _Run:
    """A built graph with what it is run on."""

    def __init__(self, problem: DecodeProblem) -> None:
        device = problem.device
        self.cudnn = FRONTEND.module()
        self.problem = problem
        _DROPPED.clear()
        handle = HANDLES.own(problem)
        HANDLES.keep_a_spare(problem)
        self.cudnn.set_stream(handle=handle, stream=current_stream(device))
        self.graph = _graph(problem, handle)
        self.execute = _executor(self.graph)
        weakref.finalize(self, _DROPPED.append, self.graph).atexit = False
        self.workspace_bytes = self.graph.get_workspace_size()
        self.shape = output_shape(problem)
        #: Two threads may run one plan, each with its own handle; graphs do not promise to bear it.
        self.lock = threading.Lock()
        self.constants = PlanTensors(device, self._make_constants)
        self.guard: RowGuard | None = None
        if problem.lengths_dtype is not None:
            self.guard = RowGuard(
                device,
                batch=problem.B,
                capacity=problem.T,
                width=problem.Hq * problem.Dv,
                out_dtype=problem.query.dtype,
                lengths_dtype=problem.lengths_dtype,
            )
            self.guard.compile()

    def _make_constants(self) -> list[Tensor]:
        """Counts of query rows, and of keys for when there are no lengths."""
        problem = self.problem
        shape = (problem.B, 1, 1, 1)
        where = torch.device(problem.device.type, problem.device.index)
        counts = single_row.known_count(problem)
        return [
            torch.ones(shape, dtype=torch.int32, device=where),
            torch.full(shape, counts, dtype=torch.int32, device=where),
        ]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: None,
        sinks: None,
        k_scale: None,
        v_scale: None,
    ) -> Tensor:
        problem, guard = self.problem, self.guard
        stream = current_stream(problem.device)
        self.constants.used_on(stream)
        query_counts, key_counts = self.constants.tensors
        if guard is not None and nonpad_kv_seqlen is not None:
            key_counts = torch.empty_like(key_counts)
            guard.count(nonpad_kv_seqlen, key_counts)
        out = query.new_empty(*self.shape)  # faster than with a tuple
        if problem.rank == 3:
            query = query.as_strided(problem.query.shape, problem.query.stride)
            key = key.as_strided(problem.key.shape, problem.key.stride)
            value = value.as_strided(problem.value.shape, problem.value.stride)
        buffers = (query, key, value, query_counts, key_counts, out)
        workspace = query_counts  # an address is wanted even where nothing is written to it
        if self.workspace_bytes:
            # From PyTorch's allocator at every call: a graph's pool owns what its capture takes.
            workspace = query.new_empty(self.workspace_bytes, dtype=torch.uint8)
        handle = HANDLES.own(problem)
        self.cudnn.set_stream(handle=handle, stream=stream)
        with self.lock:
            self.execute(buffers, workspace, handle)
        if guard is not None:
            # NaN in some versions. After the run: cuDNN may write the row.
            guard.zero(key_counts, out)
        return out


def _build(problem: DecodeProblem) -> Plan:
    return _Run(problem)


def _is_of_one_length(problem: DecodeProblem) -> bool:
    """Whether a cache that grows is a new problem, and a graph to build, at each of its steps."""
    return problem.lengths_dtype is None


TIER = Tier(
    op="decode",
    name="cudnn",
    predicates=(*_BASICS, _backend),
    build=_build,
    ready=lambda problem: False,  # until its plan is built: building one breaks a capture
    slow_build=_is_of_one_length,
)
