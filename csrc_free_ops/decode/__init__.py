"""Decode attention over a KV cache, split along the keys, in Triton.

Needs ``triton``. ``plan_split_kv`` turns shapes, strides and options into a plan; ``plan.run`` launches them.
"""

from csrc_free_ops.decode.launch import SplitKVConfig, SplitKVPlan, plan_split_kv, unsupported

__all__ = ["SplitKVConfig", "SplitKVPlan", "plan_split_kv", "unsupported"]
