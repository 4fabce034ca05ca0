"""Tiers: implementations of an operator, with the reasons for which one cannot take a problem."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_attn_tiers.problem import Problem

log = logging.getLogger("torch_attn_tiers")

#: Looks at a problem and returns None, or in words why the tier cannot take it.
Predicate = Callable[[Any], "str | None"]
#: Runs one problem: takes the operator's tensors, returns the operator's results.
Plan = Callable[..., Any]

ENTRY_POINT_GROUP = "torch_attn_tiers.tiers"


def _always_ready(problem: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False, kw_only=True)
class Tier:
    """One implementation of an operator.

    A plan of ``decode`` is called as ``plan(query, key, value, nonpad_kv_seqlen, attn_mask, sinks,
    k_scale, v_scale)`` with the user's tensors, where key and value have the past in front, and
    lengths, sinks and scales are dense. A predicate must turn down float8 caches
    (``problem.is_float8``) that the tier does not read, and scales that it does not apply. The
    plan returns ``Y``, or ``(Y, qk)`` if ``problem.qk_mode`` is not None: new contiguous tensors in
    the query's dtype. What a registered tier's plan returns is checked when it first runs.

    Args:
        op: the operator, as ``"decode"``.
        name: what ``tier=`` and the options call it: letters, digits and ``_ . + -``.
        predicates: each is given the problem and returns None, or in words why the tier cannot
            take it. One that fails or returns anything else counts as a reason, and is logged.
        build: makes the plan of a problem, compiling what is needed. An exception marks the tier
            unfit for the problem, and the next tier runs; out of memory and an error of the device
            are raised.
        ready: whether ``build`` would compile and load nothing, and so be safe within a CUDA graph
            capture. Elsewhere a tier need not be ready. By default it always is.
        kernel_tier: it is a kernel made for the operator. In a capture any tier but the best waits
            for no other: a kernel tier that is ready may stand in for a better one that is not,
            other tiers never do (:class:`ColdCaptureError`).
        slow_build: ``build`` takes many seconds, and is called by ``prepare``, for ``tier=`` or
            under ``ATTN_TIERS_JIT=1`` only. Any other call takes the tier once ``ready`` says so of
            the problem outside captures, hence it needs a ``ready`` of its own. In a capture the
            tier is then cold, as others are. A function says it of each problem.
        release: called by ``release_captured_plans``, to drop what captured graphs kept alive.
    """

    op: str
    name: str
    predicates: Sequence[Predicate]
    build: Callable[[Any], Plan]
    ready: Callable[[Any], bool] = _always_ready
    kernel_tier: bool = True
    slow_build: bool | Callable[[Any], bool] = False
    release: Callable[[], None] | None = None

    def builds_slowly(self, problem: Problem) -> bool:
        """What ``slow_build`` says of ``problem``."""
        return self.slow_build if isinstance(self.slow_build, bool) else self.slow_build(problem)

    def reasons(self, problem: Problem) -> list[str]:
        """Why this tier cannot take ``problem``: one sentence for each rule; empty if it can."""
        found = []
        for predicate in self.predicates:
            try:
                reason = predicate(problem)
                if reason is not None and (not isinstance(reason, str) or not reason):
                    raise TypeError(
                        f"predicate {_name_of(predicate)} returned {reason!r}; it must return None "
                        "if the tier can take the problem, else a sentence that says why not"
                    )
            except Exception as error:  # of another package, perhaps: it must not end the call
                log.exception("tier %s: a predicate failed on %s", self.name, problem.describe())
                reason = f"its predicate failed: {type(error).__name__}: {error}"
            if reason is not None:
                found.append(reason)
        return found


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


class TierHandle:
    """Returned by :func:`register_tier`. ``remove()``, or leaving it as a context, unregisters."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def remove(self) -> None:
        with _lock:
            if self._tier in _cascades[self._tier.op]:
                _cascades[self._tier.op].remove(self._tier)
                _registered.discard(self._tier)
        _changed()

    def __enter__(self) -> TierHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


_lock = threading.RLock()
_cascades: dict[str, list[Tier]] = {}
_registered: set[Tier] = set()
_listeners: list[Callable[[], None]] = []
_loading_lock = threading.RLock()
_loading = False
_entry_points_loaded = False
#: ``op:tier`` of entry points. Finding them looks at every installed package.
_entry_point_names: frozenset[str] | None = None


def define_op(op: str, cascade: Sequence[Tier]) -> None:
    """Declare an operator that has tiers, best first."""
    _cascades[op] = list(cascade)


def ops() -> tuple[str, ...]:
    """Operators that have tiers."""
    return tuple(_cascades)


def tiers_of(op: str) -> tuple[Tier, ...]:
    """The tiers of ``op`` in the cascade's order."""
    _load_entry_points()
    return tuple(_cascades[op])


def tier_names(op: str) -> tuple[str, ...]:
    """Names of the tiers of ``op`` in the cascade's order."""
    return tuple(tier.name for tier in tiers_of(op))


def register_tier(tier: Tier, *, before: str | None = None) -> TierHandle:
    """Add a tier to an operator's cascade.

    Args:
        tier: the tier; its name must be new.
        before: the tier that it goes ahead of. By default a kernel tier comes after the other
            kernel tiers, and any other one ahead of the last, which takes everything.

    Returns:
        A handle with ``remove()``, also usable in a ``with`` statement.

    Raises:
        ValueError, TypeError: unknown operator or ``before``, a name that is taken or could not be
            written in an option, or a field of the tier that is not what :class:`Tier` asks for.
    """
    _check(tier)
    if tier.op not in _cascades:
        raise ValueError(
            f"register_tier: op is {tier.op!r}; operators with tiers: {', '.join(ops())}"
        )
    with _lock:
        cascade = _cascades[tier.op]
        names = [other.name for other in cascade]
        if tier.name in names:
            raise ValueError(f"register_tier: {tier.op} already has a tier named {tier.name!r}")
        if before is not None:
            if before not in names:
                raise ValueError(
                    f"register_tier: before={before!r} is no tier of {tier.op}: {', '.join(names)}"
                )
            position = names.index(before)
        elif tier.kernel_tier:
            position = sum(1 for other in cascade if other.kernel_tier)
        else:
            position = len(cascade) - 1
        cascade.insert(position, tier)
        _registered.add(tier)
    _changed()
    return TierHandle(tier)


def _check(tier: Tier) -> None:
    """A TypeError or ValueError for a tier that would only fail later, and harder to understand."""
    if not isinstance(tier, Tier):
        raise TypeError(f"register_tier: tier is {tier!r}; it must be a torch_attn_tiers.Tier")
    if not isinstance(tier.name, str) or not re.fullmatch(r"[\w.+-]+", tier.name):
        raise ValueError(
            f"register_tier: name is {tier.name!r}; it must be a string of letters, digits and "
            "_ . + - (options name a tier as 'op:name,op:name')"
        )
    where = f"register_tier: tier {tier.name!r}:"
    predicates = tier.predicates
    if not isinstance(predicates, (list, tuple)) or not all(map(callable, predicates)):
        raise TypeError(
            f"{where} predicates is {predicates!r}; it must be a list or tuple of functions (empty "
            "if the tier takes every problem)"
        )
    for name in ("build", "ready"):
        if not callable(getattr(tier, name)):
            raise TypeError(f"{where} {name} is {getattr(tier, name)!r}; it must be a function")
    if tier.release is not None and not callable(tier.release):
        raise TypeError(f"{where} release is {tier.release!r}; it must be a function or None")
    if not isinstance(tier.kernel_tier, bool):
        raise TypeError(f"{where} kernel_tier is {tier.kernel_tier!r}; it must be True or False")
    if not isinstance(tier.slow_build, bool) and not callable(tier.slow_build):
        raise TypeError(
            f"{where} slow_build is {tier.slow_build!r}; it must be True, False or a function"
        )
    if tier.slow_build and tier.ready is _always_ready:
        raise ValueError(
            f"{where} slow_build=True without ready; by default a tier is always ready, so that "
            "any call would build it: give a ready that is False until prepare has built it"
        )


def is_registered(tier: Tier) -> bool:
    """Whether it came by :func:`register_tier`, and is not one of ours."""
    return tier in _registered


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever a cascade has changed."""
    _listeners.append(listener)


def _changed() -> None:
    for listener in _listeners:
        listener()


def all_names() -> set[str]:
    """Every ``op:tier``, of registered tiers and of entry points, none of which is loaded.

    An entry point is therefore named ``op.tier``.
    """
    global _entry_point_names
    if _entry_point_names is None:
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        _entry_point_names = frozenset(point.name.replace(".", ":", 1) for point in points)
    names = {f"{op}:{tier.name}" for op, cascade in _cascades.items() for tier in cascade}
    return names | _entry_point_names


def _load_entry_points() -> None:
    """Register the tiers of other packages, once. A broken package is logged and skipped."""
    global _entry_points_loaded, _loading
    if _entry_points_loaded:
        return
    # A lock of its own: a package that is being imported elsewhere may be registering a tier.
    with _loading_lock:
        if _entry_points_loaded or _loading:  # loading: an entry point asks for the tiers so far
            return
        _loading = True
        try:
            for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
                try:
                    loaded = point.load()
                    if isinstance(loaded, Tier):
                        register_tier(loaded)
                    else:
                        loaded()
                except Exception:
                    log.exception("entry point %s = %s is broken: skipped", point.name, point.value)
            _entry_points_loaded = True  # only now: other threads wait for all of them
        finally:
            _loading = False
