"""Captures a call into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph, what the call returned while it was captured)"""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
