"""The peers' page tables, layouts and plans, against stand-ins with their libraries' signatures."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from torch_attn_tiers.cli.bench import peers
from torch_attn_tiers.cli.bench.cases import Case, Inputs, reference, relative_error
from torch_attn_tiers.cli.bench.sides import Side

MIXED = Case("mixed", 3, 4, 2, 16, 256, "mixed")
TINY = Case("tiny", 1, 8, 1, 64, 128, "full")
CPU = torch.device("cpu")


@pytest.fixture(params=[MIXED, TINY], ids=lambda case: case.name)
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(peers, "_WORKSPACE_BYTES", 64)
    return Inputs(request.param, torch.bfloat16, CPU, 0)


def check(sides: list[Side], inputs: Inputs) -> None:
    """The last set's call of every side gives the reference, in the reference's shape."""
    for side in sides:
        assert len(side.calls) == inputs.sets
        out = side.to_bhsd(side.calls[-1]())
        assert out.shape == inputs.reference.shape, side.name
        assert relative_error(out, inputs.reference) < side.tolerance, side.name


def attend(query: torch.Tensor, keys: Any, values: Any, scale: float) -> torch.Tensor:
    """Attention of [B,Hq,D] over one [n,Hkv,D] of keys and of values a sequence."""
    rows = []
    for b, (key, value) in enumerate(zip(keys, values, strict=True)):
        k, v = (x.transpose(0, 1)[None] for x in (key, value))
        rows.append(reference(query[b : b + 1, :, None], k, v, [key.shape[0]], scale)[:, :, 0])
    return torch.cat(rows).to(query.dtype)


def test_xqa(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def xqa_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
        bmm1_scale, bmm2_scale, out, kv_layout,
    ):  # fmt: skip
        assert seq_lens.dtype == torch.uint32 and block_tables.dtype == torch.int32
        assert not workspace_buffer.any() and bmm2_scale == 1.0
        gathered: list[list[torch.Tensor]] = [[], []]
        for cache, into in zip(kv_cache, gathered, strict=True):
            for b, n in enumerate(seq_lens.tolist()):
                pages = [cache[int(j)] for j in block_tables[b]]
                if kv_layout == "HND":
                    pages = [page.transpose(0, 1) for page in pages]
                into.append(torch.cat(pages)[:n])
        out.copy_(attend(query, *gathered, bmm1_scale))

    module: Any = types.ModuleType("flashinfer")
    module.decode = types.SimpleNamespace(
        xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    sides = peers.xqa(inputs)
    assert [side.name for side in sides] == ["xqa:nhd", "xqa:hnd"]
    check(sides, inputs)


def test_flashinfer(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(
            self, workspace, kv_layout, *, use_cuda_graph, use_tensor_cores, backend,
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer,
        ):  # fmt: skip
            assert kv_layout == "NHD" and use_cuda_graph and use_tensor_cores

        def plan(
            self, indptr, indices, last_page_len, q_heads, kv_heads, head_dim, page_size,
            *, q_data_type, kv_data_type, sm_scale,
        ):  # fmt: skip
            self.table = indptr.tolist(), indices.tolist(), last_page_len.tolist()
            self.page, self.scale = page_size, sm_scale

        def run(self, query, kv_cache):
            indptr, indices, last = self.table
            gathered: list[list[torch.Tensor]] = [[], []]
            for cache, into in zip(kv_cache, gathered, strict=True):
                for b, length in enumerate(last):
                    ids = indices[indptr[b] : indptr[b + 1]]
                    n = (len(ids) - 1) * self.page + length
                    into.append(torch.cat([cache[i] for i in ids])[:n])
            return attend(query, *gathered, self.scale)

    module: Any = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    check(peers.flashinfer_fa2(inputs), inputs)


@pytest.mark.parametrize("schedules", [True, False])
def test_fa3(inputs: Inputs, schedules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, scheduler_metadata
    ):
        assert q.is_contiguous() and k_cache.is_contiguous() and causal
        keys = [k[:n] for k, n in zip(k_cache, cache_seqlens.tolist(), strict=True)]
        values = [v[:n] for v, n in zip(v_cache, cache_seqlens.tolist(), strict=True)]
        return attend(q[:, 0], keys, values, softmax_scale)[:, None]

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
        *, cache_seqlens, qkv_dtype, causal,
    ):  # fmt: skip
        if not schedules:
            raise TypeError("another version")
        return torch.zeros(1)

    module: Any = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.get_scheduler_metadata = get_scheduler_metadata
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    sides = peers.fa3(inputs)
    assert [side.name for side in sides] == ["fa3", "fa3:ahead"][: 1 + schedules]
    check(sides, inputs)


def test_sdpa_runs_on_this_machine() -> None:
    inputs = Inputs(TINY, torch.bfloat16, CPU, 0)
    sides = peers.sdpa("flash", inputs)
    with sides[0].context():
        check(sides, inputs)
