"""Decode attention over a KV cache, split along the keys, in one Triton launch.

Needs ``triton``. ``unsupported`` says why a problem cannot be taken, ``plan_split_kv`` turns
shapes, strides and options into a plan; ``plan.compile`` compiles it and ``plan.run`` launches it.
"""

from csrc_free_ops.decode.launch import SplitKVConfig, SplitKVPlan, plan_split_kv, unsupported
from csrc_free_ops.decode.scratch import release_captured_counters

__all__ = [
    "SplitKVConfig",
    "SplitKVPlan",
    "plan_split_kv",
    "release_captured_counters",
    "unsupported",
]
