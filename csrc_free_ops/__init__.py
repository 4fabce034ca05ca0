"""Attention kernels without a line of C++: tensors in, tensors out.

Imports PyTorch and Triton only and chooses nothing: which kernel runs for a call is the business of
``torch_attn_tiers``.
"""

#: Raised when a change to an operator's kernels may change which of its tiers is the fastest: what
#: was measured before is then ignored.
KERNEL_REVISIONS = {"decode": 1, "gdn_chunk_prefill": 1}
