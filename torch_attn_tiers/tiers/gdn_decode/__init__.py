"""Tiers of ``gdn_decode`` and ``gdn_decode_``.

A plan is called as ``plan(q, k, v, g, beta, A_log, dt_bias, state, new_state, read_indices,
write_indices, out)`` and returns nothing. It writes all of out, contiguous ``[B,Sq,Hv,V]``, and
states into new_state, which is the same tensor as state in the in-place form. States come as
V-first views ``[P,Hv,V,K]`` with any strides; the optional tensors are there if the problem has
them.
"""

from torch_attn_tiers.tiers.gdn_decode import reference, triton

#: The cascade: the order of preference where nothing has been measured.
CASCADE = (triton.TIER, reference.TIER)
