"""Runs every kernel variant once at small sizes; made to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
        python -m tests.gpu.memcheck_pass [TIER [DTYPES [SHARD/SHARDS]]]

for example `flash f16,bf16,f32 0/4`, or `triton` for gdn_chunk_prefill. Without the caching
allocator each tensor is an allocation of its own, so that a read one element past a cache is seen.
Results are not looked at: tests/gpu compares those of all cases with the oracle.
Most of the time goes into compiling: run the shards beside each other, or once without the
sanitizer before, which fills Triton's cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from tests import oracle
from tests.conformance.calls import Maker, same_bits
from tests.conformance.cases import CASES
from tests.conformance.gdn_calls import GDN_TIERS, GdnCall, prompts
from tests.conformance.test_cache_writes import QUANTISED_CASES, SCATTERS, _fill, _laid_out
from tests.conformance.test_gdn import CASES as GDN_CASES
from tests.conformance.test_gdn import OVERLOADS, WITH_CHECKPOINTS

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def decode_pass(tier: str, dtype: torch.dtype, shard: int, shards: int) -> tuple[int, int]:
    """(cases run, cases that the tier does not take)"""
    ran = passed_over = 0
    for case in CASES[shard::shards]:
        if not case.everywhere or not case.is_legal_in(dtype):
            continue
        call = case.make(Maker(dtype, "cuda"))
        if call.reasons_against(tier):
            passed_over += 1
            continue
        call.run(tier)
        torch.cuda.synchronize()
        ran += 1
    return ran, passed_over


def gdn_pass(tier: str, dtype: torch.dtype, shard: int, shards: int) -> int:
    """Cases of gdn_chunk_prefill run, in all overloads where checkpoints matter."""

    def make(dtype: torch.dtype = dtype, seed: int = 0) -> Maker:
        return Maker(dtype, "cuda", seed=seed)

    def heads_of_a_model(make: Callable[..., Maker]) -> GdnCall:
        lengths = [300, 17, 64, 0, 65, 1]
        return prompts(make(), lengths, T=500, Hq=2, Hv=4, K=128, V=128, qk_l2norm=True)

    def a_long_sequence_which_is_split(make: Callable[..., Maker]) -> GdnCall:
        return prompts(make(), [4200], Hq=1, Hv=1, K=128, V=96, qk_l2norm=True)

    cases = {
        "heads of a model": heads_of_a_model,
        "a long sequence, which is split": a_long_sequence_which_is_split,
        **GDN_CASES,
    }
    names = list(cases)[shard::shards]
    for name in names:
        call = cases[name](make)
        simple = name in GDN_CASES and name not in WITH_CHECKPOINTS
        for overload in OVERLOADS[:1] if simple else OVERLOADS:
            call.with_(overload).run(tier)
            torch.cuda.synchronize()
            if overload in ("h_fla", "h_compact") and tier == "triton":
                call.with_(overload, total_chunks=1).run(tier)  # more states than rows of h
                torch.cuda.synchronize()
    return len(names)


def scatter_pass() -> int:
    """Cases run, through the operators."""
    for c in SCATTERS.values():
        m = Maker(torch.float16, "cuda")
        cache, _ = _laid_out(_fill(m, c.cache, c.dtype), c.cache_order, c.wide)
        update, _ = _laid_out(_fill(m, c.update, c.dtype), c.update_order, c.wide)
        indices = None if c.indices is None else m.integers(c.indices, c.index_dtype)
        mode = c.write_mode
        expected = oracle.tensor_scatter(cache, update, indices, axis=c.axis, write_mode=mode)
        torch.ops.attn_tiers.tensor_scatter_(cache, update, indices, axis=c.axis, write_mode=mode)
        assert same_bits(cache, expected)
        torch.ops.attn_tiers.kv_scatter_(
            cache, cache.clone(), update, update, indices, axis=c.axis, write_mode=mode
        )
        torch.cuda.synchronize()
    m = Maker(torch.bfloat16, "cuda")
    for key_shape, value_shape, axis, _ in QUANTISED_CASES.values():
        caches, updates = [m.float8(*key_shape), m.float8(*value_shape)], []
        for shape in (key_shape, value_shape):
            cut = list(shape)
            cut[axis] = 1
            updates.append(m.normal(*cut))
        scale = m.scales(0.5)
        per_head = scale.expand(key_shape[2 if axis == 1 else 1])
        args = (*caches, *updates, m.integers([0, 8, -1]), scale, per_head)
        torch.ops.attn_tiers.kv_scatter_(*args, axis=axis)
        torch.cuda.synchronize()
    return len(SCATTERS) + len(QUANTISED_CASES)


def main(tier: str = "flash", dtypes: str = "f16,bf16,f32", part: str = "0/1") -> None:
    shard, shards = map(int, part.split("/"))
    for name in dtypes.split(","):
        if tier in GDN_TIERS:
            ran, passed_over = gdn_pass(tier, DTYPES[name], shard, shards), 0
        else:
            ran, passed_over = decode_pass(tier, DTYPES[name], shard, shards)
        print(f"{tier} {name}: {ran} cases, {passed_over} not for this tier", flush=True)
        assert ran
    if shard == 0 and tier not in GDN_TIERS:
        print(f"scatter: {scatter_pass()} cases", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
