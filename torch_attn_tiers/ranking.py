"""Which tier is tried first: by an order that was measured on this device, else the cascade's.

A table ``tables/<device>.json`` sorts the problems of an operator into classes and gives each the
order of its tiers. It holds under the library versions that it was measured with; under others it
is ignored, with one warning. ``python -m torch_attn_tiers tune`` writes it.

A table orders, it does not choose: every tier is still asked whether it takes the problem. Tiers
that it does not name keep the places that they have in the cascade.

Asked once for each new problem, before its plan is built; calls with a known plan do not come here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import logging
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from csrc_free_ops import KERNEL_REVISIONS
from csrc_free_ops.facts import DeviceFacts
from csrc_free_ops.sizes import next_power_of_2
from torch_attn_tiers.options import tables_folder
from torch_attn_tiers.problem import (
    DecodeProblem,
    GdnProblem,
    Problem,
    dtype_name,
    library_versions,
)
from torch_attn_tiers.tier import Tier

log = logging.getLogger("torch_attn_tiers")

#: Where the tables of the package lie.
FOLDER = pathlib.Path(__file__).parent / "tables"
_CASCADES = "the cascade's"
#: A size of a problem and that of its class differ by a factor of at most 2 ** this.
_FARTHEST = 2
#: Libraries whose versions a table of an operator depends on, besides PyTorch and Triton.
_LIBRARIES = {
    "decode": ("nvidia-cudnn-frontend", "flashinfer-python"),
    "gdn_chunk_prefill": ("flashinfer-python", "nvidia-cutlass-dsl"),  # the second compiles
}

_Kind = tuple[int | str, ...]
_Sizes = tuple[int, ...]


class Order(NamedTuple):
    """Tiers, the one to try first in front, and where their order comes from, in words."""

    tiers: tuple[Tier, ...]
    source: str


class ProblemClass(NamedTuple):
    """A class of problems that one order serves. ``str`` of it is what tables and reports say."""

    op: str
    #: What agrees within a class, by the fields of the operator's scheme.
    kind: _Kind
    #: Exponents of the powers of two nearest to its sizes.
    sizes: _Sizes

    def __str__(self) -> str:
        return f"{self.kind_in_words()} {self.sizes_in_words()}"

    @classmethod
    def parse(cls, op: str, words: str) -> ProblemClass:
        """The class that ``words`` are the ``str`` of.

        Raises:
            KeyError, ValueError: they are of none.
        """
        scheme = _SCHEMES[op]
        sizes = [_octave(int(size)) for size in _from_words(scheme.sizes, words)]
        return cls(op, _from_words(scheme.fields, words), tuple(sizes))

    def kind_in_words(self) -> str:
        """As ``"query=bfloat16 cache=bfloat16 G=4 D=128 Dv=128 window=no Sq=1"``."""
        return _in_words(_SCHEMES[self.op].fields, self.kind)

    def sizes_in_words(self) -> str:
        """As ``"rows=8 T=4096"``."""
        return _in_words(_SCHEMES[self.op].sizes, [1 << size for size in self.sizes])


class _Scheme(NamedTuple):
    """How the problems of an operator are sorted into classes."""

    fields: tuple[str, ...]
    sizes: tuple[str, ...]
    #: Values of the fields, then exponents of the powers of two nearest to the sizes.
    read: Callable[[Any], tuple[_Kind, _Sizes]]
    #: Exponents of the least and the largest class of each size: those outside count as these.
    bounds: tuple[tuple[int, int], ...]


def _read_decode(problem: DecodeProblem) -> tuple[_Kind, _Sizes]:
    query, key = problem.query, problem.key
    B, Hq, Sq, D = query.shape
    _, Hkv, T, _ = key.shape
    has_window = problem.left_window >= 0 or problem.right_window >= 0
    kind = _decode_kind(
        query.dtype, key.dtype, Hq // Hkv, D, problem.value.shape[3], has_window, min(Sq, 17)
    )
    return kind, (_octave(B * Hkv), _octave(T))


@functools.lru_cache
def _decode_kind(
    query: torch.dtype, cache: torch.dtype, G: int, D: int, Dv: int, has_window: bool, Sq: int
) -> _Kind:
    """Kernels pad a group to a power of two and head sizes to 64, 128 or 256; so do classes."""
    return (
        dtype_name(query),
        dtype_name(cache),
        next_power_of_2(G),
        max(next_power_of_2(D), 64),
        max(next_power_of_2(Dv), 64),
        "yes" if has_window else "no",
        1 if Sq == 1 else "2-16" if Sq <= 16 else "17-",
    )


def _read_gdn(problem: GdnProblem) -> tuple[_Kind, _Sizes]:
    """Kernels work on rows of their own and carry a state along each: how many, and how long."""
    h = "pool" if problem.pool is not None else problem.h_layout or "no"
    kind = _gdn_kind(problem.q.dtype, problem.K, problem.V, h, problem.batch_invariant)
    N = problem.N
    return kind, (_octave(N * problem.Hv), _octave(problem.B * problem.T // max(N, 1)))


@functools.lru_cache
def _gdn_kind(dtype: torch.dtype, K: int, V: int, h: str, batch_invariant: bool) -> _Kind:
    invariant = "yes" if batch_invariant else "no"
    return dtype_name(dtype), next_power_of_2(K), next_power_of_2(V), h, invariant


#: Of the operators that tables rank. Rows are pairs of a batch row and a KV head, or of a sequence
#: and a value head; tokens are those of a sequence if all have as many.
_SCHEMES = {
    "decode": _Scheme(
        ("query", "cache", "G", "D", "Dv", "window", "Sq"),
        ("rows", "T"),
        _read_decode,
        ((0, 9), (7, 17)),
    ),
    "gdn_chunk_prefill": _Scheme(
        ("dtype", "K", "V", "h", "batch_invariant"),
        ("rows", "tokens"),
        _read_gdn,
        ((3, 9), (7, 14)),
    ),
}


def order_of(problem: Problem, cascade: tuple[Tier, ...]) -> Order:
    """The tiers of ``cascade``, all of them, in the order in which to try them."""
    table = _tables.get((problem.device, problem.op)) or _load(problem.device, problem.op)
    if isinstance(table, str):
        return Order(cascade, table)
    return table.order(*_SCHEMES[problem.op].read(problem), cascade)


def class_of(problem: Problem) -> ProblemClass:
    """The class of a problem.

    Raises:
        KeyError: tables do not rank its operator.
    """
    return ProblemClass(problem.op, *_SCHEMES[problem.op].read(problem))


def folders() -> list[pathlib.Path]:
    """Where tables are looked for, in this order."""
    given = tables_folder()
    return [pathlib.Path(given), FOLDER] if given else [FOLDER]


def table_name(device: DeviceFacts) -> str:
    """A device's name as that of a file: ``"nvidia_h200"``; its architecture if it has none."""
    return re.sub(r"[^a-z0-9]+", "_", (device.name or device.arch).lower()).strip("_")


@functools.cache
def versions(op: str) -> dict[str, str]:
    """Versions that the times of an operator's tiers depend on, of what is installed."""
    found = dict(library_versions())
    for package in _LIBRARIES.get(op, ()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "nvidia-cudnn-frontend" in found and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    found["kernels"] = str(KERNEL_REVISIONS[op])
    return found


def section(
    orders: Mapping[ProblemClass, Iterable[str]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """An operator's part of a table: ``about`` it ("versions" at least), then every order."""
    kinds: dict[str, dict[str, str]] = {}
    for one, names in sorted(
        orders.items(), key=lambda item: (item[0].kind_in_words(), item[0].sizes)
    ):
        kinds.setdefault(one.kind_in_words(), {})[one.sizes_in_words()] = " ".join(names)
    return {**about, "orders": kinds}


def orders_of(op: str, part: Mapping[str, Any]) -> dict[ProblemClass, list[str]]:
    """The orders of an operator's part of a table, as :func:`section` takes them."""
    return {
        ProblemClass.parse(op, f"{kind} {sizes}"): names.split()
        for kind, orders in part["orders"].items()
        for sizes, names in orders.items()
    }


def forget() -> None:
    """Read the tables anew when they are next needed. For tests."""
    with _lock:
        _tables.clear()
        _warned.clear()


def _octave(size: int) -> int:
    """Exponent of the power of two nearest to a size, by their ratio: 2 for 3 to 5."""
    return (size * size).bit_length() // 2


def _in_words(names: Iterable[str], values: Iterable[Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values))


def _from_words(names: Iterable[str], words: str) -> tuple[int | str, ...]:
    """The inverse of :func:`_in_words`.

    Raises:
        KeyError: a name is missing.
    """
    given = dict(word.split("=") for word in words.split())
    return tuple(int(given[name]) if given[name].isdigit() else given[name] for name in names)


def _arranged(cascade: tuple[Tier, ...], names: Sequence[str]) -> tuple[Tier, ...]:
    """The cascade with the named tiers in the order of the names, on the places that they have."""
    named = iter(sorted((t for t in cascade if t.name in names), key=lambda t: names.index(t.name)))
    return tuple(next(named) if tier.name in names else tier for tier in cascade)


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------


class _Table:
    """The orders of one operator on one device, as they were measured."""

    def __init__(self, path: pathlib.Path, op: str, written: Mapping[str, Any]) -> None:
        self.path = path
        self._scheme = _SCHEMES[op]
        self._steps = _steps(len(self._scheme.sizes))
        #: Names of tiers, and the class that was measured.
        self._measured: dict[tuple[_Kind, _Sizes], tuple[list[str], ProblemClass]] = {}
        for one, names in orders_of(op, written).items():
            self._measured[one.kind, one.sizes] = names, one
        # Both have 16 bits and one rate, so that only one of them need be measured.
        for names, one in list(self._measured.values()):
            twin = tuple("float16" if value == "bfloat16" else value for value in one.kind)
            self._measured.setdefault((twin, one.sizes), (names, one))
        self._orders: dict[tuple[_Kind, _Sizes], tuple[tuple[Tier, ...], Order]] = {}

    def order(self, kind: _Kind, sizes: _Sizes, cascade: tuple[Tier, ...]) -> Order:
        """By that of the class, else of the nearest one of its kind, else the cascade's."""
        wanted = kind, sizes
        known = self._orders.get(wanted)
        if known is not None and known[0] == cascade:
            return known[1]
        entry = self._nearest(kind, sizes)
        if entry is None:
            order = Order(cascade, f"{_CASCADES}, {self.path.name} has no class near")
        else:
            names, measured = entry
            source = f"measured, {self.path.name}: {measured}"
            order = Order(_arranged(cascade, names), source)
        self._orders[wanted] = cascade, order
        return order

    def _nearest(self, kind: _Kind, sizes: _Sizes) -> tuple[list[str], ProblemClass] | None:
        bounded = [
            min(max(size, least), most) for size, (least, most) in zip(sizes, self._scheme.bounds)
        ]
        for step in self._steps:
            entry = self._measured.get((kind, tuple(map(int.__add__, bounded, step))))
            if entry is not None:
                return entry
        return None


def _steps(dimensions: int) -> list[tuple[int, ...]]:
    """Ways to a class nearby, the shortest first; of two as short, to the larger sizes."""
    steps = itertools.product(range(-_FARTHEST, _FARTHEST + 1), repeat=dimensions)
    return sorted(steps, key=lambda step: (sum(map(abs, step)), [-s for s in step]))


#: By device and operator; in words why there is none.
_tables: dict[tuple[DeviceFacts, str], _Table | str] = {}
_warned: set[tuple[pathlib.Path, str]] = set()
_lock = threading.Lock()


def _load(device: DeviceFacts, op: str) -> _Table | str:
    with _lock:
        if (device, op) not in _tables:  # another thread may have been faster
            _tables[device, op] = _read(device, op)
        return _tables[device, op]


def _read(device: DeviceFacts, op: str) -> _Table | str:
    none = f"{_CASCADES}, no table for {op} on {device.name or device.arch}"
    if op not in _SCHEMES:
        return none
    for folder in folders():
        path = folder / f"{table_name(device)}.json"
        found = _read_from(path, op) if path.exists() else None
        if found is not None:
            return found
    return none


def _read_from(path: pathlib.Path, op: str) -> _Table | str | None:
    """The table in a file, or why it is ignored; None if it has none for the operator."""
    try:
        written = json.loads(path.read_text())["ops"].get(op)
        if written is None:
            return None
        different = _differences(written["versions"], versions(op))
        if not different:
            return _Table(path, op, written)
        reason = f"measured with {different}"
    except Exception as error:
        reason = f"cannot be read: {type(error).__name__}: {error}"
    if (path, op) not in _warned:  # there may be several devices of the name
        _warned.add((path, op))
        log.warning(
            "%s is ignored for %s: %s. The cascade's order holds; measure anew by "
            "python -m torch_attn_tiers tune",
            path,
            op,
            reason,
        )
    return f"{_CASCADES}, {path.name} is ignored: {reason}"


def _differences(measured: Mapping[str, str], installed: Mapping[str, str]) -> str:
    """Versions that are not those of the table, in words; empty if there are none.

    A library that is on one side only makes no difference to the order of the tiers without it.
    """
    names = sorted(measured.keys() & installed.keys())
    return ", ".join(
        f"{name} {measured[name]} (here {installed[name]})"
        for name in names
        if measured[name] != installed[name]
    )
