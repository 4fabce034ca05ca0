"""Orders of tiers as measured, a file ``<device>.json`` for each device.

:mod:`torch_attn_tiers.ranking` reads them, ``python -m torch_attn_tiers tune`` writes them.
"""
