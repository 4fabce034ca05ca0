"""``attn_tiers::gdn_decode`` and ``gdn_gates`` in plain PyTorch, token by token.

Letters: ``B`` rows, ``Sq`` tokens of each, ``Hq`` heads of q and k, ``Hv`` heads of v, ``K`` and
``V`` their sizes, ``P`` states of a pool. Value head ``h`` uses q and k of head ``h // (Hv/Hq)``.

Nothing here reads a value of a tensor on the host, so all of it can be captured into a CUDA graph.
There is no matrix product: sums are float32, whatever PyTorch is allowed to do in those.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from csrc_free_ops.reference.gdn import l2norm
from csrc_free_ops.reference.state_pool import in_pool, read_states, write_states


def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor
) -> None:
    """Writes ``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, in float32.

    Args:
        a, b, g, beta: ``[..,Hv]``. A_log, dt_bias: ``[Hv]``.
    """
    g.copy_(-torch.exp(A_log.float()) * softplus(a.float() + dt_bias.float()))
    beta.copy_(torch.sigmoid(b.float()))


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    new_state: Tensor,
    read_indices: Tensor | None,
    write_indices: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    qk_l2norm: bool = False,
) -> None:
    """Writes the outputs of all tokens, and states: after the last token, or after each.

    Args:
        q, k: ``[B,Sq,Hq,K]``. v, out: ``[B,Sq,Hv,V]``. g, beta: ``[B,Sq,Hv]``.
        A_log, dt_bias: ``[Hv]``; with them g and beta are what :func:`gdn_gates` calls a and b.
        state: ``[P,Hv,V,K]``, read; new_state: ``[P,Hv,V,K]``, written, and may be the same.
        read_indices: ``[B]``, the state that a row starts from. One that is none of the pool's
            means zero. None: row ``b`` has state ``b``, read and written.
        write_indices: ``[B]``, where the last state goes, or ``[B,Sq]``, the state after each
            token. One that is none of the pool's drops it. A row that neither reads nor writes a
            state has outputs of zero.
    """
    if A_log is not None and dt_bias is not None:
        a, b = g, beta
        g, beta = torch.empty_like(a, dtype=torch.float32), torch.empty_like(b, dtype=torch.float32)
        gdn_gates(a, b, A_log, dt_bias, g, beta)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    v, g, beta = v.float(), g.float(), beta.float()

    S = _initial(state, read_indices)  # [B,Hv,V,K]
    idle = _idle(state, read_indices, write_indices)
    write_each = write_indices is not None and write_indices.dim() == 2
    for t in range(q.shape[1]):
        S = torch.exp(g[:, t])[:, :, None, None] * S
        d = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, None, :]).sum(-1))
        S = S + d[:, :, :, None] * k[:, t, :, None, :]
        o = scale * (S * q[:, t, :, None, :]).sum(-1)
        out[:, t] = o if idle is None else torch.where(idle[:, None, None], 0.0, o)
        if write_indices is not None and write_each:
            write_states(new_state, write_indices[:, t], S)
    if write_indices is None:
        new_state.copy_(S)
    elif not write_each:
        write_states(new_state, write_indices, S)


def _initial(state: Tensor, indices: Tensor | None) -> Tensor:
    """The states ``[B,Hv,V,K]`` to start from, in float32."""
    if indices is None:
        return state.float()
    return read_states(state, indices)


def _idle(state: Tensor, reads: Tensor | None, writes: Tensor | None) -> Tensor | None:
    """Which rows ``[B]`` neither read nor write a state; None if there are no indices."""
    if reads is None or writes is None:
        return None
    P = state.shape[0]
    written = in_pool(writes, P)
    return ~(in_pool(reads, P) | (written.any(1) if written.dim() == 2 else written))
