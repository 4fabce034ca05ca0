"""How an operator reaches PyTorch: declared with ``custom_op``, called without its overhead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, custom_op, fallthrough_kernel

#: Backends with a kernel of their own in the dispatcher; others go through custom_op.
DIRECT_BACKENDS = ("CPU", "CUDA")
#: Backends whose tensors every kernel refuses; custom_op does not get to see them.
_REFUSED = ("NestedTensorCPU", "NestedTensorCUDA")

#: Holds the direct kernels. If it were collected they would vanish without a word.
_libraries: dict[str, Library] = {}


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
) -> None:
    """Register ``kernel`` as the inference-only operator ``name`` ("library::op.overload").

    ``custom_op`` alone costs some 20 µs a call with ten tensors (its autograd wrapper). The kernel
    is therefore registered again for CPU and CUDA directly, and autograd is passed through: the
    kernel and the fake must call :func:`forbid_grad`. A mutating kernel must call
    :func:`mark_written`.
    """
    op = custom_op(name, mutates_args=tuple(mutates), schema=schema)(kernel)
    op.register_fake(fake)

    namespace, _, qualified = name.partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = Library(namespace, "IMPL")
    library = _libraries[namespace]
    direct = torch.compiler.disable(kernel)  # else Dynamo traces into the choice of a tier
    for backend in (*DIRECT_BACKENDS, *_REFUSED):
        library.impl(qualified, direct, backend, allow_override=True)
    with warnings.catch_warnings():  # that a kernel is overridden is the point
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(qualified, fallthrough_kernel, "Autograd", allow_override=True)
        if mutates:
            library.impl(qualified, fallthrough_kernel, "ADInplaceOrView", allow_override=True)
            for view in ("Conjugate", "Negative"):
                library.impl(qualified, _resolving(name, mutates), view)


def _resolving(name: str, mutates: Sequence[str]) -> Callable[..., Any]:
    """For conjugate or negative views: reads them as what they stand for, refuses to write them."""
    namespace, _, qualified = name.partition("::")

    def resolve(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops, namespace), qualified).default
        names = [argument.name for argument in operator._schema.arguments]
        resolved = []
        for argument, value in zip(names, args):
            if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
                if argument in mutates:
                    raise ValueError(
                        f"{qualified}: {argument} is a conjugate or negative view, which is not "
                        "written through: write into the tensor that it is a view of"
                    )
                value = value.resolve_conj().resolve_neg()
            resolved.append(value)
        return operator(*resolved, **kwargs)

    return resolve


def forbid_grad(op: str, *tensors: Tensor | None) -> None:
    """Raise if gradients would be lost: grad mode is on and an input requires grad."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"attn_tiers::{op} is inference-only and an input requires grad; "
                    "call it under torch.no_grad() or torch.inference_mode(), or detach the input"
                )


def mark_written(*tensors: Tensor) -> None:
    """Tell autograd that ``tensors`` have been written in place."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
