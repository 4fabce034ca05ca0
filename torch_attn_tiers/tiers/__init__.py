"""Implementations of the operators, one folder for each, best first."""

from torch_attn_tiers.tier import define_op
from torch_attn_tiers.tiers.checkpoints import CASCADE as CHECKPOINTS
from torch_attn_tiers.tiers.decode import CASCADE as DECODE
from torch_attn_tiers.tiers.gdn import CASCADE as GDN
from torch_attn_tiers.tiers.gdn_decode import CASCADE as GDN_DECODE
from torch_attn_tiers.tiers.gdn_gates import CASCADE as GDN_GATES

define_op("decode", DECODE)
define_op("gdn_chunk_prefill", GDN)
define_op("gdn_decode", GDN_DECODE)
define_op("gdn_gates", GDN_GATES)
define_op("scatter_checkpoints_", CHECKPOINTS)
