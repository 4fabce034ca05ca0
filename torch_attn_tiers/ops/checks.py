"""Helpers of argument checks. They work on symbolic sizes, so fake kernels share them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_attn_tiers.problem import dtype_name
from torch_attn_tiers.tier import tier_names

#: Dtypes of the tokens, gates and states of the gated delta net.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT_NAMES = "float16, bfloat16 or float32"
#: Scales and softcaps between which they, their reciprocals and their products with log2(e) are
#: neither zero nor infinite in float32, on devices that flush subnormal numbers too.
LEAST, MOST = 2.0**-126, 2.0**127


def require(condition: bool | torch.SymBool, message: str) -> None:
    """``ValueError(message)`` unless ``condition``."""
    torch._check_value(condition, lambda: message)


def require_type(condition: bool, message: str) -> None:
    """``TypeError(message)`` unless ``condition``."""
    if not condition:
        raise TypeError(message)


def require_floats(op: str, name: str, tensor: Tensor) -> None:
    """``TypeError`` unless ``tensor`` is float16, bfloat16 or float32."""
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {dtype_name(tensor.dtype)}; it must be {FLOAT_NAMES}")


def require_integers(op: str, name: str, tensor: Tensor) -> None:
    """``TypeError`` unless ``tensor`` is int32 or int64, as indices and lengths are."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} is {dtype_name(tensor.dtype)}; it must be int32 or int64")


def require_tier(op: str, tiers_of: str, tier: str | None) -> None:
    """``ValueError`` unless ``tier`` is None or the name of a tier of the operator ``tiers_of``."""
    names = tier_names(tiers_of)
    require(
        tier is None or tier in names,
        f"{op}: tier={tier!r}; it must be None or one of {', '.join(names)}",
    )


def require_dense(op: str, required: Iterable[str], **tensors: Tensor | None) -> None:
    """``TypeError`` unless all tensors have strides and memory, and none of ``required`` is None.

    PyTorch takes None for any tensor.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            require_type(name not in required, f"{op}: {name} is None; it must be a tensor")
            continue
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        require_type(
            kind == "strided",
            f"{op}: {name} is a tensor of layout {kind.strip('_')}; it must be a dense strided one",
        )


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    """``ValueError`` unless all tensors are where the first one is."""
    (first, where), *others = [(n, t.device) for n, t in tensors.items() if t is not None]
    for name, device in others:
        if device != where:
            raise ValueError(
                f"{op}: {name} is on {device} and {first} on {where}; all tensors must be on one "
                "device"
            )


def require_shape(
    op: str, name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str
) -> None:
    """``ValueError`` unless ``tensor`` has the shape ``expected``, which ``meaning`` explains."""
    if all(type(size) is int for size in (*tensor.shape, *expected)) and tensor.shape == expected:
        return  # no symbols to be bound: a call over new sizes need not pay for the text
    text = f"{op}: {name} has shape {shape_of(tensor)}; it must be {shape_of(expected)}, {meaning}"
    require(tensor.dim() == len(expected), text)
    for size, wanted in zip(tensor.shape, expected):
        require(size == wanted, text)


def require_writable(op: str, name: str, tensor: Tensor) -> None:
    """``ValueError`` unless each element of ``tensor`` is a place in memory of its own."""
    require(
        not tensor.is_conj() and not tensor.is_neg(),
        f"{op}: {name} is a conjugate or negative view, which is not written through: write into "
        "the tensor that it is a view of",
    )
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return  # no elements
    for size, stride in zip(tensor.shape, tensor.stride()):
        require(
            not (isinstance(stride, int) and stride == 0) or size <= 1,
            f"{op}: {name} is an expanded tensor (stride 0); several of its elements are one place "
            "in memory, write into a contiguous copy",
        )


def require_apart(op: str, name: str, written: Tensor, read_name: str, read: Tensor) -> None:
    """``ValueError`` if the spans of memory, from first to last element, have a byte in common.

    A look at addresses: for the ``check`` option.
    """
    if written.numel() == 0 or read.numel() == 0:
        return
    (begin, end), (read_begin, read_end) = map(_span, (written, read))
    require(
        end <= read_begin or read_end <= begin,
        f"{op}: {read_name} overlaps {name} in memory, and is read while that is written: pass a "
        "copy",
    )


def require_apart_from_others(op: str, name: str, given: Mapping[str, Tensor | None]) -> None:
    """The same for the argument of that name, which is written, and each of the others."""
    written = given[name]
    assert written is not None
    for read_name, read in given.items():
        if read is not None and read_name != name:
            require_apart(op, name, written, read_name, read)


def _span(tensor: Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + elements * tensor.element_size()


def require_number_of_float32(op: str, name: str, value: float | None, default: str) -> None:
    """``ValueError`` unless ``value`` is None, zero, or finite and a normal number in float32.

    A kernel gets it as a float32: an infinite one would leave NaN where another tier has none.
    """
    require(
        value is None or -math.inf < value < math.inf,
        f"{op}: {name}={value}; it must be finite (None is {default})",
    )
    require(
        value is None or value == 0 or LEAST <= abs(value) <= MOST,
        f"{op}: {name}={value}; what is computed in float32 needs 0.0 or a size between "
        f"{LEAST:.2g} and {MOST:.2g}",
    )


def require_scale(op: str, name: str, scale: Tensor, heads: int | torch.SymInt) -> None:
    """A TypeError or ValueError unless ``scale`` is float32 of shape ``[]`` or ``[heads]``."""
    require_type(
        scale.dtype is torch.float32,
        f"{op}: {name} is {str(scale.dtype).removeprefix('torch.')}; it must be float32",
    )
    require(
        scale.dim() == 0 or (scale.dim() == 1 and scale.shape[0] == heads),
        f"{op}: {name} has shape {shape_of(scale)}; it must be () or ({heads},), one for all or "
        "one for each KV head",
    )


def shape_of(tensor: Tensor | Sequence[object]) -> str:
    """The shape as in ``(2, 3)`` or ``(2,)``, whether its sizes are numbers or symbols."""
    sizes = tensor.shape if isinstance(tensor, Tensor) else tensor
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What of a tensor goes into a flat key: all that a check or a problem takes from it."""
    if tensor is None:
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),  # an integer: cheaper than a device, and -1 for all that has no index
        tensor.data_ptr() % 16 == 0,
    )
