"""`gdn_chunk_prefill` in float64, token by token, written from the contract (section 3).

It shares no code with the package.
"""

from __future__ import annotations

import dataclasses

import torch

CHUNK = 64


@dataclasses.dataclass
class GdnResult:
    """What one call must return, in float64 on the CPU, states as `[.., K, V]`."""

    out: torch.Tensor
    final_state: torch.Tensor  # [N, Hv, K, V]
    fla: torch.Tensor  # [chunks, Hv, K, V]
    compact: torch.Tensor  # [complete chunks, Hv, K, V]
    starts: list[int]  # of the compact layout, N + 1 of them


def gdn_chunk_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> GdnResult:
    """All results of a call; the checkpoints in both layouts."""
    B, T, Hq, K = q.shape
    Hv, V = v.shape[2:]
    if scale is None:
        scale = 1 / K**0.5
    if qk_l2norm:
        q, k = _normalised(q), _normalised(k)
    q, k, v, g, beta = (x.detach().cpu().double() for x in (q, k, v, g, beta))
    if cu_seqlens is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.cpu().tolist()
        spans = [(0, first, end) for first, end in zip(bounds, bounds[1:], strict=False)]

    head = torch.arange(Hv) // (Hv // Hq)  # of q and k, for each head of v
    out = torch.zeros(B, T, Hv, V, dtype=torch.float64)
    final_state = torch.zeros(len(spans), Hv, K, V, dtype=torch.float64)
    fla, compact, starts = [], [], [0]
    for i, (b, first, end) in enumerate(spans):
        S = torch.zeros(Hv, K, V, dtype=torch.float64)
        if initial_state is not None:
            given = initial_state[i].detach().cpu().double()
            S = given.transpose(1, 2).clone() if state_v_first else given.clone()
        for t in range(first, end):
            position = t - first
            if position % CHUNK == 0:
                fla.append(S.clone())
            qt, kt = q[b, t, head], k[b, t, head]  # [Hv, K]
            S *= g[b, t].exp()[:, None, None]
            d = beta[b, t][:, None] * (v[b, t] - (kt[:, None] @ S)[:, 0])
            S += kt[:, :, None] * d[:, None, :]
            out[b, t] = scale * (qt[:, None] @ S)[:, 0]
            if position % CHUNK == CHUNK - 1:
                compact.append(S.clone())
        starts.append(len(compact))
        final_state[i] = S
    none = torch.zeros(0, Hv, K, V, dtype=torch.float64)
    return GdnResult(out, final_state, _stack(fla, none), _stack(compact, none), starts)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Divided by its length, rounded to its dtype."""
    wide = x.detach().cpu().double()
    return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


def _stack(states: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.stack(states) if states else empty
