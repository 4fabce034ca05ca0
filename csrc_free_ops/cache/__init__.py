"""Writes into preallocated caches, planned by `plan_scatter`: into one, or into K and V at once.

Importing this needs torch only; Triton is imported by the first plan.
"""

from csrc_free_ops.cache.launch import ScatterWrite, plan_scatter

__all__ = ["ScatterWrite", "plan_scatter"]
