"""`gdn_chunk_prefill` as a PyTorch operator: fakes, compile, export, autograd, errors, explain."""

from __future__ import annotations

import dataclasses
import gc
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts

gdn = torch.ops.attn_tiers.gdn_chunk_prefill

B, T, N, HQ, HV, K, V = 1, 150, 3, 2, 4, 8, 12
BOUNDS = torch.tensor([0, 64, 64, 150], dtype=torch.int32)
OVERLOADS = ("default", "h_fla", "h_compact")


def _tokens(length: int = T, batch: int = B) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, length, HQ, K),
        torch.randn(batch, length, HQ, K) / 3,
        torch.randn(batch, length, HV, V),
        -torch.rand(batch, length, HV),
        torch.rand(batch, length, HV),
    )


def _packed() -> tuple[torch.Tensor, ...]:
    """Slices of one projection, and values whose last stride is not 1."""
    packed = torch.randn(B, T, 2 * HQ + 3, K)
    gates = torch.rand(B, T, 2 * HV)
    v = torch.randn(B, V, HV, T).permute(0, 3, 2, 1)
    return packed[:, :, :HQ], packed[:, :, HQ : 2 * HQ] / 3, v, -gates[..., :HV], gates[..., HV:]


STATE = torch.randn(N, HV, K, V)
NO_STATE = (None,)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one sequence": (_tokens(), {}),
    "sequences": ((*_tokens(), STATE, BOUNDS), {"qk_l2norm": True, "scale": 0.25}),
    "no state": ((*_tokens(), None, BOUNDS.long()), {}),
    "v first": (
        (*_tokens(), STATE.transpose(-1, -2).contiguous(), BOUNDS), {"state_v_first": True}
    ),
    "strided": ((*_packed(), torch.randn(N, K, HV, 2 * V)[..., ::2].transpose(1, 2), BOUNDS), {}),
    "rows of a batch": (_tokens(70, 3), {}),
    "one token": (_tokens(1), {}),
    "no tokens": (_tokens(0), {}),
    "no batch": (_tokens(5, 0), {}),
    "without final state": ((*_tokens(), STATE, BOUNDS), {"output_final_state": False}),
    "state in bfloat16": ((*_tokens(), STATE.bfloat16(), BOUNDS), {"batch_invariant": True}),
}  # fmt: skip
#: Rows of h that are all written, so that two runs agree.
ROWS = {"sequences": (3, 2), "no state": (3, 2), "v first": (3, 2), "strided": (3, 2),
        "without final state": (3, 2), "state in bfloat16": (3, 2)}  # fmt: skip

with_calls = pytest.mark.parametrize("name", CALLS)
with_overloads = pytest.mark.parametrize("overload", OVERLOADS)


def _call(name: str, overload: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    args, scalars = CALLS[name]
    if overload != "default" and name in ROWS:
        scalars = {**scalars, "total_chunks": ROWS[name][overload == "h_compact"]}
    return getattr(gdn, overload), args, scalars


# -------------------------------------------------------------------------------- fake kernels


@with_calls
@with_overloads
def test_opcheck(name: str, overload: str) -> None:
    op, args, scalars = _call(name, overload)
    opcheck(op, args, scalars)


@with_calls
@with_overloads
@pytest.mark.parametrize("h_dtype", [None, torch.float16])
def test_fake_kernel_has_the_real_shapes_strides_and_dtypes(
    name: str, overload: str, h_dtype: torch.dtype | None
) -> None:
    args, scalars = CALLS[name]
    if overload != "default":
        scalars = {**scalars, "h_dtype": h_dtype}
    op = getattr(gdn, overload)
    real = op(*args, **scalars)
    with FakeTensorMode() as mode:
        fake = op(*(a if a is None else mode.from_tensor(a) for a in args), **scalars)
    for got, expected in zip(real, fake, strict=True):
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        assert got.dtype == expected.dtype


@with_calls
@with_overloads
def test_results_share_memory_with_nothing(name: str, overload: str) -> None:
    op, args, scalars = _call(name, overload)
    results = op(*args, **scalars)
    storages = [t.untyped_storage()._cdata for t in (*results, *args) if t is not None]
    assert len(set(storages[: len(results)])) == len(results)
    assert not set(storages[: len(results)]) & set(storages[len(results) :])


def test_shapes_and_strides_of_the_contract() -> None:
    args = (*_tokens(), STATE, BOUNDS)
    out, final_state, h = gdn.h_fla(*args)
    assert out.shape == (1, T, HV, V) and out.is_contiguous()
    assert final_state.shape == (N, HV, K, V)
    assert final_state.stride() == (HV * V * K, V * K, 1, K)
    assert h.shape == (1, 3 + (T - 3) // 64, HV, K, V) and h.stride()[-2:] == (1, K)
    out, final_state, h, starts = gdn.h_compact(
        *args[:5], STATE.transpose(-1, -2), BOUNDS, state_v_first=True, output_final_state=False
    )
    assert final_state.shape == (0, HV, V, K)
    assert h.shape == (T // 64, HV, V, K) and h.is_contiguous()
    assert starts.dtype is torch.int64 and starts.tolist() == [0, 1, 1, 2]


def test_h_has_the_dtype_of_the_state_unless_told() -> None:
    args = (*(t.half() for t in _tokens()[:3]), *_tokens()[3:])
    assert gdn.h_fla(*args)[2].dtype is torch.float32
    assert gdn.h_fla(*args, STATE.bfloat16(), BOUNDS)[2].dtype is torch.bfloat16
    assert gdn.h_fla(*args, STATE.half(), BOUNDS, h_dtype=torch.float32)[2].dtype is torch.float32
    assert gdn.h_fla(*args, STATE.bfloat16(), BOUNDS)[1].dtype is torch.float32


def test_meta_tensors_give_meta_results() -> None:
    out, final_state = gdn(*(t.to("meta") for t in _tokens()))
    assert out.device.type == "meta" and final_state.shape == (1, HV, K, V)


def test_a_call_without_an_overload_is_the_default_one() -> None:
    assert gdn.overloads()[0] == "default"
    assert len(gdn(*_tokens())) == 2


def test_direct_kernels_outlive_a_garbage_collection() -> None:
    gc.collect()
    for overload in ("", ".h_fla", ".h_compact"):
        name = f"attn_tiers::gdn_chunk_prefill{overload}"
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        table = torch._C._dispatch_dump_table(name)
        assert "AutogradCPU: fallthrough" in table and "AutogradCUDA: fallthrough" in table


# -------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("name", ["sequences", "v first", "strided", "rows of a batch"])
@with_overloads
def test_compiled_result_equals_the_eager_one(name: str, overload: str) -> None:
    op, args, scalars = _call(name, overload)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: op(*args, **scalars), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*args), op(*args, **scalars))


def _layer(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, bounds: Any) -> Any:
    out, final_state = gdn(q * 2, k, v, g, beta, state, bounds, scale=0.25)
    return out + 1, final_state


def test_inductor_result_equals_the_eager_one() -> None:
    torch._dynamo.reset()
    args = (*_tokens(), STATE, BOUNDS)
    torch.testing.assert_close(torch.compile(_layer, fullgraph=True)(*args), _layer(*args))


@pytest.mark.parametrize("overload", OVERLOADS[1:])
def test_tokens_and_sequences_recompile_once_at_most(overload: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(*args: Any) -> Any:
        return getattr(gdn, overload)(*args)[:2]

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length, sequences in ((150, 3), (151, 5), (300, 2), (70, 9)):
        args = (*_tokens(length), None, torch.arange(sequences + 1) * (length // sequences))
        torch.testing.assert_close(compiled(*args), layer(*args))
    assert counter.frame_count <= 2


def test_rows_of_h_follow_the_tokens_in_a_compiled_graph() -> None:
    torch._dynamo.reset()

    def layer(*args: Any) -> Any:
        tokens, sequences = args[0].shape[1], args[6].shape[0] - 1
        return gdn.h_fla(*args, total_chunks=tokens // 64 + sequences)[2]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (150, 200):
        args = (*_tokens(length), STATE, BOUNDS)
        assert compiled(*args).shape == (1, length // 64 + N, HV, K, V)


@with_overloads
def test_export_round_trip_with_other_lengths(overload: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any, bounds: Any) -> Any:
            return getattr(gdn, overload)(q, k, v, g, beta, None, bounds, qk_l2norm=True)[:2]

    # PyTorch tells an empty tensor from others: without a complete chunk h_compact's h is one.
    least = 128 if overload == "h_compact" else 8
    tokens, bounds = torch.export.Dim("tokens", min=least), torch.export.Dim("bounds", min=3)
    exported = torch.export.export(
        Layer(), (*_tokens(), BOUNDS), dynamic_shapes=(*({1: tokens},) * 5, {0: bounds})
    )
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    args = (*_tokens(199), torch.tensor([0, 5, 9, 20, 199], dtype=torch.int32))
    torch.testing.assert_close(torch.export.load(stored).module()(*args), Layer()(*args))


# -------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("which", range(6))
@with_overloads
def test_input_that_requires_grad_is_one_clear_error(overload: str, which: int) -> None:
    args = [*_tokens(5), STATE[:1].clone()]
    args[which].requires_grad_()
    op = getattr(gdn, overload)
    text = "inference-only and an input requires grad"
    with pytest.raises(RuntimeError, match=text):
        op(*args)
    with pytest.raises(RuntimeError, match=text):
        op(*(a.to("meta") for a in args))
    with torch.no_grad():
        assert not op(*args)[0].requires_grad


def test_compiled_input_that_requires_grad_is_the_same_error() -> None:
    torch._dynamo.reset()
    weight = torch.ones(K, requires_grad=True)

    def layer(q: torch.Tensor, *rest: torch.Tensor) -> Any:
        return gdn(q * weight, *rest)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="inference-only and an input requires grad"):
        compiled(*_tokens(5))
    with torch.no_grad():
        assert not compiled(*_tokens(5)).requires_grad


def test_autocast_casts_nothing() -> None:
    tokens = _tokens(5)
    plain = gdn(*tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        casting = gdn(*tokens)
    assert all(torch.equal(a, b) for a, b in zip(plain, casting))


# ---------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One broken rule: what differs from a good call, and words that the error must hold."""

    words: tuple[str, ...]
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overload: str = "default"
    error: type[Exception] = ValueError


NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
GOOD = dict(zip(NAMES, (*_tokens(), STATE, BOUNDS), strict=True))
_Z = torch.zeros
WRONG = {
    "q_of_rank_three": Wrong(("q", "(150, 2, 8)"), {"q": _Z(T, HQ, K)}),
    "v_of_rank_three": Wrong(("v", "(150, 4, 12)"), {"v": _Z(T, HV, V)}),
    "k_of_another_length": Wrong(("k", "151"), {"k": _Z(1, 151, HQ, K)}),
    "k_of_another_size": Wrong(("k", "that of q"), {"k": _Z(1, T, HQ, K + 1)}),
    "v_of_another_length": Wrong(("v", "151"), {"v": _Z(1, 151, HV, V)}),
    "g_of_the_heads_of_q": Wrong(("g", "one gate for each head of v"), {"g": _Z(1, T, HQ)}),
    "beta_with_a_dimension_more": Wrong(("beta", "[B,T,Hv]"), {"beta": _Z(1, T, HV, 1)}),
    "heads_that_do_not_divide": Wrong(
        ("v has 4 heads and q 3",), {"q": _Z(1, T, 3, K), "k": _Z(1, T, 3, K)}
    ),
    "fewer_heads_of_v_than_of_q": Wrong(
        ("v has 4 heads and q 8",), {"q": _Z(1, T, 8, K), "k": _Z(1, T, 8, K)}
    ),
    "no_heads_of_q": Wrong(("q has 0 heads",), {"q": _Z(1, T, 0, K), "k": _Z(1, T, 0, K)}),
    "no_heads_of_v": Wrong(("v 0",), {"v": _Z(1, T, 0, V), "g": _Z(1, T, 0), "beta": _Z(1, T, 0)}),
    "head_size_of_zero": Wrong(("v", "head size 0"), {"v": _Z(1, T, HV, 0), "initial_state": None}),
    "head_size_too_large": Wrong(
        ("q", "257", "256"),
        {"q": _Z(1, T, HQ, 257), "k": _Z(1, T, HQ, 257), "initial_state": None},
    ),
    "cu_seqlens_with_a_batch": Wrong(
        ("cu_seqlens", "[1,T,..]"),
        {n: torch.cat([GOOD[n]] * 2) for n in ("q", "k", "v", "g", "beta")},
    ),
    "cu_seqlens_without_an_entry": Wrong(("cu_seqlens", "(0,)"), {"cu_seqlens": BOUNDS[:0]}),
    "cu_seqlens_of_rank_two": Wrong(("cu_seqlens", "[N+1]"), {"cu_seqlens": BOUNDS[None]}),
    "cu_seqlens_in_float": Wrong(
        ("cu_seqlens", "float32"), {"cu_seqlens": BOUNDS.float()}, error=TypeError
    ),
    "state_of_another_number_of_sequences": Wrong(
        ("initial_state", "(2, 4, 8, 12)", "(3, 4, 8, 12)"), {"initial_state": STATE[:2]}
    ),
    "state_with_the_wrong_axis_first": Wrong(
        ("initial_state", "[N,Hv,K,V]"), {"initial_state": STATE.transpose(-1, -2)}
    ),
    "state_with_the_other_axis_first": Wrong(
        ("initial_state", "state_v_first=True"), {}, {"state_v_first": True}
    ),
    "state_in_float64": Wrong(
        ("initial_state", "float64"), {"initial_state": STATE.double()}, error=TypeError
    ),
    "inputs_in_float64": Wrong(
        ("q", "float64"), {n: GOOD[n].double() for n in ("q", "k", "v")}, error=TypeError
    ),
    "mixed_dtypes": Wrong(("v", "float16"), {"v": GOOD["v"].half()}, error=TypeError),
    "gates_of_another_dtype": Wrong(("g", "float16"), {"g": GOOD["g"].half()}, error=TypeError),
    "beta_in_integers": Wrong(("beta", "int32"), {"beta": GOOD["beta"].int()}, error=TypeError),
    "tensors_on_two_devices": Wrong(("k is on meta",), {"k": GOOD["k"].to("meta")}),
    "scale_not_finite": Wrong(("scale", "finite"), {}, {"scale": float("inf")}),
    "scale_not_a_number": Wrong(("scale", "finite"), {}, {"scale": float("nan")}),
    "scale_beyond_float32": Wrong(("scale", "1e+39", "float32"), {}, {"scale": 1e39}),
    "scale_below_float32": Wrong(("scale", "-1e-46", "float32"), {}, {"scale": -1e-46}),
    "no_such_tier": Wrong(("tier", "fast", "reference"), {}, {"tier": "fast"}),
    "negative_rows_of_h": Wrong(("total_chunks", "-1"), {}, {"total_chunks": -1}, "h_fla"),
    "h_in_integers": Wrong(
        ("h_dtype", "int32"), {}, {"h_dtype": torch.int32}, "h_compact", TypeError
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_broken_rule_is_an_error_that_says_what_to_do(name: str) -> None:
    wrong = WRONG[name]
    tensors = [{**GOOD, **wrong.tensors}[n] for n in NAMES]
    op = getattr(gdn, wrong.overload)
    with pytest.raises(wrong.error) as eager:
        op(*tensors, **wrong.scalars)
    text = str(eager.value)
    assert text.startswith("gdn_chunk_prefill")
    for word in wrong.words:
        assert word in text, text
    with pytest.raises(wrong.error) as explained:
        torch_attn_tiers.explain(op, *tensors, **wrong.scalars)
    assert str(explained.value) == text
    if "k is on meta" in text:
        return
    with FakeTensorMode() as mode, pytest.raises(wrong.error) as fake:
        op(*(t if t is None else mode.from_tensor(t) for t in tensors), **wrong.scalars)
    assert str(fake.value) == text


@pytest.mark.parametrize("bounds", [[1, 5, 9], [0, 9, 5], [0, 5, 151], [-1, 5, 9]])
def test_bounds_that_are_none_are_an_error_when_checked(bounds: list[int]) -> None:
    args = (*_tokens(), None, torch.tensor(bounds))
    gdn(*args)  # no error, no access out of bounds
    with torch_attn_tiers.options(check=True), pytest.raises(ValueError, match="cu_seqlens is"):
        gdn(*args)


def test_right_bounds_pass_the_check() -> None:
    with torch_attn_tiers.options(check=True):
        gdn(*_tokens(), STATE, BOUNDS)
        gdn(*_tokens())


# ------------------------------------------------------------------------------ explain, options


def test_explain_names_the_traits_of_the_call() -> None:
    args = (*(t.to("meta") for t in (*_tokens(), STATE, BOUNDS)),)
    text = str(torch_attn_tiers.explain(gdn.h_compact, *args, device="cpu", qk_l2norm=True))
    for word in (
        "T=150 N=3 Hq=2 Hv=4", "head_dim=8", "head_v_dim=12", "head_v_eq_head_k=False",
        "num_v_gte_num_q=True", "qk_l2norm=True", "output_h=True", "h=compact,float32,2",
    ):  # fmt: skip
        assert word in text
    assert "-> reference" in text


def test_explain_takes_arguments_by_name_and_refuses_unknown_ones() -> None:
    named = dict(zip(NAMES, (*_tokens(), STATE, BOUNDS), strict=True))
    assert torch_attn_tiers.explain("gdn_chunk_prefill", **named).chosen == "reference"
    with pytest.raises(TypeError, match="h_dtype"):
        torch_attn_tiers.explain("gdn_chunk_prefill", **named, h_dtype=torch.float32)
    with pytest.raises(TypeError, match="given twice: q"):
        torch_attn_tiers.explain("gdn_chunk_prefill", named["q"], **named)


def test_scale_spelled_in_two_ways_is_one_problem() -> None:
    args = _tokens(5)
    one = torch_attn_tiers.explain("gdn_chunk_prefill", *args).problem
    other = torch_attn_tiers.explain("gdn_chunk_prefill", *args, scale=1 / K**0.5).problem
    assert one == other
    assert torch_attn_tiers.explain("gdn_chunk_prefill", *args, scale=0.0).problem != one


def test_tier_can_be_forced_by_an_option() -> None:
    with torch_attn_tiers.options(force="gdn_chunk_prefill:reference"):
        with torch_attn_tiers.record_dispatch() as calls:
            gdn(*_tokens(5))
    assert [(call.op, call.tier) for call in calls] == [("gdn_chunk_prefill", "reference")]


def test_tiers_in_the_order_of_the_cascade() -> None:
    verdicts = torch_attn_tiers.explain("gdn_chunk_prefill", *_tokens(5)).verdicts
    assert [verdict.name for verdict in verdicts] == ["flashinfer", "triton", "reference"]


def test_triton_is_chosen_on_gpus_that_it_runs_on() -> None:
    args = tuple(t.to("meta") for t in (*_tokens(), STATE, BOUNDS))
    gpu = DeviceFacts("cuda", 0, (9, 0), "sm_90", 132, 227 << 10, 50 << 20, False)
    explanation = torch_attn_tiers.explain("gdn_chunk_prefill", *args, device=gpu)
    assert explanation.chosen == "triton"
    old = gpu._replace(capability=(7, 5), arch="sm_75")
    verdict = torch_attn_tiers.explain("gdn_chunk_prefill", *args, device=old).verdicts[1]
    assert "needs compute capability 8.0 or newer, the device has 7.5" in verdict.reasons
