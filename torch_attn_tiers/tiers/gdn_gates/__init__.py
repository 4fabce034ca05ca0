"""Tiers of ``gdn_gates``.

A plan is called as ``plan(a, b, A_log, dt_bias, g, beta)`` and returns nothing. It writes g and
beta, contiguous float32 ``[tokens,Hv]``; a and b are views of that shape with any strides.
"""

from torch_attn_tiers.tiers.gdn_gates import reference, triton

#: The cascade: the order of preference where nothing has been measured.
CASCADE = (triton.TIER, reference.TIER)
