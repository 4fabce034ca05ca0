"""Tiers of ``gdn_chunk_prefill``, each with its predicates and its launch in a file of its own.

A plan is called as ``plan(q, k, v, g, beta, initial_state, cu_seqlens, out, final_state, h,
h_cu_starts)`` and returns nothing. The operator has allocated the last four, contiguous, with
states V-first (``[N,Hv,V,K]``; h ``[R,Hv,V,K]`` in either layout); those not asked for are None. A
plan writes all of out, tokens of no sequence too. The initial state comes as a V-first view, with
any strides, and cu_seqlens dense. A plan that has to write more rows of h than the call asks for
says so by its attribute ``h_rows``: as many are allocated, and the first R are returned.

With ``problem.pool`` a plan is called as ``plan(q, k, v, g, beta, pool, read_indices,
write_indices, track_lens, track_indices, cu_seqlens, out)``. The pool is a V-first view with any
strides, which the plan reads and writes; indices are dense. It writes all of out.
"""

from torch_attn_tiers.tiers.gdn import flashinfer, reference, triton

#: The cascade: the order of preference where nothing has been measured.
CASCADE = (flashinfer.TIER, triton.TIER, reference.TIER)
