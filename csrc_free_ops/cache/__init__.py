"""Writes into preallocated caches: `tensor_scatter` into one, `kv_scatter` into K and V at once.

`plan_scatter` works a write out ahead of time. Importing this needs torch only; Triton is imported
by the first plan.
"""

from csrc_free_ops.cache.launch import ScatterWrite, kv_scatter, plan_scatter, tensor_scatter

__all__ = ["ScatterWrite", "kv_scatter", "plan_scatter", "tensor_scatter"]
