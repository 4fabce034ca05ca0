"""`gdn_decode` and `gdn_gates` as PyTorch operators: fakes, compile, export, errors, explain."""

from __future__ import annotations

import copy
import dataclasses
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
from tests import gdn_decode_oracle
from tests.tolerances import assert_gdn_close

ops = torch.ops.attn_tiers
FORMS = {
    "gdn_decode": ops.gdn_decode.default,
    "gdn_decode_": ops.gdn_decode_.default,
    "gdn_decode_.raw": ops.gdn_decode_.raw,
}
IN_PLACE = ("gdn_decode_", "gdn_decode_.raw")

B, SQ, HQ, HV, K, V, P = 3, 2, 2, 4, 8, 12, 7


def _gates(form: str, batch: int = B, tokens: int = SQ) -> tuple[torch.Tensor, ...]:
    g, beta = -torch.rand(batch, tokens, HV), torch.rand(batch, tokens, HV)
    return (g, beta, torch.rand(HV), torch.rand(HV)) if form.endswith("raw") else (g, beta)


def _tokens(form: str, batch: int = B, tokens: int = SQ) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, tokens, HQ, K),
        torch.randn(batch, tokens, HQ, K) / 3,
        torch.randn(batch, tokens, HV, V),
        *_gates(form, batch, tokens),
    )


READS, WRITES = torch.tensor([4, -1, 0], dtype=torch.int32), torch.tensor([4, 2, -1])
EACH = torch.tensor([[4, 1], [-1, 2], [3, -1]])
#: state, then indices, then scalars.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "states": ((torch.randn(B, HV, K, V),), {"qk_l2norm": True, "scale": 0.25}),
    "v first": ((torch.randn(B, HV, V, K),), {"state_v_first": True}),
    "v first memory": ((torch.randn(B, HV, V, K).mT,), {}),
    "bfloat16": ((torch.randn(B, HV, K, V).bfloat16(),), {}),
    "strided": ((torch.randn(B, K, HV, 2 * V)[..., ::2].transpose(1, 2),), {}),
    "pool": ((torch.randn(P, HV, K, V), READS), {}),
    "pool, writes": ((torch.randn(P, HV, K, V), READS, WRITES), {}),
    "pool, each": ((torch.randn(P, HV, V, K), READS, EACH), {"state_v_first": True}),
}
CASES = [
    (form, name)
    for form in FORMS
    for name, (args, _) in CALLS.items()
    if form in IN_PLACE or len(args) == 1
]
with_cases = pytest.mark.parametrize("form,name", CASES)
with_forms = pytest.mark.parametrize("form", FORMS)


def _call(form: str, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, scalars = CALLS[name]
    return (*_tokens(form), *copy.deepcopy(args)), scalars


# -------------------------------------------------------------------------------- fake kernels


@with_cases
def test_opcheck(form: str, name: str) -> None:
    args, scalars = _call(form, name)
    opcheck(FORMS[form], args, scalars)


@with_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fake_kernel_has_the_real_shapes_strides_and_dtypes(
    form: str, name: str, dtype: torch.dtype
) -> None:
    args, scalars = _call(form, name)
    args = (*(x.to(dtype) for x in args[:3]), *args[3:])
    real = FORMS[form](*args, **scalars)
    with FakeTensorMode() as mode:
        fake = FORMS[form](*(mode.from_tensor(a) for a in args), **scalars)
    pairs = zip(real, fake) if form == "gdn_decode" else [(real, fake)]
    for got, expected in pairs:
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        assert got.dtype == expected.dtype


@with_cases
def test_results_share_memory_with_nothing(form: str, name: str) -> None:
    args, scalars = _call(form, name)
    result = FORMS[form](*args, **scalars)
    results = result if form == "gdn_decode" else (result,)
    storages = [t.untyped_storage()._cdata for t in (*results, *args)]
    assert len(set(storages[: len(results)])) == len(results)
    assert not set(storages[: len(results)]) & set(storages[len(results) :])


def test_new_state_lies_v_first_whatever_the_state_does() -> None:
    state = torch.randn(B, HV, K, V)
    for given in (state, state.mT.contiguous().mT):
        _, new_state = ops.gdn_decode(*_tokens("gdn_decode"), given)
        assert new_state.shape == state.shape and new_state.mT.is_contiguous()
    _, new_state = ops.gdn_decode(*_tokens("gdn_decode"), state.mT, state_v_first=True)
    assert new_state.shape == state.mT.shape and new_state.is_contiguous()


@pytest.mark.parametrize("form", IN_PLACE)
def test_writing_is_seen_by_autograd(form: str) -> None:
    state = torch.randn(B, HV, K, V)
    version = state._version
    FORMS[form](*_tokens(form), state)
    assert state._version > version


def test_a_call_without_an_overload_is_the_default_one() -> None:
    assert ops.gdn_decode_.overloads() == ["default", "raw"]
    assert ops.gdn_decode_(*_tokens("gdn_decode_"), torch.randn(B, HV, K, V)).shape == (
        B, SQ, HV, V,
    )  # fmt: skip


# -------------------------------------------------------------------------------------- compile


@with_cases
def test_compiled_result_equals_the_eager_one(form: str, name: str) -> None:
    args, scalars = _call(form, name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: FORMS[form](*args, **scalars), fullgraph=True, backend="aot_eager"
    )
    others = copy.deepcopy(args)
    torch.testing.assert_close(compiled(*args), FORMS[form](*others, **scalars))
    torch.testing.assert_close(args, others)


@pytest.mark.parametrize("form", IN_PLACE)
def test_inductor_writes_in_place_without_a_copy(form: str) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()

    def layer(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return FORMS[form](q * 2, *rest, state_v_first=True) + 1

    args = (*_tokens(form), torch.randn(P, HV, V, K), READS, WRITES)
    others = copy.deepcopy(args)
    address = args[-3].data_ptr()
    got, codes = run_and_get_code(torch.compile(layer, fullgraph=True), *args)
    torch.testing.assert_close(got, layer(*others))
    torch.testing.assert_close(args[-3], others[-3])
    assert args[-3].data_ptr() == address
    assert f"empty_strided_cpu(({P}, {HV}, {V}, {K})" not in "\n".join(codes), "the pool is cloned"


@with_forms
def test_batches_recompile_once_at_most(form: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: FORMS[form](*args), fullgraph=True, backend=counter)
    for batch in (2, 8, 64, 3):
        args = (*_tokens(form, batch), torch.randn(batch, HV, K, V))
        others = copy.deepcopy(args)
        torch.testing.assert_close(compiled(*args), FORMS[form](*others))
    assert counter.frame_count <= 2


def test_batches_over_a_pool_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.gdn_decode_.default, fullgraph=True, backend=counter)
    pool = torch.randn(100, HV, K, V)
    for batch in (2, 8, 64, 3):
        args = (*_tokens("gdn_decode_", batch), pool.clone(), torch.arange(batch) * 3 % 100)
        others = copy.deepcopy(args)
        torch.testing.assert_close(compiled(*args), ops.gdn_decode_(*others))
    assert counter.frame_count <= 2


@with_forms
def test_export_round_trip_with_another_batch(form: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return FORMS[form](*args, qk_l2norm=True)

    batch = torch.export.Dim("batch", min=2)
    args = (*_tokens(form), torch.randn(B, HV, K, V))
    shapes = tuple(None if x.dim() == 1 else {0: batch} for x in args)
    exported = torch.export.export(Layer(), copy.deepcopy(args), dynamic_shapes=(shapes,))
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    args = (*_tokens(form, 5), torch.randn(5, HV, K, V))
    others = copy.deepcopy(args)
    torch.testing.assert_close(torch.export.load(stored).module()(*args), Layer()(*others))
    torch.testing.assert_close(args[-1], others[-1])


# -------------------------------------------------------------------------------------- autograd


@with_forms
def test_input_that_requires_grad_is_one_clear_error(form: str) -> None:
    count = len(_tokens(form)) + 1
    for which in range(count):
        args = [*_tokens(form), torch.randn(B, HV, K, V)]
        args[which].requires_grad_()
        text = "inference-only and an input requires grad"
        with pytest.raises(RuntimeError, match=text):
            FORMS[form](*args)
        with pytest.raises(RuntimeError, match=text):
            FORMS[form](*(a.to("meta") for a in args))


def test_autocast_casts_nothing() -> None:
    args = (*_tokens("gdn_decode"), torch.randn(B, HV, K, V))
    plain = ops.gdn_decode(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        casting = ops.gdn_decode(*args)
    assert all(torch.equal(a, b) for a, b in zip(plain, casting))


# ---------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One broken rule: what differs from a good call, and words that the error must hold."""

    words: tuple[str, ...]
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: str = "gdn_decode_"
    error: type[Exception] = ValueError


NAMES = {
    "gdn_decode": ("q", "k", "v", "g", "beta", "state"),
    "gdn_decode_": ("q", "k", "v", "g", "beta", "state", "read_indices", "write_indices"),
    "gdn_decode_.raw": (
        "q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "read_indices", "write_indices",
    ),
}  # fmt: skip
_Z = torch.zeros
GOOD = {
    **dict(zip(("q", "k", "v", "g", "beta"), _tokens("gdn_decode_"))),
    **dict(zip(("a", "b", "A_log", "dt_bias"), _gates("gdn_decode_.raw"))),
    "state": torch.randn(P, HV, K, V),
    "read_indices": READS,
    "write_indices": WRITES,
}
_DENSE = {"read_indices": None, "write_indices": None}
WRONG = {
    "q_of_rank_three": Wrong(("q", "[B,Sq,Hq,K]"), {"q": _Z(B, HQ, K)}),
    "v_of_rank_three": Wrong(("v", "[B,Sq,Hv,V]"), {"v": _Z(B, HV, V)}),
    "too_many_tokens": Wrong(
        ("q has 17 tokens", "16", "gdn_chunk_prefill"), {"q": _Z(B, 17, HQ, K)}
    ),
    "no_tokens": Wrong(("q has 0 tokens",), {"q": _Z(B, 0, HQ, K)}),
    "k_of_another_size": Wrong(("k", "that of q"), {"k": _Z(B, SQ, HQ, K + 1)}),
    "v_of_other_tokens": Wrong(("v", "B and Sq of q"), {"v": _Z(B, SQ + 1, HV, V)}),
    "g_of_the_heads_of_q": Wrong(("g", "one for each head of v"), {"g": _Z(B, SQ, HQ)}),
    "a_of_the_heads_of_q": Wrong(("a", "for each head"), {"a": _Z(B, SQ, HQ)}, {}, IN_PLACE[1]),
    "A_log_of_other_heads": Wrong(("A_log", "[Hv]"), {"A_log": _Z(HQ)}, {}, IN_PLACE[1]),
    "dt_bias_in_integers": Wrong(
        ("dt_bias", "int32"), {"dt_bias": _Z(HV).int()}, {}, IN_PLACE[1], TypeError
    ),
    "heads_that_do_not_divide": Wrong(
        ("v has 4 heads and q 3",), {"q": _Z(B, SQ, 3, K), "k": _Z(B, SQ, 3, K)}
    ),
    "head_size_too_large": Wrong(
        ("q", "257", "256"), {"q": _Z(B, SQ, HQ, 257), "k": _Z(B, SQ, HQ, 257)}
    ),
    "head_size_of_zero": Wrong(("v", "head size 0"), {"v": _Z(B, SQ, HV, 0)}),
    "state_with_the_wrong_axis_first": Wrong(
        ("state", "(7, 4, 8, 12)", "[P,Hv,K,V]"), {"state": _Z(P, HV, V, K)}
    ),
    "state_with_the_other_axis_first": Wrong(
        ("state", "state_v_first=True"), {}, {"state_v_first": True}
    ),
    "state_of_other_rows": Wrong(("state", "(3, 4, 8, 12)", "[B,Hv,K,V]"), _DENSE),
    "state_of_other_rows_for_a_new_one": Wrong(
        ("state", "(3, 4, 8, 12)", "[B,Hv,K,V]"), {}, {}, "gdn_decode"
    ),
    "state_in_float64": Wrong(
        ("state", "float64"), {"state": GOOD["state"].double()}, error=TypeError
    ),
    "state_that_is_expanded": Wrong(
        ("state", "stride 0"), {"state": _Z(1, HV, K, V).expand(P, HV, K, V)}
    ),
    "write_indices_alone": Wrong(("read_indices is None",), {"read_indices": None}),
    "read_indices_of_two_dimensions": Wrong(("read_indices", "[B]"), {"read_indices": EACH}),
    "read_indices_of_other_rows": Wrong(("read_indices", "(3,)"), {"read_indices": _Z(4).int()}),
    "read_indices_in_float": Wrong(
        ("read_indices", "float32"), {"read_indices": _Z(B)}, error=TypeError
    ),
    "write_indices_of_other_tokens": Wrong(
        ("write_indices", "[B] or [B,Sq]"), {"write_indices": _Z(B, 3).long()}
    ),
    "write_indices_in_bool": Wrong(
        ("write_indices", "bool"), {"write_indices": _Z(B).bool()}, error=TypeError
    ),
    "mixed_dtypes": Wrong(("v", "float16"), {"v": GOOD["v"].half()}, error=TypeError),
    "inputs_in_float64": Wrong(("q", "float64"), {"q": GOOD["q"].double()}, error=TypeError),
    "gates_of_another_dtype": Wrong(("g", "float16"), {"g": GOOD["g"].half()}, error=TypeError),
    "b_of_another_dtype": Wrong(
        ("b is float16",), {"b": GOOD["b"].half()}, {}, IN_PLACE[1], TypeError
    ),
    "tensors_on_two_devices": Wrong(("k is on meta",), {"k": GOOD["k"].to("meta")}),
    "scale_not_finite": Wrong(("scale", "finite"), {}, {"scale": float("inf")}),
    "scale_beyond_float32": Wrong(("scale", "1e+39", "float32"), {}, {"scale": 1e39}),
    "no_such_tier": Wrong(("tier", "fast", "triton, reference"), {}, {"tier": "fast"}),
    "no_state": Wrong(("state is None",), {"state": None}, error=TypeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_broken_rule_is_an_error_that_says_what_to_do(name: str) -> None:
    wrong = WRONG[name]
    named = {**GOOD, **wrong.tensors}
    tensors = [named[n] for n in NAMES[wrong.form]]
    op = FORMS[wrong.form]
    before = copy.deepcopy(named["state"])
    with pytest.raises(wrong.error) as eager:
        op(*tensors, **wrong.scalars)
    text = str(eager.value)
    assert text.startswith(f"{wrong.form}: ")
    for word in wrong.words:
        assert word in text, text
    assert before is None or torch.equal(before, named["state"])
    if "None" in text and "state" in text.split(":")[1]:
        return
    with pytest.raises(wrong.error) as explained:
        torch_attn_tiers.explain(op, *tensors, **wrong.scalars)
    assert str(explained.value) == text
    if "k is on meta" in text:
        return
    with FakeTensorMode() as mode, pytest.raises(wrong.error) as fake:
        op(*(t if t is None else mode.from_tensor(t) for t in tensors), **wrong.scalars)
    assert str(fake.value) == text


def test_conjugate_view_is_not_written_through() -> None:
    state = torch.randn(B, HV, K, V)._neg_view()
    with pytest.raises(ValueError, match="state is a conjugate or negative view"):
        ops.gdn_decode_(*_tokens("gdn_decode_"), state)


@pytest.mark.parametrize(
    "reads,writes,words",
    [
        ([7, 1, 2], None, "read_indices is .*below 7"),
        ([0, 1, 2], [0, 9, 2], "write_indices is .*below 7"),
        ([0, 1, 0], None, "rows 0 and 2 both write state 0"),
        ([0, 1, 2], [3, 4, 3], "rows 0 and 2 both write state 3"),
        ([0, 1, 2], [[3, 4], [5, 6], [-1, 4]], "rows 0 and 2 both write state 4"),
        ([0, 1, 2], [1, 4, 5], "row 1 reads state 1 of the pool and row 0 writes it"),
    ],
)
def test_indices_with_an_undefined_result_are_an_error_when_checked(
    reads: Any, writes: Any, words: str
) -> None:
    indices = (torch.tensor(reads), None if writes is None else torch.tensor(writes))
    args = (*_tokens("gdn_decode_"), torch.randn(P, HV, K, V), *indices)
    ops.gdn_decode_(*args)  # no error, no access out of bounds
    with torch_attn_tiers.options(check=True), pytest.raises(ValueError, match=words):
        ops.gdn_decode_(*args)


@pytest.mark.parametrize(
    "reads,writes",
    [([0, 1, -1], None), ([2, 1, 0], [-1, -1, -1]), ([2, 2, 2], [[3, 3], [-1, 4], [-9, -1]])],
)
def test_right_indices_pass_the_check(reads: Any, writes: Any) -> None:
    indices = (torch.tensor(reads), None if writes is None else torch.tensor(writes))
    with torch_attn_tiers.options(check=True):
        ops.gdn_decode_(*_tokens("gdn_decode_"), torch.randn(P, HV, K, V), *indices)
        ops.gdn_decode_(*_tokens("gdn_decode_"), torch.randn(B, HV, K, V))


@pytest.mark.parametrize("form", IN_PLACE)
def test_inputs_inside_the_state_are_an_error_when_checked(form: str) -> None:
    q, k, v, *rest = _tokens(form)
    state = torch.randn(B, HV, K, V)
    args = (q, k, state.view(-1)[: v.numel()].view_as(v), *rest, state)
    name, _, overload = form.partition(".")
    op = getattr(getattr(ops, name), overload or "default")
    with torch_attn_tiers.options(check=True):
        op(*args[:2], v, *args[3:])
        with pytest.raises(ValueError, match="v overlaps state in memory, and is read while"):
            op(*args)


# ------------------------------------------------------------------------------ explain, options


def test_explain_describes_the_call() -> None:
    args = (*_tokens(IN_PLACE[1]), torch.randn(P, HV, V, K), READS, EACH)
    explanation = torch_attn_tiers.explain(
        "gdn_decode_.raw", *args, device="cpu", qk_l2norm=True, state_v_first=True
    )
    text = str(explanation)
    for word in (
        "gdn_decode_.raw float32 B=3 Sq=2 Hq=2 Hv=4 K=8 V=12", "state=float32", "pool=7",
        "a state for each token", "qk_l2norm", "-> reference",
    ):  # fmt: skip
        assert word in text
    assert [verdict.name for verdict in explanation.verdicts] == ["triton", "reference"]


@with_forms
def test_triton_is_chosen_on_nvidia_gpus(form: str) -> None:
    args = tuple(t.to("meta") for t in (*_tokens(form), torch.randn(B, HV, K, V)))
    for arch in ("sm_80", "sm_90", "sm_120"):
        explanation = torch_attn_tiers.explain(FORMS[form], *args, device=DeviceFacts.of(arch))
        assert explanation.chosen == "triton"
    amd = torch_attn_tiers.explain(FORMS[form], *args, device=DeviceFacts.of("gfx942"))
    assert amd.chosen == "reference" and "AMD" in amd.verdicts[0].reasons[0]
    old = DeviceFacts.of("sm_80")._replace(capability=(7, 5), arch="sm_75")
    assert "8.0" in torch_attn_tiers.explain(FORMS[form], *args, device=old).verdicts[0].reasons[0]


def test_views_of_one_state_are_one_problem() -> None:
    tokens, state = _tokens("gdn_decode"), torch.randn(B, HV, V, K)
    one = torch_attn_tiers.explain("gdn_decode", *tokens, state, state_v_first=True).problem
    other = torch_attn_tiers.explain("gdn_decode", *tokens, state.mT, scale=1 / K**0.5).problem
    assert one == other
    in_place = torch_attn_tiers.explain("gdn_decode_", *tokens, state, state_v_first=True)
    assert in_place.problem != one


def test_tier_can_be_forced_by_an_option() -> None:
    with torch_attn_tiers.options(force="gdn_decode:reference,gdn_gates:reference"):
        with torch_attn_tiers.record_dispatch() as calls:
            ops.gdn_decode_(*_tokens("gdn_decode_"), torch.randn(B, HV, K, V))
            ops.gdn_gates(*_gates("raw"))
    assert [(call.op, call.tier) for call in calls] == [
        ("gdn_decode", "reference"), ("gdn_gates", "reference"),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------- gates

_GENERATOR = torch.Generator().manual_seed(11)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


GATES = {
    "plain": (_normal(1, 30, HV), _normal(1, 30, HV)),
    "far": (100 * _normal(2, 3, HV), 100 * _normal(2, 3, HV)),
    "float16": (_normal(5, HV).half(), _normal(5, HV).half()),
    "mixed": (_normal(5, HV).half(), _normal(5, HV)),
    "halves of a projection": _normal(2, 9, 2 * HV).split(HV, -1),
    "transposed": (_normal(HV, 3, 2).permute(2, 1, 0), _normal(2, 3, HV)),
    "one row": (_normal(HV), _normal(HV)),
    "nothing": (_normal(0, HV), _normal(0, HV)),
}
with_gates = pytest.mark.parametrize("name", GATES)


@with_gates
@pytest.mark.parametrize("tier", ["triton", "reference"])
def test_gates_agree_with_the_oracle(name: str, tier: str) -> None:
    a, b = GATES[name]
    generator = torch.Generator().manual_seed(12)
    A_log = torch.randn(2 * HV, generator=generator)[::2]
    dt_bias = torch.randn(HV, generator=generator).bfloat16()
    with torch_attn_tiers.record_dispatch() as calls:
        g, beta = ops.gdn_gates(a, b, A_log, dt_bias, tier=tier)
    assert [(call.op, call.tier) for call in calls] == [("gdn_gates", tier)]
    made = gdn_decode_oracle.gates(a, b, A_log, dt_bias)
    for got, expected, exponent in zip((g, beta), made, (a + dt_bias, b), strict=True):
        assert got.dtype is torch.float32 and got.shape == a.shape and got.is_contiguous()
        # The exponent is rounded to float32 as a sum, and again times log2(e): of a far one that
        # is a relative error of the power by itself.
        allowed = 2e-6 + exponent.double().abs() * 2**-23
        error = (got.double() - expected).abs()
        assert (error <= allowed * expected.abs() + 1e-37).all(), (error / expected.abs()).max()


@with_gates
def test_opcheck_gates(name: str) -> None:
    opcheck(ops.gdn_gates.default, (*GATES[name], torch.randn(HV), torch.randn(HV)))


def test_raw_form_equals_gates_and_the_plain_one() -> None:
    tokens = _tokens("gdn_decode_.raw")
    pool = torch.randn(P, HV, K, V)
    state, other = pool.clone(), pool.clone()
    out = ops.gdn_decode_.raw(*tokens, state, READS, EACH)
    plain = ops.gdn_decode_(*tokens[:3], *ops.gdn_gates(*tokens[3:]), other, READS, EACH)
    assert_gdn_close(out, plain, inputs=torch.float32, what="out")
    torch.testing.assert_close(state, other)


@pytest.mark.parametrize(
    "args,error,words",
    [
        ((_Z(3, 4), _Z(3, 5), _Z(4), _Z(4)), ValueError, "b has shape"),
        ((_Z(3, 4), _Z(3, 4), _Z(3), _Z(4)), ValueError, "A_log has shape"),
        ((_Z(3, 4), _Z(3, 4), _Z(4), _Z(1, 4)), ValueError, "dt_bias has shape"),
        ((_Z(()), _Z(()), _Z(4), _Z(4)), ValueError, "a has no dimension"),
        ((_Z(3, 0), _Z(3, 0), _Z(0), _Z(0)), ValueError, "a has 0 heads"),
        ((_Z(3, 4).double(), _Z(3, 4), _Z(4), _Z(4)), TypeError, "a is float64"),
        ((_Z(3, 4), None, _Z(4), _Z(4)), TypeError, "b is None"),
        ((_Z(3, 4), _Z(3, 4, device="meta"), _Z(4), _Z(4)), ValueError, "b is on meta"),
    ],
)
def test_wrong_gates_are_an_error(args: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"gdn_gates: {words}"):
        ops.gdn_gates(*args)


@pytest.mark.parametrize("tier", ["triton", "reference"])
def test_rows_of_padding_may_share_a_place(tier: str) -> None:
    def run(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        pool = torch.randn(P, HV, K, V)
        out = ops.gdn_decode_(*_tokens("gdn_decode_", 6), pool, slots, tier=tier)
        return out, pool

    alone = run(torch.tensor([3, -1, 1, -1, -1, 5]))
    shared = run(torch.tensor([3, 0, 1, 0, 0, 5]))
    for got, wanted, rows in zip(shared, alone, ([0, 2, 5], range(1, P)), strict=True):
        assert torch.equal(got[list(rows)], wanted[list(rows)])
