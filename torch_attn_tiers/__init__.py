"""Attention for inference: operators with one meaning, run by the fastest tier that fits.

Importing the package registers the operators. See :mod:`torch_attn_tiers.ops` for what they take.
"""

from csrc_free_ops.facts import DeviceFacts
from torch_attn_tiers import checkpoints, ops, tiers
from torch_attn_tiers.dispatch import (
    DispatchRecord,
    Explanation,
    TierVerdict,
    explain,
    prepare,
    record_dispatch,
    release_captured_plans,
)
from torch_attn_tiers.errors import ColdCaptureError, TierNotEligibleError
from torch_attn_tiers.gdn import (
    GdnPrefill,
    GdnPrefillCompact,
    GdnPrefillFla,
    gdn_chunk_prefill,
)
from torch_attn_tiers.options import options, read_environment
from torch_attn_tiers.problem import (
    CheckpointProblem,
    DecodeProblem,
    GdnDecodeProblem,
    GdnGatesProblem,
    GdnProblem,
)
from torch_attn_tiers.tier import Tier, all_names, register_tier

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointProblem",
    "ColdCaptureError",
    "DecodeProblem",
    "DeviceFacts",
    "DispatchRecord",
    "Explanation",
    "GdnDecodeProblem",
    "GdnGatesProblem",
    "GdnPrefill",
    "GdnPrefillCompact",
    "GdnPrefillFla",
    "GdnProblem",
    "Tier",
    "TierNotEligibleError",
    "TierVerdict",
    "checkpoints",
    "explain",
    "gdn_chunk_prefill",
    "ops",
    "options",
    "prepare",
    "record_dispatch",
    "register_tier",
    "release_captured_plans",
    "tiers",
]

read_environment(all_names)
