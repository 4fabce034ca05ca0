"""The gated delta rule over whole prompts in Triton kernels, one file for each step.

``chunk_map`` finds the chunks of each sequence, ``prepare`` makes of each chunk what does not
depend on the state, ``scan`` carries the state from chunk to chunk and writes the outputs. Where
sequences are split, ``segments`` makes the states that their segments begin with. Needs
``triton``. ``plan_gdn`` turns shapes, strides and options into a plan; ``plan.run`` launches it.
"""

from csrc_free_ops.gdn.launch import GdnConfig, GdnPlan, plan_gdn, unsupported

__all__ = ["GdnConfig", "GdnPlan", "plan_gdn", "unsupported"]
