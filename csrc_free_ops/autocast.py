"""Autocast does not reach into this library: dtypes are the caller's, sums are float32 at least."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(
    function: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """``function`` as it computes outside autocast regions; its first argument tells the device.

    Under autocast PyTorch's matrix products round float32 operands to 16 bits.
    """

    @functools.wraps(function)
    def wrapped(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        device = tensor.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return function(tensor, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(tensor, *args, **kwargs)

    return wrapped
