"""`opcheck` of every operator on CUDA tensors, where the tiers are not those of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from tests.test_ops_decode import CALLS, cast, checks_of
from tests.test_ops_tensor_scatter import INDICES, SCATTERS, _caches, _updates


def _there(value: Any) -> Any:
    """A tensor's copy on the GPU, with its strides and its place in the storage."""
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes() // value.element_size()
    storage = value.as_strided((size,), (1,), 0).to("cuda")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck_decode(name: str, dtype: torch.dtype) -> None:
    overload, args, scalars = CALLS[name]
    given = cast(name, [_there(arg) for arg in args], dtype)
    operator = getattr(torch.ops.attn_tiers.decode, overload)
    opcheck(operator, given, scalars, test_utils=checks_of(name))


@pytest.mark.parametrize("name", SCATTERS)
def test_opcheck_tensor_scatter(name: str) -> None:
    args, scalars = SCATTERS[name]
    opcheck(torch.ops.attn_tiers.tensor_scatter_.default, tuple(map(_there, args)), scalars)


def test_opcheck_kv_scatter() -> None:
    args = (*_caches(), *_updates(), INDICES)
    opcheck(torch.ops.attn_tiers.kv_scatter_.default, tuple(map(_there, args)))
