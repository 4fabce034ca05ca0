"""Errors that callers may want to catch by name."""

from __future__ import annotations


class TierNotEligibleError(ValueError):
    """The tier that was asked for cannot run this call; the message lists the reasons."""


class ColdCaptureError(RuntimeError):
    """A CUDA graph is being captured and no kernel for this problem has been built yet.

    Building would break the capture, and a slow tier would be frozen into the graph. The message
    names the :func:`torch_attn_tiers.prepare` call to make before the capture.
    """
