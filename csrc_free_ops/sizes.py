"""Arithmetic of tile sizes."""

from __future__ import annotations


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, and at least 1. Without Triton."""
    return 1 << max(0, n - 1).bit_length()
