"""Arguments of a call that does not go through PyTorch's dispatcher, bound by the same schema."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

#: What a type of a schema accepts, and how an error calls it.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a tensor"),
    "bool": ((bool,), "a bool"),
    "int": ((numbers.Integral, torch.SymInt), "an integer"),
    "float": ((numbers.Real, torch.SymFloat), "a number"),
    "str": ((str,), "a string"),
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
}


def bind(
    call: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments as the operator ``call`` ("decode.present") gets them.

    Raises:
        TypeError: an argument is missing, unknown, given twice or of another type.
    """
    packet, _, overload = call.partition(".")
    operator = getattr(getattr(torch.ops.attn_tiers, packet), overload or "default")
    positional = [a for a in operator._schema.arguments if not a.kwarg_only]
    keyword = [a for a in operator._schema.arguments if a.kwarg_only]
    takes = f"it takes {_names(positional)}, and as keywords {_names(keyword)}"

    if len(args) > len(positional):
        raise TypeError(f"{call}: got {len(args)} positional arguments; {takes}")
    unknown = [name for name in kwargs if name not in {a.name for a in positional + keyword}]
    if unknown:
        raise TypeError(f"{call}: unknown: {', '.join(unknown)}; {takes}")
    given = dict(zip((a.name for a in positional), args))
    twice = [name for name in given if name in kwargs]
    if twice:
        raise TypeError(f"{call}: given twice: {', '.join(twice)}; {takes}")
    given.update(kwargs)
    given = {name: _plain(value) for name, value in given.items()}
    required = [a for a in positional + keyword if not a.has_default_value()]
    missing = [a for a in required if a.name not in given]
    if missing:
        raise TypeError(f"{call}: missing: {_names(missing)}; {takes}")
    for argument in positional + keyword:
        if argument.name in given:
            _check_type(call, argument, given[argument.name])

    bound = [given[a.name] if a.name in given else a.default_value for a in positional]
    return bound, {a.name: given[a.name] for a in keyword if a.name in given}


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, as PyTorch's dispatcher does it."""
    is_numpys = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpys else value


def _names(arguments: Sequence[Any]) -> str:
    return ", ".join(a.name for a in arguments)


def _check_type(call: str, argument: Any, value: Any) -> None:
    name = str(argument.real_type)
    optional = name.startswith("Optional[")
    types, words = _TYPES.get(name.removeprefix("Optional[").removesuffix("]"), ((object,), ""))
    if (optional and value is None) or (
        isinstance(value, types) and (bool in types or not isinstance(value, bool))
    ):
        return
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    shown = repr(value) if is_plain else f"of type {type(value).__name__}"
    raise TypeError(
        f"{call}: {argument.name} is {shown}; it must be {words}{' or None' if optional else ''}"
    )
