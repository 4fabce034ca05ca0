"""Tiers of ``scatter_checkpoints_``.

A plan is called as ``plan(pool, dst, h, h_src, track_mask, final_state, final_mask)``, the last two
both None or both not, and returns nothing. It writes into the pool.
"""

from torch_attn_tiers.tiers.checkpoints import reference, triton

#: The cascade: the order of preference where nothing has been measured.
CASCADE = (triton.TIER, reference.TIER)
