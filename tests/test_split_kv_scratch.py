"""Counters of the split-KV kernel: pieces do not overlap, and captures never allocate chunks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from csrc_free_ops.decode import scratch


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> scratch.CounterArena:
    """An arena of the CPU's memory with chunks of 256 counters."""

    def zeros(count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(scratch, "_zeros_outside_pools", zeros)
    monkeypatch.setattr(scratch, "COUNTERS_PER_CHUNK", 256)
    monkeypatch.setattr(scratch, "COUNTERS_PER_STREAM", 32)
    return scratch.CounterArena(torch.device("cpu"))


def test_pieces_never_overlap(arena: scratch.CounterArena) -> None:
    arena.reserve(100)
    pieces = [arena.for_stream(7, 40), arena.for_stream(8, 3), arena.for_captured_call(33)]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        piece.fill_(number)
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3]]


def test_a_stream_keeps_its_piece_until_it_needs_a_larger_one(arena: scratch.CounterArena) -> None:
    small = arena.for_stream(7, 40)
    assert arena.for_stream(7, 30) is small
    assert arena.for_stream(7, 500).numel() >= 500


def test_a_capture_allocates_no_chunk(
    arena: scratch.CounterArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.reserve(64)
    monkeypatch.setattr(scratch, "is_capturing", lambda device: True)

    def forbidden(count: int, device: torch.device) -> torch.Tensor:
        raise AssertionError("allocates in a capture")

    monkeypatch.setattr(scratch, "_zeros_outside_pools", forbidden)
    arena.reserve(10_000)
    for _ in range(20):  # more than the chunk has: the graph zeroes the rest itself
        assert arena.for_captured_call(64).numel() >= 64


def test_released_counters_serve_later_captures(arena: scratch.CounterArena) -> None:
    arena.reserve(64)
    first = arena.for_captured_call(64)
    arena.release_captured()
    assert arena.for_captured_call(50).data_ptr() == first.data_ptr()
    assert arena.for_captured_call(50).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("last", range(1, 34))
def test_what_is_left_is_enough_only_for_whole_pieces(
    arena: scratch.CounterArena, last: int
) -> None:
    assert arena.for_stream(7, 333).numel() >= 333  # of a chunk of 2 * 333, no multiple of 32
    assert arena.for_stream(8, 333 - 34 + last).numel() >= 333 - 34 + last
