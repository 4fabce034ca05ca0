"""Which keys a query row sees and what a mask adds to its logits, as tensors, in plain PyTorch.

For the reference, and for tiers whose library takes a mask in place of lengths and windows. Nothing
here reads a value of a tensor on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def visible_keys(
    query: Tensor,
    T: int,
    nonpad_kv_seqlen: Tensor | None = None,
    attn_mask: Tensor | None = None,
    past_len: int = 0,
    is_causal: bool = False,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Tensor:
    """Which keys a query row sees, by length, causality, window and mask.

    Returns bool ``[B|1,Hq|1,Sq|1,T]``, with 1 where nothing depends on the dimension.

    Query row ``i`` stands at position ``p = i + offset``. With lengths the last row stands at the
    last valid key (``offset = n - Sq``); otherwise the rows follow ``past_len`` keys.
    """
    Sq = query.shape[2]
    j = torch.arange(T, device=query.device)
    i = torch.arange(Sq, device=query.device)[:, None]
    if nonpad_kv_seqlen is None:
        p = i + past_len
        visible = torch.ones((1, 1, 1, T), dtype=torch.bool, device=query.device)
    else:
        n = nonpad_kv_seqlen.to(torch.int64).clamp(0, T)[:, None, None, None]
        p = i + (n - Sq)
        visible = j < n
    if is_causal:
        visible = visible & (j <= p)
    if left_window_size >= 0:
        visible = visible & (j >= p - left_window_size)
    if right_window_size >= 0:
        visible = visible & (j <= p + right_window_size)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            allowed = attn_mask
        elif attn_mask.is_floating_point():
            allowed = attn_mask != -torch.inf
        else:
            allowed = torch.ones_like(attn_mask, dtype=torch.bool)
        visible = visible & F.pad(allowed, (0, T - attn_mask.shape[-1]), value=False)
    return visible


def additive_mask(attn_mask: Tensor | None, T: int, dtype: torch.dtype) -> Tensor | float:
    """What ``attn_mask`` adds to the logits, in ``dtype``; 0 where there is nothing to add."""
    if attn_mask is None or attn_mask.dtype is torch.bool:
        return 0.0
    if torch.promote_types(attn_mask.dtype, dtype) != dtype:
        # float64's lowest number does not mean "masked" and must not become -inf.
        attn_mask = attn_mask.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return F.pad(attn_mask.to(dtype), (0, T - attn_mask.shape[-1]))
