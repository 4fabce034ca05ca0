"""`attn_tiers::decode` as a PyTorch operator: fake kernels, compile, export, autograd."""

from __future__ import annotations

import gc
import io
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

import torch_attn_tiers

decode = torch.ops.attn_tiers.decode

B, HQ, HKV, SQ, T, P, D, DV = 3, 6, 2, 2, 9, 4, 8, 12


def _qkv(batch: int = B, length: int = T, sq: int = SQ) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, HQ, sq, D),
        torch.randn(batch, HKV, length, D),
        torch.randn(batch, HKV, length, DV),
    )


def _strided() -> tuple[torch.Tensor, ...]:
    """Slices of a packed projection, and caches with positions before heads."""
    packed = torch.randn(B, SQ, HQ + HKV, D)
    return (
        packed[:, :, :HQ].transpose(1, 2),
        torch.randn(B, T, HKV, 2 * D)[..., D:].transpose(1, 2),
        torch.randn(B, T, HKV, DV).transpose(1, 2),
    )


def _rank_3() -> tuple[torch.Tensor, ...]:
    return torch.randn(B, SQ, HQ * D), torch.randn(B, T, HKV * D), torch.randn(B, T, HKV * DV)


def _past() -> tuple[torch.Tensor, ...]:
    return torch.randn(B, HKV, P, D), torch.randn(B, HKV, P, DV)


def _float8(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.float8_e4m3fn) for tensor in tensors)


def _over_float8() -> tuple[torch.Tensor, ...]:
    """A float16 query over float8 caches, of which one has positions before heads."""
    query, key, value = _strided()
    return query.half(), *_float8(key, value.contiguous())


LENGTHS = torch.tensor([9, 0, 5], dtype=torch.int32)
SCALES = (torch.tensor(0.5), torch.tensor([2.0, 0.25]))
HEADS = {"q_num_heads": HQ, "kv_num_heads": HKV}
NO_PAST = (None, None)

CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "plain": ("default", _qkv(), {}),
    "lengths": ("default", (*_qkv(), LENGTHS), {"is_causal": True}),
    "all arguments": (
        "default",
        (*_qkv(), LENGTHS.long(), torch.randn(SQ, T - 2), torch.randn(HQ)),
        {"scale": 0.3, "softcap": 2.0, "left_window_size": 3, "right_window_size": 1},
    ),
    "strided": ("default", _strided(), {}),
    "rank 3": ("default", _rank_3(), HEADS),
    "rank 3, sliced": ("default", tuple(t[:, :1] for t in _rank_3()), HEADS),
    "one of everything": ("default", tuple(t[:1, :1, :1] for t in _qkv()), {}),
    "batch invariant": ("default", (*_qkv(), LENGTHS), {"batch_invariant": True}),
    "no batch": ("default", _qkv(batch=0), {}),
    "no queries": ("default", _qkv(sq=0), {}),
    "no keys": ("default", _qkv(length=0), {}),
    "present": ("present", (*_qkv(), *_past()), {"is_causal": True}),
    "present, no past": ("present", _strided(), {}),
    "present, rank 3": ("present", (*_rank_3(), *_past()), HEADS),
    "present, empty past": ("present", (*_qkv(), *(t[:, :, :0] for t in _past())), {}),
    "present, no keys": ("present", _qkv(length=0), {}),
    "present, lengths": ("present", (*_qkv(), *NO_PAST, LENGTHS), {}),
    "qk": ("qk", (*_qkv(), *_past()), {}),
    "qk, rank 3": ("qk", (*_rank_3(), *NO_PAST, LENGTHS), {**HEADS, "qk_matmul_output_mode": 2}),
    "qk, after softmax": ("qk", (*_qkv(), *_past()), {"qk_matmul_output_mode": 3}),
    "float8": ("default", _over_float8(), {}),
    "float8, scales": ("default", (*_over_float8(), LENGTHS, None, None, *SCALES), {}),
    "float8, present": ("present", (*_over_float8(), *_float8(*_past())), {"is_causal": True}),
    "float8, qk": ("qk", (*_over_float8(), *NO_PAST, LENGTHS, None, None, *SCALES), {}),
}

with_calls = pytest.mark.parametrize("name", CALLS)


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# -------------------------------------------------------------------------------- fake kernels


def cast(name: str, args: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with floating point in ``dtype``, but for calls over float8 caches."""
    if name.startswith("float8"):
        return tuple(args)
    return tuple(a.to(dtype) if a is not None and a.is_floating_point() else a for a in args)


def checks_of(name: str) -> tuple[str, ...]:
    """What opcheck is to check: it compares arguments for the schema, and cannot in float8."""
    left_out = "test_schema" if name.startswith("float8") else ""
    return tuple(one for one in DEFAULT_TEST_UTILS if one != left_out)


@with_calls
def test_opcheck(name: str) -> None:
    overload, args, scalars = CALLS[name]
    opcheck(getattr(decode, overload), args, scalars, test_utils=checks_of(name))


@with_calls
def test_fake_kernel_has_the_real_shapes_strides_and_dtypes(name: str) -> None:
    overload, args, scalars = CALLS[name]
    for dtype in (torch.float32, torch.float16):
        given = cast(name, args, dtype)
        real = _tuple(getattr(decode, overload)(*given, **scalars))
        with FakeTensorMode() as mode:
            faked = [a if a is None else mode.from_tensor(a) for a in given]
            fake = _tuple(getattr(decode, overload)(*faked, **scalars))
        for got, expected in zip(real, fake, strict=True):
            assert got.shape == expected.shape
            assert got.stride() == expected.stride()
            assert got.dtype == expected.dtype


@with_calls
def test_results_share_memory_with_nothing(name: str) -> None:
    overload, args, scalars = CALLS[name]
    results = _tuple(getattr(decode, overload)(*args, **scalars))
    storages = [t.untyped_storage()._cdata for t in (*results, *args) if t is not None]
    assert len(set(storages[: len(results)])) == len(results)
    assert not set(storages[: len(results)]) & set(storages[len(results) :])


def test_meta_tensors_give_meta_results() -> None:
    query, key, value = (t.to("meta") for t in _qkv())
    result = decode(query, key, value)
    assert result.device.type == "meta" and result.shape == (B, HQ, SQ, DV)


def test_a_call_without_an_overload_is_the_default_one() -> None:
    args = (*_qkv(), LENGTHS)
    torch.testing.assert_close(decode(*args), decode.default(*args))
    assert decode.overloads()[0] == "default"


def test_direct_kernels_outlive_a_garbage_collection() -> None:
    gc.collect()
    for name in ("decode", "decode.present", "decode.qk", "tensor_scatter_", "kv_scatter_"):
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attn_tiers::{name}", key)
        table = torch._C._dispatch_dump_table(f"attn_tiers::{name}")
        assert "AutogradCPU: fallthrough" in table and "AutogradCUDA: fallthrough" in table


# -------------------------------------------------------------------------------------- compile


def _step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    return decode(query * 2, key, value, lengths, is_causal=True, scale=0.25) + 1


@with_calls
def test_compiled_result_equals_the_eager_one(name: str) -> None:
    overload, args, scalars = CALLS[name]

    def call(*args: Any) -> Any:
        return getattr(decode, overload)(*args, **scalars)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), call(*args))


def test_inductor_result_equals_the_eager_one() -> None:
    torch._dynamo.reset()
    args = (*_qkv(), LENGTHS)
    torch.testing.assert_close(torch.compile(_step, fullgraph=True)(*args), _step(*args))


def test_kernels_are_not_traced_where_their_caller_is_not() -> None:
    """Dynamo's hook is on there, for the frames that an untraced one calls."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    caller = torch._dynamo.disable(_step, recursive=False)
    args = (*_qkv(), LENGTHS)
    result = torch.compile(lambda *args: caller(*args), backend=counter)(*args)
    torch.testing.assert_close(result, _step(*args))
    assert counter.frame_count == 0


@pytest.mark.parametrize("batches, limit", [((1, 2, 8, 64), 2), ((2, 8, 64), 2)])
def test_batch_sizes_recompile_once_at_most(batches: tuple[int, ...], limit: int) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_step, fullgraph=True, backend=counter)
    for batch in batches:
        args = (*_qkv(batch=batch), torch.full((batch,), 5))
        torch.testing.assert_close(compiled(*args), _step(*args))
    assert counter.frame_count <= limit


def test_growing_keys_and_masks_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, mask: decode(q, k, v, None, mask), fullgraph=True, backend=counter
    )
    for length in (9, 10, 11, 33):
        args = (*_qkv(length=length), None, torch.randn(B, 1, 1, length))
        without_lengths = (*args[:3], args[4])
        torch.testing.assert_close(compiled(*without_lengths), decode(*args))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("overload", ["default", "present", "qk"])
def test_export_round_trip_with_another_batch(overload: str) -> None:
    class Step(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return getattr(decode, overload)(query, key, value, left_window_size=4)

    batch = torch.export.Dim("batch")
    exported = torch.export.export(Step(), _qkv(), dynamic_shapes=({0: batch},) * 3)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    args = _qkv(batch=7)
    torch.testing.assert_close(torch.export.load(stored).module()(*args), Step()(*args))


# -------------------------------------------------------------------------------------- autograd


WEIGHT = torch.ones(D, requires_grad=True)


def _with_gradient(*args: torch.Tensor) -> torch.Tensor:
    return decode(args[0] * WEIGHT, *args[1:])


def test_input_that_requires_grad_is_one_clear_error() -> None:
    with pytest.raises(RuntimeError, match="inference-only and an input requires grad"):
        _with_gradient(*_qkv())
    leaf = torch.randn(B, HKV, T, D, requires_grad=True)
    query, _, value = _qkv()
    for call in (decode, decode.present, decode.qk):
        with pytest.raises(RuntimeError, match="inference-only and an input requires grad"):
            call(query, leaf, value)
    with pytest.raises(RuntimeError, match="inference-only"):
        decode(query.to("meta"), leaf.to("meta"), value.to("meta"))


def test_compiled_input_that_requires_grad_is_the_same_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="inference-only and an input requires grad"):
        torch.compile(_with_gradient, fullgraph=True, backend="aot_eager")(*_qkv())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_just_works(mode: Any) -> None:
    torch._dynamo.reset()
    args = _qkv()
    with mode():
        expected = _with_gradient(*args)
        compiled = torch.compile(_with_gradient, fullgraph=True, backend="aot_eager")(*args)
    assert not expected.requires_grad
    torch.testing.assert_close(compiled, expected)


def test_no_grad_inside_the_compiled_function_just_works() -> None:
    torch._dynamo.reset()

    def call(*args: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return _with_gradient(*args)

    args = _qkv()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(compiled, call(*args))


def test_autocast_casts_nothing() -> None:
    query, key, value = _qkv()
    plain = decode(query, key, value)
    invariant = decode(query, key, value, batch_invariant=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decode(query, key, value), plain)
        assert torch.equal(decode(query, key, value, batch_invariant=True), invariant)
        with pytest.raises(TypeError, match="key is float32 and query bfloat16"):
            decode(query.bfloat16(), key, value)


# --------------------------------------------------------------------- errors, eager and compiled


def test_error_of_the_fake_kernel_is_that_of_the_real_one() -> None:
    query, key, value = _qkv()
    for bad in (
        lambda q, k, v: decode(q[:, :5], k, v),
        lambda q, k, v: decode(q, k[..., :4], v),
        lambda q, k, v: decode(q, k, v, scale=-1.0),
        lambda q, k, v: decode(q, k, v, torch.zeros(B + 1, dtype=torch.int64)),
        lambda q, k, v: decode(q, k, v, tier="fast"),
        lambda q, k, v: decode.present(q, k, v, k),
    ):
        with pytest.raises(ValueError) as eager:
            bad(query, key, value)
        with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
            bad(*(mode.from_tensor(t) for t in (query, key, value)))
        assert str(fake.value) == str(eager.value)
        torch._dynamo.reset()
        with pytest.raises(Exception) as compiled:
            torch.compile(bad, fullgraph=True, backend="eager")(query, key, value)
        assert str(eager.value) in str(compiled.value)


def test_tensors_on_two_devices_are_an_error() -> None:
    query, key, value = _qkv()
    with pytest.raises(ValueError, match="key is on meta and query on cpu"):
        torch_attn_tiers.explain("decode", query, key.to("meta"), value)
    with pytest.raises(ValueError, match="on meta"):
        decode(query, key.to("meta"), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_only_hidden_keys_read_minus_infinity_in_masked_logits(
    dtype: torch.dtype, batch_invariant: bool
) -> None:
    query, key = torch.randn(1, 2, 1, 8, dtype=dtype), torch.randn(1, 1, 4, 8, dtype=dtype)
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.0, -1e5, lowest, -torch.inf])
    *_, logits = torch.ops.attn_tiers.decode.qk(
        query, key, key, None, None, None, mask, qk_matmul_output_mode=2,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    assert logits.isinf().tolist() == [[[[False, False, False, True]]] * 2]
    assert (logits[..., 2] <= torch.finfo(dtype).min / 2).all()


@pytest.mark.parametrize("tier", ["flash", "unfused"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_may_be_any_finite_number(dtype: torch.dtype, softcap: float, tier: str) -> None:
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 5, 16)
    most = torch.finfo(dtype).max
    sinks = torch.tensor([most, most / 1.3, -most, -torch.inf], dtype=dtype)
    y = decode(query, key, key, None, None, sinks, softcap=softcap, tier=tier)
    expected = decode(query, key, key, softcap=softcap, tier="unfused")
    expected[:, :2] = 0
    torch.testing.assert_close(y, expected)
    for strange in (torch.inf, torch.nan):
        sinks.fill_(strange)
        y = decode(query, key, key, None, None, sinks, softcap=softcap, tier=tier)
        assert y.isnan().all()


# --------------------------------------------------------------------------- torch.func transforms


def _transform_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8)


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "jacrev", "jacfwd", "vmap of grad"])
def test_derivatives_of_torch_func_are_errors_and_not_zeros(name: str) -> None:
    query, key = _transform_inputs()

    def f(query: torch.Tensor) -> torch.Tensor:
        return torch.ops.attn_tiers.decode(query, key, key).sum()

    run: dict[str, Any] = {
        "grad": lambda: torch.func.grad(f)(query),
        "vjp": lambda: torch.func.vjp(f, query),
        "jvp": lambda: torch.func.jvp(f, (query,), (query,)),
        "jacrev": lambda: torch.func.jacrev(f)(query),
        "jacfwd": lambda: torch.func.jacfwd(f)(query),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(f))(query[None]),
    }
    with pytest.raises(RuntimeError, match="attn_tiers::decode is inference-only"):
        run[name]()


@pytest.mark.parametrize("how", ["detach", "no_grad", "constant"])
def test_within_a_derivative_a_call_that_takes_no_part_just_works(how: str) -> None:
    query, key = _transform_inputs()
    expected = torch.ops.attn_tiers.decode(query, key, key)
    cache = torch.zeros_like(key)

    def f(x: torch.Tensor) -> torch.Tensor:
        torch.ops.attn_tiers.tensor_scatter_(cache, key)
        with torch.set_grad_enabled(how != "no_grad"):
            taken = {"detach": x.detach(), "no_grad": x, "constant": query}[how]
            weight = torch.ops.attn_tiers.decode(taken, cache, cache)
        return (x * weight).sum()

    assert torch.func.grad(f)(query).equal(expected)
    assert cache.equal(key)


def test_vmap_is_call_by_call() -> None:
    query, key = _transform_inputs()
    queries, masks = torch.randn(3, *query.shape), torch.randn(5, 3)
    decode = torch.ops.attn_tiers.decode

    def f(query: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return decode.present(query, key, key, None, None, None, mask)

    got = torch.vmap(f, in_dims=(0, 1))(queries, masks)
    expected = [f(q, mask) for q, mask in zip(queries, masks.T)]
    for result, *rows in zip(got, *expected):
        torch.testing.assert_close(result, torch.stack(rows))
    assert torch.vmap(lambda _: decode(query, key, key))(queries).shape == queries.shape
    with pytest.raises(NotImplementedError, match=r"tensor_scatter_ is not supported .* \(Vmap\)"):
        torch.vmap(torch.ops.attn_tiers.tensor_scatter_)(key[None].clone(), key[None])


def test_vmap_over_nothing() -> None:
    query, key = _transform_inputs()
    queries = torch.randn(0, *query.shape)
    decode = torch.ops.attn_tiers.decode

    def f(query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return decode.present(query, key, key)

    output, present, _ = torch.vmap(f)(queries)
    assert output.shape == (0, *query.shape) and present.shape == (0, *key.shape)
    assert output.dtype is query.dtype and output.device == query.device
    twice = torch.vmap(torch.vmap(lambda query: decode(query, key, key)))(queries[None])
    assert twice.shape == (1, 0, *query.shape)


def test_functionalize_is_refused_without_a_word_of_batches() -> None:
    query, key = _transform_inputs()
    with pytest.raises(NotImplementedError, match=r"\(Functionalize\): call it outside$"):
        torch.func.functionalize(lambda query: torch.ops.attn_tiers.decode(query, key, key))(query)
