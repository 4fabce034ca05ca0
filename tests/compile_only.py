"""Compiles the kernels' specialisations of real model shapes for one GPU, without having it.

    TRITON_INTERPRET=0 python -m tests.compile_only sm_90 [decode gdn ...]

prints one JSON line for each specialisation: the group of kernels it belongs to, its name and the
bytes of shared memory that it asks for. A group that fails does not keep the next from its turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from csrc_free_ops.facts import (
    DeviceFacts,
    PoolIndices,
    broadcast_facts,
    contiguous_facts,
    heads_first_facts,
    tensor_facts,
)
from csrc_free_ops.launch import Launch

KIB = 1024
TENSOR_MEMORY = 512  # columns, where a GPU has it (sm_100)


@dataclasses.dataclass(frozen=True)
class Target:
    """What Triton is told, and the shared memory of one block (vendor's programming guide)."""

    backend: str
    arch: Any
    warp: int
    shared_memory: int
    multiprocessors: int

    def device(self, name: str) -> DeviceFacts:
        capability = (self.arch // 10, self.arch % 10) if self.backend == "cuda" else (9, 4)
        return DeviceFacts(
            "cuda", 0, capability, name, self.multiprocessors, self.shared_memory, 50 << 20, False
        )


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * KIB, 108),
    "sm_89": Target("cuda", 89, 32, 99 * KIB, 142),
    "sm_90": Target("cuda", 90, 32, 227 * KIB, 132),
    "sm_100": Target("cuda", 100, 32, 227 * KIB, 148),
    "sm_120": Target("cuda", 120, 32, 99 * KIB, 170),
    "gfx942": Target("hip", "gfx942", 64, 64 * KIB, 304),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Heads and head sizes of a model, and what its attention asks for besides."""

    Hq: int
    Hkv: int
    D: int
    Dv: int | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    rows: tuple[int, ...] = (1,)
    B: int = 16
    T: int = 8192
    mask: torch.dtype | None = None
    sinks: torch.dtype | None = None
    softcap: float = 0.0
    left_window: int = -1
    batch_invariant: bool = False
    lengths: bool = True
    positions_first: bool = False
    float8: bool = False  # caches and scales


TWO = (torch.bfloat16, torch.float32)
MODELS = {
    "llama-3-8b": Model(32, 8, 128, dtypes=TWO, rows=(1, 4, 512)),
    "llama-3-8b in float16": Model(32, 8, 128, dtypes=(torch.float16,), rows=(4,)),
    "llama-3-70b": Model(64, 8, 128, B=64, rows=(8,)),
    "llama-2-7b (no groups)": Model(32, 32, 128, positions_first=True),
    "llama-3.2-1b": Model(32, 8, 64, dtypes=TWO, B=1, T=131072),
    "qwen2.5-7b (groups of 7)": Model(28, 4, 128),
    "qwen3-next": Model(16, 2, 256, dtypes=TWO, rows=(1, 4)),
    "gemma-2-9b": Model(16, 8, 256, softcap=50.0, left_window=4095),
    "gemma-3-27b": Model(32, 16, 128, left_window=1023),
    "gpt-oss-120b": Model(64, 8, 64, sinks=torch.bfloat16, left_window=127),
    "phi-2 (head size 80)": Model(32, 32, 80, dtypes=(torch.float16,)),
    "phi-3-mini (head size 96)": Model(32, 32, 96, left_window=2046),
    "falcon-7b (one KV head)": Model(71, 1, 64),
    "deepseek (192 and 128)": Model(16, 16, 192, Dv=128, rows=(1, 4)),
    "one tile": Model(8, 1, 64, dtypes=TWO, B=1, T=128),
    "one tile of head size 80": Model(32, 8, 80, rows=(1, 32), B=4, T=50, left_window=20),
    "bool mask": Model(32, 8, 128, mask=torch.bool),
    "additive mask, everything on": Model(
        32, 8, 128, dtypes=TWO, rows=(4,), mask=torch.float32, sinks=torch.float32, softcap=30.0,
        left_window=511, lengths=False,
    ),
    "batch invariant": Model(32, 8, 128, dtypes=TWO, rows=(1, 4), batch_invariant=True),
    "widest head in float32": Model(8, 8, 256, dtypes=(torch.float32,), rows=(16,)),
    "float8, llama-3-8b": Model(32, 8, 128, rows=(1, 4, 512), float8=True),
    "float8, llama-3-8b in float16": Model(
        32, 8, 128, dtypes=(torch.float16,), rows=(4,), float8=True
    ),
    "float8, qwen3-next": Model(16, 2, 256, rows=(1, 16), float8=True),
    "float8, gpt-oss-120b": Model(
        64, 8, 64, sinks=torch.bfloat16, left_window=127, positions_first=True, float8=True
    ),
    "float8, head size 80": Model(32, 32, 80, dtypes=(torch.float16,), float8=True),
    "float8, deepseek (192 and 128)": Model(16, 16, 192, Dv=128, float8=True),
    "float8, odd head sizes": Model(8, 8, 33, Dv=31, float8=True),
    "float8, one tile": Model(8, 8, 128, T=64, float8=True),
    "float8, one tile of odd head sizes": Model(8, 8, 33, Dv=31, T=64, float8=True),
    "float8, additive mask, everything on": Model(
        32, 8, 128, rows=(4,), mask=torch.float32, sinks=torch.float32, softcap=30.0,
        left_window=511, lengths=False, float8=True,
    ),
    "float8, batch invariant": Model(32, 8, 128, batch_invariant=True, float8=True),
}  # fmt: skip


def decode(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of each decode kernel."""
    from csrc_free_ops.decode import plan_split_kv, unsupported

    target = TARGETS[name]
    device = target.device(name)
    seen = set()
    for model_name, model in MODELS.items():
        for dtype, rows in itertools.product(model.dtypes, model.rows):
            query = contiguous_facts((model.B, model.Hq, rows, model.D), dtype)
            cache_dtype = torch.float8_e4m3fn if model.float8 else dtype
            scale = (model.Hkv,) if model.float8 else None
            key = _cache(model, model.D, cache_dtype)
            value = _cache(model, model.Dv or model.D, cache_dtype)
            options: dict[str, Any] = {
                "lengths_dtype": torch.int32 if model.lengths else None,
                "mask": _mask(model, rows),
                "sinks_dtype": model.sinks,
                "k_scale": scale,
                "v_scale": scale,
                "is_causal": rows > 1,
                "offset": 0,
                "scale": model.D**-0.5,
                "softcap": model.softcap,
                "left_window": model.left_window,
                "right_window": -1,
                "batch_invariant": model.batch_invariant,
            }
            what = f"{model_name}, {str(dtype).removeprefix('torch.')}, {rows} rows"
            reason = unsupported(query, key, value, device, **options)
            if reason is not None:
                raise SystemExit(f"{what}: not supported on {name}: {reason}")
            plan = plan_split_kv(query, key, value, device, **options)
            if plan.specialization in seen:
                continue
            seen.add(plan.specialization)
            yield what, _shared_memory(plan.launch, target)


def _cache(model: Model, size: int, dtype: torch.dtype) -> Any:
    if not model.positions_first:
        return contiguous_facts((model.B, model.Hkv, model.T, size), dtype)
    flat = torch.empty(model.B, model.T, model.Hkv * size, dtype=dtype, device="meta")
    return heads_first_facts(flat, model.Hkv)


def _mask(model: Model, rows: int) -> Any:
    if model.mask is None:
        return None
    mask = torch.empty(model.B, 1, rows, model.T, dtype=model.mask, device="meta")
    return broadcast_facts(mask, (model.B, model.Hq, rows))


def cache(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of each cache-write kernel."""
    from csrc_free_ops.cache import plan_scatter

    target = TARGETS[name]
    device = target.device(name)
    indices = contiguous_facts((4,), torch.int32)
    dtypes = (torch.bfloat16, torch.float32, torch.int8)
    for heads, size, rows in ((8, 128, 1), (8, 128, 16), (32, 80, 1)):
        for dtype, count, circular in itertools.product(dtypes, (1, 2), (False, True)):
            caches = (contiguous_facts((4, heads, 4096, size), dtype),) * count
            updates = (contiguous_facts((4, heads, rows, size), dtype),) * count
            write = plan_scatter(caches, updates, indices, device, axis=-2, circular=circular)
            (part,) = write.parts
            what = f"{count} caches of {heads} x {size}, {dtype}, circular={circular}"
            yield what, _shared_memory(part.launch, target)
        scales = (contiguous_facts((), torch.float32), contiguous_facts((heads,), torch.float32))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            caches = (contiguous_facts((4, heads, 4096, size), torch.float8_e4m3fn),) * 2
            updates = (contiguous_facts((4, heads, rows, size), dtype),) * 2
            write = plan_scatter(
                caches, updates, indices, device, axis=-2, circular=False, scales=scales
            )
            (part,) = write.parts
            what = f"float8 caches of {heads} x {size} from {dtype}"
            yield what, _shared_memory(part.launch, target)


def lengths(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of the kernels that count keys and zero empty rows."""
    from csrc_free_ops.cache.lengths import RowGuard

    target = TARGETS[name]
    for width, out_dtype, lengths_dtype in itertools.product(
        (64, 4096, 5000), (torch.float16, torch.bfloat16), (torch.int32, torch.int64)
    ):
        guard = RowGuard(
            target.device(name), batch=4, capacity=4096, width=width, out_dtype=out_dtype,
            lengths_dtype=lengths_dtype,
        )  # fmt: skip
        for launch in guard.launches:
            what = f"{launch.kernel.fn.__name__} {width} {out_dtype} {lengths_dtype}"
            yield what, _shared_memory(launch, target)


#: dtype, Hq, Hv, K, V, layout of h, options; of Qwen3-Next where there are 16 and 32 heads.
GDN = (
    (torch.bfloat16, 16, 32, 128, 128, None, {"qk_l2norm": True}),
    (torch.bfloat16, 16, 32, 128, 128, "fla", {"qk_l2norm": True}),
    (torch.bfloat16, 16, 32, 128, 128, "compact", {"h_dtype": torch.bfloat16}),
    (torch.float16, 2, 8, 64, 40, "compact", {"cu_seqlens_dtype": None}),
    (torch.bfloat16, 4, 8, 256, 256, None, {}),
    (torch.float32, 4, 4, 256, 256, None, {"output_final_state": False}),
    (torch.bfloat16, 16, 32, 128, 128, None, {"pool": PoolIndices(torch.int32, torch.int64)}),
    (torch.bfloat16, 16, 32, 128, 128, None, {"pool": PoolIndices(*[torch.int64] * 4)}),
    (torch.float32, 16, 32, 128, 128, None, {"pool": PoolIndices(*[torch.int32] * 4)}),
    (torch.float32, 2, 4, 64, 40, "compact", {"qk_l2norm": True}),
    # On Hopper with 64 columns, and one program a multiprocessor.
    (torch.bfloat16, 4, 12, 128, 128, "compact", {"qk_l2norm": True}),
    # There with 16.
    (torch.bfloat16, 2, 4, 128, 128, "fla", {"qk_l2norm": True}),
    (torch.float16, 2, 4, 64, 40, "compact", {"cu_seqlens_dtype": None}),
    (torch.bfloat16, 2, 4, 128, 128, None, {"pool": PoolIndices(*[torch.int64] * 4)}),
    # One long sequence of few heads is split.
    (torch.bfloat16, 2, 8, 128, 128, None, {"qk_l2norm": True, "sequences": 1}),
    (torch.bfloat16, 2, 8, 128, 128, "fla", {"qk_l2norm": True, "sequences": 1}),
    (
        torch.bfloat16, 2, 8, 128, 128, None,
        {"sequences": 1, "pool": PoolIndices(*[torch.int64] * 4)},
    ),
    (torch.float16, 2, 8, 64, 40, "compact", {"sequences": 1, "cu_seqlens_dtype": None}),
    (torch.bfloat16, 2, 6, 64, 128, "compact", {"qk_l2norm": True, "sequences": 1}),
    (torch.bfloat16, 2, 4, 256, 256, None, {"sequences": 1}),
    (torch.float32, 4, 4, 256, 256, None, {"sequences": 1}),
    (torch.float32, 2, 4, 32, 40, "fla", {"sequences": 1, "initial_state": None}),
)  # fmt: skip


def gdn(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of each kernel of the gated delta rule."""
    from csrc_free_ops.gdn import plan_gdn, unsupported
    from csrc_free_ops.gdn.launch import shared_memory_bound

    target = TARGETS[name]
    device = target.device(name)
    seen = set()
    for dtype, Hq, Hv, K, V, h_layout, changes in GDN:
        q = contiguous_facts((1, 8192, Hq, K), dtype)
        v = contiguous_facts((1, 8192, Hv, V), dtype)
        gate = contiguous_facts((1, 8192, Hv), torch.float32)
        options: dict[str, Any] = {
            "initial_state": contiguous_facts((4, Hv, V, K), torch.float32),
            "cu_seqlens_dtype": torch.int32,
            "sequences": 4,
            "scale": K**-0.5,
            "h_layout": h_layout,
            "h_rows": 200,
            "h_dtype": torch.float32,
            **changes,
        }
        what = f"{str(dtype).removeprefix('torch.')}, K={K}, V={V}, h={h_layout}"
        what += f", pool {options['pool']}" if "pool" in options else ""
        reason = unsupported(q, q, v, device, **options)
        if reason is not None:
            raise SystemExit(f"{what}: not supported on {name}: {reason}")
        plan = plan_gdn(q, q, v, gate, gate, device, **options)
        if (plan.split is not None) != (options["sequences"] == 1):
            raise SystemExit(f"{what}: split into {plan.split}")
        for launch in plan.launches:
            if launch.specialization in seen:
                continue
            seen.add(launch.specialization)
            compiled = _compiled(launch, target)
            shared = compiled.metadata.shared
            what_of = f"{launch.kernel.fn.__name__}, {what}"
            bound = shared_memory_bound(plan.config, K, dtype)
            if shared > min(bound, device.shared_memory):
                raise SystemExit(f"{what_of}: {shared} bytes of shared memory, foreseen {bound}")
            if device.is_nvidia and launch.options.get("num_stages", 1) > 1:
                if not _copies_ahead(compiled.asm["ttgir"]):
                    raise SystemExit(f"{what_of}: no loop has copies under way before it begins")
            yield what_of, shared


#: dtypes of tokens and states, Hq, Hv, K, V, tokens of a row, indices, K-first memory; of
#: Qwen3-Next but for the last four.
GDN_STEPS: tuple[tuple[Any, ...], ...] = (
    (torch.bfloat16, torch.float32, 16, 32, 128, 128, 1, 0, False),
    (torch.bfloat16, torch.float32, 16, 32, 128, 128, 1, 1, False),
    (torch.bfloat16, torch.bfloat16, 16, 32, 128, 128, 1, 1, False),
    (torch.bfloat16, torch.bfloat16, 16, 32, 128, 128, 4, 2, False),
    (torch.float16, torch.float32, 2, 8, 64, 40, 16, 2, False),
    (torch.bfloat16, torch.float32, 4, 4, 256, 256, 1, 0, False),
    (torch.float32, torch.float16, 4, 4, 96, 256, 3, 0, False),
    (torch.bfloat16, torch.float32, 16, 32, 128, 128, 1, 0, True),
)


def gdn_decode(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of the recurrent kernel and of the gates."""
    from csrc_free_ops.gdn.decode import plan_gdn_decode, plan_gdn_gates, unsupported

    target = TARGETS[name]
    device = target.device(name)
    for dtype, state_dtype, Hq, Hv, K, V, Sq, index_rank, k_first in GDN_STEPS:
        q = contiguous_facts((4, Sq, Hq, K), dtype)
        v = contiguous_facts((4, Sq, Hv, V), dtype)
        gate = contiguous_facts((4, Sq, Hv), dtype)
        head = contiguous_facts((Hv,), torch.float32)
        state = contiguous_facts((4, Hv, V, K), state_dtype)
        if k_first:
            state = state._replace(stride=(*state.stride[:2], 1, V))
        options: dict[str, Any] = {"A_log": head, "dt_bias": head}
        if index_rank:
            options["read_indices"] = contiguous_facts((4,), torch.int32)
            options["write_indices"] = contiguous_facts((4, Sq)[:index_rank], torch.int64)
        what = f"{dtype}, state {state_dtype}, K={K}, V={V}, Sq={Sq}".replace("torch.", "")
        reason = unsupported(q, v, state)
        if reason is not None:
            raise SystemExit(f"{what}: not supported on {name}: {reason}")
        plan = plan_gdn_decode(
            q, q, v, gate, gate, state, device, scale=1.0, qk_l2norm=True, **options
        )
        yield f"{what}, indices {index_rank}", _shared_memory(plan.launch, target)
    rows, head = (contiguous_facts(shape, torch.bfloat16) for shape in ((100, 32), (32,)))
    gates = plan_gdn_gates(rows, rows, head, head, device)
    yield "gates", _shared_memory(gates.launch, target)


def checkpoints(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of the kernel that copies checkpoints into a pool."""
    from csrc_free_ops.gdn.checkpoints import plan_checkpoints

    target = TARGETS[name]
    row, flag = (contiguous_facts((4,), dtype) for dtype in (torch.int64, torch.bool))
    for pool_dtype, h_dtype, K, V, k_first, has_final in (
        (torch.float32, torch.float32, 128, 128, False, True),
        (torch.bfloat16, torch.float32, 128, 128, True, True),
        (torch.bfloat16, torch.bfloat16, 96, 40, False, False),
        (torch.float16, torch.bfloat16, 256, 256, True, True),
    ):
        pool = contiguous_facts((100, 32, K, V), pool_dtype)
        h, final = (
            contiguous_facts((n, 32, K, V), dtype)._replace(stride=(32 * K * V, K * V, 1, K))
            for n, dtype in ((64, h_dtype), (4, torch.float32))
        )
        if not k_first:
            pool = pool._replace(stride=h.stride)
        last = (final, flag) if has_final else (None, None)
        plan = plan_checkpoints(pool, row, h, row, flag, *last, target.device(name))
        what = f"{h_dtype} into {pool_dtype}, K={K}, V={V}, K-first {k_first}, final {has_final}"
        yield what, _shared_memory(plan.launch, target)


def gdn_pack(name: str) -> Iterator[tuple[str, int]]:
    """(name, bytes of shared memory) of the kernels around a library's prefill."""
    from csrc_free_ops.gdn.pack import plan_pack

    target = TARGETS[name]
    for dtype, gate_dtype, Hq, Hv, B, cu, norm, state, h_starts in (
        (torch.bfloat16, torch.float32, 16, 32, 1, torch.int32, True, torch.float32, False),
        (torch.float16, torch.float16, 16, 48, 1, torch.int64, True, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, 2, 8, 1, None, False, None, True),
        (torch.bfloat16, torch.bfloat16, 16, 16, 4, None, True, None, False),
    ):
        packed = torch.empty(B, 8192, 2 * Hq + Hv, 128, dtype=dtype, device="meta")
        q, k, v = (tensor_facts(x) for x in packed.split([Hq, Hq, Hv], 2))
        gate = contiguous_facts((B, 8192, Hv), gate_dtype)
        plan = plan_pack(
            q, k, v, gate, gate, target.device(name), cu_seqlens_dtype=cu, sequences=max(B, 4),
            qk_l2norm=norm, initial_state_dtype=state, output_final_state=True,
            has_h_starts=h_starts,
        )  # fmt: skip
        what = f"{dtype}, {Hq}/{Hv}, B={B}, cu_seqlens {cu}, state {state}".replace("torch.", "")
        for launch in plan.launches:
            shared = _shared_memory(launch, target)
            yield f"{launch.kernel.fn.__name__}, {what}", shared
    yield from _state_pool(name)


def _state_pool(name: str) -> Iterator[tuple[str, int]]:
    """The copies of states around it, into pools of either memory order."""
    from csrc_free_ops.gdn.state_pool import StatePoolPlan

    target = TARGETS[name]
    for dtype, k_first in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, False)):
        pool = contiguous_facts((100, 32, 128, 128), dtype)
        if k_first:
            pool = pool._replace(stride=(32 * 128 * 128, 128 * 128, 1, 128))
        indices = PoolIndices(torch.int32, torch.int64)
        plan = StatePoolPlan(pool, indices, 4, target.device(name))
        for launch in plan.launches:
            shared = _shared_memory(launch, target)
            yield f"{launch.kernel.fn.__name__}, {dtype}, K-first {k_first}", shared


KERNELS = {
    "decode": decode,
    "cache": cache,
    "lengths": lengths,
    "gdn": gdn,
    "gdn_decode": gdn_decode,
    "gdn_pack": gdn_pack,
    "checkpoints": checkpoints,
}


def _copies_ahead(ttgir: str) -> bool:
    """Whether some loop of a kernel has copies to shared memory under way before it begins.

    The compiler says nothing where it cannot have them, and what they save is lost.
    """
    depth_of_copies = set()
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        if "scf.for" in line and depth in depth_of_copies:
            return True
        if re.search(r"async_(tma_)?copy_global_to_local", line):
            depth_of_copies.add(depth)
    return False


def _shared_memory(launch: Launch, target: Target) -> int:
    """Bytes of shared memory that the compiled kernel asks for."""
    return int(_compiled(launch, target).metadata.shared)


def _compiled(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel.

    One that asks for more tensor memory than there is compiles to a trap, and its launch fails.
    """
    from triton.backends.compiler import GPUTarget

    compiled = launch.compile_for(GPUTarget(target.backend, target.arch, target.warp))
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    if columns > TENSOR_MEMORY:
        raise SystemExit(
            f"{launch.kernel.fn.__name__}, {launch.constants}: {columns} columns of tensor "
            f"memory of {TENSOR_MEMORY}"
        )
    return compiled


def main(target: str, *groups: str) -> int:
    failed = 0
    for group in groups or KERNELS:
        try:
            for name, shared in KERNELS[group](target):
                print(json.dumps({"group": group, "name": name, "shared": shared}), flush=True)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
