"""Offsets beyond 2^31 elements. One allocation of 4.4 GB serves all, seen through long strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests import oracle
from tests.conformance.calls import Call, Maker, require, same_bits
from tests.conformance.tiers import DECODE_TIERS

MakeMaker = Callable[..., Maker]
BEYOND = 2**31 + 4096


@pytest.fixture(scope="module")
def storage() -> Iterator[torch.Tensor]:
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    yield torch.zeros(BEYOND + (1 << 21), dtype=torch.float16, device="cuda")
    torch.cuda.empty_cache()


def _views(storage: torch.Tensor, m: Maker, which: str) -> dict[str, torch.Tensor]:
    """Key and value [2, 2, T, D] whose last batch, head or position lies beyond 2^31 elements."""
    T, D = 912, 128  # of pages of 16
    call = m.qkv(B=2, T=T, D=D, cache_dtype=storage.dtype)
    strides = {
        "batch": (BEYOND, T * D, D, 1),
        "head": (T * D, BEYOND, D, 1),
        "position": (D, 2 * D, BEYOND // (T - 1) // D * D, 1),
    }[which]
    for shift, name in ((0, "key"), (2 * T * D, "value")):
        view = storage.as_strided(
            (2, 2, T, D), strides, shift if which != "position" else 4 * shift // T
        )
        view.copy_(call[name])
        call[name] = view
    return call


@pytest.mark.parametrize("tier", DECODE_TIERS)
@pytest.mark.parametrize("which", ["batch", "head", "position"])
def test_offsets_beyond_32_bits(
    which: str, tier: str, storage: torch.Tensor, maker: MakeMaker, must_run: frozenset[str]
) -> None:
    m = maker()
    tensors = _views(storage, m, which)
    call = Call({**tensors, "nonpad_kv_seqlen": m.lengths([911, 912])})
    require(call, tier, must_run - {"mea"})
    call.check(tier)


@pytest.mark.parametrize("which", ["batch", "head", "position"])
def test_float8_offsets_beyond_32_bits(which: str, storage: torch.Tensor, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    tensors = _views(storage.view(torch.float8_e4m3fn), m, which)
    scales = {"k_scale": m.scales(0.5, 2.0), "v_scale": m.scales(3.0, 0.1)}
    call = Call({**tensors, **scales, "nonpad_kv_seqlen": m.lengths([911, 912])})
    require(call, "flash")
    call.check("flash")
    updates = [m.normal(2, 2, 3, 128) for _ in range(2)]
    indices, caches = m.integers([0, 897]), (tensors["key"], tensors["value"])
    expected = [
        oracle.tensor_scatter(cache, oracle.quantised(update, scale, 1), indices)
        for cache, update, scale in zip(caches, updates, scales.values(), strict=True)
    ]
    torch.ops.attn_tiers.kv_scatter_(*caches, *updates, indices, *scales.values())
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


def test_mask_offsets_beyond_32_bits(storage: torch.Tensor, maker: MakeMaker) -> None:
    m = maker()
    mask = storage.as_strided((2, 1, 1, m.T), (BEYOND, m.T, m.T, 1))
    mask.copy_(m.normal(2, 1, 1, m.T))
    call = Call({**m.qkv(), "attn_mask": mask, "nonpad_kv_seqlen": m.lengths([m.T, 77])})
    require(call, "flash")
    call.check("flash")


@pytest.mark.parametrize("which", ["batch", "head", "position"])
def test_scatter_offsets_beyond_32_bits(
    which: str, storage: torch.Tensor, maker: MakeMaker
) -> None:
    m = maker()
    caches = _views(storage, m, which)
    updates = [m.normal(2, 2, 3, 128), m.normal(2, 2, 3, 128)]
    indices = m.integers([0, 897])
    pair = (caches["key"], caches["value"])
    expected = [oracle.tensor_scatter(c, u, indices) for c, u in zip(pair, updates, strict=True)]
    torch.ops.attn_tiers.kv_scatter_(*pair, *updates, indices)
    assert all(same_bits(c, e) for c, e in zip(pair, expected, strict=True))
    for update in updates:
        update += 1
    expected = [oracle.tensor_scatter(c, u, indices) for c, u in zip(pair, updates, strict=True)]
    for cache, update in zip(pair, updates, strict=True):
        torch.ops.attn_tiers.tensor_scatter_(cache, update, indices)
    assert all(same_bits(c, e) for c, e in zip(pair, expected, strict=True))
