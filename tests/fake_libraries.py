"""Stand-ins for the libraries behind the tiers `cudnn` and `xqa`, which run on a CPU.

That of `flashinfer` is in `fake_gdn_library.py`.

They have the part of the libraries' surface that the tiers use, read memory as the libraries do (by
the strides that they are told), and leave what the libraries leave: NaN or nothing in empty rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_attn_tiers import Tier
from torch_attn_tiers import tier as tiers
from torch_attn_tiers.tiers.decode import cudnn, xqa
from torch_attn_tiers.tiers.gdn import flashinfer, flashinfer_library


@dataclasses.dataclass
class Faults:
    """What a fake is told to do wrong."""

    at_build: BaseException | None = None
    at_run: BaseException | None = None


def _address(tensor: torch.Tensor, shape: Any, stride: Any) -> torch.Tensor:
    """The memory that begins where the tensor does, by other strides."""
    return tensor.as_strided(tuple(shape), tuple(stride))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row `[Hq,D]` over `[Hkv,n,D]`."""
    group = query.shape[0] // key.shape[0]
    key, value = (t.double().repeat_interleave(group, 0) for t in (key, value))
    logits = torch.einsum("hd,hnd->hn", query.double(), key) * scale
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(-1, 1)], 1)
    weights = logits.softmax(-1)[:, : key.shape[1]]
    return torch.einsum("hn,hnd->hd", weights, value)


# ---------------------------------------------------------------------------------------- cuDNN


@dataclasses.dataclass
class _GraphTensor:
    name: str
    dim: list[int]
    stride: list[int]
    data_type: str
    uid: int = -1
    output: bool = False

    def set_uid(self, uid: int) -> _GraphTensor:
        self.uid = uid
        return self

    def set_output(self, output: bool) -> _GraphTensor:
        self.output = output
        return self

    def set_dim(self, dim: list[int]) -> _GraphTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> _GraphTensor:
        self.stride = stride
        return self


class FakeHandle:
    """Counts, and remembers the stream that it was last given."""

    made: list[FakeHandle] = []

    def __init__(self) -> None:
        self.stream: int | None = None
        FakeHandle.made.append(self)


class FakeGraph:
    """`cudnn.pygraph`, as far as attention of one row goes."""

    faults = Faults()
    workspace_size = 48
    built: list[FakeGraph] = []
    executed: list[tuple[FakeGraph, FakeHandle]] = []

    def __init__(self, *, io_data_type: str, intermediate_data_type: str, compute_data_type: str,
                 handle: FakeHandle) -> None:  # fmt: skip
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        assert isinstance(handle, FakeHandle) and handle.stream is not None
        self.io = io_data_type
        self.steps: list[str] = []
        self.sdpa_arguments: dict[str, Any] = {}

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> Any:
        return _GraphTensor(name, dim, stride, data_type)

    def sdpa(self, **kwargs: Any) -> tuple[_GraphTensor, None]:
        self.sdpa_arguments = kwargs
        self.out = _GraphTensor("O", [], [], self.io)
        return self.out, None

    def _step(self, name: str) -> None:
        self.steps.append(name)

    def validate(self) -> None:
        self._step("validate")

    def build_operation_graph(self) -> None:
        self._step("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]
        self._step("create_execution_plans")

    def check_support(self) -> None:
        if self.faults.at_build is not None:
            raise self.faults.at_build
        self._step("check_support")

    def build_plans(self) -> None:
        self._step("build_plans")
        FakeGraph.built.append(self)

    def get_workspace_size(self) -> int:
        return self.workspace_size

    def execute(self, buffers: dict[int, torch.Tensor], workspace: torch.Tensor, *,
                handle: FakeHandle) -> None:  # fmt: skip
        assert self.steps[-1] == "build_plans" and handle.stream is not None
        assert workspace.nbytes >= max(1, self.workspace_size)
        if self.workspace_size:
            workspace.fill_(0xFF)
        FakeGraph.executed.append((self, handle))
        if self.faults.at_run is not None:
            raise self.faults.at_run
        arguments = self.sdpa_arguments

        def memory(described: _GraphTensor) -> torch.Tensor:
            tensor = buffers[described.uid]
            dtype = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.int32: "INT32"}
            assert dtype[tensor.dtype] == described.data_type, described.name
            return _address(tensor, described.dim, described.stride)

        query, key, value = (memory(arguments[name]) for name in "qkv")
        query_counts, key_counts = (memory(arguments[f"seq_len_{name}"]) for name in ("q", "kv"))
        out = memory(self.out)
        assert arguments["use_padding_mask"] and not arguments["generate_stats"]
        for b in range(query.shape[0]):
            n = int(key_counts[b])
            assert int(query_counts[b]) == 1 and 0 <= n <= key.shape[2]
            if n == 0:
                out[b] = math.nan
                continue
            seen = slice(max(0, n - arguments.get("diagonal_band_left_bound", n)), n)
            row = _attention(query[b, :, 0], key[b, :, seen], value[b, :, seen],
                             arguments["attn_scale"])  # fmt: skip
            out[b, :, 0] = row.to(out.dtype)


class OrderedFakeGraph(FakeGraph):
    """That of a frontend which takes buffers in the order of their numbers, too."""

    orders: list[tuple[int, ...]] = []

    def execute(self, buffers: Any, workspace: torch.Tensor, handle: FakeHandle,
                tensor_uids: tuple[int, ...] | None = None) -> None:  # fmt: skip
        if tensor_uids is not None:
            assert type(buffers) is tuple
            self.orders.append(tensor_uids)
            buffers = dict(zip(tensor_uids, buffers, strict=True))
        super().execute(buffers, workspace, handle=handle)


def fake_cudnn(version: str = "1.32.0", backend: int = 91900) -> types.ModuleType:
    """The module `cudnn`."""
    module = types.ModuleType("cudnn")
    names = ("HALF", "BFLOAT16", "FLOAT", "INT32")
    module.__dict__.update(
        __version__=version,
        backend_version=lambda: backend,
        data_type=types.SimpleNamespace(**{name: name for name in names}),
        heur_mode=types.SimpleNamespace(A="A"),
        diagonal_alignment=types.SimpleNamespace(BOTTOM_RIGHT="BOTTOM_RIGHT"),
        pygraph=FakeGraph,
        create_handle=FakeHandle,
        set_stream=lambda handle, stream: setattr(handle, "stream", stream),
    )
    return module


# ------------------------------------------------------------------------------------------ XQA


class FakeXqa:
    """`flashinfer.xqa.xqa`: the keyword arguments that the tier uses, and raw memory."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.calls: list[dict[str, Any]] = []
        self.kernels: set[tuple[Any, ...]] = set()

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        page_table: torch.Tensor, seq_lens: torch.Tensor, output: torch.Tensor,
        workspace_buffer: torch.Tensor, semaphores: torch.Tensor, num_kv_heads: int,
        page_size: int, sinks: torch.Tensor | None = None, q_scale: Any = 1.0,
        kv_scale: float = 1.0, sliding_win_size: int = 0, kv_layout: str = "NHD",
        sm_count: int | None = None,
    ) -> None:  # fmt: skip
        B, _, Hq, D = q.shape
        kernel = (q.dtype, k_cache.dtype, page_size, D, Hq // num_kv_heads, sliding_win_size > 0)
        if kernel not in self.kernels:
            if self.faults.at_build is not None:
                raise self.faults.at_build
            self.kernels.add(kernel)
        self.calls.append(dict(
            q=q, k_cache=k_cache, table=page_table, seq_lens=seq_lens, semaphores=semaphores,
            scratch=workspace_buffer, window=sliding_win_size, sinks=sinks, q_scale=q_scale,
        ))  # fmt: skip
        if self.faults.at_run is not None:
            raise self.faults.at_run
        assert kv_layout == "NHD" and kv_scale == 1.0
        if isinstance(q_scale, torch.Tensor):
            assert q_scale.dtype is torch.float32 and q_scale.numel() == 1
        else:
            assert isinstance(q_scale, float)
        assert v_cache.dtype is k_cache.dtype in (q.dtype, torch.float8_e4m3fn)
        assert seq_lens.dtype is torch.uint32 and seq_lens.shape == (B, 1)
        assert page_table.dtype is torch.int32 and page_table.is_contiguous()
        assert semaphores.dtype is torch.uint32 and semaphores.numel() >= B * num_kv_heads
        assert not bool(semaphores.view(torch.int32).any())
        assert q.is_contiguous() and output.is_contiguous() and output.shape == q.shape
        assert sinks is None or sinks.dtype is torch.float32
        stride = k_cache.stride()
        assert all(one % D == 0 for one in stride[:3])
        heads = (num_kv_heads, page_size, D)
        for b in range(B):
            n = int(seq_lens.view(torch.int32)[b])
            assert 0 <= n <= page_table.shape[1] * page_size
            if n == 0:
                if b % 2:  # unwritten, or this
                    output[b] = math.nan
                continue
            rows = []
            for cache in (k_cache, v_cache):  # both by the strides of K, as the library does
                pages = [
                    cache.as_strided(
                        heads, (stride[2], stride[1], 1),
                        cache.storage_offset() + int(page) * stride[0],
                    )
                    for page in page_table[b, : -(-n // page_size)]
                ]  # fmt: skip
                begin = max(0, n - sliding_win_size) if sliding_win_size else 0
                rows.append(torch.cat(pages, 1)[:, begin:n])
            row = _attention(q[b, 0], *rows, float(q_scale) / math.sqrt(D), sinks)
            output[b, 0] = row.to(output.dtype)


def fake_flashinfer(version: str = "0.7.2") -> tuple[types.ModuleType, types.ModuleType]:
    """The modules `flashinfer` and `flashinfer.xqa`."""
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.xqa")
    package.__dict__.update(__version__=version, __path__=[])
    module.__dict__.update(xqa=FakeXqa())
    return package, module


# ------------------------------------------------------------------------------------- fixtures


def forget() -> None:
    """Look for the libraries again."""
    for library in (cudnn.FRONTEND, xqa.FLASHINFER, flashinfer.FLASHINFER):
        library.forget()
    cudnn.HANDLES.forget()
    xqa.KERNELS.forget()
    xqa._MEMORY.clear()
    xqa._has_nvcc.cache_clear()
    flashinfer.VARIANTS.forget()
    flashinfer_library._SCRATCH.clear()


def install(
    monkeypatch: pytest.MonkeyPatch, package: str, modules: list[types.ModuleType], version: str
) -> None:
    """Put modules where an import finds them, as the package of a version."""
    import importlib.metadata

    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == package else real(name)
    )
    forget()


def install_cudnn(
    monkeypatch: pytest.MonkeyPatch, version: str = "1.32.0", backend: int = 91900
) -> None:
    """A fake `cudnn`; what it built and ran is forgotten."""
    FakeGraph.faults = Faults()
    for counted in (FakeGraph.built, FakeGraph.executed, FakeHandle.made):
        counted.clear()  # type: ignore[attr-defined]
    install(monkeypatch, "nvidia-cudnn-frontend", [fake_cudnn(version, backend)], version)


def install_xqa(monkeypatch: pytest.MonkeyPatch, version: str = "0.7.2") -> FakeXqa:
    """A fake `flashinfer.xqa`, and a compiler."""
    modules = fake_flashinfer(version)
    install(monkeypatch, "flashinfer-python", list(modules), version)
    monkeypatch.setattr(xqa, "_has_nvcc", _yes)
    return modules[1].xqa


def _yes() -> bool:
    return True


_yes.cache_clear = lambda: None  # type: ignore[attr-defined]


@contextlib.contextmanager
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tier: Tier) -> Iterator[None]:
    """The tier takes problems of the CPU, where the stand-in runs them."""
    module = {"cudnn": cudnn, "xqa": xqa, "flashinfer": flashinfer}[tier.name]
    basics = tuple(one for one in module._BASICS if one is not module._device)
    monkeypatch.setattr(module, "_BASICS", basics)
    here = dataclasses.replace(tier, predicates=(*basics, tier.predicates[-1]))
    put(here, instead_of=tier)
    try:
        yield
    finally:
        put(tier, instead_of=here)


def put(tier: Tier, *, instead_of: Tier) -> None:
    """One tier in the place of another."""
    cascade = tiers._cascades[tier.op]
    cascade[cascade.index(instead_of)] = tier
    tiers._changed()


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """A package is not to be found; others are as they were, since answers are remembered."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == package else find_spec(name, *rest),
    )
