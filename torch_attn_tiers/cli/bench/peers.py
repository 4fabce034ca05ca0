"""The public decode kernels that the bench measures beside ours.

Each builder returns the sides of one peer for given inputs; a peer with several ways to run (page
layouts, schedules made ahead) counts by the fastest. Page tables, plans, layouts and workspaces are
made here, outside the timing. A builder raises when its library is missing or refuses the case.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from torch_attn_tiers.cli.bench.cases import Case, Inputs
from torch_attn_tiers.cli.bench.sides import Side, bind_all

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Peer:
    """A public implementation: how it is labelled, imported and built."""

    name: str
    label: str
    module: str  # what must be importable
    build: Callable[[Inputs], list[Side]]
    full_only: bool = False  # has no per-sequence lengths
    # What its nvcc run depends on; None if it compiles nothing.
    compile_key: Callable[[Case], tuple[int, ...]] | None = None

    def gap(self) -> str | None:
        """Why it cannot run here at all, judged without importing it."""
        found = importlib.util.find_spec(self.module.split(".")[0])
        return None if found else f"{self.module} is not installed"


def listed(case: Case) -> list[str]:
    """The peers without which a ratio for this case is not printed."""
    return [p.name for p in PEERS.values() if case.lengths == "full" or not p.full_only]


def cudnn_fe(inputs: Inputs) -> list[Side]:
    """cuDNN's graph API over [B,Hkv,T,D] with a padding mask."""
    import cudnn

    case = inputs.case
    data = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    handle = cudnn.create_handle()

    def on_current_stream() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=handle, stream=stream)

    on_current_stream()
    started = time.perf_counter()
    graph = cudnn.pygraph(
        io_data_type=data[inputs.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    query_lengths = torch.ones(case.batch, 1, 1, 1, dtype=torch.int32, device=inputs.device)
    key_lengths = inputs.lengths.view(-1, 1, 1, 1)
    q, k, v = (graph.tensor_like(x[0]) for x in (inputs.query, inputs.key, inputs.value))
    seq_q, seq_kv = graph.tensor_like(query_lengths), graph.tensor_like(key_lengths)
    o, _ = graph.sdpa(
        name="decode",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=case.scale,
        use_padding_mask=True,
        seq_len_q=seq_q,
        seq_len_kv=seq_kv,
    )
    out = torch.empty_like(inputs.query[0])
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    built = time.perf_counter() - started
    workspace_bytes = max(1, graph.get_workspace_size())
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=inputs.device)

    def call(i: int) -> torch.Tensor:
        on_current_stream()
        tensors = {
            q: inputs.query[i],
            k: inputs.key[i],
            v: inputs.value[i],
            seq_q: query_lengths,
            seq_kv: key_lengths,
            o: out,
        }
        graph.execute(tensors, workspace, handle=handle)
        return out

    notes = {"layout": "hnd", "build_s": round(built, 3)}
    return [Side("cudnn_fe", bind_all(call, inputs.sets), "cudnn_fe", notes=notes)]


def xqa(inputs: Inputs) -> list[Side]:
    """FlashInfer's XQA over pages of 64 keys: [pages,64,Hkv,D], and [B,Hkv,T,D] seen as pages."""
    import flashinfer

    case, page = inputs.case, 64
    pages = case.capacity // page
    lengths = inputs.lengths.to(torch.uint32)
    query = [q.view(case.batch, case.q_heads, case.head_dim) for q in inputs.query]

    def side(layout: str, caches: list[Any], table: torch.Tensor) -> Side:
        # Zeroed once: the first 8 MB hold semaphores that reset themselves.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
        out = torch.empty_like(query[0])

        def call(i: int) -> torch.Tensor:
            flashinfer.decode.xqa_batch_decode_with_kv_cache(
                query[i],
                caches[i],
                workspace,
                table,
                lengths,
                case.capacity,
                bmm1_scale=case.scale,
                bmm2_scale=1.0,
                out=out,
                kv_layout=layout.upper(),
            )
            return out

        return Side(
            f"xqa:{layout}",
            bind_all(call, inputs.sets),
            "xqa",
            to_bhsd=lambda o: o.view(case.batch, case.q_heads, 1, case.head_dim),
            notes={"layout": layout, "page": page},
        )

    first = torch.arange(case.batch, device=inputs.device, dtype=torch.int32).view(-1, 1)
    column = torch.arange(pages, device=inputs.device, dtype=torch.int32)
    nhd = [(_paged(k, page), _paged(v, page)) for k, v in inputs.pairs_nhd]
    hnd = [(_overlapping_pages(k, page), _overlapping_pages(v, page)) for k, v in inputs.pairs]
    return [
        side("nhd", nhd, first * pages + column),
        side("hnd", hnd, first * (case.kv_heads * pages) + column),
    ]


def fa3(inputs: Inputs) -> list[Side]:
    """FlashAttention-3 over [B,T,Hkv,D], its schedule made inside each call and ahead of it."""
    fa3_fwd_interface: Any = importlib.import_module("fa3_fwd_interface")
    case = inputs.case
    query = [q.transpose(1, 2).contiguous() for q in inputs.query]
    key, value = inputs.key_nhd, inputs.value_nhd

    def side(name: str, schedule: torch.Tensor | None) -> Side:
        def call(i: int) -> torch.Tensor:
            return fa3_fwd_interface.flash_attn_with_kvcache(
                query[i],
                key[i],
                value[i],
                cache_seqlens=inputs.lengths,
                softmax_scale=case.scale,
                causal=True,
                scheduler_metadata=schedule,
            )

        notes = {"layout": "nhd", "schedule_ahead": schedule is not None}
        calls = bind_all(call, inputs.sets)
        return Side(name, calls, "fa3", to_bhsd=lambda out: out.transpose(1, 2), notes=notes)

    sides = [side("fa3", None)]
    with contextlib.suppress(Exception):  # not in every version
        schedule = fa3_fwd_interface.get_scheduler_metadata(
            case.batch,
            1,
            case.capacity,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            cache_seqlens=inputs.lengths,
            qkv_dtype=inputs.dtype,
            causal=True,
        )
        ahead = side("fa3:ahead", schedule)
        ahead.calls[0]()
        torch.cuda.synchronize()
        sides.append(ahead)
    return sides


def flashinfer_fa2(inputs: Inputs) -> list[Side]:
    """FlashInfer's FA2 decode with tensor cores over [pages,p,Hkv,D]; its host plan made ahead."""
    return [_flashinfer_fa2(inputs, page) for page in (16, 64)]


def _flashinfer_fa2(inputs: Inputs, page: int) -> Side:
    import flashinfer

    case, device = inputs.case, inputs.device
    per_row = [-(-n // page) for n in inputs.host_lengths]
    stride = case.capacity // page
    indices = [b * stride + j for b, count in enumerate(per_row) for j in range(count)]
    starts = [0]
    for count in per_row:
        starts.append(starts[-1] + count)
    last_lengths = [(n - 1) % page + 1 for n in inputs.host_lengths]
    indptr, index, last = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, indices, last_lengths)
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=index.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
        backend="fa2",
    )

    def plan() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        wrapper.plan(
            indptr,
            index,
            last,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            page,
            q_data_type=inputs.dtype,
            kv_data_type=inputs.dtype,
            sm_scale=case.scale,
        )
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e6

    plan()
    plan_us = plan()
    query = [q.view(case.batch, case.q_heads, case.head_dim) for q in inputs.query]
    caches = [(_paged(k, page), _paged(v, page)) for k, v in inputs.pairs_nhd]
    return Side(
        f"flashinfer_fa2:p{page}",
        bind_all(lambda i: wrapper.run(query[i], caches[i]), inputs.sets),
        "flashinfer_fa2",
        to_bhsd=lambda o: o.view(case.batch, case.q_heads, 1, case.head_dim),
        notes={"layout": "nhd", "page": page, "plan_us": round(plan_us)},
    )


def sdpa(backend: str, inputs: Inputs) -> list[Side]:
    """PyTorch's scaled_dot_product_attention over [B,Hkv,T,D] with one backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = inputs.case
    which = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

    def call(i: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.query[i],
            inputs.key[i],
            inputs.value[i],
            scale=case.scale,
            enable_gqa=case.group > 1,
        )

    return [
        Side(
            f"sdpa_{backend}",
            bind_all(call, inputs.sets),
            f"sdpa_{backend}",
            context=lambda: sdpa_kernel(which),
            notes={"layout": "hnd"},
        )
    ]


def flex(inputs: Inputs) -> list[Side]:
    """PyTorch's flex_attention, compiled, the block mask made ahead."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = inputs.case
    lengths = inputs.lengths

    def valid(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < lengths[b]

    block_mask = create_block_mask(
        valid, case.batch, None, 1, case.capacity, device=str(inputs.device)
    )
    torch._dynamo.reset()  # one specialisation a case; without this the eighth hits the limit
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def call(i: int) -> torch.Tensor:
        return compiled(
            inputs.query[i],
            inputs.key[i],
            inputs.value[i],
            block_mask=block_mask,
            enable_gqa=case.group > 1,
            scale=case.scale,
        )

    return [Side("flex", bind_all(call, inputs.sets), "flex", notes={"layout": "hnd"})]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cudnn_fe", "cuDNN FE", "cudnn", cudnn_fe),
        Peer(
            "xqa",
            "XQA",
            "flashinfer",
            xqa,
            compile_key=lambda case: (case.head_dim, case.group),
        ),
        Peer("fa3", "FA3", "fa3_fwd_interface", fa3),
        Peer(
            "flashinfer_fa2",
            "FlashInfer FA2",
            "flashinfer",
            flashinfer_fa2,
            compile_key=lambda case: (case.head_dim,),
        ),
        Peer(
            "sdpa_flash",
            "SDPA flash",
            "torch",
            functools.partial(sdpa, "flash"),
            full_only=True,
        ),
        Peer(
            "sdpa_cudnn",
            "SDPA cuDNN",
            "torch",
            functools.partial(sdpa, "cudnn"),
            full_only=True,
        ),
        Peer("flex", "flex", "torch", flex),
    )
}


def compile_ahead(
    peers: Iterable[Peer], cases: Collection[Case], dtype: torch.dtype, device: torch.device
) -> None:
    """Runs the peers that call nvcc once for each kernel that the cases need, side by side.

    A failure is left for the real build, which records it as the peer's gap.
    """
    jobs: dict[tuple[str, tuple[int, ...]], tuple[Peer, Case]] = {}
    for peer in peers:
        if peer.compile_key is None or peer.gap() is not None:
            continue
        for case in cases:
            small = Case("compile", 1, case.group, 1, case.head_dim, 128, "full")
            jobs.setdefault((peer.name, peer.compile_key(case)), (peer, small))

    def build(peer: Peer, case: Case) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            for side in peer.build(Inputs(case, dtype, device, 0)):
                side.calls[0]()
            torch.cuda.synchronize()

    if jobs:
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda job: build(*job), jobs.values()))


def _paged(cache: torch.Tensor, page: int) -> torch.Tensor:
    """A contiguous [B,T,Hkv,D] cache as [B*T/page, page, Hkv, D]."""
    return cache.view(-1, page, *cache.shape[2:])


def _overlapping_pages(cache: torch.Tensor, page: int) -> torch.Tensor:
    """A contiguous [B,Hkv,T,D] cache as [n, Hkv, page, D] without a copy.

    Pages start every `page` keys of every head, so that neighbours overlap; page
    `b*Hkv*(T/page) + j` is the one of sequence b, keys `j*page` on.
    """
    batch, kv_heads, capacity, head_dim = cache.shape
    count = (batch - 1) * kv_heads * (capacity // page) + capacity // page
    return cache.as_strided(
        (count, kv_heads, page, head_dim), (page * head_dim, capacity * head_dim, head_dim, 1)
    )
