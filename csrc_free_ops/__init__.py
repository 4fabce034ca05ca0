"""Attention kernels without a line of C++: tensors in, tensors out.

Imports PyTorch and Triton only and chooses nothing: which kernel runs for a call is the business of
``torch_attn_tiers``.
"""
