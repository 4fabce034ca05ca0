"""`gdn_decode` in float64, one row, head and token after the other, from the contract (section 5).

It shares no code with the package.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class StepResult:
    """What one call must leave, in float64 on the CPU."""

    out: torch.Tensor  # [B, Sq, Hv, V]
    written: dict[int, torch.Tensor]  # place in the pool -> its state [Hv, K, V]


def gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`."""
    a, b, A_log, dt_bias = (x.detach().cpu().double() for x in (a, b, A_log, dt_bias))
    return -A_log.exp() * torch.logaddexp(a + dt_bias, torch.zeros(())), 1 / (1 + (-b).exp())


def gdn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    read_indices: torch.Tensor | None = None,
    write_indices: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> StepResult:
    """All that a call returns and writes. Without indices row `b` has place `b`."""
    B, Sq, Hq, K = q.shape
    Hv, V = v.shape[2:]
    if scale is None:
        scale = 1 / K**0.5
    if qk_l2norm:
        q, k = _normalised(q), _normalised(k)
    q, k, v, g, beta = (x.detach().cpu().double() for x in (q, k, v, g, beta))
    states = state.detach().cpu().double()
    if state_v_first:
        states = states.transpose(-1, -2)
    P = states.shape[0]
    reads = list(range(B)) if read_indices is None else read_indices.tolist()
    writes = reads if write_indices is None else write_indices.tolist()
    head = torch.arange(Hv) // (Hv // Hq)  # of q and k, for each head of v

    out = torch.zeros(B, Sq, Hv, V, dtype=torch.float64)
    written = {}
    for b in range(B):
        each = writes[b] if isinstance(writes[b], list) else [-1] * (Sq - 1) + [writes[b]]
        each = [place if place < P else -1 for place in each]
        starts = 0 <= reads[b] < P
        S = states[reads[b]].clone() if starts else torch.zeros(Hv, K, V, dtype=torch.float64)
        for t in range(Sq):
            qt, kt = q[b, t, head], k[b, t, head]  # [Hv, K]
            S = S * g[b, t].exp()[:, None, None]
            d = beta[b, t][:, None] * (v[b, t] - (kt[:, None] @ S)[:, 0])
            S = S + kt[:, :, None] * d[:, None, :]
            if starts or max(each) >= 0:
                out[b, t] = scale * (qt[:, None] @ S)[:, 0]
            if each[t] >= 0:
                written[each[t]] = S
    return StepResult(out, written)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Divided by its length, rounded to its dtype."""
    wide = x.detach().cpu().double()
    return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)
