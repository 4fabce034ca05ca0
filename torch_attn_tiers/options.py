"""Options of choosing: environment variables, read at import, and a context manager over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Options:
    """One state of all options. Equal states are one object, so that a plan key may hold it."""

    disable: frozenset[tuple[str, str]] = frozenset()
    force: tuple[tuple[str, str], ...] = ()
    jit: bool = False
    check: bool = False

    def forced(self, op: str) -> str | None:
        """The tier that stands in for a missing ``tier=`` argument of ``op``."""
        return dict(self.force).get(op)


_PREFIX = "ATTN_TIERS_"
_VARIABLES = ("DISABLE", "FORCE", "JIT", "CHECK", "TABLES")
_interned: dict[tuple[object, ...], Options] = {}
_defaults = Options()
_context: ContextVar[Options | None] = ContextVar("torch_attn_tiers.options", default=None)


def current() -> Options:
    """The options of this context, by default those of the environment."""
    return _context.get() or _defaults


@contextlib.contextmanager
def options(
    *,
    disable: str | None = None,
    force: str | None = None,
    jit: bool | None = None,
    check: bool | None = None,
) -> Iterator[None]:
    """Set options within a ``with`` block, for this thread (or async task).

    What is not given stays as it is. Each option has an environment variable, read at import.

    Args:
        disable: tiers not to use, as in ``"decode:flash,decode:mea"``; ``""`` disables none.
            ``ATTN_TIERS_DISABLE``.
        force: the tier of an operator where a call gives no ``tier=``, as in ``"decode:flash"``;
            ``""`` forces none. ``ATTN_TIERS_FORCE``.
        jit: allow builds of many seconds within a call. ``ATTN_TIERS_JIT=1``.
        check: read lengths and indices on the device and raise if they break a rule. Each check
            waits for the device; not done during a capture. ``ATTN_TIERS_CHECK=1``.

    Raises:
        ValueError: a name that no operator has, or two forced tiers of one operator.
        TypeError: an option of another type.

    Example:
        >>> import torch, torch_attn_tiers
        >>> q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 16, 64), torch.randn(1, 2, 16, 64)
        >>> with torch_attn_tiers.options(force="decode:unfused"):
        ...     torch.ops.attn_tiers.decode(q, k, v).shape
        torch.Size([1, 8, 1, 64])
    """
    for name, text in (("disable", disable), ("force", force)):
        if text is not None and not isinstance(text, str):
            raise TypeError(
                f"options: {name} is {text!r}; it must be a string of names as in "
                "'decode:flash,decode:mea'"
            )
    for name, flag in (("jit", jit), ("check", check)):
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(f"options: {name} is {flag!r}; it must be True or False")
    now = current()
    token = _context.set(
        _intern(
            now.disable if disable is None else frozenset(_parse("disable", disable)),
            now.force if force is None else _one_per_op("force", _parse("force", force)),
            now.jit if jit is None else jit,
            now.check if check is None else check,
        )
    )
    try:
        yield
    finally:
        _context.reset(token)


def read_environment(
    names_of: Callable[[], Collection[str]], environ: os._Environ[str] | dict[str, str] = os.environ
) -> None:
    """Take the defaults from ``ATTN_TIERS_*``; ``names_of`` returns all ``op:tier``."""
    global _defaults, _known_names, _tables
    _known_names = names_of
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _VARIABLES:
            known = ", ".join(_PREFIX + variable for variable in _VARIABLES)
            raise ValueError(
                f"{name}={environ[name]!r}: there is no such option; known are {known}"
            )
    disable = _parse("ATTN_TIERS_DISABLE", environ.get("ATTN_TIERS_DISABLE", ""))
    force = _parse("ATTN_TIERS_FORCE", environ.get("ATTN_TIERS_FORCE", ""))
    _defaults = _intern(
        frozenset(disable),
        _one_per_op("ATTN_TIERS_FORCE", force),
        _flag("ATTN_TIERS_JIT", environ),
        _flag("ATTN_TIERS_CHECK", environ),
    )
    _tables = environ.get("ATTN_TIERS_TABLES") or None


def tables_folder() -> str | None:
    """The folder of ``ATTN_TIERS_TABLES``, of measured tables that come before the package's."""
    return _tables


_tables: str | None = None


def _no_names() -> Collection[str]:
    return ()


_known_names: Callable[[], Collection[str]] = _no_names


def _intern(
    disable: frozenset[tuple[str, str]], force: tuple[tuple[str, str], ...], jit: bool, check: bool
) -> Options:
    key = (disable, force, jit, check)
    return _interned.setdefault(key, Options(disable, force, jit, check))


def _parse(where: str, text: str) -> list[tuple[str, str]]:
    """``"op:tier,op:tier"`` as pairs, each name checked."""
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, _, tier = item.partition(":")
        known = _known_names()
        if f"{op}:{tier}" not in known:
            raise ValueError(
                f"{where}: {item!r} is no tier; it must be one of {', '.join(sorted(known))}"
            )
        pairs.append((op, tier))
    return pairs


def _one_per_op(where: str, pairs: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    chosen = dict(pairs)
    if len(chosen) != len(set(pairs)):
        raise ValueError(
            f"{where}: more than one tier of an operator in {pairs}; give one for each"
        )
    return tuple(sorted(chosen.items()))


def _flag(name: str, environ: os._Environ[str] | dict[str, str]) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: must be 0 or 1")
    return value == "1"
