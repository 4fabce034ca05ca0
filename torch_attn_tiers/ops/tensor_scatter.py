"""``attn_tiers::tensor_scatter_`` and ``kv_scatter_``: write into caches, in place.

The meaning is that of ONNX ``TensorScatter``: ``past_cache[b,..,w[b]+s,..] = update[b,..,s,..]``
along ``axis``; ``write_mode`` is what ONNX calls ``mode``. Both return nothing.

Tensors (positional)
    past_cache, or key_cache and value_cache: ``[B, .., T, ..]``, any strides that do not overlap.
    update, or key and value: of the cache's dtype and shape, but ``[.., S, ..]`` with ``S <= T``
    along ``axis``; any strides. write_indices ``[B]`` int32 or int64, never read by the host;
    without it writing starts at 0. Into a float8_e4m3fn cache ``kv_scatter_`` also writes float16,
    bfloat16 and float32: divided by k_scale or v_scale (float32 ``[]``, or ``[Hkv]`` for a cache of
    rank 4, whose heads are the first dimension besides 0 and ``axis``; default 1) in float32,
    rounded to nearest even, and saturated at 448. NaN stays NaN.
Scalars (keyword)
    axis: the dimension of positions, any but 0 (default -2, as in ``[B,Hkv,T,D]``). write_mode:
    ``"linear"`` drops a position past the cache, and the whole row of a negative index, which is
    how to skip a row; ``"circular"`` wraps positions modulo ``T``. After a wrap, masks and windows
    over physical positions have no meaning.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    ColdCaptureError: a CUDA graph is being captured and the kernel has not been built; call it
    once before, or :func:`torch_attn_tiers.prepare`.

An update must not overlap its cache in memory: their spans, from the first to the last element,
are disjoint. Keep K and V in allocations of their own: two halves of one allocation, written in a
compiled graph, make PyTorch clone the whole storage at each step.

Example:
    >>> import torch, torch_attn_tiers
    >>> cache, new = torch.zeros(2, 1, 4, 1), torch.ones(2, 1, 1, 1)
    >>> torch.ops.attn_tiers.tensor_scatter_(cache, new, torch.tensor([3, -1]))
    >>> cache.flatten(1).tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from csrc_free_ops import reference
from csrc_free_ops.facts import DeviceFacts, TensorFacts, device_facts, has_triton, tensor_facts
from torch_attn_tiers.dispatch import (
    Explanation,
    TierVerdict,
    build_failure,
    define_call,
    facts_for,
    is_capturing,
)
from torch_attn_tiers.errors import ColdCaptureError
from torch_attn_tiers.ops.checks import (
    layout,
    require,
    require_apart,
    require_dense,
    require_integers,
    require_same_device,
    require_scale,
    require_type,
    require_writable,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad, mark_written
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import Problem, dtype_name

log = logging.getLogger("torch_attn_tiers")

_ONE_CACHE = (
    "kv_scatter_: key_cache and value_cache begin at one place in memory, and the values would "
    "overwrite the keys; give two caches"
)
_MODES = ("linear", "circular")
_FLOAT8 = torch.float8_e4m3fn
#: What is divided by a scale and rounded on its way into a float8 cache.
_QUANTISED = (torch.float16, torch.bfloat16, torch.float32)
_NO_SCALES: _Scales = (None, None)


# ---------------------------------------------------------------------------------------------
# Checks, shared by the kernels and the fake kernels
# ---------------------------------------------------------------------------------------------


def _check(
    op: str,
    pairs: tuple[tuple[str, Tensor, str, Tensor], ...],
    write_indices: Tensor | None,
    scales: _Scales,
    axis: int,
    write_mode: str,
) -> None:
    """Raise unless each ``(cache name, cache, update name, update)`` and the rest are legal."""
    first_name, first = pairs[0][:2]
    named = {name: tensor for pair in pairs for name, tensor in (pair[:2], pair[2:])}
    optional = dict(write_indices=write_indices, **dict(zip(("k_scale", "v_scale"), scales)))
    require_dense(op, named, **named, **optional)
    require_same_device(op, **named, **optional)
    require(
        write_mode in _MODES,
        f"{op}: write_mode={write_mode!r}; it must be 'linear' or 'circular'",
    )
    for cache_name, cache, update_name, update in pairs:
        _check_pair(op, cache_name, cache, update_name, update, axis)
        require(
            cache.shape[0] == first.shape[0],
            f"{op}: {cache_name} has batch size {cache.shape[0]} and {first_name} "
            f"{first.shape[0]}; they must agree",
        )
    if write_indices is not None:
        require_integers(op, "write_indices", write_indices)
        require(
            write_indices.dim() == 1 and write_indices.shape[0] == first.shape[0],
            f"{op}: write_indices has shape {shape_of(write_indices)}; it must be "
            f"({first.shape[0]},), one index for each batch row",
        )
    for name, scale, pair in zip(("k_scale", "v_scale"), scales, pairs):
        if scale is not None:
            _check_scale(op, name, scale, pair, axis)


def _check_pair(
    op: str, cache_name: str, cache: Tensor, update_name: str, update: Tensor, axis: int
) -> None:
    rank = cache.dim()
    shapes = f"{update_name} has shape {shape_of(update)} and {cache_name} {shape_of(cache)}"
    dtypes = (
        f"{op}: {update_name} is {dtype_name(update.dtype)} and {cache_name} "
        f"{dtype_name(cache.dtype)}"
    )
    if cache.dtype is _FLOAT8 and op == "kv_scatter_":
        require_type(
            update.dtype in (*_QUANTISED, _FLOAT8),
            f"{dtypes}; into that go float16, bfloat16, float32 and float8_e4m3fn: convert it",
        )
    else:
        hint = " (kv_scatter_ quantises)" if cache.dtype is _FLOAT8 else ""
        require_type(
            update.dtype is cache.dtype,
            f"{dtypes}; they must have one dtype (nothing is cast): convert one{hint}",
        )
    require(
        rank >= 2 and update.dim() == rank,
        f"{op}: {shapes}; they must have one rank of at least 2",
    )
    require(
        -rank <= axis < rank and axis % rank != 0,
        f"{op}: axis={axis} for {cache_name} of rank {rank}; it must name a dimension other than 0",
    )
    axis %= rank
    for dim in range(rank):
        if dim == axis:
            require(
                update.shape[dim] <= cache.shape[dim],
                f"{op}: {shapes}; along axis {axis} the update must not be longer than the cache",
            )
        else:
            require(
                update.shape[dim] == cache.shape[dim],
                f"{op}: {shapes}; they must agree in dimension {dim}",
            )
    require_writable(op, cache_name, cache)


def _check_scale(
    op: str, name: str, scale: Tensor, pair: tuple[str, Tensor, str, Tensor], axis: int
) -> None:
    cache_name, cache, update_name, update = pair
    require(
        cache.dtype is _FLOAT8,
        f"{op}: {name} is given and {cache_name} is {dtype_name(cache.dtype)}; scales go with "
        "float8_e4m3fn caches only: leave it out",
    )
    require(
        update.dtype is not _FLOAT8,
        f"{op}: {name} is given and {update_name} is float8_e4m3fn; only numbers that are rounded "
        "to it are divided by a scale: leave it out",
    )
    rank = cache.dim()
    if rank == 4:
        require_scale(op, name, scale, cache.shape[reference.heads_dimension(axis % rank)])
    else:
        require(
            scale.dim() == 0,
            f"{op}: {name} has shape {shape_of(scale)} and {cache_name} rank {rank}; it must be "
            "(), one for each KV head goes with caches of rank 4: view it as one",
        )
        require_scale(op, name, scale, 1)


def _check_values(
    op: str, pairs: _Pairs, write_indices: Tensor | None, axis: int, write_mode: str
) -> None:
    """Under the ``check`` option: raise for what would lose part of an update."""
    caches, updates = [pair[:2] for pair in pairs], [pair[2:] for pair in pairs]
    for (cache_name, cache), (update_name, update) in itertools.product(caches, updates):
        require_apart(op, cache_name, cache, update_name, update)
    if (
        write_indices is None
        or write_mode == "circular"
        or pairs[0][3].shape[axis] == 0  # nothing to lose, wherever it goes
        or is_capturing(device_facts(write_indices.device))
    ):
        return
    _, cache, _, update = pairs[0]
    length = update.shape[axis]
    last = min(cache.shape[axis] for _, cache, _, _ in pairs) - length
    if (write_indices > last).any():
        raise ValueError(
            f"{op}: write_indices is {write_indices.tolist()}; with {length} new "
            f"positions in a cache of {last + length} an index must be at most {last} "
            "(a negative one skips its row)"
        )


# ---------------------------------------------------------------------------------------------
# Which implementation writes
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteProblem(Problem):
    """One checked cache write: all that its kernel depends on."""

    caches: tuple[TensorFacts, ...]
    updates: tuple[TensorFacts, ...]
    indices: TensorFacts | None
    #: Of float8 caches whose updates are of another dtype.
    scales: tuple[TensorFacts | None, ...]
    axis: int
    circular: bool

    def describe(self) -> str:
        """The problem on one line."""
        words = [self.call, f"axis={self.axis}"]
        for cache, update in zip(self.caches, self.updates):
            words.append(f"{dtype_name(update.dtype)} {shape_of(update.shape)}")
            into = "" if update.dtype is cache.dtype else f"{dtype_name(cache.dtype)} "
            words.append(f"into {into}{shape_of(cache.shape)}")
        for name, scale in zip(("k_scale", "v_scale"), self.scales):
            if scale is not None:
                words.append(f"{name}={'per head' if scale.shape else 'one'}")
        if self.indices is not None:
            words.append(f"write_indices={dtype_name(self.indices.dtype)}")
        if self.circular:
            words.append("circular")
        return " ".join(words) + f" on {self.device}"


class _Write(Protocol):
    """Writes ``updates`` into ``caches``, divided by ``scales`` where that is asked for."""

    def is_compiled(self) -> bool: ...
    def compile(self) -> None: ...
    def run(
        self,
        caches: Sequence[Tensor],
        updates: Sequence[Tensor],
        write_indices: Tensor | None,
        scales: Sequence[Tensor | None],
    ) -> None: ...


class _ReferenceWrite:
    """The write in plain PyTorch, of several kernels."""

    def __init__(self, axis: int, circular: bool) -> None:
        self.scalars: dict[str, Any] = dict(axis=axis, circular=circular)

    def is_compiled(self) -> bool:
        return True

    def compile(self) -> None:
        pass

    def run(
        self,
        caches: Sequence[Tensor],
        updates: Sequence[Tensor],
        write_indices: Tensor | None,
        scales: Sequence[Tensor | None],
    ) -> None:
        for cache, update, scale in zip(caches, updates, scales):
            reference.tensor_scatter(cache, update, write_indices, scale, **self.scalars)


#: By flat key, writes whose arguments are checked and whose kernels are loaded.
_writes: dict[tuple[Any, ...], _Write] = {}
_MAX_WRITES = 4096
#: Kernels that could not be built, and why. The reference writes in their place.
_unfit: dict[WriteProblem, str] = {}

_Pairs = tuple[tuple[str, Tensor, str, Tensor], ...]
_Scales = tuple[Tensor | None, Tensor | None]


def _problem(
    op: str,
    pairs: _Pairs,
    write_indices: Tensor | None,
    scales: _Scales,
    axis: int,
    write_mode: str,
    facts: DeviceFacts | None = None,
) -> WriteProblem:
    """The problem of a call, checked; ``facts`` replace its device."""
    _check(op, pairs, write_indices, scales, axis, write_mode)
    device = facts_for(pairs[0][1], facts)
    return WriteProblem(
        op=op,
        call=op,
        device=device,
        capturing=is_capturing(device),
        caches=tuple(tensor_facts(cache) for _, cache, _, _ in pairs),
        updates=tuple(tensor_facts(update) for _, _, _, update in pairs),
        indices=None if write_indices is None else tensor_facts(write_indices),
        scales=tuple(None if scale is None else tensor_facts(scale) for scale in scales),
        axis=axis % pairs[0][1].dim(),
        circular=write_mode == "circular",
    )


def _against_triton(problem: WriteProblem) -> list[str]:
    """Why the Triton kernel cannot write this."""
    reasons = []
    if problem.device.type != "cuda":
        reasons.append(f"runs on CUDA devices, not on {problem.device.type}")
    elif not problem.device.is_nvidia:
        reasons.append("not run on AMD GPUs yet")
    if not has_triton():
        reasons.append("the package triton is not installed")
    widest = max((cache.dtype for cache in problem.caches), key=lambda dtype: dtype.itemsize)
    if widest.itemsize > 8:
        reasons.append(f"copies elements of at most 8 bytes, not {dtype_name(widest)}")
    if problem in _unfit:
        reasons.append(_unfit[problem])
    return reasons


def _plan(problem: WriteProblem) -> _Write:
    """The write that runs, not compiled yet."""
    if _against_triton(problem):
        return _ReferenceWrite(problem.axis, problem.circular)
    from csrc_free_ops.cache import plan_scatter

    return plan_scatter(
        problem.caches,
        problem.updates,
        problem.indices,
        problem.device,
        axis=problem.axis,
        circular=problem.circular,
        scales=problem.scales,
    )


def _compiled(problem: WriteProblem) -> tuple[_Write, bool]:
    """The write that runs, ready to, and whether equal calls may take it too."""
    write = _plan(problem)
    if write.is_compiled():
        write.compile()  # takes the loaded kernels
        return write, True
    if problem.capturing:
        raise ColdCaptureError(_cold(problem))
    try:
        write.compile()
        return write, True
    except Exception as error:
        lasting = build_failure(error)
        reason = f"its build failed: {type(error).__name__}: {error}"
        log.warning("%s: %s (%s)", problem.call, reason, problem.describe(), exc_info=error)
        if lasting:
            if len(_unfit) >= _MAX_WRITES:
                _unfit.clear()
            _unfit[problem] = reason
        return _ReferenceWrite(problem.axis, problem.circular), lasting


def _cold(problem: WriteProblem) -> str:
    return (
        f"{problem.call}: a CUDA graph is being captured and the kernel of this write is not "
        "built; building it now would break the capture.\n"
        f"Before the capture, call torch_attn_tiers.prepare({problem.call!r}, ...) with the "
        "arguments of this call, or run the call once.\n"
        f"Problem: {problem.describe()}"
    )


def _explain(problem: WriteProblem) -> Explanation:
    """The two implementations' verdicts. They are no tiers: nothing forces or disables one."""
    reasons = tuple(_against_triton(problem))
    is_ready = not reasons and _plan(problem).is_compiled()
    is_cold = problem.capturing and not reasons and not is_ready
    verdicts = [
        TierVerdict("triton", not reasons, reasons, is_ready, not reasons and not is_cold),
        TierVerdict("reference", True, (), True, bool(reasons)),
    ]
    error = f"ColdCaptureError: {_cold(problem).splitlines()[0]}" if is_cold else None
    return Explanation(problem, verdicts, len(_writes), 0, error)


def _prepare(problem: WriteProblem) -> None:
    _unfit.pop(problem, None)
    _compiled(problem)


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("tensor_scatter_", past_cache, update)
    tensors = (past_cache, update, write_indices)
    try:
        flat = (past_cache.device, *map(layout, tensors), axis, write_mode)
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        named = dict(past_cache=past_cache, update=update)
        require_dense("tensor_scatter_", named, **named, write_indices=write_indices)
        raise
    write = _writes.get(flat)
    if write is None or current().check:
        pairs = (("past_cache", past_cache, "update", update),)
        write = _checked(
            "tensor_scatter_", flat, pairs, write_indices, _NO_SCALES, axis, write_mode
        )
    write.run((past_cache,), (update,), write_indices, _NO_SCALES)
    mark_written(past_cache)


def _kv_scatter(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    write_indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("kv_scatter_", key_cache, value_cache, key, value, k_scale, v_scale)
    caches, updates, scales = (key_cache, value_cache), (key, value), (k_scale, v_scale)
    tensors = (*caches, *updates, write_indices, *scales)
    try:
        is_one = key_cache.data_ptr() == value_cache.data_ptr() and key_cache.numel() > 0
        flat = (key_cache.device, *map(layout, tensors), axis, write_mode)
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        named = dict(key_cache=key_cache, value_cache=value_cache, key=key, value=value)
        optional = dict(write_indices=write_indices, k_scale=k_scale, v_scale=v_scale)
        require_dense("kv_scatter_", named, **named, **optional)
        raise
    write = _writes.get(flat)
    if write is None or current().check:
        pairs = _kv_pairs(key_cache, value_cache, key, value)
        write = _checked("kv_scatter_", flat, pairs, write_indices, scales, axis, write_mode)
    if is_one:
        raise ValueError(_ONE_CACHE)
    write.run(caches, updates, write_indices, scales)
    mark_written(*caches)


def _begin_at_one_place(a: Tensor, b: Tensor) -> bool:
    if a.device.type != "meta":
        return a.data_ptr() == b.data_ptr()
    one_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return one_storage and a.storage_offset() == b.storage_offset()


def _kv_pairs(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor) -> _Pairs:
    return ("key_cache", key_cache, "key", key), ("value_cache", value_cache, "value", value)


def _checked(
    op: str,
    flat: tuple[Any, ...],
    pairs: _Pairs,
    write_indices: Tensor | None,
    scales: _Scales,
    axis: int,
    write_mode: str,
) -> _Write:
    """The write of a call that is not known yet, or whose values are to be checked."""
    write = _writes.get(flat)
    if write is None:
        problem = _problem(op, pairs, write_indices, scales, axis, write_mode)
        write, lasting = _compiled(problem)
        if lasting:
            if len(_writes) >= _MAX_WRITES:
                _writes.clear()
            _writes[flat] = write
    if current().check:
        _check_values(op, pairs, write_indices, axis, write_mode)
    return write


def _tensor_scatter_problem(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None,
    *,
    facts: DeviceFacts | None,
    axis: int = -2,
    write_mode: str = "linear",
) -> WriteProblem:
    forbid_grad("tensor_scatter_", past_cache, update)
    pairs = (("past_cache", past_cache, "update", update),)
    return _problem("tensor_scatter_", pairs, write_indices, _NO_SCALES, axis, write_mode, facts)


def _kv_scatter_problem(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    write_indices: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    facts: DeviceFacts | None,
    axis: int = -2,
    write_mode: str = "linear",
) -> WriteProblem:
    forbid_grad("kv_scatter_", key_cache, value_cache, key, value, k_scale, v_scale)
    pairs, scales = _kv_pairs(key_cache, value_cache, key, value), (k_scale, v_scale)
    problem = _problem("kv_scatter_", pairs, write_indices, scales, axis, write_mode, facts)
    if _begin_at_one_place(key_cache, value_cache) and key_cache.numel() > 0:
        raise ValueError(_ONE_CACHE)
    return problem


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _tensor_scatter_fake(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("tensor_scatter_", past_cache, update)
    pairs = (("past_cache", past_cache, "update", update),)
    _check("tensor_scatter_", pairs, write_indices, _NO_SCALES, axis, write_mode)


def _kv_scatter_fake(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    write_indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> None:
    forbid_grad("kv_scatter_", key_cache, value_cache, key, value, k_scale, v_scale)
    pairs = _kv_pairs(key_cache, value_cache, key, value)
    _check("kv_scatter_", pairs, write_indices, (k_scale, v_scale), axis, write_mode)


define(
    "attn_tiers::tensor_scatter_",
    "(Tensor(a!) past_cache, Tensor update, Tensor? write_indices=None, *, int axis=-2, "
    'str write_mode="linear") -> ()',
    _tensor_scatter,
    _tensor_scatter_fake,
    mutates=("past_cache",),
)
define(
    "attn_tiers::kv_scatter_",
    "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, "
    "Tensor? write_indices=None, Tensor? k_scale=None, Tensor? v_scale=None, *, int axis=-2, "
    'str write_mode="linear") -> ()',
    _kv_scatter,
    _kv_scatter_fake,
    mutates=("key_cache", "value_cache"),
)
define_call("tensor_scatter_", _tensor_scatter_problem, explain=_explain, prepare=_prepare)
define_call("kv_scatter_", _kv_scatter_problem, explain=_explain, prepare=_prepare)
