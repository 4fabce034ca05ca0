"""Elements so far apart that offsets take more than 32 bits, in a file of holes."""

from __future__ import annotations

import pathlib

import pytest
import torch

import torch_attn_tiers  # noqa: F401  registers the operators
from csrc_free_ops.facts import contiguous_facts, device_facts, tensor_facts

pytest.importorskip("triton")

from csrc_free_ops.gdn import plan_gdn
from csrc_free_ops.gdn.launch import default_config

T, D = 130, 16  # three chunks


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_chunks: int,
    qk_l2norm: bool,
    is_early: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In Triton's interpreter."""
    device = device_facts(torch.device("cpu"))
    g, beta = -torch.linspace(0, 1, T)[None, :, None], torch.full((1, T, 1), 0.5)
    config = default_config(D, D, 1, q.dtype, device)._replace(segment_chunks=segment_chunks)
    if is_early:
        config = config._replace(bv=64, v_ahead=False, v_early=True)
    plan = plan_gdn(
        *map(tensor_facts, (q, k, v, g, beta)), device,
        sequences=1, scale=1.0, qk_l2norm=qk_l2norm, config=config,
    )  # fmt: skip
    assert (plan.split is not None) == (segment_chunks > 0)
    out, state = torch.empty(1, T, 1, D, dtype=v.dtype), torch.empty(1, 1, D, D)
    plan.run(q, k, v, g, beta, None, None, out, state, None, None)
    return out, state


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("segment_chunks", [0, 1])
@pytest.mark.parametrize("is_early", [False, True])
def test_chunks_further_apart_than_32_bits(
    is_early: bool, segment_chunks: int, qk_l2norm: bool, tmp_path: pathlib.Path
) -> None:
    stride = 2**25  # 63 times it are less than 2^31
    # Of this file the pages of T tokens are written.
    memory = torch.from_file(
        str(tmp_path / "holes"), shared=True, size=T * stride, dtype=torch.bfloat16
    )
    packed = memory.as_strided((1, T, 1, 3 * D), (0, stride, 3 * D, 1))
    packed.copy_(0.3 * torch.randn(1, T, 1, 3 * D, generator=torch.Generator().manual_seed(0)))
    far = packed.split(D, -1)
    near = [x.contiguous() for x in far]
    options = segment_chunks, qk_l2norm, is_early
    for got, wanted in zip(run(*far, *options), run(*near, *options), strict=True):
        assert torch.equal(got, wanted)


def test_offsets_have_64_bits_where_a_chunk_is_that_long() -> None:
    q = contiguous_facts((1, 256, 1, D), torch.bfloat16)
    gate = contiguous_facts((1, 256, 1), torch.float32)
    for stride, wide in ((2**25 - 1, False), (2**25, True)):
        far = q._replace(stride=(0, stride, 0, 1))
        for where in range(3):
            inputs = [far if i == where else q for i in range(3)]
            plan = plan_gdn(
                *inputs, gate, gate, device_facts(torch.device("cpu")), sequences=1, scale=1.0
            )
            assert plan.scan.constants["WIDE"] is wide


def test_indices_of_decode_further_apart_than_32_bits(tmp_path: pathlib.Path) -> None:
    stride = 2**30  # twice it is past the integers of 32 bits
    memory = torch.from_file(
        str(tmp_path / "holes"), shared=True, size=2 * stride + 1, dtype=torch.int32
    )
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, 1, D, generator=generator) / 4
    v = torch.randn(1, 3, 1, D, generator=generator)
    gates = torch.rand(1, 3, 1, generator=generator)
    reads = torch.tensor([-1])
    far = memory.as_strided((1, 3), (1, stride))
    for places in ([2, 0, 3], [-1, -1, 1]):
        far.copy_(torch.tensor([places]))
        results = []
        for writes in (far, far.contiguous()):
            pool = torch.zeros(4, 1, D, D)
            out = torch.ops.attn_tiers.gdn_decode_(
                q, k, v, -gates, gates, pool, reads, writes, tier="triton"
            )
            results.append((out, pool))
        for got, wanted in zip(*results, strict=True):
            assert wanted.any() and torch.equal(got, wanted)
