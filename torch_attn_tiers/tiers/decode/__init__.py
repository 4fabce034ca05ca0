"""Tiers of ``decode``, each with its predicates and its launch in a file of its own."""

from torch_attn_tiers.tiers.decode import flash, mea, unfused

#: The cascade: the order of preference where nothing has been measured.
# xqa and cudnn go ahead of flash once their tests of tests/gpu have passed on a GPU.
CASCADE = (flash.TIER, mea.TIER, unfused.TIER)
