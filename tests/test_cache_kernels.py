"""The Triton cache-write kernel against a loop over positions; by the interpreter on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from csrc_free_ops.cache import launch
from csrc_free_ops.cache.launch import scatter_plan
from csrc_free_ops.facts import DeviceFacts, tensor_facts
from csrc_free_ops.launch import Launch
from tests.cache_writes import kv_scatter, tensor_scatter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDICES = (-9, -1, 0, 3, 6, 7, 100, 2**31 - 1)


def loop(
    cache: torch.Tensor,
    update: torch.Tensor,
    write_indices: torch.Tensor | None,
    axis: int,
    circular: bool,
) -> torch.Tensor:
    """One position after the other, from the operator's definition."""
    out = cache.clone()
    axis %= out.dim()
    capacity = out.shape[axis]
    for b, s in itertools.product(range(out.shape[0]), range(update.shape[axis])):
        start = 0 if write_indices is None else int(write_indices[b])
        position = (start + s) % capacity if circular else start + s
        if circular or (start >= 0 and position < capacity):
            out[b].select(axis - 1, position).copy_(update[b].select(axis - 1, s))
    return out


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).mul(4).to(dtype)


def indices(batch: int, dtype: torch.dtype | None, start: int = 0) -> torch.Tensor | None:
    if dtype is None:
        return None
    chosen = [INDICES[(start + b) % len(INDICES)] for b in range(batch)]
    return torch.tensor(chosen, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("index_dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_kv_scatter_with_two_head_sizes(
    length: int, index_dtype: torch.dtype | None, circular: bool
) -> None:
    keys, values = normal(8, 3, 7, 16), normal(8, 3, 7, 40)
    key, value = normal(8, 3, length, 16), normal(8, 3, length, 40)
    w = indices(8, index_dtype)
    expected = loop(keys, key, w, -2, circular), loop(values, value, w, -2, circular)
    kv_scatter(keys, values, key, value, w, circular=circular)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


@pytest.mark.parametrize(
    "shape, axis",
    [
        ((3, 7, 2, 16), 1),
        ((2, 7, 24), 1),
        ((2, 3, 16, 7), -1),
        ((2, 3, 2, 7, 5), -2),
        ((2, 2, 3, 7, 2, 3), 3),
        ((3, 7), 1),
        ((1, 2, 7, 80), 2),
        ((0, 2, 7, 8), 2),
        ((2, 1, 7, 1), 2),
        ((2, 0, 7, 8), 2),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_tensor_scatter_any_rank_axis_and_strides(
    shape: tuple[int, ...], axis: int, strided: bool
) -> None:
    for length, circular in itertools.product((1, 3), (False, True)):
        update_shape = list(shape)
        update_shape[axis] = length
        if strided:  # reversed memory order, every second element of the last dimension
            reverse = tuple(reversed(range(len(shape))))
            cache = normal(*(2 * n for n in reversed(shape))).permute(reverse)
            update = normal(*(2 * n for n in reversed(update_shape))).permute(reverse)
            cache = cache[tuple(slice(0, 2 * n, 2) for n in shape)]
            update = update[tuple(slice(n) for n in update_shape)]
        else:
            cache, update = normal(*shape), normal(*update_shape)
        w = indices(shape[0], torch.int64, start=length)
        expected = loop(cache, update, w, axis, circular)
        tensor_scatter(cache, update, w, axis=axis, circular=circular)
        assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.float8_e4m3fn],
    ids=str,
)
def test_every_element_size_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    cache, update = normal(2, 2, 7, 8, dtype=dtype), normal(2, 2, 3, 8, dtype=dtype)
    w = torch.tensor([1, -2], dtype=torch.int32, device=DEVICE)
    expected = loop(cache, update, w, -2, False)
    tensor_scatter(cache, update, w)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_only_the_named_slots_change() -> None:
    storage = torch.full((2, 2, 9, 8), float("nan"), device=DEVICE)
    cache = storage[:, :, 1:8]
    w = torch.tensor([6, -1], dtype=torch.int32, device=DEVICE)
    tensor_scatter(cache, torch.ones(2, 2, 3, 8, device=DEVICE), w)
    written = (storage == 1).all(-1)
    assert written.nonzero().tolist() == [[0, 0, 7], [0, 1, 7]]
    assert torch.isnan(storage[~written]).all()


def test_expanded_indices_and_update() -> None:
    cache = normal(4, 2, 7, 8)
    update = normal(1, 1, 1, 8).expand(4, 2, 2, 8)
    w = torch.tensor([5], device=DEVICE).expand(4)
    expected = loop(cache, update, w, -2, False)
    tensor_scatter(cache, update, w)
    assert torch.equal(cache, expected)


def test_a_decode_step_is_one_small_launch_in_both_layouts() -> None:
    batch, heads, capacity, head_dim = 16, 8, 8192, 128
    for nhd in (False, True):
        shapes = [(batch, heads, n, head_dim) for n in (capacity, 1)]
        if nhd:
            strides = [(n * heads * head_dim, head_dim, heads * head_dim, 1) for n in (capacity, 1)]
        else:
            strides = [(heads * n * head_dim, n * head_dim, head_dim, 1) for n in (capacity, 1)]
        layout = (shapes[0], strides[0], shapes[1], strides[1])
        plan = scatter_plan((layout, layout), 1, -2, False)
        assert plan is not None and plan.grid == (batch,)
        assert plan.rows * plan.block_d == heads * head_dim


def _plan(length: int, dim: int = 64, device: str = "cuda", stride: int = 1) -> launch.ScatterWrite:
    cache = torch.empty(2, 3, 64, dim * stride, dtype=torch.float16, device="meta")[..., ::stride]
    update = torch.empty(2, 3, length, dim, dtype=torch.float16, device="meta")
    gpu = DeviceFacts.of("sm_90", int(device.partition(":")[2] or 0))
    facts = ((tensor_facts(cache),), (tensor_facts(update),))
    return launch.plan_scatter(*facts, None, gpu, axis=-2, circular=False)


def test_one_loaded_kernel_serves_many_layouts_whatever_else_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readiness belongs to what is compiled: it may not get lost with a plan in a bounded cache."""
    loaded: set[object] = set()
    monkeypatch.setattr(
        Launch, "compile", lambda self, index: loaded.add((index, self.specialization))
    )
    monkeypatch.setattr(
        Launch, "is_compiled", lambda self, index: (index, self.specialization) in loaded
    )
    write = _plan(3)
    assert not write.is_compiled()
    write.compile()
    for length in range(1, 65):
        for dim in (16, 32, 48, 80, 96, 112, 128, 144, 160):
            _plan(length, dim)
    assert _plan(3) is not write and _plan(3).is_compiled()
    assert not _plan(3, device="cuda:1").is_compiled(), "a module is of one device"
    assert not _plan(3, stride=2).is_compiled()


def test_layouts_that_do_not_fold_are_planned_slice_by_slice() -> None:
    shape, order = (2, 3, 2, 7, 4), (4, 2, 0, 3, 1)
    cache = normal(*(shape[i] for i in order)).permute([order.index(i) for i in range(5)])
    update = normal(2, 3, 2, 2, 4)
    gpu = DeviceFacts.of("sm_90")
    facts = (tensor_facts(cache),), (tensor_facts(update),)
    write = launch.plan_scatter(*facts, None, gpu, axis=3, circular=False)
    assert len(write.parts) > 1
    for part in write.parts:
        sliced = [cache, update]
        for dim, i in part.slices:
            sliced = [t.select(dim, i) for t in sliced]
        for tensor, (dtype, aligned) in zip(sliced, part.launch.pointers.values()):
            assert tensor.dtype == dtype and (not aligned or tensor.data_ptr() % 16 == 0)
