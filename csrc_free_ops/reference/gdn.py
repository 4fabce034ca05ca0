"""``attn_tiers::gdn_chunk_prefill`` in plain PyTorch: the gated delta rule over whole prompts.

Letters: ``T`` tokens, ``N`` sequences, ``Hq`` heads of q and k, ``Hv`` heads of v, ``K`` and ``V``
their sizes, ``C`` tokens of a chunk. Value head ``h`` uses q and k of head ``h // (Hv/Hq)`` and has
a state ``S [K,V]`` of its own.

:func:`gdn_recurrence` is the meaning, token by token. :func:`gdn_chunk_prefill` is the same sum
chunk by chunk, in matrix products. Nothing here reads a value of a tensor on the host, so all of it
can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.autocast import without_autocast
from csrc_free_ops.reference.state_pool import read_states, write_states

#: Tokens of a chunk: the distance of checkpoints.
CHUNK = 64
#: Under the root in :func:`l2norm`.
L2NORM_EPS = 1e-6


@without_autocast
def gdn_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor,
    *,
    scale: float,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T,Hv,V]`` and the last state ``[Hv,K,V]`` of one sequence, token by token.

    Args:
        q, k: ``[T,Hq,K]``. v: ``[T,Hv,V]``. g, beta: ``[T,Hv]``.
        S: ``[Hv,K,V]``, the state before the first token. Its dtype, float32 or float64, is the one
            that everything is computed in and returned as.
        qk_l2norm: divide q and k by their length first.
    """
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[1] // q.shape[1]
    q, k = (x.to(S.dtype).repeat_interleave(group, 1) for x in (q, k))
    v, g, beta = (x.to(S.dtype) for x in (v, g, beta))
    outputs = []
    for t in range(q.shape[0]):
        S = torch.exp(g[t])[:, None, None] * S
        d = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + torch.einsum("hk,hv->hkv", k[t], d)
        outputs.append(scale * torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(outputs) if outputs else torch.empty_like(v), S


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x²) + 1e-6)`` over the last dimension, in float32, rounded to x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)


@without_autocast
def gdn_chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    h: Tensor | None,
    h_cu_starts: Tensor | None,
    *,
    scale: float,
    qk_l2norm: bool = False,
    h_layout: str | None = None,
) -> None:
    """Writes the outputs, the last states and the checkpoints of all sequences.

    One chunk after the other, each copied to new memory of one shape and padded with zeros, so that
    the bits of a sequence depend on nothing but itself.

    Args:
        q, k: ``[B,T,Hq,K]``. v: ``[B,T,Hv,V]``. g, beta: ``[B,T,Hv]``.
        initial_state: ``[N,Hv,V,K]``, zero if None. States lie V-first here, in and out.
        cu_seqlens: ``[N+1]``: sequence ``i`` is tokens ``cu_seqlens[i]`` to ``cu_seqlens[i+1]``.
            If None each of the ``B`` rows is a sequence.
        out: ``[B,T,Hv,V]``. Tokens of no sequence become zero.
        final_state: ``[N,Hv,V,K]``.
        h: ``[R,Hv,V,K]``: row ``r`` is the state before the r-th chunk of all sequences ("fla"), or
            after the r-th complete one ("compact"). Rows beyond are left, states beyond dropped.
        h_cu_starts: ``[N+1]``, first row of each sequence in the compact layout.
    """
    bounds, chunks = _bounds(cu_seqlens, q)
    if h_cu_starts is not None:
        h_cu_starts.copy_(compact_starts(bounds))
    dtype = torch.promote_types(q.dtype, torch.float32)
    states = q.new_zeros(bounds.shape[0] - 1, *v.shape[2:], q.shape[3], dtype=dtype)
    if initial_state is not None:
        states.copy_(initial_state)

    def keep(c: int, of: ChunkMap, before: Tensor, after: Tensor) -> None:
        if h is not None and h_layout == "fla":
            _write_row(h, torch.arange(c, c + 1, device=h.device), of.exists[c : c + 1], before)
        elif h is not None:
            _write_row(h, of.compact_row[c : c + 1], of.complete[c : c + 1], after)

    _prefill(q, k, v, g, beta, states, bounds, chunks, out, scale, qk_l2norm, keep)
    if final_state is not None:
        final_state.copy_(states)


@without_autocast
def gdn_chunk_prefill_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    read_indices: Tensor,
    write_indices: Tensor,
    track_lens: Tensor | None,
    track_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    qk_l2norm: bool = False,
) -> None:
    """Writes the outputs, and into the pool the last states and one state inside each sequence.

    Args:
        q, k, v, g, beta, cu_seqlens, out: as of :func:`gdn_chunk_prefill`.
        pool: ``[P,Hv,V,K]``, states V-first.
        read_indices: ``[N]``, the state that a sequence starts from; zero if it is none of the
            pool's.
        write_indices: ``[N]``, where its last state goes; nowhere if that is none of the pool's.
        track_lens, track_indices: ``[N]``: the state after so many of its tokens goes there too,
            if it is one that a chunk ends with.
    """
    bounds, chunks = _bounds(cu_seqlens, q)
    states = read_states(pool, read_indices)
    tracked = torch.empty_like(states)

    def keep(c: int, of: ChunkMap, before: Tensor, after: Tensor) -> None:
        if track_lens is not None:
            at = of.sequence[c : c + 1]
            tokens = torch.minimum(of.first[c] + CHUNK, of.end[c]) - bounds[at]
            _write_row(tracked, at, of.exists[c] & (tokens == track_lens[at]), after)

    _prefill(q, k, v, g, beta, states, bounds, chunks, out, scale, qk_l2norm, keep)
    if track_lens is not None and track_indices is not None:
        lengths = _lengths(bounds)
        ends_chunk = (track_lens % CHUNK == 0) | (track_lens == lengths)
        wanted = (track_lens > 0) & (track_lens <= lengths) & ends_chunk
        write_states(pool, torch.where(wanted, track_indices, -1), tracked)
    write_states(pool, write_indices, states)  # after the others: the last state stays


def _bounds(cu_seqlens: Tensor | None, q: Tensor) -> tuple[Tensor, int]:
    """Where the sequences begin, ``[N+1]`` within the flat tokens, and the most chunks they have.

    ``q`` is ``[B,T,Hq,K]``.
    """
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return torch.arange(B + 1, device=q.device) * T, B * -(-T // CHUNK)
    return cu_seqlens.to(torch.int64).clamp(0, B * T), chunk_bound(T, cu_seqlens.shape[0] - 1)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    bounds: Tensor,
    chunks: int,
    out: Tensor,
    scale: float,
    qk_l2norm: bool,
    keep: Callable[[int, ChunkMap, Tensor, Tensor], None],
) -> None:
    """Writes the outputs, and takes ``states [N,Hv,V,K]`` from the first ones to the last.

    ``keep`` is shown the states ``[Hv,K,V]`` before and after each chunk.
    """
    Hq, (Hv, V), device, dtype = q.shape[2], v.shape[2:], q.device, states.dtype
    out.zero_()
    if states.shape[0] == 0:
        return
    of = chunk_map(bounds, chunks)

    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    rows = q.new_zeros(chunks * CHUNK, Hv, V)
    for c in range(chunks):
        at = of.sequence[c : c + 1]  # not a number: that would be read by the host
        token = of.first[c] + torch.arange(CHUNK, device=device)
        inside = token < of.end[c]
        token = torch.where(inside, token, 0)
        qc, kc, vc, gc, bc = (_rows_of(x, token, inside) for x in (q, k, v, g, beta))
        if qk_l2norm:
            qc, kc = l2norm(qc), l2norm(kc)
        # [Hv,C,.], the heads of q and k repeated for their value heads.
        qc, kc = (x.to(dtype).transpose(0, 1).repeat_interleave(Hv // Hq, 0) for x in (qc, kc))
        vc, gc, bc = (x.to(dtype).transpose(0, 1).contiguous() for x in (vc, gc, bc))

        before = states.index_select(0, at)[0].transpose(1, 2).contiguous()
        output, after = gdn_chunk(qc, kc, vc, gc, bc, before, scale)
        # A chunk of no sequence leaves the state as it is: -0.0, and what is not finite, too.
        after = torch.where(of.exists[c], after, before)
        states.index_copy_(0, at, after.transpose(1, 2)[None])
        rows[c * CHUNK : (c + 1) * CHUNK] = output.transpose(0, 1)
        keep(c, of, before, after)

    if chunks:
        _gather_tokens(out, rows, bounds, of)


def gdn_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs ``[H,C,V]`` of one chunk and the state ``[H,K,V]`` after it.

    Args:
        q, k: ``[H,C,K]``. v: ``[H,C,V]``. g, beta: ``[H,C]``. S: ``[H,K,V]``, the state before.

    With ``decay[t,s] = exp(g[s+1] + .. + g[t])`` the recurrence unrolls to
    ``S[t] = decay[t,-1] S + sum_{s<=t} decay[t,s] k[s] d[s]ᵀ``. Put into the rule for ``d`` this is
    a triangular system, ``(I + A) d = beta (v - decay[:,-1] k S)``, with ``A = beta decay (k kᵀ)``
    below the diagonal.
    """
    C = q.shape[1]
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    # Each sum by itself: a difference of running sums would lose the small ones after a large one.
    sums = torch.where(lower.tril(-1), g[:, :, None], 0.0).cumsum(1)
    decay = torch.where(lower, torch.exp(sums), 0.0)
    since_start = torch.exp(g.cumsum(1))[:, :, None]

    A = beta[:, :, None] * torch.where(lower.tril(-1), decay * (k @ k.transpose(1, 2)), 0.0)
    right = beta[:, :, None] * (v - since_start * (k @ S))
    d = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)

    output = scale * (since_start * (q @ S) + (decay * (q @ k.transpose(1, 2))) @ d)
    to_end = decay[:, -1, :, None]
    return output, since_start[:, -1:] * S + (to_end * k).transpose(1, 2) @ d


class ChunkMap(NamedTuple):
    """Where each chunk lies, all ``[chunks]``. Those that do not exist hold no token."""

    sequence: Tensor
    first: Tensor  # its first token
    end: Tensor  # one past the last token of its sequence
    exists: Tensor  # bool
    complete: Tensor  # bool: it has all its C tokens
    compact_row: Tensor  # its row among complete chunks
    starts: Tensor  # [N+1]: first chunk of each sequence


def chunk_map(cu_seqlens: Tensor, chunks: int) -> ChunkMap:
    """The map of at most ``chunks`` chunks, made on the device; there is at least one sequence."""
    starts = _exclusive_cumsum((_lengths(cu_seqlens) + CHUNK - 1) // CHUNK)
    c = torch.arange(chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), c, right=True)
    exists = sequence < cu_seqlens.shape[0] - 1
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    number = c - starts[sequence]  # within its sequence
    first = cu_seqlens[sequence] + number * CHUNK
    end = torch.where(exists, cu_seqlens[sequence + 1], first)
    complete = exists & (end - first >= CHUNK)
    compact_row = compact_starts(cu_seqlens)[sequence] + number
    return ChunkMap(sequence, first, end, exists, complete, compact_row, starts)


def chunk_bound(T: int, N: int) -> int:
    """The most chunks that ``N`` sequences of ``T`` tokens in all can have."""
    m = min(N, T)
    return m + (T - m) // CHUNK


def compact_starts(cu_seqlens: Tensor) -> Tensor:
    """``[N+1]`` int64: complete chunks before each sequence, and of all."""
    return _exclusive_cumsum(_lengths(cu_seqlens) // CHUNK)


def _lengths(cu_seqlens: Tensor) -> Tensor:
    return (cu_seqlens[1:] - cu_seqlens[:-1]).clamp(min=0)


def _exclusive_cumsum(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _rows_of(x: Tensor, token: Tensor, inside: Tensor) -> Tensor:
    """Rows ``[C,..]`` of tokens, zero where there is none (whatever the memory there holds)."""
    return torch.where(inside.view(-1, *[1] * (x.dim() - 1)), x.index_select(0, token), 0.0)


def _write_row(h: Tensor, row: Tensor, wanted: Tensor, S: Tensor) -> None:
    """``h[row] = S``, V-first, if it is wanted and ``h`` has that row."""
    R = h.shape[0]
    if R:
        wanted = (wanted & (row < R)).view(1, 1, 1, 1)
        row = row.clamp(max=R - 1)
        value = S.transpose(1, 2)[None].to(h.dtype)
        h.index_copy_(0, row, torch.where(wanted, value, h.index_select(0, row)))


def _gather_tokens(out: Tensor, rows: Tensor, cu_seqlens: Tensor, of: ChunkMap) -> None:
    """Copies the rows of chunks to their tokens. The others keep what they hold."""
    token = torch.arange(out.shape[0] * out.shape[1], device=out.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    known = (sequence < cu_seqlens.shape[0] - 1) & (token >= cu_seqlens[0])
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    row = of.starts[sequence] * CHUNK + token - cu_seqlens[sequence]
    row = row.clamp(0, rows.shape[0] - 1)
    flat = torch.where(known[:, None, None], rows.index_select(0, row), 0.0)
    out.copy_(flat.view(out.shape))
