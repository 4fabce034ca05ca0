"""Plans of `gdn_chunk_prefill`'s Triton tier in which a choice that goes by shapes is forced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from torch_attn_tiers import dispatch

Noted = TypeVar("Noted")


def plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the plans that were made is known, until the test ends."""
    monkeypatch.setattr(dispatch._plans, "plans", {})
    dispatch._plans.forget_decisions()


@contextlib.contextmanager
def forced(monkeypatch: pytest.MonkeyPatch, choice: str, value: Any) -> Iterator[None]:
    """Plans are made anew, and ``choice`` of `csrc_free_ops.gdn.launch` is always that value."""
    monkeypatch.setattr(f"csrc_free_ops.gdn.launch.{choice}", lambda *_, **__: value)
    plans_anew(monkeypatch)
    yield
    dispatch._plans.forget_decisions()


def noted(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], Noted]) -> list[Noted]:
    """What ``note`` says of each plan that is made from now on."""
    from csrc_free_ops.gdn.launch import plan_gdn

    notes: list[Noted] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plan = plan_gdn(*args, **kwargs)
        notes.append(note(plan))
        return plan

    monkeypatch.setattr("csrc_free_ops.gdn.plan_gdn", recorded)
    return notes
