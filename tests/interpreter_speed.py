"""Triton's interpreter without the work that it repeats: the same results in less time.

The interpreter replaces the functions of `triton.language` again at each call of a device
function, checks integers for an overflow and drops what it found, and makes the types and shapes
of all tensors anew. `without_repeated_work()` does each of these once. It computes nothing itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _patching_once() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_patch_lang`, idle while its modules are patched already, and `GridExecutor.__call__`."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules_of: dict[Any, frozenset[str]] = {}
    patched: set[str] = set()

    def patch_lang(fn: Any) -> Any:
        modules = modules_of.get(fn)
        if modules is None:
            seen = (one for one in fn.__globals__.values() if inspect.ismodule(one))
            modules = frozenset(one.__name__ for one in seen if one in (tl, tl.core))
            modules_of[fn] = modules
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # the launch before has restored what it replaced
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    return patch_lang, call


def _remembered_dtypes() -> Callable[[Any], np.dtype]:
    """`_get_np_dtype` by the name of the element's type."""
    original = interpreter._get_np_dtype
    by_name: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        found = by_name.get(element.name)
        if found is None:
            found = by_name[element.name] = original(dtype)
        return found

    return get_np_dtype


def _remembered_shapes() -> tuple[Callable[..., None], Callable[..., None]]:
    """The initialisers of `tl.block_type` and `tl.tensor`, with one object for equal shapes."""
    block_init, tensor_init = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[Any, tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
        found = blocks.get(key)
        if found is None:
            block_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        found = tensors.get(key)
        if found is None:
            tensor_init(self, handle, type)
            tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    return init_block, init_tensor


def _broadcasting_if_shapes_differ() -> Callable[..., tuple[Any, Any]]:
    """`broadcast_impl_value`; equal shapes are one object."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [one.type.shape if one.type.is_block() else None for one in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] is shapes[1] else broadcast(self, lhs, rhs)

    return broadcast_impl_value


@contextlib.contextmanager
def without_repeated_work() -> Iterator[None]:
    """Kernels that the interpreter runs within this block run faster."""
    patch_lang, launch = _patching_once()
    init_block, init_tensor = _remembered_shapes()
    replaced: list[tuple[Any, str, Any]] = [
        (interpreter, "_patch_lang", patch_lang),
        (interpreter.GridExecutor, "__call__", launch),
        (interpreter, "_get_np_dtype", _remembered_dtypes()),
        (tl.block_type, "__init__", init_block),
        (tl.tensor, "__init__", init_tensor),
        (TritonSemantic, "broadcast_impl_value", _broadcasting_if_shapes_differ()),
    ]
    if not interpreter.interpreter_builder.options.debug:
        # It ends in a device_assert, which does nothing without `debug`.
        replaced.append((TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *args: None))
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
