"""`tensor_scatter_` and `kv_scatter_` against the oracle: as operators, and each implementation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from tests import oracle
from tests.conformance.calls import Maker, same_bits

MakeMaker = Callable[..., Maker]
Write = Callable[..., None]


def _operator(cache, update, indices, *, axis, write_mode):  # type: ignore[no-untyped-def]
    torch.ops.attn_tiers.tensor_scatter_(cache, update, indices, axis=axis, write_mode=write_mode)


def _reference(cache, update, indices, *, axis, write_mode):  # type: ignore[no-untyped-def]
    from csrc_free_ops.reference.tensor_scatter import tensor_scatter

    tensor_scatter(cache, update, indices, axis=axis, circular=write_mode == "circular")


def _triton(cache, update, indices, *, axis, write_mode):  # type: ignore[no-untyped-def]
    from tests.cache_writes import tensor_scatter

    tensor_scatter(cache, update, indices, axis=axis, circular=write_mode == "circular")


WRITES: dict[str, Write] = {"operator": _operator, "reference": _reference, "triton": _triton}


@dataclasses.dataclass(frozen=True)
class ScatterCase:
    """One write: shapes of cache and update, indices, and how the tensors lie in memory."""

    cache: tuple[int, ...]
    update: tuple[int, ...]
    indices: tuple[int, ...] | None
    axis: int = -2
    write_mode: str = "linear"
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    cache_order: tuple[int, ...] | None = None  # permutation that makes the cache strided
    update_order: tuple[int, ...] | None = None
    wide: bool = False  # cut out of a wider allocation, last dimension not dense


CACHE, ONE, FEW = (3, 2, 11, 16), (3, 2, 1, 16), (3, 2, 4, 16)

SCATTERS = {
    "one_position_per_row": ScatterCase(CACHE, ONE, (0, 10, 4)),
    "no_indices_start_at_zero": ScatterCase(CACHE, FEW, None),
    "several_positions": ScatterCase(CACHE, FEW, (0, 7, 3)),
    "int64_indices": ScatterCase(CACHE, FEW, (0, 7, 3), index_dtype=torch.int64),
    "linear_drops_past_the_end": ScatterCase(CACHE, FEW, (9, 11, 10)),
    "linear_drops_far_past_the_end": ScatterCase(CACHE, FEW, (2**31 - 1, 2**31 - 3, 12)),
    "linear_drops_what_int32_would_wrap": ScatterCase(
        CACHE, FEW, (2**32 + 1, -(2**32) + 1, 2**62), index_dtype=torch.int64
    ),
    "linear_drops_what_int64_would_wrap": ScatterCase(
        CACHE, FEW, (2**63 - 1, 2**63 - 3, 4), index_dtype=torch.int64
    ),
    "circular_index_at_the_ends_of_int64": ScatterCase(
        CACHE,
        FEW,
        (2**63 - 1, 2**63 - 3, -(2**63)),
        index_dtype=torch.int64,
        write_mode="circular",
    ),
    "negative_index_skips_the_row": ScatterCase(CACHE, ONE, (-1, 4, -7)),
    "negative_index_skips_every_position_of_the_row": ScatterCase(CACHE, FEW, (-1, 4, -3)),
    "very_negative_index_skips_several_positions": ScatterCase(CACHE, FEW, (-4, -(2**31), 2)),
    "every_row_skipped": ScatterCase(CACHE, ONE, (-1, -1, -1)),
    "circular_wraps": ScatterCase(CACHE, FEW, (9, 10, 0), write_mode="circular"),
    "circular_index_past_the_capacity": ScatterCase(
        CACHE, FEW, (11, 25, 11 * 9 + 10), write_mode="circular"
    ),
    "circular_update_of_the_whole_capacity": ScatterCase(
        CACHE, CACHE, (0, 5, 10), write_mode="circular"
    ),
    "circular_index_in_the_billions": ScatterCase(
        CACHE, FEW, (2**31 - 1, 2**31 - 2, 5), write_mode="circular"
    ),
    "update_of_the_whole_capacity": ScatterCase(CACHE, CACHE, (0, 0, 0)),
    "rank_three_packed_heads": ScatterCase((2, 9, 24), (2, 2, 24), (3, 8)),
    "rank_two": ScatterCase((2, 9), (2, 3), (3, 7), axis=1),
    "rank_five": ScatterCase((2, 2, 3, 7, 8), (2, 2, 3, 2, 8), (3, 6), axis=3),
    "axis_one": ScatterCase((2, 9, 3, 8), (2, 2, 3, 8), (3, 8), axis=1),
    "axis_last": ScatterCase((2, 3, 5, 9), (2, 3, 5, 2), (3, 8), axis=-1),
    "axis_counted_from_the_front": ScatterCase(CACHE, FEW, (1, 2, 9), axis=2),
    "capacity_of_one": ScatterCase((2, 2, 1, 8), (2, 2, 1, 8), (0, 1)),
    "circular_capacity_of_one": ScatterCase(
        (2, 2, 1, 8), (2, 2, 1, 8), (0, 7), write_mode="circular"
    ),
    "head_size_no_power_of_two": ScatterCase((2, 2, 7, 40), (2, 2, 2, 40), (1, 6)),
    "wide_head": ScatterCase((1, 2, 3, 1500), (1, 2, 1, 1500), (1,)),
    "positions_outside_heads": ScatterCase(
        CACHE, FEW, (0, 8, 3), cache_order=(0, 2, 1, 3), update_order=(0, 2, 1, 3)
    ),
    "update_in_another_layout": ScatterCase(CACHE, FEW, (0, 8, 3), update_order=(0, 2, 1, 3)),
    "cache_in_no_natural_order": ScatterCase(CACHE, FEW, (0, 8, 3), cache_order=(3, 1, 0, 2)),
    "rank_five_that_does_not_fold": ScatterCase(
        (2, 3, 2, 7, 4), (2, 3, 2, 2, 4), (3, 6), axis=3, cache_order=(4, 2, 0, 3, 1)
    ),
    "cut_from_a_wider_allocation": ScatterCase(CACHE, FEW, (0, 8, 3), wide=True),
    "empty_update": ScatterCase(CACHE, (3, 2, 0, 16), (0, 8, 3)),
    "empty_batch": ScatterCase((0, 2, 11, 16), (0, 2, 1, 16), ()),
    "no_heads": ScatterCase((3, 0, 11, 16), (3, 0, 1, 16), (0, 1, 2)),
}
for _dtype in (
    torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.bool,
):  # fmt: skip
    SCATTERS[f"dtype_{str(_dtype).removeprefix('torch.')}"] = ScatterCase(
        CACHE, FEW, (0, 9, -8), dtype=_dtype
    )


def _fill(m: Maker, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = m.normal(*shape, dtype=torch.float32) * 20
    return numbers > 0 if dtype == torch.bool else numbers.abs().to(dtype)


def _laid_out(
    tensor: torch.Tensor, order: tuple[int, ...] | None, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tensor in the layout asked for, the whole allocation behind it)"""
    if wide:
        shape = [2 * n for n in tensor.shape]
        whole = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        view = whole[tuple(slice(0, 2 * n, 2) for n in tensor.shape)]
    else:
        order = order or tuple(range(tensor.dim()))
        whole = tensor.permute(order).contiguous()
        view = whole.permute([order.index(i) for i in range(tensor.dim())])
    view.copy_(tensor)
    return view, whole


@pytest.mark.parametrize("implementation", WRITES)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_agrees_with_the_oracle(name: str, implementation: str, maker: MakeMaker) -> None:
    c, m = SCATTERS[name], maker()
    cache, whole = _laid_out(_fill(m, c.cache, c.dtype), c.cache_order, c.wide)
    update, _ = _laid_out(_fill(m, c.update, c.dtype), c.update_order, c.wide)
    indices = None if c.indices is None else m.integers(c.indices, c.index_dtype)
    before_update, around = update.clone(), whole.clone()
    expected = oracle.tensor_scatter(cache, update, indices, axis=c.axis, write_mode=c.write_mode)
    WRITES[implementation](cache, update, indices, axis=c.axis, write_mode=c.write_mode)
    assert same_bits(cache, expected)
    assert same_bits(update, before_update)
    if c.wide:  # what lies between the elements of the view is untouched
        cut = tuple(slice(0, 2 * n, 2) for n in c.cache)
        whole[cut], around[cut] = 0, 0
        assert same_bits(whole, around)


@pytest.mark.parametrize("implementation", WRITES)
def test_indices_may_be_a_strided_view(implementation: str, maker: MakeMaker) -> None:
    m = maker()
    cache, update = m.normal(*CACHE), m.normal(*ONE)
    indices = m.integers([[4, -9], [0, -9], [10, -9]])[:, 0]
    expected = oracle.tensor_scatter(cache, update, indices)
    WRITES[implementation](cache, update, indices, axis=-2, write_mode="linear")
    assert same_bits(cache, expected)


@pytest.mark.parametrize("implementation", WRITES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_and_payload_bits_are_copied_exactly(
    dtype: torch.dtype, implementation: str, maker: MakeMaker
) -> None:
    m = maker(dtype)
    bits = torch.arange(-(2**15), 2**15, 2048, dtype=torch.int16, device=m.device)
    update = bits.view(dtype).reshape(1, 2, 1, 16)
    cache = m.normal(1, 2, 5, 16)
    WRITES[implementation](cache, update, m.integers([3]), axis=-2, write_mode="linear")
    assert same_bits(cache[:, :, 3:4], update)


@pytest.mark.parametrize("implementation", WRITES)
def test_writes_one_after_the_other_build_the_cache_of_a_loop(
    implementation: str, maker: MakeMaker
) -> None:
    """The serving pattern: lengths advance by one, a freed slot is skipped by -1."""
    m = maker()
    cache = torch.zeros(3, 2, 6, 16, device=m.device)
    expected = cache.cpu()
    lengths = m.integers([0, -1, 3])
    for _ in range(4):
        step = m.normal(3, 2, 1, 16, dtype=torch.float32)
        expected = oracle.tensor_scatter(expected, step, lengths)
        WRITES[implementation](cache, step, lengths, axis=-2, write_mode="linear")
        lengths += (lengths >= 0).to(lengths.dtype)
    assert same_bits(cache, expected)
    assert not bool(cache[1].any())


def _kv_operator(caches, updates, indices, axis, write_mode):  # type: ignore[no-untyped-def]
    torch.ops.attn_tiers.kv_scatter_(*caches, *updates, indices, axis=axis, write_mode=write_mode)


def _kv_triton(caches, updates, indices, axis, write_mode):  # type: ignore[no-untyped-def]
    from tests.cache_writes import kv_scatter

    kv_scatter(*caches, *updates, indices, axis=axis, circular=write_mode == "circular")


KV_WRITES = {"operator": _kv_operator, "triton": _kv_triton}
KV_CASES = {
    "alike": ((2, 2, 9, 16), (2, 2, 9, 16), 1, -2),
    "two_head_sizes": ((2, 2, 9, 40), (2, 2, 9, 8), 3, -2),
    "positions_before_heads": ((2, 9, 2, 16), (2, 9, 2, 24), 2, 1),
    "rank_three": ((2, 9, 32), (2, 9, 48), 2, 1),
}


@pytest.mark.parametrize("implementation", KV_WRITES)
@pytest.mark.parametrize("write_mode", ["linear", "circular"])
@pytest.mark.parametrize("name", KV_CASES)
def test_kv_scatter_writes_both_caches(
    name: str, write_mode: str, implementation: str, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    key_shape, value_shape, length, axis = KV_CASES[name]
    caches = [m.normal(*shape) for shape in (key_shape, value_shape)]
    updates = []
    for shape in (key_shape, value_shape):
        cut = list(shape)
        cut[axis] = length
        updates.append(m.normal(*cut))
    for values in ([8, 0], [-3, 4] if write_mode == "linear" else [17, 4]):
        indices = m.integers(values)
        expected = [
            oracle.tensor_scatter(c, u, indices, axis=axis, write_mode=write_mode)
            for c, u in zip(caches, updates, strict=True)
        ]
        KV_WRITES[implementation](caches, updates, indices, axis, write_mode)
        assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


@pytest.mark.parametrize("implementation", KV_WRITES)
def test_kv_scatter_into_strided_caches_of_two_layouts(
    implementation: str, maker: MakeMaker
) -> None:
    m = maker(torch.float16)
    caches = [m.normal(2, 7, 3, 16).transpose(1, 2), m.normal(2, 3, 7, 16)]
    updates = [m.normal(2, 3, 2, 16), m.normal(2, 2, 3, 16).transpose(1, 2)]
    indices = m.integers([6, 2], torch.int64)
    expected = [oracle.tensor_scatter(c, u, indices) for c, u in zip(caches, updates, strict=True)]
    KV_WRITES[implementation](caches, updates, indices, -2, "linear")
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


@pytest.mark.parametrize("implementation", KV_WRITES)
def test_kv_scatter_into_halves_of_one_allocation(implementation: str, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    both = m.normal(2, 2, 2, 7, 16)
    caches, updates = list(both), [m.normal(2, 2, 1, 16), m.normal(2, 2, 1, 16)]
    indices = m.integers([6, -1])
    expected = [oracle.tensor_scatter(c, u, indices) for c, u in zip(caches, updates, strict=True)]
    KV_WRITES[implementation](caches, updates, indices, -2, "linear")
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


# ------------------------------------------------------------------------------------ float8 caches

FLOAT8 = torch.float8_e4m3fn


def _quantise_operator(caches, updates, indices, scales, axis, write_mode):  # type: ignore[no-untyped-def]
    torch.ops.attn_tiers.kv_scatter_(
        *caches, *updates, indices, *scales, axis=axis, write_mode=write_mode
    )


def _quantise_reference(caches, updates, indices, scales, axis, write_mode):  # type: ignore[no-untyped-def]
    from tests.cache_writes import reference_kv_scatter as kv_scatter

    circular = write_mode == "circular"
    kv_scatter(*caches, *updates, indices, *scales, axis=axis, circular=circular)


def _quantise_triton(caches, updates, indices, scales, axis, write_mode):  # type: ignore[no-untyped-def]
    from tests.cache_writes import kv_scatter

    circular = write_mode == "circular"
    kv_scatter(*caches, *updates, indices, *scales, axis=axis, circular=circular)


QUANTISING = {
    "operator": _quantise_operator,
    "reference": _quantise_reference,
    "triton": _quantise_triton,
}
QUANTISED = (torch.float16, torch.bfloat16, torch.float32)


def _same_float8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bits agree, but for those of NaN."""
    a, b = a.detach().cpu(), b.detach().cpu()
    nan = a.float().isnan() & b.float().isnan()
    return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())


@pytest.mark.parametrize("implementation", QUANTISING)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_quantising_rounds_to_the_nearest_saturates_and_keeps_nan(
    scale: float | None, dtype: torch.dtype, implementation: str, maker: MakeMaker
) -> None:
    """Every number of 16 bits; in float32 those, their neighbours and the ties between results."""
    m = maker()
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    if dtype is torch.float32:
        some = bits[::7].view(torch.float16).float()
        values = torch.from_numpy(oracle.float8_values()).sort().values
        ties = ((values[1:] + values[:-1]) / 2).float()
        numbers = torch.cat([some, ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1)])
        numbers = torch.cat([numbers, torch.tensor([3e38, -3e38, 1e-40, 447.9, 448.1, 464.0])])
        numbers = numbers[: len(numbers) // 8 * 8]
    else:
        numbers = bits.view(dtype)
    update = numbers.view(1, 1, -1, 8).to(m.device)
    caches = [torch.zeros(update.shape, dtype=FLOAT8, device=m.device) for _ in range(2)]
    scales = (None if scale is None else m.scales(scale), None)
    QUANTISING[implementation](caches, [update, -update], None, scales, -2, "linear")
    assert _same_float8(caches[0], oracle.quantised(update, scales[0]))
    assert _same_float8(caches[1], oracle.quantised(-update, None))
    nan = update.isnan()
    assert torch.equal(caches[0].float().isnan(), nan)
    assert bool((caches[0].float().abs()[~nan] <= 448).all())


#: Shapes of the caches, axis, how the key's cache lies in memory.
QUANTISED_CASES = {
    "heads_first": ((3, 2, 9, 16), (3, 2, 9, 24), -2, None),
    "positions_first": ((3, 9, 2, 16), (3, 9, 2, 16), 1, None),
    "positions_last": ((3, 2, 16, 9), (3, 2, 16, 9), -1, None),
    "positions_before_heads_in_memory": ((3, 2, 9, 16), (3, 2, 9, 16), 2, (0, 2, 1, 3)),
    "one_kv_head": ((3, 1, 9, 16), (3, 1, 9, 16), -2, None),
    "head_size_of_one": ((3, 2, 9, 1), (3, 2, 9, 5), -2, None),
    "capacity_of_one": ((3, 2, 1, 16), (3, 2, 1, 16), -2, None),
    "two_capacities": ((3, 2, 9, 16), (3, 2, 12, 16), -2, None),
}


@pytest.mark.parametrize("implementation", QUANTISING)
@pytest.mark.parametrize("write_mode", ["linear", "circular"])
@pytest.mark.parametrize("kinds", ["none none", "one one", "head head", "one head", "head none"])
@pytest.mark.parametrize("name", QUANTISED_CASES)
def test_quantised_scales_belong_to_heads(
    name: str, kinds: str, write_mode: str, implementation: str, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    *shapes, axis, order = QUANTISED_CASES[name]
    heads_dim = 2 if axis == 1 else 1
    length = min(2, *(shape[axis] for shape in shapes))
    caches, updates, scales = [], [], []
    for shape, kind in zip(shapes, kinds.split(), strict=True):
        caches.append(_laid_out(m.float8(*shape), order, False)[0])
        cut = list(shape)
        cut[axis] = length
        updates.append(m.normal(*cut))
        heads = shape[heads_dim]
        of_heads = m.integers([2**h for h in range(2 * heads)], torch.float32)[::2] * 0.3
        scales.append({"none": None, "one": m.scales(0.7), "head": of_heads}[kind])
    indices = m.integers([0, 8, -1 if write_mode == "linear" else 17])
    expected = [
        oracle.tensor_scatter(
            cache, oracle.quantised(update, scale, heads_dim), indices,
            axis=axis, write_mode=write_mode,
        )
        for cache, update, scale in zip(caches, updates, scales, strict=True)
    ]  # fmt: skip
    QUANTISING[implementation](caches, updates, indices, scales, axis, write_mode)
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


@pytest.mark.parametrize("implementation", QUANTISING)
@pytest.mark.parametrize("shape", [(2, 9, 24), (2, 9), (2, 2, 3, 9, 8), (2, 2, 3, 9, 8, 2)])
def test_quantising_into_caches_of_other_ranks_takes_one_scale(
    shape: tuple[int, ...], implementation: str, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    axis = shape.index(9)
    order = tuple(reversed(range(len(shape))))
    caches = [_laid_out(m.float8(*shape), o, False)[0] for o in (None, order)]
    updates = [m.normal(*(3 if size == 9 else size for size in shape)) for _ in caches]
    indices, scales = m.integers([4, -1]), [m.scales(0.2), m.scales(5.0)]
    expected = [
        oracle.tensor_scatter(c, oracle.quantised(u, s), indices, axis=axis)
        for c, u, s in zip(caches, updates, scales, strict=True)
    ]
    QUANTISING[implementation](caches, updates, indices, scales, axis, "linear")
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


@pytest.mark.parametrize("implementation", QUANTISING)
def test_float8_updates_are_copied_bit_for_bit(implementation: str, maker: MakeMaker) -> None:
    m = maker()
    update = torch.arange(256, dtype=torch.uint8).view(FLOAT8).view(1, 2, 1, 128).to(m.device)
    caches = [m.float8(1, 2, 5, 128) for _ in range(2)]
    QUANTISING[implementation](
        caches, [update, update], m.integers([3]), (None, None), -2, "linear"
    )
    assert all(same_bits(cache[:, :, 3:4], update) for cache in caches)


@pytest.mark.parametrize("implementation", QUANTISING)
def test_one_cache_in_float8_and_one_that_is_copied(implementation: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    caches, updates = [m.float8(2, 2, 5, 16), m.normal(2, 2, 5, 8)], []
    for cache in caches:
        updates.append(m.normal(2, 2, 1, cache.shape[3]))
    indices, scale = m.integers([4, 0]), m.scales(0.5, 2.0)
    expected = [
        oracle.tensor_scatter(caches[0], oracle.quantised(updates[0], scale, 1), indices),
        oracle.tensor_scatter(caches[1], updates[1], indices),
    ]
    QUANTISING[implementation](caches, updates, indices, (scale, None), -2, "linear")
    assert all(same_bits(c, e) for c, e in zip(caches, expected, strict=True))


def test_quantise_then_decode_is_near_attention_over_what_was_written(maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    call = m.qkv(B=2, T=12, cache_dtype=FLOAT8)
    keys, values = m.normal(2, 2, 5, m.D), m.normal(2, 2, 5, m.D)
    scales = m.scales(0.02, 0.01), m.scales(0.01)
    start = m.integers([0, -5])
    ops = torch.ops.attn_tiers
    ops.kv_scatter_(call["key"], call["value"], keys, values, start, *scales)
    y = ops.decode(*call.values(), m.lengths([5, 0]), None, None, *scales)
    dense = oracle.decode(call["query"], keys, values).y
    dense[1] = 0
    torch.testing.assert_close(y.double().cpu(), dense, rtol=0.1, atol=0.1)


def test_scatter_then_decode_is_attention_over_what_was_written(maker: MakeMaker) -> None:
    m = maker(torch.float32)
    call = m.qkv(B=2, T=12)
    call["key"].fill_(math.nan)
    call["value"].fill_(math.nan)
    keys, values = m.normal(2, 2, 5, m.D), m.normal(2, 2, 5, m.D)
    start = m.integers([0, -5])
    torch.ops.attn_tiers.kv_scatter_(call["key"], call["value"], keys, values, start)
    y = torch.ops.attn_tiers.decode(*call.values(), m.lengths([5, 0]))
    dense = oracle.decode(call["query"], keys, values).y
    dense[1] = 0
    torch.testing.assert_close(y.double().cpu(), dense, rtol=1e-5, atol=1e-5)
