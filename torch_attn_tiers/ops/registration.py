"""How an operator reaches PyTorch: declared with ``custom_op``, called without its overhead."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
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
    direct = _untraced(kernel)  # else Dynamo traces into the choice of a tier
    for backend in (*DIRECT_BACKENDS, *_REFUSED):
        library.impl(qualified, direct, backend, allow_override=True)
    with warnings.catch_warnings():  # that a kernel is overridden is the point
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(qualified, fallthrough_kernel, "Autograd", allow_override=True)
        library.impl(qualified, _transformed(name, mutates), "FuncTorchDynamicLayerFrontMode")
        if mutates:
            library.impl(qualified, fallthrough_kernel, "ADInplaceOrView", allow_override=True)
            for view in ("Conjugate", "Negative"):
                library.impl(qualified, _resolving(name, mutates), view)


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """As ``torch.compiler.disable(kernel)``, by a mark on its code and not by a wrapper.

    The wrapper takes and puts back Dynamo's hook at every call, whether it is in use or not.
    """
    try:
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy

        # The second is for the frames within.
        strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        set_code_exec_strategy(kernel.__code__, strategy)
    except (ImportError, AttributeError, TypeError):  # another version of PyTorch
        return torch.compiler.disable(kernel)
    return kernel


def _operator(name: str) -> Any:
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _resolving(name: str, mutates: Sequence[str]) -> Callable[..., Any]:
    """For conjugate or negative views: reads them as what they stand for, refuses to write them."""

    def resolve(*args: Any, **kwargs: Any) -> Any:
        operator = _operator(name)
        resolved = []
        for argument, value in zip(operator._schema.arguments, args):
            if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
                if argument.name in mutates:
                    raise ValueError(
                        f"{name.partition('::')[2]}: {argument.name} is a conjugate or negative "
                        "view, which is not written through: write into the tensor that it is a "
                        "view of"
                    )
                value = value.resolve_conj().resolve_neg()
            resolved.append(value)
        return operator(*resolved, **kwargs)

    return resolve


def _transformed(name: str, mutates: Sequence[str]) -> Callable[..., Any]:
    """For calls within ``torch.func`` transforms, which would take the lack of a formula for zero.

    Only such a call comes here, so that others pay nothing for it. The innermost transform is dealt
    with, the next one finds its way here by itself.
    """
    qualified = name.partition("::")[2]

    def transform(*args: Any, **kwargs: Any) -> Any:
        from torch._C import _functorch
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
        from torch._functorch.vmap import unwrap_batched
        from torch.utils import _pytree as pytree

        operator = _operator(name)
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, kind = interpreter.level(), interpreter.key().name
        if kind in ("Grad", "Jvp"):
            if kind == "Grad":
                forbid_grad(qualified, *args)
            else:
                forbid_tangents(qualified, *args)
            unwrap = lambda t: _functorch._unwrap_for_grad(t, level)  # noqa: E731
            args = pytree.tree_map_only(Tensor, unwrap, args)
            with interpreter.lower():
                result = operator(*args, **kwargs)
            return pytree.tree_map_only(
                Tensor, lambda t: _functorch._wrap_for_grad(t, level), result
            )
        if kind != "Vmap" or mutates:
            hint = ", it takes a batch itself" if kind == "Vmap" else ""
            raise NotImplementedError(
                f"attn_tiers::{qualified} is not supported within this torch.func transform "
                f"({kind}): call it outside{hint}"
            )
        args, dims = unwrap_batched(args, level)
        results = []
        with interpreter.lower():
            if all(dim is None for dim in dims):
                return operator(*args, **kwargs)
            for i in range(interpreter.batch_size()):
                row = [a if d is None else a.select(d, i) for a, d in zip(args, dims)]
                results.append(operator(*row, **kwargs))
            if results:
                stacked = pytree.tree_map(lambda *rows: torch.stack(rows), *results)
            else:
                stacked = _of_no_rows(operator, args, dims, kwargs)
        return pytree.tree_map(lambda t: _functorch._add_batch_dim(t, 0, level), stacked)

    return transform


def _of_no_rows(operator: Any, args: Any, dims: Any, kwargs: dict[str, Any]) -> Any:
    """What the results of a call for each row of an empty dimension are stacked to."""
    from torch.utils import _pytree as pytree

    row = []
    for argument, dim in zip(args, dims):
        if isinstance(argument, Tensor):
            shape = [size for i, size in enumerate(argument.shape) if i != dim]
            device, argument = argument.device, argument.new_empty(shape, device="meta")
        row.append(argument)
    return pytree.tree_map(
        lambda result: result.new_empty((0, *result.shape), device=device),
        operator(*row, **kwargs),
    )


def forbid_tangents(op: str, *tensors: Tensor | None) -> None:
    """Raise if forward derivatives would be lost: an input has one."""
    for tensor in tensors:
        if tensor is not None and _tangent(tensor) is not None:
            raise RuntimeError(
                f"attn_tiers::{op} is inference-only and an input has a forward derivative; "
                "detach the input"
            )


def _tangent(tensor: Tensor) -> Tensor | None:
    """The forward derivative, below autograd too: fakes and traced calls are run there."""
    with contextlib.ExitStack() as stack:
        for key in ("AutogradFunctionality", "ADInplaceOrView"):
            key = getattr(torch._C.DispatchKey, key)
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        return forward_ad.unpack_dual(tensor, level=0).tangent


def forbid_grad(op: str, *tensors: Tensor | None) -> None:
    """Raise if derivatives would be lost.

    That is, grad mode is on and an input requires grad, or an input has a forward derivative.
    """
    if forward_ad._current_level >= 0:  # else no tensor has one
        forbid_tangents(op, *tensors)
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
