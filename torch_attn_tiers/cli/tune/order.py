"""From times to an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Microseconds of each tier, at the same lengths for all.
Times = Mapping[str, Sequence[float]]


def fastest_first(times: Times) -> list[str]:
    """Tiers by their worst ratio to the best of those that are left, the smallest first.

    The second is thus the best choice where the first cannot run, and so on.
    """
    left = dict(times)
    order = []
    while left:
        worst = worst_ratios(left)
        first = min(left, key=lambda tier: (worst[tier], sum(left[tier])))
        order.append(first)
        del left[first]
    return order


def worst_ratios(times: Times) -> dict[str, float]:
    """Of each tier, how many times the best one's time it takes where it does worst."""
    best = [min(column) for column in zip(*times.values())]
    return {tier: max(t / b for t, b in zip(row, best)) for tier, row in times.items()}
