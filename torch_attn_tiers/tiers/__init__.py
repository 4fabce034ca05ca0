"""Implementations of the operators, one folder for each, best first."""

from torch_attn_tiers.tier import define_op
from torch_attn_tiers.tiers.decode import CASCADE as DECODE
from torch_attn_tiers.tiers.gdn import CASCADE as GDN

define_op("decode", DECODE)
define_op("gdn_chunk_prefill", GDN)
