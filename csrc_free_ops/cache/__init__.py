"""Writes into preallocated caches: `tensor_scatter` into one, `kv_scatter` into K and V at once.

Importing this needs torch only; Triton is imported by the first call.
"""

from csrc_free_ops.cache.launch import kv_scatter, tensor_scatter

__all__ = ["kv_scatter", "tensor_scatter"]
