"""``attn_tiers::decode``: attention of new query rows over a KV cache.

===========  ==============================================================================
overload     returns
===========  ==============================================================================
default      ``Y``
``present``  ``(Y, present_key, present_value)``: takes ``past_key`` and ``past_value``
``qk``       ``(Y, present_key, present_value, qk_matmul_output)``: also the logits
===========  ==============================================================================

The meaning is that of the ONNX ``Attention`` operator (opsets 23 to 25), with windows and sinks;
see ``csrc_free_ops/reference/decode.py`` for it in code. Name the overload when you call one that
is not the default: ``torch.ops.attn_tiers.decode.present(...)``.

Tensors (positional)
    query ``[B,Hq,Sq,D]`` or ``[B,Sq,Hq*D]``; key, value ``[B,Hkv,T,D|Dv]`` or ``[B,T,Hkv*D|Dv]``,
    of one rank and one dtype: float16, bfloat16, float32 (float64 in ``unfused``). Under a float16
    or bfloat16 query, key and value (and past) may all be float8_e4m3fn. Any strides.
    past_key, past_value ``[B,Hkv,P,D|Dv]``: keys in front of the new ones, both or neither.
    nonpad_kv_seqlen ``[B]`` int32 or int64: how many keys of each row are valid, clamped to
    ``[0,T]`` on the device; not with past_key. attn_mask: bool (True attends) or numeric (added),
    aligned from the right with ``[B,Hq,Sq,T]``; a shorter last dimension masks the rest.
    sinks ``[Hq]``: a logit of each head that joins the denominator only. k_scale, v_scale: float32
    ``[]`` or ``[Hkv]``, what float8 numbers of key and value are multiplied by (default 1).
Scalars (keyword)
    is_causal, scale (default ``1/sqrt(D)``), softcap, left_window_size and right_window_size (keys
    before and after the current one; -1 is unlimited), q_num_heads and kv_num_heads (3-D inputs
    only), batch_invariant (a row's bits depend on no other row, nor on ``B`` or ``T``), tier (see
    :func:`torch_attn_tiers.explain`), and for ``qk`` qk_matmul_output_mode: 0 scaled products, 1
    after softcap, 2 after the mask, 3 after softmax.
Results
    ``Y`` ``[B,Hq,Sq,Dv]`` or ``[B,Sq,Hq*Dv]``; present_key, present_value ``[B,Hkv,P+T,D|Dv]``;
    qk_matmul_output ``[B,Hq,Sq,P+T]``. All new, contiguous, in the query's dtype (present_key and
    present_value in the keys'). A row that sees no key is zero.
Errors
    ValueError, TypeError: an argument breaks a rule above. RuntimeError: an input requires grad.
    TierNotEligibleError, ColdCaptureError: see :mod:`torch_attn_tiers.errors`.

Example:
    >>> import torch, torch_attn_tiers
    >>> query = torch.randn(2, 8, 1, 64)
    >>> cache = torch.randn(2, 2, 128, 64)
    >>> lengths = torch.tensor([128, 5], dtype=torch.int32)
    >>> torch.ops.attn_tiers.decode(query, cache, cache, lengths).shape
    torch.Size([2, 8, 1, 64])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from csrc_free_ops.facts import (
    DeviceFacts,
    broadcast_facts,
    contiguous_facts,
    heads_first_facts,
)
from torch_attn_tiers.dispatch import Decision, decide, define_call, facts_for, is_capturing, known
from torch_attn_tiers.ops.checks import (
    LEAST,
    MOST,
    layout,
    require,
    require_dense,
    require_same_device,
    require_scale,
    require_tier,
    require_type,
    shape_of,
)
from torch_attn_tiers.ops.registration import define, forbid_grad, forbid_tangents
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import DecodeProblem, dtype_name, library_versions

_TENSORS = "Tensor query, Tensor key, Tensor value, "
_PAST = "Tensor? past_key=None, Tensor? past_value=None, "
_OPTIONAL = (
    "Tensor? nonpad_kv_seqlen=None, Tensor? attn_mask=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, *, "
)
_SCALARS = (
    "bool is_causal=False, float? scale=None, float softcap=0.0, int left_window_size=-1, "
    "int right_window_size=-1, int? q_num_heads=None, int? kv_num_heads=None, "
    "bool batch_invariant=False, str? tier=None"
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT8 = torch.float8_e4m3fn
#: Dtypes of queries over float8 caches.
_HALVES = (torch.float16, torch.bfloat16)
_SINKS = (torch.float16, torch.bfloat16, torch.float32)
_MASKS = (
    torch.bool, *_FLOATS,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


class Tensors(NamedTuple):
    """The positional arguments of all overloads."""

    query: Tensor
    key: Tensor
    value: Tensor
    past_key: Tensor | None = None
    past_value: Tensor | None = None
    nonpad_kv_seqlen: Tensor | None = None
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Scalars(NamedTuple):
    """The keyword arguments of all overloads."""

    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    left_window_size: int = -1
    right_window_size: int = -1
    q_num_heads: int | None = None
    kv_num_heads: int | None = None
    batch_invariant: bool = False
    tier: str | None = None
    qk_matmul_output_mode: int = 0  # of decode.qk only


_REQUIRED = ("query", "key", "value")
_WITHOUT_PAST = tuple(name for name in Tensors._fields if not name.startswith("past_"))


def _bind(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensors, Scalars]:
    """The arguments of an overload by name. PyTorch leaves out those at their default."""
    positional = _WITHOUT_PAST if op == "decode" else Tensors._fields
    named = dict(zip(positional, args))
    named.update((name, kwargs[name]) for name in positional if name in kwargs)
    scalars = {name: value for name, value in kwargs.items() if name in Scalars._fields}
    return Tensors(**named), Scalars(**scalars)


class Sizes(NamedTuple):
    """The letters of the contract, read off checked arguments."""

    rank: int
    B: int
    Hq: int
    Hkv: int
    Sq: int
    P: int
    T: int
    D: int
    Dv: int

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of ``Y``."""
        if self.rank == 4:
            return (self.B, self.Hq, self.Sq, self.Dv)
        return (self.B, self.Sq, self.Hq * self.Dv)


# ---------------------------------------------------------------------------------------------
# Checks, shared by the kernels, the fake kernels, explain and prepare
# ---------------------------------------------------------------------------------------------


def _check(op: str, tensors: Tensors, scalars: Scalars) -> Sizes:
    """The sizes of a legal call; a ValueError or TypeError for any other."""
    require_dense(op, _REQUIRED, **tensors._asdict())
    require_same_device(op, **tensors._asdict())
    _check_dtypes(op, tensors)
    sizes = _check_shapes(op, tensors, scalars)
    _check_optional(op, sizes, tensors)
    _check_scalars(op, scalars, tensors.query.dtype)
    return sizes


def _check_dtypes(op: str, tensors: Tensors) -> None:
    dtype = tensors.query.dtype
    require_type(
        dtype in _FLOATS,
        f"{op}: query is {dtype_name(dtype)}; it must be float16, bfloat16, float32 or float64",
    )
    key_dtype = tensors.key.dtype
    if key_dtype is _FLOAT8:
        require_type(
            dtype in _HALVES,
            f"{op}: key is float8_e4m3fn and query {dtype_name(dtype)}; float8 caches go with "
            "float16 and bfloat16 queries: convert one of them",
        )
    else:
        require_type(key_dtype is dtype, _not_one_dtype(op, "key", key_dtype, dtype))
    for name in ("value", "past_key", "past_value"):
        tensor = getattr(tensors, name)
        if tensor is None or tensor.dtype is key_dtype:
            continue
        require_type(
            _FLOAT8 not in (tensor.dtype, key_dtype),
            f"{op}: {name} is {dtype_name(tensor.dtype)} and key {dtype_name(key_dtype)}; caches "
            "and what is added to them are all float8_e4m3fn or none: convert one of them",
        )
        raise TypeError(_not_one_dtype(op, name, tensor.dtype, dtype))


def _not_one_dtype(op: str, name: str, dtype: torch.dtype, query_dtype: torch.dtype) -> str:
    text = (
        f"{op}: {name} is {dtype_name(dtype)} and query {dtype_name(query_dtype)}; they must "
        "have one dtype (nothing is cast, under autocast neither): convert one of them"
    )
    if dtype.is_floating_point and dtype.itemsize == 1:
        text += "; of float8 caches float8_e4m3fn is taken"
    return text


def _check_shapes(op: str, tensors: Tensors, scalars: Scalars) -> Sizes:
    query, key, value = tensors[:3]
    rank = query.dim()
    require(
        rank in (3, 4),
        f"{op}: query has shape {shape_of(query)}; it must be [B,Hq,Sq,D] or [B,Sq,Hq*D]",
    )
    for name, tensor in (("key", key), ("value", value)):
        require(
            tensor.dim() == rank,
            f"{op}: {name} has shape {shape_of(tensor)} and query {shape_of(query)}; "
            "query, key and value must have one rank",
        )
    B, Hq, Sq, D = _heads_first_shape(op, "query", query, "q_num_heads", scalars.q_num_heads)
    key_B, Hkv, S, key_D = _heads_first_shape(op, "key", key, "kv_num_heads", scalars.kv_num_heads)
    value_B, value_H, value_S, Dv = _heads_first_shape(
        op, "value", value, "kv_num_heads", scalars.kv_num_heads
    )
    for name, tensor, size in (("key", key, key_B), ("value", value, value_B)):
        require(
            size == B,
            f"{op}: {name} has shape {shape_of(tensor)}; its batch size must be {B}, the query's",
        )
    require(
        value_H == Hkv,
        f"{op}: value has {value_H} heads and key {Hkv}; they must agree",
    )
    require(
        value_S == S,
        f"{op}: value has length {value_S} and key {S}; they must agree",
    )
    require(
        key_D == D,
        f"{op}: key has head size {key_D} and query {D}; they must agree",
    )
    require(
        Hkv >= 1 and Hq >= 1, f"{op}: query has {Hq} heads and key {Hkv}; each must be at least 1"
    )
    require(
        Hq % Hkv == 0,
        f"{op}: query has {Hq} heads and key {Hkv}; the first must be a multiple of the second",
    )
    require(
        D >= 1 and Dv >= 1,
        f"{op}: head sizes are {D} (key) and {Dv} (value); they must be at least 1",
    )

    P = _check_past(op, tensors, (B, Hkv), {"past_key": D, "past_value": Dv})
    return Sizes(rank, B, Hq, Hkv, Sq, P, P + S, D, Dv)


def _check_past(
    op: str, tensors: Tensors, leading: tuple[int, int], head_sizes: dict[str, int]
) -> int:
    """``P``, the length of the past: 0 without one."""
    past_key, past_value = tensors.past_key, tensors.past_value
    require(
        (past_key is None) == (past_value is None),
        f"{op}: only one of past_key and past_value is given; give both or neither",
    )
    if past_key is None:
        return 0
    P = past_key.shape[2] if past_key.dim() == 4 else None
    for name, size in head_sizes.items():
        past = getattr(tensors, name)
        expected = (*leading, "P" if P is None else P, size)
        rule = f"{name} has shape {shape_of(past)}; it must be {shape_of(expected)}"
        require(
            past.dim() == 4 and P is not None,
            f"{op}: {rule}, 4-D whatever the query's rank",
        )
        for dim in range(4):
            require(
                past.shape[dim] == expected[dim],
                f"{op}: {rule}, [B,Hkv,P,D] with one P for past_key and past_value",
            )
    assert P is not None
    return P


def _heads_first_shape(
    op: str, name: str, tensor: Tensor, heads_name: str, heads: int | None
) -> tuple[int, int, int, int]:
    """Batch, heads, length and head size of a 3-D or 4-D input."""
    if tensor.dim() == 4:
        require(
            heads is None,
            f"{op}: {heads_name}={heads} and {name} has shape {shape_of(tensor)}; it goes with 3-D "
            "inputs only, leave it out",
        )
        batch, heads_, length, size = tensor.shape
        return batch, heads_, length, size
    batch, length, width = tensor.shape
    require(
        heads is not None,
        f"{op}: {name} has shape {shape_of(tensor)}; 3-D inputs need {heads_name}",
    )
    assert heads is not None
    require(heads >= 1, f"{op}: {heads_name}={heads}; it must be at least 1")
    require(
        width % heads == 0,
        f"{op}: {name} has shape {shape_of(tensor)}; its last dimension must be a multiple of "
        f"{heads_name}={heads}",
    )
    return batch, heads, length, width // heads


def _check_optional(op: str, sizes: Sizes, tensors: Tensors) -> None:
    nonpad_kv_seqlen, sinks = tensors.nonpad_kv_seqlen, tensors.sinks
    if nonpad_kv_seqlen is not None:
        require(
            tensors.past_key is None,
            f"{op}: nonpad_kv_seqlen and past_key are both given; lengths are those of a cache "
            "that already holds its past, give one of them",
        )
        require_type(
            nonpad_kv_seqlen.dtype in (torch.int32, torch.int64),
            f"{op}: nonpad_kv_seqlen is {dtype_name(nonpad_kv_seqlen.dtype)}; it must be int32 or "
            "int64",
        )
        require(
            nonpad_kv_seqlen.dim() == 1 and nonpad_kv_seqlen.shape[0] == sizes.B,
            f"{op}: nonpad_kv_seqlen has shape {shape_of(nonpad_kv_seqlen)}; it must be "
            f"({sizes.B},), one length for each batch row",
        )
    if sinks is not None:
        require_type(
            sinks.dtype in _SINKS,
            f"{op}: sinks is {dtype_name(sinks.dtype)}; it must be float32, float16 or bfloat16",
        )
        require(
            sinks.dim() == 1 and sinks.shape[0] == sizes.Hq,
            f"{op}: sinks has shape {shape_of(sinks)}; it must be ({sizes.Hq},), one for each "
            "query head",
        )
    if tensors.attn_mask is not None:
        _check_mask(op, sizes, tensors.attn_mask)
    for name in ("k_scale", "v_scale"):
        scale = getattr(tensors, name)
        if scale is not None:
            require(
                tensors.key.dtype is _FLOAT8,
                f"{op}: {name} is given and key is {dtype_name(tensors.key.dtype)}; scales go with "
                "float8_e4m3fn caches only: leave it out",
            )
            require_scale(op, name, scale, sizes.Hkv)


def _check_mask(op: str, sizes: Sizes, attn_mask: Tensor) -> None:
    aligned = f"({sizes.B}, {sizes.Hq}, {sizes.Sq}, {sizes.T})"
    dtype = attn_mask.dtype
    require_type(
        dtype in _MASKS,
        f"{op}: attn_mask is {dtype_name(dtype)}; it must be bool, an integer, or float16, "
        "bfloat16, float32 or float64: convert it",
    )
    require(
        1 <= attn_mask.dim() <= 4,
        f"{op}: attn_mask has shape {shape_of(attn_mask)}; its rank must be 1 to 4, aligned from "
        f"the right with {aligned}",
    )
    leading = (sizes.B, sizes.Hq, sizes.Sq)[4 - attn_mask.dim() :]
    for dim, size in enumerate(leading):
        require(
            attn_mask.shape[dim] == 1 or attn_mask.shape[dim] == size,
            f"{op}: attn_mask has shape {shape_of(attn_mask)}; dimension {dim} must be 1 or {size} "
            f"to broadcast to {aligned}",
        )
    require(
        attn_mask.shape[-1] <= sizes.T,
        f"{op}: attn_mask has shape {shape_of(attn_mask)}; its last dimension must not exceed the "
        f"{sizes.T} keys (a shorter one masks the rest)",
    )


def _check_scalars(op: str, scalars: Scalars, dtype: torch.dtype) -> None:
    scale, softcap = scalars.scale, scalars.softcap
    require(
        scale is None or 0 < scale < math.inf,
        f"{op}: scale={scale}; it must be positive and finite (None is 1/sqrt(D))",
    )
    require(
        0 <= softcap < math.inf,
        f"{op}: softcap={softcap}; it must be finite and not negative (0 is none)",
    )
    if dtype is not torch.float64:
        rule = (
            f"logits of {dtype_name(dtype)} queries are computed in float32, it must be between "
            f"{LEAST:.2g} and {MOST:.2g}"
        )
        require(scale is None or LEAST <= scale <= MOST, f"{op}: scale={scale}; {rule}")
        require(
            softcap == 0 or LEAST <= softcap <= MOST,
            f"{op}: softcap={softcap}; {rule}, or 0 for none",
        )
    for name in ("left_window_size", "right_window_size"):
        size = getattr(scalars, name)
        require(size >= -1, f"{op}: {name}={size}; it must be at least -1 (-1 is unlimited)")
    mode = scalars.qk_matmul_output_mode
    require(
        0 <= mode <= 3,
        f"{op}: qk_matmul_output_mode={mode}; it must be 0 (products), 1 (after softcap), "
        "2 (after the mask) or 3 (after softmax)",
    )
    require_tier(op, "decode", scalars.tier)


# ---------------------------------------------------------------------------------------------
# The problem
# ---------------------------------------------------------------------------------------------


def _problem(
    op: str, tensors: Tensors, scalars: Scalars, facts: DeviceFacts | None
) -> DecodeProblem:
    """The problem of a call, checked and in canonical form; ``facts`` replace its device."""
    sizes = _check(op, tensors, scalars)
    query, key, value = tensors[:3]
    B, Hq, Hkv, T = sizes.B, sizes.Hq, sizes.Hkv, sizes.T
    if op == "decode":
        key_facts = heads_first_facts(key, Hkv)
        value_facts = heads_first_facts(value, Hkv)
    else:  # the tier is given present_key and present_value
        key_facts = contiguous_facts((B, Hkv, T, sizes.D), key.dtype)
        value_facts = contiguous_facts((B, Hkv, T, sizes.Dv), value.dtype)
    lengths, mask, sinks = tensors.nonpad_kv_seqlen, tensors.attn_mask, tensors.sinks
    is_causal, left_window, right_window = _canonical_window(sizes, lengths is not None, scalars)
    options = current()
    device = facts_for(query, facts)
    return DecodeProblem(
        call=op,
        device=device,
        versions=library_versions(),
        requested=scalars.tier or options.forced("decode"),
        jit=options.jit,
        capturing=is_capturing(device),
        query=heads_first_facts(query, Hq),
        key=key_facts,
        value=value_facts,
        rank=sizes.rank,
        lengths_dtype=None if lengths is None else lengths.dtype,
        mask=None if mask is None else broadcast_facts(mask, (B, Hq, sizes.Sq)),
        sinks_dtype=None if sinks is None else sinks.dtype,
        k_scale=None if tensors.k_scale is None else tuple(tensors.k_scale.shape),
        v_scale=None if tensors.v_scale is None else tuple(tensors.v_scale.shape),
        is_causal=is_causal,
        past_len=sizes.P,
        scale=_canonical_scale(sizes.D, scalars.scale),
        softcap=scalars.softcap,
        left_window=left_window,
        right_window=right_window,
        qk_mode=scalars.qk_matmul_output_mode if op == "decode.qk" else None,
        batch_invariant=scalars.batch_invariant,
    )


def _canonical_scale(D: int, scale: float | None) -> float:
    """The scale; the default if it is that but for its last bits, as ``D**-0.5`` may be."""
    default = 1 / math.sqrt(D)
    if scale is None or math.isclose(scale, default, rel_tol=1e-14):
        return default
    return scale


def _canonical_window(sizes: Sizes, has_lengths: bool, scalars: Scalars) -> tuple[bool, int, int]:
    """Causality and windows, without what hides nothing whatever the lengths are.

    A row stands at ``p = i + offset``, with ``-Sq <= p < T`` if there are lengths, else from ``P``
    to ``P + Sq - 1``; it sees keys from ``p - left`` to ``p + right``.
    """
    last = sizes.T - 1 if has_lengths else sizes.P + sizes.Sq - 1
    first = -sizes.Sq if has_lengths else sizes.P
    is_causal, left, right = scalars.is_causal, scalars.left_window_size, scalars.right_window_size
    if right == 0:
        is_causal = True  # the same rule
    if has_lengths and sizes.Sq == 1:
        is_causal, right = False, -1  # the row stands at the last valid key
    if is_causal and first >= sizes.T - 1:
        is_causal = False
    if is_causal or right >= sizes.T - 1 - first:
        right = -1
    if left >= last:
        left = -1
    return is_causal, left, right


def _problem_of(op: str, *args: Any, facts: DeviceFacts | None, **kwargs: Any) -> DecodeProblem:
    """:func:`_problem` for ``explain`` and ``prepare``, from the operator's own arguments."""
    forbid_grad(op, *args)
    return _problem(op, *_bind(op, args, kwargs), facts)


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """:func:`layout` of lengths, sinks and scales, which a tier is given dense."""
    return tensor.shape, tensor.dtype, tensor.get_device()


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    nonpad_kv_seqlen: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **scalars: Any,
) -> Tensor:
    # Spelled out: this runs at every call, and a loop or a function for it costs microseconds.
    options = current()
    try:
        if torch.is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (attn_mask is not None and attn_mask.requires_grad)
            or (sinks is not None and sinks.requires_grad)
            or (k_scale is not None and k_scale.requires_grad)
            or (v_scale is not None and v_scale.requires_grad)
        ):
            forbid_grad("decode", query, key, value, attn_mask, sinks, k_scale, v_scale)
        if forward_ad._current_level >= 0:
            forbid_tangents("decode", query, key, value, attn_mask, sinks, k_scale, v_scale)
        flat = (
            "decode",
            options,
            query.device,
            query.shape,
            query.stride(),
            query.dtype,
            query.data_ptr() % 16 == 0,
            key.shape,
            key.stride(),
            key.dtype,
            key.get_device(),
            key.data_ptr() % 16 == 0,
            value.shape,
            value.stride(),
            value.dtype,
            value.get_device(),
            value.data_ptr() % 16 == 0,
            None if nonpad_kv_seqlen is None else _kind(nonpad_kv_seqlen),
            None if attn_mask is None else layout(attn_mask),
            None if sinks is None else _kind(sinks),
            None if k_scale is None else _kind(k_scale),
            None if v_scale is None else _kind(v_scale),
            *scalars,
            *scalars.values(),
        )
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        args = (query, key, value, nonpad_kv_seqlen, attn_mask, sinks, k_scale, v_scale)
        require_dense("decode", _REQUIRED, **dict(zip(_WITHOUT_PAST, args)))
        raise
    decision = known(flat)
    if decision is None:
        args = (query, key, value, nonpad_kv_seqlen, attn_mask, sinks, k_scale, v_scale)
        decision = decide(flat, _problem("decode", *_bind("decode", args, scalars), None))
    if options.check:
        _check_values(decision, nonpad_kv_seqlen)
    if nonpad_kv_seqlen is not None:
        nonpad_kv_seqlen = nonpad_kv_seqlen.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
    if k_scale is not None:
        k_scale = k_scale.contiguous()
    if v_scale is not None:
        v_scale = v_scale.contiguous()
    return decision(query, key, value, nonpad_kv_seqlen, attn_mask, sinks, k_scale, v_scale)


def _decode_with_present(
    op: str, args: tuple[Any, ...], scalars: dict[str, Any]
) -> tuple[Any, Tensor, Tensor]:
    """What the tier returns, and present_key and present_value."""
    forbid_grad(op, *args)
    options = current()
    query, key, value, past_key, past_value, nonpad_kv_seqlen, attn_mask, *dense = _all(args)
    try:
        flat = (op, options, query.device, *map(layout, args), *scalars, *scalars.values())
    except (AttributeError, RuntimeError):  # a tensor without what a key is made of
        require_dense(op, _REQUIRED, **dict(zip(Tensors._fields, args)))
        raise
    decision = known(flat)
    if decision is None:
        decision = decide(flat, _problem(op, *_bind(op, args, scalars), None))
    if options.check:
        _check_values(decision, nonpad_kv_seqlen)
    present_key = _concatenate(past_key, key, decision.problem.key.shape)
    present_value = _concatenate(past_value, value, decision.problem.value.shape)
    if nonpad_kv_seqlen is not None:
        nonpad_kv_seqlen = nonpad_kv_seqlen.contiguous()
    dense = [None if t is None else t.contiguous() for t in dense]  # sinks and scales
    result = decision(query, present_key, present_value, nonpad_kv_seqlen, attn_mask, *dense)
    return result, present_key, present_value


def _all(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All positional arguments, None for those left out."""
    return args + (None,) * (len(Tensors._fields) - len(args))


def _decode_present(*args: Any, **scalars: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _decode_with_present("decode.present", args, scalars)


def _decode_qk(*args: Any, **scalars: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result, present_key, present_value = _decode_with_present("decode.qk", args, scalars)
    output, products = result
    return output, present_key, present_value, products


def _concatenate(past: Tensor | None, new: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``concat(past, new)`` as a new contiguous tensor of ``shape``, that is ``[B,Hkv,T,D]``."""
    B, heads, _, size = shape
    if new.dim() == 3:
        new = new.view(B, new.shape[1], heads, size).transpose(1, 2)
    # Not the layout that cat and clone would choose: it depends on the strides of the inputs.
    present = new.new_empty(shape)
    if past is None:
        return present.copy_(new)
    if new.dtype is _FLOAT8:  # as bytes, which cat takes everywhere
        bytes_ = [tensor.view(torch.uint8) for tensor in (past, new, present)]
        torch.cat(bytes_[:2], 2, out=bytes_[2])
        return present
    return torch.cat([past, new], 2, out=present)


def _check_values(decision: Decision, nonpad_kv_seqlen: Tensor | None) -> None:
    """Under the ``check`` option: raise for a length that would be clamped."""
    problem = decision.problem
    if nonpad_kv_seqlen is None or is_capturing(problem.device):
        return
    bad = (nonpad_kv_seqlen < 0) | (nonpad_kv_seqlen > problem.T)
    if bad.any():
        raise ValueError(
            f"{problem.call}: nonpad_kv_seqlen is {nonpad_kv_seqlen.tolist()}; each length must "
            f"lie between 0 and the capacity {problem.T}"
        )


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _decode_fake(*args: Any, **kwargs: Any) -> Tensor:
    sizes = _fake_sizes("decode", args, kwargs)
    return args[0].new_empty(sizes.output)


def _decode_present_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_with_present(args, _fake_sizes("decode.present", args, kwargs))


def _decode_qk_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = _fake_sizes("decode.qk", args, kwargs)
    products = args[0].new_empty(sizes.B, sizes.Hq, sizes.Sq, sizes.T)
    return *_fake_with_present(args, sizes), products


def _fake_sizes(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes:
    forbid_grad(op, *args)
    return _check(op, *_bind(op, args, kwargs))


def _fake_with_present(args: tuple[Any, ...], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = args[:3]
    B, Hkv, T = sizes.B, sizes.Hkv, sizes.T
    present_key = key.new_empty(B, Hkv, T, sizes.D)
    present_value = value.new_empty(B, Hkv, T, sizes.Dv)
    return query.new_empty(sizes.output), present_key, present_value


# ---------------------------------------------------------------------------------------------
# Registration: the default overload first, a call by the packet takes the first that matches
# ---------------------------------------------------------------------------------------------

define(
    "attn_tiers::decode",
    f"({_TENSORS}{_OPTIONAL}{_SCALARS}) -> Tensor",
    _decode,
    _decode_fake,
)
define(
    "attn_tiers::decode.present",
    f"({_TENSORS}{_PAST}{_OPTIONAL}{_SCALARS}) -> (Tensor, Tensor, Tensor)",
    _decode_present,
    _decode_present_fake,
)
define(
    "attn_tiers::decode.qk",
    f"({_TENSORS}{_PAST}{_OPTIONAL}{_SCALARS}, int qk_matmul_output_mode=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _decode_qk,
    _decode_qk_fake,
)
for _name in ("decode", "decode.present", "decode.qk"):
    define_call(_name, functools.partial(_problem_of, _name))
