"""``attn_tiers::scatter_checkpoints_`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_free_ops.reference.state_pool import in_pool, read_states, write_states


def scatter_checkpoints(
    pool: Tensor,
    dst: Tensor,
    h: Tensor,
    h_src: Tensor,
    track_mask: Tensor,
    final_state: Tensor | None,
    final_mask: Tensor | None,
) -> None:
    """Writes one state of each sequence into a pool: ``pool[dst[i]] = h[h_src[i]]``, or the final.

    Args:
        pool: ``[P,..]``, any strides.
        dst: ``[N]``. A sequence whose place is none of the pool's writes nothing.
        h: ``[R,..]``. h_src: ``[N]``; a row that ``h`` does not have is not written.
        track_mask: ``[N]``, the sequences that take a row of ``h``.
        final_state: ``[N,..]``. final_mask: ``[N]``, the sequences that take it, before all.
    """
    states = read_states(h, h_src)
    wanted = track_mask & in_pool(h_src, h.shape[0])
    if final_state is not None and final_mask is not None:
        states = torch.where(final_mask[:, None, None, None], final_state, states)
        wanted = wanted | final_mask
    write_states(pool, torch.where(wanted, dst, -1), states)
