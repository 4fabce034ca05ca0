"""The reference of `gdn_chunk_prefill`: the recurrence, its chunked form, and the chunk map."""

from __future__ import annotations

import pytest
import torch

from csrc_free_ops.reference import gdn_recurrence
from csrc_free_ops.reference.gdn import chunk_bound, chunk_map, gdn_chunk, gdn_chunk_prefill
from tests import gdn_oracle


def _sequence(T: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(T, 2, 8), torch.randn(T, 2, 8) / 3, torch.randn(T, 4, 12)
    g, beta = -torch.rand(T, 4), torch.rand(T, 4)
    return tuple(x.to(dtype) for x in (q, k, v, g, beta, torch.randn(4, 8, 12)))


@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_recurrence_equals_the_oracle(qk_l2norm: bool) -> None:
    *tokens, S = _sequence(9, torch.float64)
    out, state = gdn_recurrence(*tokens, S, scale=0.3, qk_l2norm=qk_l2norm)
    batch = [x[None] for x in tokens]
    expected = gdn_oracle.gdn_chunk_prefill(*batch, S[None], scale=0.3, qk_l2norm=qk_l2norm)
    torch.testing.assert_close(out[None], expected.out)
    torch.testing.assert_close(state[None], expected.final_state)


def test_recurrence_of_no_token_keeps_the_state() -> None:
    *tokens, S = _sequence(0, torch.float32)
    out, state = gdn_recurrence(*tokens, S, scale=1.0)
    assert out.shape == (0, 4, 12) and torch.equal(state, S)


def test_chunk_equals_the_recurrence_to_the_last_digits_of_float64() -> None:
    q, k, v, g, beta, S = _sequence(64, torch.float64)
    out, state = gdn_recurrence(q, k, v, g, beta, S, scale=0.3)
    heads_first = [x.repeat_interleave(2, 1).transpose(0, 1) for x in (q, k)]
    chunk_out, chunk_state = gdn_chunk(
        *heads_first, v.transpose(0, 1), g.t(), beta.t().contiguous(), S, 0.3
    )
    torch.testing.assert_close(chunk_out.transpose(0, 1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chunk_state, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[0], [64, 0, 1], [1, 63, 65, 0, 200], [0, 0, 129, 0]])
def test_chunk_map_names_every_chunk_once(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    T, N = sum(lengths), len(lengths)
    of = chunk_map(bounds, chunk_bound(T, N) + 2)
    chunks = [(i, m) for i, length in enumerate(lengths) for m in range(-(-length // 64))]
    assert of.exists.tolist() == [True] * len(chunks) + [False] * (len(of.exists) - len(chunks))
    for c, (i, m) in enumerate(chunks):
        assert int(of.sequence[c]) == i
        assert int(of.first[c]) == int(bounds[i]) + 64 * m
        assert int(of.end[c]) == int(bounds[i + 1])
        assert bool(of.complete[c]) == (lengths[i] - 64 * m >= 64)
        if of.complete[c]:
            assert int(of.compact_row[c]) == sum(x // 64 for x in lengths[:i]) + m
    assert torch.equal(of.first[len(chunks) :], of.end[len(chunks) :])


def test_bound_of_chunks_is_reached_and_never_passed() -> None:
    for T in (0, 1, 2, 63, 64, 65, 130, 300):
        for N in (1, 2, 3, 7, 200):
            # One token for as many sequences as there are, all others in the last.
            m = min(N, T)
            lengths = [1] * (m - 1) + [T - m + 1] if m else [0]
            chunks = sum(-(-length // 64) for length in lengths)
            assert chunks == chunk_bound(T, N)


def test_empty_last_sequence_keeps_every_bit_of_its_state() -> None:
    q, v = torch.randn(1, 200, 1, 4), torch.randn(1, 200, 1, 3)
    gate = torch.rand(1, 200, 1)
    state = torch.randn(2, 1, 3, 4)
    state[1, 0, 0, 0], state[1, 0, 1, 1], state[1, 0, 2, 2] = -0.0, torch.inf, torch.nan
    out, final = torch.empty_like(v), torch.empty_like(state)
    bounds = torch.tensor([0, 20, 20])
    gdn_chunk_prefill(q, q, v, -gate, gate, state, bounds, out, final, None, None, scale=1.0)
    assert torch.equal(final[1].view(torch.int32), state[1].view(torch.int32))
