"""How the cache writes behave as PyTorch operators: mutation, compile without a copy, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import torch_attn_tiers
from tests.test_ops_decode import checks_of
from torch_attn_tiers import ColdCaptureError, DeviceFacts
from torch_attn_tiers.ops import tensor_scatter as module

tensor_scatter_ = torch.ops.attn_tiers.tensor_scatter_
kv_scatter_ = torch.ops.attn_tiers.kv_scatter_
decode = torch.ops.attn_tiers.decode

B, HKV, T, S, D, DV = 3, 2, 8, 2, 4, 6
INDICES = torch.tensor([0, 7, -1])


def _caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, HKV, T, D), torch.randn(B, HKV, T, DV)


def _updates() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, DV)


SCATTERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "linear": ((_caches()[0], _updates()[0], INDICES), {}),
    "from the start": ((_caches()[0], _updates()[0]), {}),
    "circular": ((_caches()[0], _updates()[0], INDICES.int()), {"write_mode": "circular"}),
    "strided": ((_caches()[0].transpose(1, 2), _updates()[0].transpose(1, 2)), {"axis": 1}),
    "rank 2": ((torch.zeros(B, T), torch.ones(B, S), INDICES), {"axis": -1}),
    "nothing": ((_caches()[0], _updates()[0][:, :, :0], INDICES), {}),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_opcheck_tensor_scatter(name: str) -> None:
    args, scalars = SCATTERS[name]
    opcheck(tensor_scatter_.default, args, scalars)


def test_opcheck_kv_scatter() -> None:
    opcheck(kv_scatter_.default, (*_caches(), *_updates(), INDICES))
    opcheck(kv_scatter_.default, (*_caches(), *_updates()), {"write_mode": "circular"})


def _float8_caches() -> tuple[torch.Tensor, ...]:
    return tuple(cache.to(torch.float8_e4m3fn) for cache in _caches())


def test_opcheck_of_float8_caches() -> None:
    checks = checks_of("float8")
    scales = torch.tensor(0.5), torch.tensor([0.5, 2.0])
    args = (*_float8_caches(), *_updates(), INDICES, *scales)
    opcheck(kv_scatter_.default, args, test_utils=checks)
    key_cache, _ = _float8_caches()
    args = (key_cache, key_cache[:, :, :S].clone(), INDICES)
    opcheck(tensor_scatter_.default, args, test_utils=checks)


def test_compiled_step_over_float8_caches_writes_in_place() -> None:
    k_scale, v_scale = torch.tensor(0.02), torch.tensor([0.01, 0.02])

    def step(query, key, value, key_cache, value_cache, lengths):  # type: ignore[no-untyped-def]
        kv_scatter_(key_cache, value_cache, key * 2, value, lengths, k_scale, v_scale)
        args = (query * 2, key_cache, value_cache, lengths + 1, None, None, k_scale, v_scale)
        return decode(*args)

    torch._dynamo.reset()
    query, key, value, _, _, lengths = _serving_args()
    args = [query.half(), key, value, *_float8_caches(), lengths]
    expected_args = [t.clone() for t in args]
    expected = step(*expected_args)
    result, (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), *args)
    torch.testing.assert_close(result, expected)
    for cache, expected_cache in zip(args[3:5], expected_args[3:5]):
        assert torch.equal(cache.view(torch.uint8), expected_cache.view(torch.uint8))
        assert f"empty_strided_cpu({tuple(cache.shape)}" not in code


def test_autograd_is_told_of_the_write() -> None:
    """A value saved for a backward pass and then overwritten must be noticed."""
    (cache, _), (update, _) = _caches(), _updates()
    weight = torch.ones(D, requires_grad=True)
    loss = (cache * weight).sum()
    tensor_scatter_(cache, update, INDICES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_can_be_written() -> None:
    with torch.inference_mode():
        (cache, _), (update, _) = _caches(), _updates()
        tensor_scatter_(cache, update, INDICES)
    assert torch.equal(cache[0, :, :S], update[0])


def test_input_that_requires_grad_is_an_error() -> None:
    caches, updates = _caches(), _updates()
    updates[1].requires_grad_()
    with pytest.raises(RuntimeError, match="inference-only"):
        kv_scatter_(*caches, *updates)
    with torch.no_grad():
        kv_scatter_(*caches, *updates)


def _serving_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    kv_scatter_(key_cache, value_cache, key * 2, value, lengths)
    return decode(query * 2, key_cache, value_cache, lengths + 1)


def _serving_args() -> list[torch.Tensor]:
    query = torch.randn(B, HKV * 2, 1, D)
    return [query, *(u[:, :, :1] for u in _updates()), *_caches(), torch.tensor([0, 3, 7])]


def test_compiled_write_is_in_place_and_clones_no_cache() -> None:
    torch._dynamo.reset()
    args = _serving_args()
    expected_args = [t.clone() for t in args]
    expected = _serving_step(*expected_args)
    result, (code, *_) = run_and_get_code(torch.compile(_serving_step, fullgraph=True), *args)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(args[3:5], expected_args[3:5])
    for cache in args[3:5]:
        assert f"empty_strided_cpu({tuple(cache.shape)}" not in code
    assert "copy_" not in code.split("def call")[1].split("runner")[0]


def test_compiled_writes_of_layers_into_slices_of_one_cache() -> None:
    """Per-layer caches taken as views inside the graph: the usual form of a model."""

    def step(cache: torch.Tensor, update: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in cache.unbind(0):
            tensor_scatter_(layer, update, lengths)
        return cache.sum()

    torch._dynamo.reset()
    cache = torch.zeros(2, B, HKV, T, D)
    update, lengths = torch.randn(B, HKV, 1, D), torch.tensor([0, 3, 7])
    expected_cache = cache.clone()
    expected = step(expected_cache, update, lengths)
    result = torch.compile(step, fullgraph=True)(cache, update, lengths)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(cache, expected_cache)


def test_batch_sizes_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_serving_step, fullgraph=True, backend=counter)
    for batch in (1, 2, 8, 64):
        compiled(*(t[:1].repeat(batch, *(1,) * (t.dim() - 1)) for t in _serving_args()))
    assert counter.frame_count <= 2


def test_export_with_the_caches_as_buffers() -> None:
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("key_cache", torch.zeros(B, HKV, T, D))
            self.register_buffer("value_cache", torch.zeros(B, HKV, T, DV))

        def forward(self, query: Any, key: Any, value: Any, lengths: Any) -> Any:
            return _serving_step(query, key, value, self.key_cache, self.value_cache, lengths)

    query, key, value, _, _, lengths = _serving_args()
    module = Step()
    exported = torch.export.export(module, (query, key, value, lengths)).module()
    expected = module(query, key, value, lengths)
    torch.testing.assert_close(exported(query, key, value, lengths), expected)
    torch.testing.assert_close(exported.key_cache, module.key_cache)


# ------------------------------------------------------- kernels: readiness, captures and failures


class _Kernel:
    """Stands for the Triton write, on tensors of a CPU."""

    def __init__(self) -> None:
        self.loaded = False
        self.compiles = self.runs = 0
        self.failure: Exception | None = None

    def is_compiled(self) -> bool:
        return self.loaded

    def compile(self) -> None:
        self.compiles += 1
        if self.failure is not None:
            raise self.failure
        self.loaded = True

    def run(self, caches: Any, updates: Any, write_indices: Any, scales: Any) -> None:
        assert self.loaded
        self.runs += 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """Takes every write that it is not unfit for."""
    kernel = _Kernel()
    plan = module._plan
    monkeypatch.setattr(module, "_writes", {})
    monkeypatch.setattr(module, "_unfit", {})
    monkeypatch.setattr(module, "_against_triton", lambda problem: [
        module._unfit[problem]] if problem in module._unfit else [])  # fmt: skip
    monkeypatch.setattr(module, "_plan", lambda p: plan(p) if module._against_triton(p) else kernel)
    return kernel


WRITES = {
    "tensor_scatter_": lambda: (torch.zeros(B, HKV, T, D), _updates()[0], INDICES),
    "kv_scatter_": lambda: (*_caches(), *_updates(), INDICES),
}


@pytest.mark.parametrize("name", WRITES)
def test_cold_write_in_a_capture_is_an_error_that_names_prepare(
    name: str, kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    args = WRITES[name]()
    explanation = torch_attn_tiers.explain(name, *args)
    assert explanation.chosen is None
    assert f"would raise ColdCaptureError: {name}: a CUDA graph" in str(explanation)
    with pytest.raises(ColdCaptureError, match=rf"prepare\('{name}', ...\)"):
        getattr(torch.ops.attn_tiers, name)(*args)
    with pytest.raises(RuntimeError, match="call prepare before the capture"):
        torch_attn_tiers.prepare(name, *args)
    assert kernel.compiles == kernel.runs == 0


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("how", ["prepare", "call"])
def test_prepared_or_run_before_it_is_captured(
    how: str, name: str, kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = WRITES[name]()
    if how == "prepare":
        meta = [t.to("meta") for t in args]
        explanation = torch_attn_tiers.prepare(name, *meta, device="cpu", write_mode="circular")
        assert explanation.chosen == "triton" and explanation.verdicts[0].ready
    else:
        getattr(torch.ops.attn_tiers, name)(*args, write_mode="circular")
    before = kernel.runs
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    getattr(torch.ops.attn_tiers, name)(*args, write_mode="circular")
    assert kernel.runs == before + 1


def test_kernel_that_cannot_be_built_leaves_the_write_to_the_reference(
    kernel: _Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.failure = RuntimeError("no compiler")
    cache, update, _ = WRITES["tensor_scatter_"]()
    for _ in range(2):
        tensor_scatter_(cache, update)
    assert torch.equal(cache[:, :, :S], update) and kernel.compiles == 1
    (record,) = caplog.records
    assert "tensor_scatter_: its build failed: RuntimeError: no compiler" in record.getMessage()
    verdict = torch_attn_tiers.explain("tensor_scatter_", cache, update).verdicts[0]
    assert verdict.reasons == ("its build failed: RuntimeError: no compiler",)
    kernel.failure = None
    assert torch_attn_tiers.prepare("tensor_scatter_", cache, update).chosen == "triton"


def test_out_of_memory_is_no_verdict_on_the_kernel(kernel: _Kernel) -> None:
    args = WRITES["tensor_scatter_"]()
    kernel.failure = RuntimeError("Triton Error [CUDA]: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        tensor_scatter_(*args)
    kernel.failure = None
    tensor_scatter_(*args)
    assert kernel.runs == 1


def _explain_on(arch: str, *args: torch.Tensor) -> torch_attn_tiers.Explanation:
    meta = [t.to("meta") for t in args]
    name = "tensor_scatter_" if len(args) == 2 else "kv_scatter_"
    return torch_attn_tiers.explain(name, *meta, device=DeviceFacts.of(arch))


def test_who_writes_on_which_device() -> None:
    pytest.importorskip("triton")
    args = (*_caches(), *_updates())
    assert _explain_on("sm_90", *args).chosen == "triton"
    assert _explain_on("sm_90", *args[::2]).chosen == "triton"
    amd = _explain_on("gfx942", *args)
    assert amd.chosen == "reference" and amd.verdicts[0].reasons == ("not run on AMD GPUs yet",)
    assert torch_attn_tiers.explain("kv_scatter_", *args).chosen == "reference"


def test_widest_dtype_decides_whether_the_kernel_can_write() -> None:
    pytest.importorskip("triton")
    (keys, values), (key, value) = _caches(), _updates()
    wide = _explain_on("sm_90", keys, values.cdouble(), key, value.cdouble())
    assert wide.verdicts[0].reasons == ("copies elements of at most 8 bytes, not complex128",)
    assert wide.chosen == "reference"


def test_check_option_lets_an_update_of_no_position_go_anywhere() -> None:
    cache = torch.randn(B, HKV, T, D)
    before = cache.clone()
    with torch_attn_tiers.options(check=True):
        tensor_scatter_(cache, cache.new_empty(B, HKV, 0, D), torch.full((B,), T + 2))
        kv_scatter_(cache, cache.clone(), *[cache.new_empty(B, HKV, 0, D)] * 2, torch.full((B,), T))
    assert cache.equal(before)


def test_check_option_refuses_an_update_inside_the_cache() -> None:
    cache = torch.randn(B, HKV, T, D)
    with torch_attn_tiers.options(check=True):
        with pytest.raises(ValueError, match="update overlaps past_cache in memory"):
            tensor_scatter_(cache, cache[:, :, :S])
        tensor_scatter_(cache, cache[:, :, :S].clone())
        tensor_scatter_(cache[:1], cache[1:2, :, :S])  # beside it
        values = torch.randn(B, HKV, T, D)
        with pytest.raises(ValueError, match="key overlaps value_cache in memory"):
            kv_scatter_(cache, values, values[:, :, :S], values[:, :, :S].clone())
        with pytest.raises(ValueError, match="value overlaps value_cache in memory"):
            kv_scatter_(cache, values, values[:, :, :S].clone(), values[:, :, :S])


def test_one_cache_for_keys_and_values_is_an_error() -> None:
    cache = torch.randn(B, HKV, T, D)
    before, update = cache.clone(), torch.randn(B, HKV, S, D)
    for other in (cache, cache[:, :, :]):
        with pytest.raises(ValueError, match="begin at one place in memory"):
            kv_scatter_(cache, other, update, update)
    with pytest.raises(ValueError, match="begin at one place in memory"):
        torch_attn_tiers.explain("kv_scatter_", cache, cache, update, update)
    assert cache.equal(before)
    packed = torch.zeros(B, HKV, T, 2, D)  # keys and values take turns in memory
    kv_scatter_(packed[..., 0, :], packed[..., 1, :], update, update)
    empty = torch.empty(0, HKV, T, D)
    kv_scatter_(empty, empty, *[torch.empty(0, HKV, S, D)] * 2)


@pytest.mark.parametrize("scatter", ["linear", "circular"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.bits16,
        torch.int32, torch.uint32, torch.float32, torch.complex32,
        torch.int64, torch.uint64, torch.float64, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
def test_a_dtype_of_any_kind_is_copied(dtype: torch.dtype, scatter: str) -> None:
    """By its bytes, which are compared."""
    size = dtype.itemsize
    bytes_ = torch.randint(2, (2, 5, 3 * size), dtype=torch.uint8)
    cache, update = bytes_.view(dtype), bytes_[:, :2].flip(-1).contiguous().view(dtype)
    expected = bytes_.clone()
    expected[0, 3:5] = update.view(torch.uint8)[0]
    expected[1, 4] = update.view(torch.uint8)[1, 0]
    if scatter == "circular":
        expected[1, 0] = update.view(torch.uint8)[1, 1]
    tensor_scatter_(cache, update, torch.tensor([3, 4]), write_mode=scatter)
    assert bytes_.equal(expected)


def test_a_cache_without_elements_is_never_expanded() -> None:
    empty, update = torch.zeros(1, 1, 1, 0).expand(2, 2, 4, 0), torch.zeros(2, 2, 1, 0)
    tensor_scatter_(empty, update)
    kv_scatter_(empty, torch.zeros(2, 2, 4, 3), update, torch.ones(2, 2, 1, 3))
    with pytest.raises(ValueError, match="past_cache is an expanded tensor"):
        tensor_scatter_(torch.zeros(1, 1, 1, 1).expand(2, 2, 4, 1), torch.zeros(2, 2, 1, 1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["itself", "views"])
def test_explain_knows_that_caches_begin_at_one_place(name: str, device: str) -> None:
    both = torch.zeros(2, B, HKV, T, D, device=device)
    new = torch.zeros(B, HKV, S, D, device=device)
    key_cache, value_cache = (both[0], both[0]) if name == "views" else (both[0],) * 2
    for ask in (torch_attn_tiers.explain, torch_attn_tiers.prepare):
        with pytest.raises(ValueError, match="begin at one place"):
            ask("kv_scatter_", key_cache, value_cache, new, new, device="cpu")
        ask("kv_scatter_", both[0], both[1], new, new, device="cpu")
