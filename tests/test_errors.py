"""Every rule of the contract, broken: the error's type and text, eager, fake and compiled.

The texts stand in full in the expected blocks, so that a change of wording is seen in review:
EXPECTTEST_ACCEPT=1 rewrites them.
"""

# ruff: noqa: E501  (whole texts)
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_attn_tiers

expecttest = pytest.importorskip("expecttest")

B, HQ, HKV, SQ, T, D, DV = 2, 4, 2, 3, 9, 16, 8


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One broken rule: what differs from a good call, and words that the error must hold."""

    words: tuple[str, ...]
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overload: str = "default"
    error: type[Exception] = ValueError


GOOD = {
    "query": _zeros(B, HQ, SQ, D),
    "key": _zeros(B, HKV, T, D),
    "value": _zeros(B, HKV, T, DV),
}
FLAT = {
    "query": _zeros(B, SQ, HQ * D),
    "key": _zeros(B, T, HKV * D),
    "value": _zeros(B, T, HKV * DV),
}
HEADS = {"q_num_heads": HQ, "kv_num_heads": HKV}
FLOAT8 = torch.float8_e4m3fn
CACHES = {
    "query": GOOD["query"].half(),
    "key": GOOD["key"].to(FLOAT8),
    "value": GOOD["value"].to(FLOAT8),
}
LENGTHS = torch.full((B,), 3, dtype=torch.int32)
PAST = {"past_key": _zeros(B, HKV, 5, D), "past_value": _zeros(B, HKV, 5, DV)}
ORDER = {
    "default": (
        "query", "key", "value", "nonpad_kv_seqlen", "attn_mask", "sinks", "k_scale", "v_scale",
    ),
    "present": (
        "query", "key", "value", "past_key", "past_value", "nonpad_kv_seqlen", "attn_mask",
        "sinks", "k_scale", "v_scale",
    ),
}  # fmt: skip
ORDER["qk"] = ORDER["present"]

SHAPES = {
    "query_of_rank_two": Wrong(("query", "(3, 16)"), {"query": _zeros(3, D)}),
    "key_of_another_rank": Wrong(("key", "rank"), {"key": FLAT["key"]}),
    "value_of_another_rank": Wrong(("value", "rank"), {"value": FLAT["value"]}),
    "heads_that_do_not_divide": Wrong(
        ("heads", "4", "3"), {"key": _zeros(B, 3, T, D), "value": _zeros(B, 3, T, DV)}
    ),
    "no_kv_heads": Wrong(("heads", "0"), {"key": _zeros(B, 0, T, D), "value": _zeros(B, 0, T, DV)}),
    "key_of_another_batch": Wrong(("key", "batch", "3"), {"key": _zeros(3, HKV, T, D)}),
    "value_of_another_batch": Wrong(("value", "batch", "3"), {"value": _zeros(3, HKV, T, DV)}),
    "key_of_another_head_size": Wrong(("key", "17"), {"key": _zeros(B, HKV, T, 17)}),
    "value_of_another_length": Wrong(("value", "10"), {"value": _zeros(B, HKV, 10, DV)}),
    "value_of_other_heads": Wrong(("value", "1"), {"value": _zeros(B, 1, T, DV)}),
    "rank_four_with_q_num_heads": Wrong(("q_num_heads", "4"), {}, {"q_num_heads": HQ}),
    "rank_four_with_kv_num_heads": Wrong(("kv_num_heads", "2"), {}, {"kv_num_heads": HKV}),
    "rank_three_without_heads": Wrong(("q_num_heads",), FLAT),
    "rank_three_with_one_of_the_two": Wrong(("kv_num_heads",), FLAT, {"q_num_heads": HQ}),
    "rank_three_width_does_not_divide": Wrong(
        ("q_num_heads", "5"), FLAT, {"q_num_heads": 5, "kv_num_heads": HKV}
    ),
    "rank_three_no_heads": Wrong(
        ("kv_num_heads", "0"), FLAT, {"q_num_heads": HQ, "kv_num_heads": 0}
    ),
    "rank_three_head_sizes_differ": Wrong(
        ("key",), {**FLAT, "key": _zeros(B, T, HKV * 2 * D)}, HEADS
    ),
}

DTYPES = {
    "mixed_dtypes": Wrong(("key", "float16"), {"key": GOOD["key"].half()}, error=TypeError),
    "value_of_another_dtype": Wrong(
        ("value", "bfloat16"), {"value": GOOD["value"].bfloat16()}, error=TypeError
    ),
    "integers": Wrong(
        ("query", "int32"), {name: t.int() for name, t in GOOD.items()}, error=TypeError
    ),
    "float8_under_a_float32_query": Wrong(
        ("key", "float8_e4m3fn", "query", "float32"),
        {**CACHES, "query": GOOD["query"]},
        error=TypeError,
    ),
    "float8_under_a_float64_query_with_a_scale": Wrong(
        ("key", "float8_e4m3fn", "query", "float64"),
        {**CACHES, "query": GOOD["query"].double(), "k_scale": _zeros()},
        error=TypeError,
    ),
    "float8_key_and_a_value_that_is_not": Wrong(
        ("value", "float16", "key", "float8_e4m3fn"),
        {**CACHES, "value": GOOD["value"].half()},
        error=TypeError,
    ),
    "float8_value_and_a_key_that_is_not": Wrong(
        ("value", "float8_e4m3fn", "key", "float16"),
        {**CACHES, "key": GOOD["key"].half()},
        error=TypeError,
    ),
    "float8_of_another_kind": Wrong(
        ("key", "float8_e5m2"),
        {**CACHES, "key": GOOD["key"].to(torch.float8_e5m2)},
        error=TypeError,
    ),
    "float8_query": Wrong(
        ("query", "float8_e4m3fn"), {**CACHES, "query": GOOD["query"].to(FLOAT8)}, error=TypeError
    ),
    "float8_past_and_new_keys_that_are_not": Wrong(
        ("past_key", "float8_e4m3fn", "key", "float32"),
        {name: tensor.to(FLOAT8) for name, tensor in PAST.items()},
        overload="present",
        error=TypeError,
    ),
    "float8_new_keys_and_a_past_that_is_not": Wrong(
        ("past_key", "float16", "key", "float8_e4m3fn"),
        {**CACHES, **{name: tensor.half() for name, tensor in PAST.items()}},
        overload="present",
        error=TypeError,
    ),
    "k_scale_in_float16": Wrong(
        ("k_scale", "float16"), {**CACHES, "k_scale": _zeros().half()}, error=TypeError
    ),
    "lengths_in_int16": Wrong(
        ("nonpad_kv_seqlen", "int16"), {"nonpad_kv_seqlen": LENGTHS.short()}, error=TypeError
    ),
    "lengths_in_float": Wrong(
        ("nonpad_kv_seqlen", "float32"), {"nonpad_kv_seqlen": LENGTHS.float()}, error=TypeError
    ),
    "complex_mask": Wrong(
        ("attn_mask", "complex64"),
        {"attn_mask": _zeros(SQ, T, dtype=torch.complex64)},
        error=TypeError,
    ),
    "float8_mask": Wrong(
        ("attn_mask", "float8_e5m2"),
        {"attn_mask": _zeros(SQ, T, dtype=torch.float8_e5m2)},
        error=TypeError,
    ),
    "sinks_in_float64": Wrong(
        ("sinks", "float64"), {"sinks": _zeros(HQ, dtype=torch.float64)}, error=TypeError
    ),
    "past_of_another_dtype": Wrong(
        ("past_key", "float16"),
        {**PAST, "past_key": PAST["past_key"].half()},
        overload="present",
        error=TypeError,
    ),
}

OTHER_TENSORS = {
    "lengths_of_another_batch": Wrong(
        ("nonpad_kv_seqlen", "3"), {"nonpad_kv_seqlen": torch.zeros(3, dtype=torch.int32)}
    ),
    "lengths_of_rank_two": Wrong(
        ("nonpad_kv_seqlen",), {"nonpad_kv_seqlen": torch.zeros(B, 1, dtype=torch.int32)}
    ),
    "lengths_with_past": Wrong(
        ("nonpad_kv_seqlen", "past"), {**PAST, "nonpad_kv_seqlen": LENGTHS}, overload="present"
    ),
    "past_key_alone": Wrong(("past_value",), {"past_key": PAST["past_key"]}, overload="present"),
    "past_value_alone": Wrong(
        ("past_key",), {"past_value": PAST["past_value"]}, overload="present"
    ),
    "past_of_rank_three": Wrong(
        ("past_key", "4"), {**PAST, "past_key": _zeros(B, 5, HKV * D)}, overload="present"
    ),
    "past_of_another_head_size": Wrong(
        ("past_key", "17"), {**PAST, "past_key": _zeros(B, HKV, 5, 17)}, overload="present"
    ),
    "past_of_other_heads": Wrong(
        ("past_value", "3"), {**PAST, "past_value": _zeros(B, 3, 5, DV)}, overload="present"
    ),
    "pasts_of_two_lengths": Wrong(
        ("past_value", "6"), {**PAST, "past_value": _zeros(B, HKV, 6, DV)}, overload="present"
    ),
    "mask_longer_than_the_keys": Wrong(("attn_mask", "10"), {"attn_mask": _zeros(SQ, 10)}),
    "mask_of_other_rows": Wrong(("attn_mask", "2"), {"attn_mask": _zeros(2, T)}),
    "mask_of_kv_heads": Wrong(("attn_mask",), {"attn_mask": _zeros(HKV, SQ, T)}),
    "mask_of_another_batch": Wrong(("attn_mask", "3"), {"attn_mask": _zeros(3, 1, SQ, T)}),
    "mask_of_rank_five": Wrong(("attn_mask", "rank"), {"attn_mask": _zeros(1, B, HQ, SQ, T)}),
    "mask_of_rank_zero": Wrong(("attn_mask", "rank"), {"attn_mask": _zeros()}),
    "sinks_of_kv_heads": Wrong(("sinks", "2"), {"sinks": _zeros(HKV)}),
    "sinks_of_rank_two": Wrong(("sinks",), {"sinks": _zeros(1, HQ)}),
    "k_scale_without_float8": Wrong(("k_scale", "float8"), {"k_scale": _zeros()}),
    "v_scale_without_float8": Wrong(("v_scale", "float8"), {"v_scale": _zeros(HKV)}),
    "k_scale_of_query_heads": Wrong(("k_scale", "4", "2"), {**CACHES, "k_scale": _zeros(HQ)}),
    "v_scale_of_one_element": Wrong(("v_scale", "1", "2"), {**CACHES, "v_scale": _zeros(1)}),
    "v_scale_of_rank_two": Wrong(("v_scale", "(2, 1)"), {**CACHES, "v_scale": _zeros(HKV, 1)}),
    "scale_in_qk_without_float8": Wrong(
        ("k_scale", "float8"), {"k_scale": _zeros()}, overload="qk"
    ),
}

SCALARS = {
    "scale_of_zero": Wrong(("scale", "0.0"), {}, {"scale": 0.0}),
    "negative_scale": Wrong(("scale", "-1"), {}, {"scale": -1.0}),
    "scale_of_nan": Wrong(("scale", "nan"), {}, {"scale": float("nan")}),
    "negative_softcap": Wrong(("softcap", "-0.5"), {}, {"softcap": -0.5}),
    "softcap_of_nan": Wrong(("softcap", "nan"), {}, {"softcap": float("nan")}),
    "scale_beyond_float32": Wrong(("scale", "1e+39", "float32"), {}, {"scale": 1e39}),
    "scale_of_zero_in_float32": Wrong(("scale", "1e-46", "float32"), {}, {"scale": 1e-46}),
    "softcap_beyond_float32": Wrong(("softcap", "1e+39", "float32"), {}, {"softcap": 1e39}),
    "softcap_of_zero_in_float32": Wrong(("softcap", "1e-46", "float32"), {}, {"softcap": 1e-46}),
    "left_window_below_minus_one": Wrong(("left_window_size", "-2"), {}, {"left_window_size": -2}),
    "right_window_below_minus_one": Wrong(
        ("right_window_size", "-7"), {}, {"right_window_size": -7}
    ),
    "unknown_score_mode": Wrong(
        ("qk_matmul_output_mode", "4"), {}, {"qk_matmul_output_mode": 4}, "qk"
    ),
    "negative_score_mode": Wrong(
        ("qk_matmul_output_mode", "-1"), {}, {"qk_matmul_output_mode": -1}, "qk"
    ),
    "unknown_tier": Wrong(("tier", "flesh", "flash", "unfused"), {}, {"tier": "flesh"}),
}

DECODE = {**SHAPES, **DTYPES, **OTHER_TENSORS, **SCALARS}


def _call(wrong: Wrong) -> Callable[..., Any]:
    op = getattr(torch.ops.attn_tiers.decode, wrong.overload)
    return lambda *args: op(*args, **wrong.scalars)


def _args(wrong: Wrong) -> list[torch.Tensor | None]:
    tensors = {**GOOD, **wrong.tensors}
    return [tensors.get(name) for name in ORDER[wrong.overload]]


def _error(run: Callable[[], Any]) -> Exception:
    with pytest.raises((ValueError, TypeError)) as caught:
        run()
    return caught.value


def _texts(table: Mapping[str, Wrong]) -> str:
    lines = []
    for name, wrong in table.items():
        error = _error(lambda wrong=wrong: _call(wrong)(*_args(wrong)))  # type: ignore[misc]
        lines.append(f"{name}\n  {type(error).__name__}: {error}\n")
    return "".join(lines)


@pytest.mark.parametrize("overload", ORDER)
def test_the_good_call_is_good(overload: str) -> None:
    _call(Wrong((), overload=overload))(*_args(Wrong((), overload=overload)))


@pytest.mark.parametrize("name", DECODE)
def test_error_has_its_type_and_names_argument_and_value(name: str) -> None:
    wrong = DECODE[name]
    error = _error(lambda: _call(wrong)(*_args(wrong)))
    assert isinstance(error, wrong.error), repr(error)
    for word in wrong.words:
        assert word in str(error)


@pytest.mark.parametrize("name", DECODE)
def test_fake_mode_raises_the_same_error(name: str) -> None:
    wrong = DECODE[name]
    eager = _error(lambda: _call(wrong)(*_args(wrong)))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in _args(wrong)]
        fake = _error(lambda: _call(wrong)(*fakes))
    assert type(fake) is type(eager) and str(fake) == str(eager)


COMPILED = (
    "heads_that_do_not_divide", "mixed_dtypes", "lengths_with_past", "mask_longer_than_the_keys",
    "negative_scale", "unknown_tier",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_call_raises_dynamos_error_with_our_text_inside(name: str) -> None:
    wrong = DECODE[name]
    eager = _error(lambda: _call(wrong)(*_args(wrong)))
    torch._dynamo.reset()
    compiled = torch.compile(_call(wrong), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        compiled(*_args(wrong))
    assert str(eager).splitlines()[0] in str(caught.value)


@pytest.mark.parametrize("name", DECODE)
def test_explain_and_prepare_raise_what_the_call_raises(name: str) -> None:
    wrong = DECODE[name]
    op = getattr(torch.ops.attn_tiers.decode, wrong.overload)
    eager = _error(lambda: _call(wrong)(*_args(wrong)))
    for ask in (torch_attn_tiers.explain, torch_attn_tiers.prepare):
        error = _error(lambda ask=ask: ask(op, *_args(wrong), **wrong.scalars))  # type: ignore[misc]
        assert str(error) == str(eager)


@pytest.mark.parametrize("value", [2.0**-126, 2.0**127])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_the_most_and_the_least_that_float32_allows_give_numbers(
    name: str, batch_invariant: bool, value: float
) -> None:
    tensors = [torch.full_like(t, 0.25) for t in GOOD.values()]  # products of 1
    y = torch.ops.attn_tiers.decode(*tensors, batch_invariant=batch_invariant, **{name: value})
    assert y.isfinite().all()


def test_float64_queries_take_what_float32_cannot() -> None:
    tensors = [torch.full_like(t, 0.25, dtype=torch.float64) for t in GOOD.values()]
    for scalars in ({"scale": 1e-46}, {"softcap": 1e39}, {"softcap": 1e-46}):
        assert torch.ops.attn_tiers.decode(*tensors, **scalars).isfinite().all()


# --------------------------------------------------------------------- tensors of another kind

STRANGE: dict[str, Callable[[], torch.Tensor | None]] = {
    "None": lambda: None,
    "sparse_coo": lambda: _zeros(2, 2, 5, 4).to_sparse(),
    "mkldnn": lambda: _zeros(2, 2, 5, 4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([_zeros(2, 5, 4), _zeros(2, 3, 4)]),
}
_PLAIN = _zeros(2, 2, 5, 4)
_GATES, _STATE = _zeros(2, 2, 5), _zeros(2, 5, 4, 4)
_ROWS = torch.zeros(2, dtype=torch.int64)
STRANGE_CALLS: dict[str, dict[str, torch.Tensor]] = {
    "decode": dict(query=_PLAIN, key=_PLAIN, value=_PLAIN),
    "decode.present": dict(query=_PLAIN, key=_PLAIN, value=_PLAIN),
    "tensor_scatter_": dict(past_cache=_PLAIN, update=_PLAIN.clone()),
    "kv_scatter_": dict(
        key_cache=_PLAIN, value_cache=_PLAIN.clone(), key=_PLAIN.clone(), value=_PLAIN.clone()
    ),
    "gdn_chunk_prefill": dict(q=_PLAIN, k=_PLAIN, v=_PLAIN, g=_GATES, beta=_GATES),
    "gdn_chunk_prefill.pool_": dict(
        q=_PLAIN, k=_PLAIN, v=_PLAIN, g=_GATES, beta=_GATES, pool=_STATE, read_indices=_ROWS
    ),
    "gdn_decode": dict(q=_PLAIN, k=_PLAIN, v=_PLAIN, g=_GATES, beta=_GATES, state=_STATE),
    "gdn_decode_": dict(q=_PLAIN, k=_PLAIN, v=_PLAIN, g=_GATES, beta=_GATES, state=_STATE),
    "gdn_decode_.raw": dict(
        q=_PLAIN, k=_PLAIN, v=_PLAIN, a=_GATES, b=_GATES, A_log=_zeros(5), dt_bias=_zeros(5),
        state=_STATE,
    ),
    "gdn_gates": dict(a=_GATES, b=_GATES, A_log=_zeros(5), dt_bias=_zeros(5)),
    "scatter_checkpoints_": dict(
        pool=_STATE, dst=_ROWS, h=_STATE.clone(), h_src=_ROWS, track_mask=_ROWS > 0
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", STRANGE_CALLS)
@pytest.mark.parametrize("kind", STRANGE)
def test_tensor_that_is_not_dense_is_one_clear_error(kind: str, call: str) -> None:
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no mkldnn tensors")
    packet, _, overload = call.partition(".")
    op = getattr(getattr(torch.ops.attn_tiers, packet), overload or "default")
    for name in STRANGE_CALLS[call]:
        args = {**STRANGE_CALLS[call], name: STRANGE[kind]()}
        for ask in (op, lambda *a: torch_attn_tiers.explain(call, *a)):
            with pytest.raises(TypeError) as error:
                ask(*args.values())
            expected = "None" if kind == "None" else f"a tensor of layout {kind}"
            assert str(error.value).startswith(f"{call}: {name} is {expected}; it must be ")


@pytest.mark.parametrize("view", ["conjugate", "negative"])
def test_views_that_are_computed_are_read_and_not_written(view: str) -> None:
    base = torch.randn(2, 1, 3, 4, dtype=torch.complex64)
    strange = base.conj() if view == "conjugate" else base.conj().imag
    assert strange.is_conj() or strange.is_neg()
    cache, ops = torch.zeros_like(strange.resolve_conj().resolve_neg()), torch.ops.attn_tiers
    ops.tensor_scatter_(cache, strange)
    assert cache.equal(strange.resolve_conj().resolve_neg())
    before = base.clone()
    for write in (
        lambda: ops.tensor_scatter_(strange, cache),
        lambda: ops.kv_scatter_(cache.clone(), strange, cache, cache),
        lambda: torch_attn_tiers.explain("tensor_scatter_", strange, cache),
    ):
        with pytest.raises(ValueError, match="cache is a conjugate or negative view"):
            write()
    assert base.equal(before)


# ------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "which", ["query", "key", "value", "sinks", "attn_mask", "k_scale", "v_scale"]
)
@pytest.mark.parametrize("how", ["eager", "fake", "compiled"])
def test_an_input_that_requires_grad_is_an_error_under_enabled_grad(which: str, how: str) -> None:
    tensors: dict[str, torch.Tensor] = {
        **GOOD, "attn_mask": _zeros(SQ, T), "sinks": _zeros(HQ),
    }  # fmt: skip
    if which in ("k_scale", "v_scale"):
        tensors = {**CACHES, which: _zeros()}
    tensors[which] = tensors[which].clone().requires_grad_()

    def run(*args: Any) -> Any:
        return torch.ops.attn_tiers.decode(*args)

    args: list[Any] = [tensors.get(name) for name in ORDER["default"]]
    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="inference"):
        if how == "fake":
            with FakeTensorMode() as mode:
                run(*[None if t is None else mode.from_tensor(t) for t in args])
        else:
            run(*args)
    with torch.no_grad():
        assert run(*args).shape == (B, HQ, SQ, DV)


@pytest.mark.parametrize("ask", [torch_attn_tiers.explain, torch_attn_tiers.prepare])
def test_explain_and_prepare_refuse_gradients_too(ask: Callable[..., Any]) -> None:
    weight = _zeros(2, 2, 5, 4).requires_grad_()
    plain = _zeros(2, 2, 5, 4)
    for call, args in {
        "decode": (weight, plain, plain),
        "decode.present": (plain, plain, weight),
        "tensor_scatter_": (plain, weight),
        "kv_scatter_": (plain, plain.clone(), weight, weight),
        "gdn_chunk_prefill": (plain, plain, weight, _GATES, _GATES),
        "gdn_chunk_prefill.pool_": (plain, plain, weight, _GATES, _GATES, _STATE, _ROWS),
        "gdn_decode": (plain, plain, weight, _GATES, _GATES, _STATE),
        "gdn_decode_": (weight, plain, plain, _GATES, _GATES, _STATE),
        "gdn_gates": (weight, weight, _zeros(4), _zeros(4)),
        "scatter_checkpoints_": (plain, _ROWS, weight, _ROWS, _ROWS > 0),
    }.items():
        with pytest.raises(RuntimeError, match=f"attn_tiers::{call} is inference-only"):
            ask(call, *args)
        with torch.no_grad():
            ask(call, *args)


def test_cache_writes_refuse_gradients_too() -> None:
    cache, update = _zeros(2, 2, 5, 4), _zeros(2, 2, 1, 4).requires_grad_()
    with pytest.raises(Exception, match="inference"):
        torch.ops.attn_tiers.tensor_scatter_(cache, update)
    with pytest.raises(Exception, match="inference"):
        torch.ops.attn_tiers.kv_scatter_(cache, cache.clone(), update, update)
    with torch.no_grad():
        torch.ops.attn_tiers.tensor_scatter_(cache, update)


# ---------------------------------------------------------------------------------- cache writes

CACHE, UPDATE = _zeros(2, 3, 7, 4), _zeros(2, 3, 2, 4)
CACHE8 = CACHE.to(FLOAT8)
INDEX = torch.zeros(2, dtype=torch.int32)


@dataclasses.dataclass(frozen=True)
class WrongWrite:
    words: tuple[str, ...]
    args: tuple[Any, ...] = (CACHE, UPDATE, INDEX)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: type[Exception] = ValueError
    op: str = "tensor_scatter_"


WRITES = {
    "unknown_write_mode": WrongWrite(("write_mode", "ring"), scalars={"write_mode": "ring"}),
    "axis_of_the_batch": WrongWrite(("axis", "0"), scalars={"axis": 0}),
    "axis_of_the_batch_from_behind": WrongWrite(("axis", "-4"), scalars={"axis": -4}),
    "axis_that_is_not_there": WrongWrite(("axis", "4"), scalars={"axis": 4}),
    "update_longer_than_the_cache": WrongWrite(("update", "8"), (CACHE, _zeros(2, 3, 8, 4))),
    "update_of_another_batch": WrongWrite(("update", "1"), (CACHE, _zeros(1, 3, 2, 4))),
    "update_of_other_heads": WrongWrite(("update", "1"), (CACHE, _zeros(2, 1, 2, 4))),
    "update_of_another_rank": WrongWrite(("update",), (CACHE, _zeros(2, 2, 4))),
    "update_of_another_dtype": WrongWrite(
        ("update", "float16"), (CACHE, UPDATE.half()), error=TypeError
    ),
    "indices_in_float": WrongWrite(
        ("write_indices", "float32"), (CACHE, UPDATE, INDEX.float()), error=TypeError
    ),
    "indices_of_another_batch": WrongWrite(
        ("write_indices", "3"), (CACHE, UPDATE, torch.zeros(3, dtype=torch.int32))
    ),
    "indices_of_rank_zero": WrongWrite(
        ("write_indices",), (CACHE, UPDATE, torch.zeros((), dtype=torch.int32))
    ),
    "cache_of_rank_one": WrongWrite(("past_cache", "rank"), (_zeros(4), _zeros(4))),
    "kv_unknown_write_mode": WrongWrite(
        ("write_mode", "ring"), (CACHE, CACHE, UPDATE, UPDATE), {"write_mode": "ring"},
        op="kv_scatter_",
    ),
    "kv_key_longer_than_its_cache": WrongWrite(
        ("key", "8"), (CACHE, CACHE, _zeros(2, 3, 8, 4), UPDATE), op="kv_scatter_"
    ),
    "kv_value_of_another_dtype": WrongWrite(
        ("value", "float16"), (CACHE, CACHE, UPDATE, UPDATE.half()), error=TypeError,
        op="kv_scatter_",
    ),
    "kv_scale_without_float8": WrongWrite(
        ("k_scale", "float8"), (CACHE, CACHE, UPDATE, UPDATE, INDEX, _zeros()), op="kv_scatter_"
    ),
    "update_of_a_float8_cache_in_16_bits": WrongWrite(
        ("update", "float16", "past_cache", "float8_e4m3fn", "kv_scatter_"),
        (CACHE8, UPDATE.half()), error=TypeError,
    ),
    "kv_float8_update_of_another_cache": WrongWrite(
        ("value", "float8_e4m3fn", "value_cache", "float32"),
        (CACHE8, CACHE, UPDATE, UPDATE.to(FLOAT8)), error=TypeError, op="kv_scatter_",
    ),
    "kv_update_of_a_float8_cache_in_float64": WrongWrite(
        ("key", "float64", "float8_e4m3fn"), (CACHE8, CACHE8, UPDATE.double(), UPDATE),
        error=TypeError, op="kv_scatter_",
    ),
    "kv_update_of_a_float8_cache_in_another_float8": WrongWrite(
        ("value", "float8_e5m2"), (CACHE8, CACHE8, UPDATE, UPDATE.to(torch.float8_e5m2)),
        error=TypeError, op="kv_scatter_",
    ),
    "kv_scale_of_the_cache_that_is_not_float8": WrongWrite(
        ("v_scale", "value_cache", "float32"),
        (CACHE8, CACHE, UPDATE, UPDATE, INDEX, None, _zeros()), op="kv_scatter_",
    ),
    "kv_scale_of_an_update_in_float8": WrongWrite(
        ("k_scale", "key", "float8_e4m3fn"),
        (CACHE8, CACHE8, UPDATE.to(FLOAT8), UPDATE, INDEX, _zeros()), op="kv_scatter_",
    ),
    "kv_scale_in_bfloat16": WrongWrite(
        ("v_scale", "bfloat16"),
        (CACHE8, CACHE8, UPDATE, UPDATE, INDEX, None, _zeros().bfloat16()), error=TypeError,
        op="kv_scatter_",
    ),
    "kv_scale_of_other_heads": WrongWrite(
        ("k_scale", "7", "3"), (CACHE8, CACHE8, UPDATE, UPDATE, INDEX, _zeros(7)), op="kv_scatter_"
    ),
    "kv_scale_per_head_of_a_cache_without_heads": WrongWrite(
        ("k_scale", "(3,)", "rank 3"),
        (CACHE8.flatten(2), CACHE8.flatten(2), UPDATE.flatten(2)[..., :8], UPDATE.flatten(2)[..., :8],
         INDEX, _zeros(3)), {"axis": 2}, op="kv_scatter_",
    ),
}  # fmt: skip


def _write(wrong: WrongWrite, args: Any = None) -> Any:
    op = getattr(torch.ops.attn_tiers, wrong.op)
    return op(*(wrong.args if args is None else args), **wrong.scalars)


@pytest.mark.parametrize("name", WRITES)
def test_write_error_has_its_type_and_names_argument_and_value(name: str) -> None:
    wrong = WRITES[name]
    error = _error(lambda: _write(wrong))
    assert isinstance(error, wrong.error), repr(error)
    for word in wrong.words:
        assert word in str(error)


@pytest.mark.parametrize("name", WRITES)
def test_write_raises_the_same_error_in_fake_mode(name: str) -> None:
    wrong = WRITES[name]
    eager = _error(lambda: _write(wrong))
    with FakeTensorMode() as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in wrong.args]
        fake = _error(lambda: _write(wrong, fakes))
    assert type(fake) is type(eager) and str(fake) == str(eager)


# ------------------------------------------------------------------------------------ the options


@pytest.fixture
def checking() -> Iterator[None]:
    with torch_attn_tiers.options(check=True):
        yield


@pytest.mark.parametrize("length", [-1, T + 1])
def test_check_raises_for_a_length_outside_the_capacity(length: int, checking: None) -> None:
    lengths = torch.tensor([3, length], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"nonpad_kv_seqlen.*{length}"):
        torch.ops.attn_tiers.decode(*GOOD.values(), lengths)
    torch.ops.attn_tiers.decode(*GOOD.values(), LENGTHS)


def test_check_raises_for_an_index_outside_the_cache(checking: None) -> None:
    with pytest.raises(ValueError, match="write_indices.*6"):
        torch.ops.attn_tiers.tensor_scatter_(CACHE, UPDATE, torch.tensor([0, 6]))
    torch.ops.attn_tiers.tensor_scatter_(CACHE, UPDATE, torch.tensor([5, -1]))  # -1 is a skip


def test_without_check_the_same_values_are_clamped_and_dropped() -> None:
    torch.ops.attn_tiers.decode(*GOOD.values(), torch.tensor([-1, T + 1]))
    torch.ops.attn_tiers.tensor_scatter_(CACHE, UPDATE, torch.tensor([0, 6]))


@pytest.mark.parametrize("option", ["disable", "force"])
@pytest.mark.parametrize("text", ["decode:flesh", "decoder:flash", "flash", "decode:"])
def test_option_with_an_unknown_name_is_an_error(option: str, text: str) -> None:
    with pytest.raises(ValueError, match="decode:flash"):
        with torch_attn_tiers.options(**{option: text}):
            pass


def test_tier_that_is_not_eligible_lists_its_reasons() -> None:
    tensors = {name: t.double() for name, t in GOOD.items()}
    with pytest.raises(torch_attn_tiers.TierNotEligibleError, match="float64"):
        torch.ops.attn_tiers.decode(*tensors.values(), tier="flash")


def test_texts_of_shape_errors() -> None:
    expecttest.assert_expected_inline(
        _texts(SHAPES),
        """\
query_of_rank_two
  ValueError: decode: query has shape (3, 16); it must be [B,Hq,Sq,D] or [B,Sq,Hq*D]
key_of_another_rank
  ValueError: decode: key has shape (2, 9, 32) and query (2, 4, 3, 16); query, key and value must have one rank
value_of_another_rank
  ValueError: decode: value has shape (2, 9, 16) and query (2, 4, 3, 16); query, key and value must have one rank
heads_that_do_not_divide
  ValueError: decode: query has 4 heads and key 3; the first must be a multiple of the second
no_kv_heads
  ValueError: decode: query has 4 heads and key 0; each must be at least 1
key_of_another_batch
  ValueError: decode: key has shape (3, 2, 9, 16); its batch size must be 2, the query's
value_of_another_batch
  ValueError: decode: value has shape (3, 2, 9, 8); its batch size must be 2, the query's
key_of_another_head_size
  ValueError: decode: key has head size 17 and query 16; they must agree
value_of_another_length
  ValueError: decode: value has length 10 and key 9; they must agree
value_of_other_heads
  ValueError: decode: value has 1 heads and key 2; they must agree
rank_four_with_q_num_heads
  ValueError: decode: q_num_heads=4 and query has shape (2, 4, 3, 16); it goes with 3-D inputs only, leave it out
rank_four_with_kv_num_heads
  ValueError: decode: kv_num_heads=2 and key has shape (2, 2, 9, 16); it goes with 3-D inputs only, leave it out
rank_three_without_heads
  ValueError: decode: query has shape (2, 3, 64); 3-D inputs need q_num_heads
rank_three_with_one_of_the_two
  ValueError: decode: key has shape (2, 9, 32); 3-D inputs need kv_num_heads
rank_three_width_does_not_divide
  ValueError: decode: query has shape (2, 3, 64); its last dimension must be a multiple of q_num_heads=5
rank_three_no_heads
  ValueError: decode: kv_num_heads=0; it must be at least 1
rank_three_head_sizes_differ
  ValueError: decode: key has head size 32 and query 16; they must agree
""",
    )


def test_texts_of_dtype_errors() -> None:
    expecttest.assert_expected_inline(
        _texts(DTYPES),
        """\
mixed_dtypes
  TypeError: decode: key is float16 and query float32; they must have one dtype (nothing is cast, under autocast neither): convert one of them
value_of_another_dtype
  TypeError: decode: value is bfloat16 and query float32; they must have one dtype (nothing is cast, under autocast neither): convert one of them
integers
  TypeError: decode: query is int32; it must be float16, bfloat16, float32 or float64
float8_under_a_float32_query
  TypeError: decode: key is float8_e4m3fn and query float32; float8 caches go with float16 and bfloat16 queries: convert one of them
float8_under_a_float64_query_with_a_scale
  TypeError: decode: key is float8_e4m3fn and query float64; float8 caches go with float16 and bfloat16 queries: convert one of them
float8_key_and_a_value_that_is_not
  TypeError: decode: value is float16 and key float8_e4m3fn; caches and what is added to them are all float8_e4m3fn or none: convert one of them
float8_value_and_a_key_that_is_not
  TypeError: decode: value is float8_e4m3fn and key float16; caches and what is added to them are all float8_e4m3fn or none: convert one of them
float8_of_another_kind
  TypeError: decode: key is float8_e5m2 and query float16; they must have one dtype (nothing is cast, under autocast neither): convert one of them; of float8 caches float8_e4m3fn is taken
float8_query
  TypeError: decode: query is float8_e4m3fn; it must be float16, bfloat16, float32 or float64
float8_past_and_new_keys_that_are_not
  TypeError: decode.present: past_key is float8_e4m3fn and key float32; caches and what is added to them are all float8_e4m3fn or none: convert one of them
float8_new_keys_and_a_past_that_is_not
  TypeError: decode.present: past_key is float16 and key float8_e4m3fn; caches and what is added to them are all float8_e4m3fn or none: convert one of them
k_scale_in_float16
  TypeError: decode: k_scale is float16; it must be float32
lengths_in_int16
  TypeError: decode: nonpad_kv_seqlen is int16; it must be int32 or int64
lengths_in_float
  TypeError: decode: nonpad_kv_seqlen is float32; it must be int32 or int64
complex_mask
  TypeError: decode: attn_mask is complex64; it must be bool, an integer, or float16, bfloat16, float32 or float64: convert it
float8_mask
  TypeError: decode: attn_mask is float8_e5m2; it must be bool, an integer, or float16, bfloat16, float32 or float64: convert it
sinks_in_float64
  TypeError: decode: sinks is float64; it must be float32, float16 or bfloat16
past_of_another_dtype
  TypeError: decode.present: past_key is float16 and query float32; they must have one dtype (nothing is cast, under autocast neither): convert one of them
""",
    )


def test_texts_of_errors_of_the_other_tensors() -> None:
    expecttest.assert_expected_inline(
        _texts(OTHER_TENSORS),
        """\
lengths_of_another_batch
  ValueError: decode: nonpad_kv_seqlen has shape (3,); it must be (2,), one length for each batch row
lengths_of_rank_two
  ValueError: decode: nonpad_kv_seqlen has shape (2, 1); it must be (2,), one length for each batch row
lengths_with_past
  ValueError: decode.present: nonpad_kv_seqlen and past_key are both given; lengths are those of a cache that already holds its past, give one of them
past_key_alone
  ValueError: decode.present: only one of past_key and past_value is given; give both or neither
past_value_alone
  ValueError: decode.present: only one of past_key and past_value is given; give both or neither
past_of_rank_three
  ValueError: decode.present: past_key has shape (2, 5, 32); it must be (2, 2, P, 16), 4-D whatever the query's rank
past_of_another_head_size
  ValueError: decode.present: past_key has shape (2, 2, 5, 17); it must be (2, 2, 5, 16), [B,Hkv,P,D] with one P for past_key and past_value
past_of_other_heads
  ValueError: decode.present: past_value has shape (2, 3, 5, 8); it must be (2, 2, 5, 8), [B,Hkv,P,D] with one P for past_key and past_value
pasts_of_two_lengths
  ValueError: decode.present: past_value has shape (2, 2, 6, 8); it must be (2, 2, 5, 8), [B,Hkv,P,D] with one P for past_key and past_value
mask_longer_than_the_keys
  ValueError: decode: attn_mask has shape (3, 10); its last dimension must not exceed the 9 keys (a shorter one masks the rest)
mask_of_other_rows
  ValueError: decode: attn_mask has shape (2, 9); dimension 0 must be 1 or 3 to broadcast to (2, 4, 3, 9)
mask_of_kv_heads
  ValueError: decode: attn_mask has shape (2, 3, 9); dimension 0 must be 1 or 4 to broadcast to (2, 4, 3, 9)
mask_of_another_batch
  ValueError: decode: attn_mask has shape (3, 1, 3, 9); dimension 0 must be 1 or 2 to broadcast to (2, 4, 3, 9)
mask_of_rank_five
  ValueError: decode: attn_mask has shape (1, 2, 4, 3, 9); its rank must be 1 to 4, aligned from the right with (2, 4, 3, 9)
mask_of_rank_zero
  ValueError: decode: attn_mask has shape (); its rank must be 1 to 4, aligned from the right with (2, 4, 3, 9)
sinks_of_kv_heads
  ValueError: decode: sinks has shape (2,); it must be (4,), one for each query head
sinks_of_rank_two
  ValueError: decode: sinks has shape (1, 4); it must be (4,), one for each query head
k_scale_without_float8
  ValueError: decode: k_scale is given and key is float32; scales go with float8_e4m3fn caches only: leave it out
v_scale_without_float8
  ValueError: decode: v_scale is given and key is float32; scales go with float8_e4m3fn caches only: leave it out
k_scale_of_query_heads
  ValueError: decode: k_scale has shape (4,); it must be () or (2,), one for all or one for each KV head
v_scale_of_one_element
  ValueError: decode: v_scale has shape (1,); it must be () or (2,), one for all or one for each KV head
v_scale_of_rank_two
  ValueError: decode: v_scale has shape (2, 1); it must be () or (2,), one for all or one for each KV head
scale_in_qk_without_float8
  ValueError: decode.qk: k_scale is given and key is float32; scales go with float8_e4m3fn caches only: leave it out
""",
    )


def test_texts_of_scalar_errors() -> None:
    expecttest.assert_expected_inline(
        _texts(SCALARS),
        """\
scale_of_zero
  ValueError: decode: scale=0.0; it must be positive and finite (None is 1/sqrt(D))
negative_scale
  ValueError: decode: scale=-1.0; it must be positive and finite (None is 1/sqrt(D))
scale_of_nan
  ValueError: decode: scale=nan; it must be positive and finite (None is 1/sqrt(D))
negative_softcap
  ValueError: decode: softcap=-0.5; it must be finite and not negative (0 is none)
softcap_of_nan
  ValueError: decode: softcap=nan; it must be finite and not negative (0 is none)
scale_beyond_float32
  ValueError: decode: scale=1e+39; logits of float32 queries are computed in float32, it must be between 1.2e-38 and 1.7e+38
scale_of_zero_in_float32
  ValueError: decode: scale=1e-46; logits of float32 queries are computed in float32, it must be between 1.2e-38 and 1.7e+38
softcap_beyond_float32
  ValueError: decode: softcap=1e+39; logits of float32 queries are computed in float32, it must be between 1.2e-38 and 1.7e+38, or 0 for none
softcap_of_zero_in_float32
  ValueError: decode: softcap=1e-46; logits of float32 queries are computed in float32, it must be between 1.2e-38 and 1.7e+38, or 0 for none
left_window_below_minus_one
  ValueError: decode: left_window_size=-2; it must be at least -1 (-1 is unlimited)
right_window_below_minus_one
  ValueError: decode: right_window_size=-7; it must be at least -1 (-1 is unlimited)
unknown_score_mode
  ValueError: decode.qk: qk_matmul_output_mode=4; it must be 0 (products), 1 (after softcap), 2 (after the mask) or 3 (after softmax)
negative_score_mode
  ValueError: decode.qk: qk_matmul_output_mode=-1; it must be 0 (products), 1 (after softcap), 2 (after the mask) or 3 (after softmax)
unknown_tier
  ValueError: decode: tier='flesh'; it must be None or one of xqa, cudnn, flash, mea, unfused
""",
    )


def test_texts_of_write_errors() -> None:
    lines = []
    for name, wrong in WRITES.items():
        error = _error(lambda wrong=wrong: _write(wrong))  # type: ignore[misc]
        lines.append(f"{name}\n  {type(error).__name__}: {error}\n")
    expecttest.assert_expected_inline(
        "".join(lines),
        """\
unknown_write_mode
  ValueError: tensor_scatter_: write_mode='ring'; it must be 'linear' or 'circular'
axis_of_the_batch
  ValueError: tensor_scatter_: axis=0 for past_cache of rank 4; it must name a dimension other than 0
axis_of_the_batch_from_behind
  ValueError: tensor_scatter_: axis=-4 for past_cache of rank 4; it must name a dimension other than 0
axis_that_is_not_there
  ValueError: tensor_scatter_: axis=4 for past_cache of rank 4; it must name a dimension other than 0
update_longer_than_the_cache
  ValueError: tensor_scatter_: update has shape (2, 3, 8, 4) and past_cache (2, 3, 7, 4); along axis 2 the update must not be longer than the cache
update_of_another_batch
  ValueError: tensor_scatter_: update has shape (1, 3, 2, 4) and past_cache (2, 3, 7, 4); they must agree in dimension 0
update_of_other_heads
  ValueError: tensor_scatter_: update has shape (2, 1, 2, 4) and past_cache (2, 3, 7, 4); they must agree in dimension 1
update_of_another_rank
  ValueError: tensor_scatter_: update has shape (2, 2, 4) and past_cache (2, 3, 7, 4); they must have one rank of at least 2
update_of_another_dtype
  TypeError: tensor_scatter_: update is float16 and past_cache float32; they must have one dtype (nothing is cast): convert one
indices_in_float
  TypeError: tensor_scatter_: write_indices is float32; it must be int32 or int64
indices_of_another_batch
  ValueError: tensor_scatter_: write_indices has shape (3,); it must be (2,), one index for each batch row
indices_of_rank_zero
  ValueError: tensor_scatter_: write_indices has shape (); it must be (2,), one index for each batch row
cache_of_rank_one
  ValueError: tensor_scatter_: update has shape (4,) and past_cache (4,); they must have one rank of at least 2
kv_unknown_write_mode
  ValueError: kv_scatter_: write_mode='ring'; it must be 'linear' or 'circular'
kv_key_longer_than_its_cache
  ValueError: kv_scatter_: key has shape (2, 3, 8, 4) and key_cache (2, 3, 7, 4); along axis 2 the update must not be longer than the cache
kv_value_of_another_dtype
  TypeError: kv_scatter_: value is float16 and value_cache float32; they must have one dtype (nothing is cast): convert one
kv_scale_without_float8
  ValueError: kv_scatter_: k_scale is given and key_cache is float32; scales go with float8_e4m3fn caches only: leave it out
update_of_a_float8_cache_in_16_bits
  TypeError: tensor_scatter_: update is float16 and past_cache float8_e4m3fn; they must have one dtype (nothing is cast): convert one (kv_scatter_ quantises)
kv_float8_update_of_another_cache
  TypeError: kv_scatter_: value is float8_e4m3fn and value_cache float32; they must have one dtype (nothing is cast): convert one
kv_update_of_a_float8_cache_in_float64
  TypeError: kv_scatter_: key is float64 and key_cache float8_e4m3fn; into that go float16, bfloat16, float32 and float8_e4m3fn: convert it
kv_update_of_a_float8_cache_in_another_float8
  TypeError: kv_scatter_: value is float8_e5m2 and value_cache float8_e4m3fn; into that go float16, bfloat16, float32 and float8_e4m3fn: convert it
kv_scale_of_the_cache_that_is_not_float8
  ValueError: kv_scatter_: v_scale is given and value_cache is float32; scales go with float8_e4m3fn caches only: leave it out
kv_scale_of_an_update_in_float8
  ValueError: kv_scatter_: k_scale is given and key is float8_e4m3fn; only numbers that are rounded to it are divided by a scale: leave it out
kv_scale_in_bfloat16
  TypeError: kv_scatter_: v_scale is bfloat16; it must be float32
kv_scale_of_other_heads
  ValueError: kv_scatter_: k_scale has shape (7,); it must be () or (3,), one for all or one for each KV head
kv_scale_per_head_of_a_cache_without_heads
  ValueError: kv_scatter_: k_scale has shape (3,) and key_cache rank 3; it must be (), one for each KV head goes with caches of rank 4: view it as one
""",
    )


def test_scales_that_are_not_dense_are_one_clear_error() -> None:
    scale = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="kv_scatter_: k_scale is a tensor of layout sparse_coo"):
        torch.ops.attn_tiers.kv_scatter_(CACHE8, CACHE8.clone(), UPDATE, UPDATE, INDEX, scale)
