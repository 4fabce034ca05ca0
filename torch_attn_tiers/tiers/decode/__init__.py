"""Tiers of ``decode``, each with its predicates and its launch in a file of its own."""

from torch_attn_tiers.tiers.decode import cudnn, flash, mea, unfused, xqa

#: The cascade: the order of preference where nothing has been measured.
CASCADE = (xqa.TIER, cudnn.TIER, flash.TIER, mea.TIER, unfused.TIER)
