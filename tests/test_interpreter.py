"""Triton's interpreter as the tests run it: bfloat16, checked memory; what `csrc_free_ops` asks."""

from __future__ import annotations

import concurrent.futures
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here and does not interpret", allow_module_level=True)

import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import torch_attn_tiers
from csrc_free_ops import interpreter
from tests.conformance.calls import Call, Maker, same_bits
from tests.interpreter_bfloat16 import rounded, widened

BFLOAT16 = torch.bfloat16
RIGHT = interpreter.Bfloat16(multiplies=True, rounds=True)


@triton.jit
def _each(x, y, out, OP: tl.constexpr, n: tl.constexpr):
    at = tl.arange(0, n)
    a = tl.load(x + at)
    b = tl.load(y + at)
    if OP == "add":
        result = a + b
    elif OP == "subtract":
        result = a - b
    elif OP == "multiply":
        result = a * b
    elif OP == "divide":
        result = a / b
    elif OP == "negate":
        result = -a
    elif OP == "absolute":
        result = tl.abs(a)
    elif OP == "maximum":
        result = tl.maximum(a, b)
    elif OP == "minimum":
        result = tl.minimum(a, b)
    elif OP == "clamp":
        result = tl.clamp(a, tl.minimum(b, 0.5), tl.maximum(b, 0.75))
    elif OP == "fused":
        result = tl.fma(a, b, a)
    elif OP == "select":
        result = tl.where((a > b) & (a != float("-inf")), a, 0.3)
    elif OP == "constant":
        result = a + tl.full([n], 1.7, tl.bfloat16)
    elif OP == "of float32":
        result = (a.to(tl.float32) * 1.2345678).to(tl.bfloat16)
    elif OP == "of float64":
        result = (a.to(tl.float64) * 1.2345678).to(tl.bfloat16)
    elif OP == "of float16":
        result = (a.to(tl.float16) * b.to(tl.float16)).to(tl.bfloat16)
    elif OP == "of integers":
        result = (a * 100).to(tl.int32).to(tl.bfloat16)
    tl.store(out + at, result)


#: The same in float32, to be rounded.
EACH = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negate": lambda a, b: -a,
    "absolute": lambda a, b: a.abs(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda a, b: a.clamp(b.clamp(max=0.5), b.clamp(min=0.75)),
    "fused": lambda a, b: a * b + a,
    "select": lambda a, b: torch.where(a > b, a, 0.3),
    "constant": lambda a, b: a + torch.tensor(1.7, dtype=BFLOAT16).float(),
    "of float32": lambda a, b: a * 1.2345678,
    "of float64": lambda a, b: (a.double() * 1.2345678).float(),
    "of float16": lambda a, b: (a.half() * b.half()).float(),
    "of integers": lambda a, b: (a * 100).bfloat16().int().float(),
}


@pytest.mark.parametrize("op", EACH)
def test_bfloat16_operations_are_those_of_float32_rounded_once(op: str) -> None:
    x, y = Maker(BFLOAT16).normal(2, 1024)
    out = torch.empty_like(x)
    _each[(1,)](x, y, out, op, 1024)
    assert same_bits(out, EACH[op](x.float(), y.float()).bfloat16())


def test_every_bfloat16_number_is_widened_and_rounded_back() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    numbers = torch.from_numpy(widened(bits.view(torch.uint16).numpy()))
    assert same_bits(numbers, bits.view(BFLOAT16).float())
    finite = ~numbers.isnan()
    back = torch.from_numpy(rounded(numbers.numpy())).view(torch.int16)
    assert torch.equal(back[finite], bits[finite])
    assert bool(back[~finite].view(BFLOAT16).isnan().all())


def test_rounding_is_to_the_nearest_and_ties_go_to_even() -> None:
    tie = 2.0**-8
    numbers = torch.tensor(
        [1 + tie, 1 + 3 * tie, -1 - tie, 1 + 1.01 * tie, 3.4e38, math.inf, 1e-40]
    )
    wanted = [1.0, 1 + 4 * tie, -1.0, 1 + 2 * tie, math.inf, math.inf]
    got = torch.from_numpy(rounded(numbers.numpy())).view(torch.int16).view(BFLOAT16)
    assert got[:6].tolist() == wanted
    assert same_bits(got, numbers.bfloat16())


@triton.jit
def _dot(x, y, out):
    r = tl.arange(0, 32)
    at = r[:, None] * 32 + r[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.trans(tl.load(y + at))))


def test_bfloat16_products_are_exact() -> None:
    x, y = (Maker(BFLOAT16).normal(2, 32, 32) * 4).round() / 4
    out = torch.empty(32, 32)
    _dot[(1,)](x, y, out)
    assert torch.equal(out, x.float() @ y.float().mT)


@triton.jit
def _add_one(a, b):
    return a + b


@triton.jit
def _refused(x, out, OP: tl.constexpr):
    at = tl.arange(0, 16)
    if OP == "reduce":
        tl.store(out, tl.reduce(tl.load(x + at), 0, _add_one))
    elif OP == "scan":
        tl.store(out + at, tl.associative_scan(tl.load(x + at), 0, _add_one))
    elif OP == "atomic":
        tl.atomic_add(out + at, tl.load(x + at))
    elif OP == "float8":
        tl.store(out + at, tl.load(x + at).to(tl.float8e4nv).to(tl.bfloat16))


@pytest.mark.parametrize("op", ["reduce", "scan", "atomic", "float8"])
def test_what_is_not_made_right_is_an_error(op: str) -> None:
    x = torch.ones(16, dtype=BFLOAT16)
    with pytest.raises(InterpreterError, match="of bfloat16 in Triton's interpreter"):
        _refused[(1,)](x, torch.zeros_like(x), op)


@triton.jit
def _copy(x, out, shift_in, shift_out):
    at = tl.arange(0, 16)
    tl.store(out + at + shift_out, tl.load(x + at + shift_in))


@pytest.mark.parametrize(("shifts", "word"), [((1, 0), "reads"), ((0, 1), "writes")])
def test_memory_of_bfloat16_tensors_is_checked(shifts: tuple[int, int], word: str) -> None:
    whole = torch.ones(2, 32, dtype=BFLOAT16)
    with pytest.raises(InterpreterError, match=f"_copy {word} 1 of 16 elements outside"):
        _copy[(1,)](whole[0, :16], whole[1, :16], *shifts)


# --------------------------------------------------------------------------- what the tiers ask


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The interpreter has not been asked yet, and is asked again afterwards."""
    interpreter._found.cache_clear()
    yield
    interpreter._found.cache_clear()


def _truncates(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
    return TensorHandle((source.data.view("uint32") >> 16).astype("uint16"), dtype.scalar)


def _multiplies_bits(self: Any, a: TensorHandle, b: TensorHandle, d: Any, *rest: Any) -> Any:
    return TensorHandle((a.data @ b.data).astype("float32") + d.data, d.dtype)


def _fails(self: Any, *args: Any) -> Any:
    raise TypeError("no products of bfloat16")


FAULTS = {
    "truncates": ("cast_impl", _truncates, RIGHT._replace(rounds=False)),
    "multiplies bits": ("create_dot", _multiplies_bits, RIGHT._replace(multiplies=False)),
    "fails": ("create_dot", _fails, RIGHT._replace(multiplies=False)),
}


def test_right_interpreter_is_found_right(asked_anew: None) -> None:
    assert interpreter.bfloat16() == RIGHT


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_the_interpreter_is_found(
    name: str, asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, fault, found = FAULTS[name]
    monkeypatch.setattr(InterpreterBuilder, method, fault)
    assert interpreter.bfloat16() == found


def test_interpreter_is_asked_once_by_all_threads(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    run = interpreter._run
    monkeypatch.setattr(interpreter, "_run", lambda *args: (runs.append(args[0]), run(*args)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: interpreter.bfloat16(), range(8)))
    assert found == [RIGHT] * 8 and len(runs) == 2


def test_interpreter_may_be_asked_under_modes_of_the_caller(asked_anew: None) -> None:
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"):
        assert interpreter.bfloat16() == RIGHT


PRODUCTS = "bfloat16 products are wrong in Triton's interpreter"
ROUNDING = "Triton's interpreter rounds to bfloat16 towards zero"


def _reasons(op: str, *args: Any, tier: str, **scalars: Any) -> tuple[str, ...]:
    explanation = torch_attn_tiers.explain(op, *args, tier=tier, **scalars)
    (verdict,) = [one for one in explanation.verdicts if one.name == tier]
    return tuple(verdict.reasons)


def _meta(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


Q, GATE, STATE = _meta(1, 8, 2, 16), _meta(1, 8, 2, dtype=torch.float32), _meta(1, 2, 16, 16)
ROWS, FLAGS = _meta(1, dtype=torch.int64), _meta(1, dtype=torch.bool)
WIDE = _meta(1, 8, 2, 16, dtype=torch.float32)
#: Operator, arguments, scalars, tier; what a wrong product and a wrong rounding make of it.
ASKED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str, str | None]] = {
    "decode": ("decode", (Q, Q, Q), {}, "flash", PRODUCTS),
    "prefill": ("gdn_chunk_prefill", (Q, Q, Q, GATE, GATE), {}, "triton", PRODUCTS),
    "checkpoints of a prefill in float32": (
        "gdn_chunk_prefill.h_fla", (WIDE, WIDE, WIDE, GATE, GATE), {"h_dtype": BFLOAT16}, "triton",
        None,
    ),
    "pool of a prefill in float32": (
        "gdn_chunk_prefill.pool_", (WIDE, WIDE, WIDE, GATE, GATE, STATE, ROWS), {}, "triton", None,
    ),
    "gdn_decode": ("gdn_decode", (Q, Q, Q, GATE, GATE, STATE), {}, "triton", None),
    "scatter": (
        "scatter_checkpoints_", (STATE, ROWS, STATE, ROWS, FLAGS, None, None), {}, "triton", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_tiers_refuse_what_the_interpreter_gets_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, args, scalars, tier, products = ASKED[name]

    def reasons(found: interpreter.Bfloat16) -> tuple[str, ...]:
        monkeypatch.setattr(interpreter, "bfloat16", lambda: found)
        return _reasons(op, *args, **scalars, tier=tier, device="cpu")

    assert reasons(RIGHT) == ()
    assert reasons(RIGHT._replace(rounds=False)) == (ROUNDING,)
    assert reasons(RIGHT._replace(multiplies=False)) == ((products,) if products else ())


def test_interpreter_is_not_asked_where_it_would_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def bfloat16() -> interpreter.Bfloat16:
        raise AssertionError("asked")

    monkeypatch.setattr(interpreter, "bfloat16", bfloat16)
    call = Call(Maker(BFLOAT16).qkv())
    assert same_bits(call.run(), call.run("unfused"))
    half = Call(Maker(torch.float16).qkv())
    half.check("flash")
