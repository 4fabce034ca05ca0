"""`gdn_chunk_prefill.pool_` as a PyTorch operator: fakes, compile, export, errors, explain."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import torch_attn_tiers

pool_ = torch.ops.attn_tiers.gdn_chunk_prefill.pool_

T, N, HQ, HV, K, V, P = 150, 3, 2, 4, 8, 12, 7
BOUNDS = torch.tensor([0, 64, 64, 150], dtype=torch.int32)
READS, WRITES = torch.tensor([4, -1, 0], dtype=torch.int32), torch.tensor([4, 2, -1])
TRACK = (torch.tensor([64, 0, 64]), torch.tensor([1, -1, 3], dtype=torch.int32))


def _tokens(length: int = T, batch: int = 1) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, length, HQ, K),
        torch.randn(batch, length, HQ, K) / 3,
        torch.randn(batch, length, HV, V),
        -torch.rand(batch, length, HV),
        torch.rand(batch, length, HV),
    )


def _pool(*last: int) -> torch.Tensor:
    return torch.randn(P, HV, *(last or (K, V)))


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one sequence": ((*_tokens(), _pool(), READS[:1]), {}),
    "rows of a batch": ((*_tokens(70, 3), _pool(), READS, WRITES), {"qk_l2norm": True}),
    "sequences": ((*_tokens(), _pool(), READS, None, None, None, BOUNDS), {"scale": 0.25}),
    "all": ((*_tokens(), _pool(), READS, WRITES, *TRACK, BOUNDS), {}),
    "v first": (
        (*_tokens(), _pool(V, K), READS, WRITES, *TRACK, BOUNDS.long()),
        {"state_v_first": True, "batch_invariant": True},
    ),
    "bfloat16": ((*_tokens(), _pool().bfloat16(), READS, WRITES, *TRACK, BOUNDS), {}),
    "strided": (
        (*_tokens(), torch.randn(P, K, HV, 2 * V)[..., ::2].transpose(1, 2), READS, WRITES, *TRACK,
         BOUNDS), {},
    ),
    "no tokens": ((*_tokens(0), _pool(), READS[:1]), {}),
}  # fmt: skip
with_calls = pytest.mark.parametrize("name", CALLS)


def _call(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return copy.deepcopy(CALLS[name])


# -------------------------------------------------------------------------------- fake kernels


@with_calls
def test_opcheck(name: str) -> None:
    opcheck(pool_, *_call(name))


@with_calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fake_kernel_has_the_real_shapes_strides_and_dtypes(name: str, dtype: torch.dtype) -> None:
    args, scalars = _call(name)
    args = (*(x.to(dtype) for x in args[:3]), *args[3:])
    real = pool_(*args, **scalars)
    with FakeTensorMode() as mode:
        fake = pool_(*(a if a is None else mode.from_tensor(a) for a in args), **scalars)
    assert real.shape == fake.shape and real.stride() == fake.stride()
    assert real.dtype is fake.dtype is dtype


def test_writing_is_seen_by_autograd() -> None:
    args, scalars = _call("all")
    version = args[5]._version
    pool_(*args, **scalars)
    assert args[5]._version > version


def test_a_call_without_an_overload_stays_the_default_one() -> None:
    gdn = torch.ops.attn_tiers.gdn_chunk_prefill
    assert gdn.overloads() == ["default", "h_fla", "h_compact", "pool_"]
    assert len(gdn(*_tokens())) == 2


# -------------------------------------------------------------------------------------- compile


@with_calls
def test_compiled_result_equals_the_eager_one(name: str) -> None:
    (args, scalars), (others, _) = _call(name), _call(name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: pool_(*args, **scalars), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*args), pool_(*others, **scalars))
    torch.testing.assert_close(args[5], others[5])


def test_inductor_writes_in_place_without_a_copy() -> None:
    torch._dynamo.reset()

    def layer(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return pool_(q * 2, *rest) + 1

    (args, _), (others, _) = _call("all"), _call("all")
    address = args[5].data_ptr()
    got, codes = run_and_get_code(torch.compile(layer, fullgraph=True), *args)
    torch.testing.assert_close(got, layer(*others))
    torch.testing.assert_close(args[5], others[5])
    assert args[5].data_ptr() == address
    assert f"empty_strided_cpu(({P}, {HV}, {K}, {V})" not in "\n".join(codes), "the pool is cloned"


def test_tokens_and_sequences_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: pool_(*args), fullgraph=True, backend=counter)
    pool = torch.randn(50, HV, K, V)
    for length, count in ((150, 3), (151, 5), (300, 2), (70, 9)):
        rows = torch.arange(count)
        bounds = torch.arange(count + 1) * (length // count)
        args = (*_tokens(length), pool.clone(), rows, rows + 10, rows * 0 + 7, rows + 20, bounds)
        others = copy.deepcopy(args)
        torch.testing.assert_close(compiled(*args), pool_(*others))
        torch.testing.assert_close(args[5], others[5])
    assert counter.frame_count <= 2


def test_export_with_the_pool_as_a_buffer() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.zeros(P, HV, K, V))

        def forward(self, tokens: Any, *rest: Any) -> torch.Tensor:
            return pool_(*tokens, self.pool, *rest)

    args = (_tokens(), READS, WRITES, *TRACK, BOUNDS)
    module = Layer()
    exported = torch.export.export(copy.deepcopy(module), args).module()
    torch.testing.assert_close(exported(*args), module(*args))
    torch.testing.assert_close(exported.pool, module.pool)


@pytest.mark.parametrize("which", range(6))
def test_input_that_requires_grad_is_one_clear_error(which: int) -> None:
    args = list(_call("all")[0])
    args[which].requires_grad_()
    text = "attn_tiers::gdn_chunk_prefill.pool_ is inference-only and an input requires grad"
    with pytest.raises(RuntimeError, match=text):
        pool_(*args)
    with pytest.raises(RuntimeError, match=text):
        pool_(*(a.to("meta") for a in args))
    with torch.no_grad():
        pool_(*args)


# ---------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One broken rule: what differs from a good call, and words that the error must hold."""

    words: tuple[str, ...]
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: type[Exception] = ValueError


NAMES = (
    "q", "k", "v", "g", "beta", "pool", "read_indices", "write_indices", "track_lens",
    "track_indices", "cu_seqlens",
)  # fmt: skip
GOOD = dict(zip(NAMES, _call("all")[0], strict=True))
_Z = torch.zeros
WRONG = {
    "k_of_another_size": Wrong(("k", "that of q"), {"k": _Z(1, T, HQ, K + 1)}),
    "inputs_in_float64": Wrong(
        ("q", "float64"), {n: GOOD[n].double() for n in ("q", "k", "v")}, error=TypeError
    ),
    "pool_of_rank_three": Wrong(("pool", "[P,Hv,K,V]"), {"pool": _Z(P, K, V)}),
    "pool_with_the_wrong_axis_first": Wrong(
        ("pool", "(7, 4, 12, 8)", "(7, 4, 8, 12)"), {"pool": _pool(V, K)}
    ),
    "pool_with_the_other_axis_first": Wrong(
        ("pool", "state_v_first=True"), {}, {"state_v_first": True}
    ),
    "pool_of_other_heads": Wrong(("pool", "(7, 4, 8, 12)"), {"pool": _Z(P, HV + 1, K, V)}),
    "pool_in_float64": Wrong(("pool", "float64"), {"pool": GOOD["pool"].double()}, error=TypeError),
    "pool_that_is_expanded": Wrong(
        ("pool", "stride 0"), {"pool": _Z(1, HV, K, V).expand(P, HV, K, V)}
    ),
    "read_indices_of_other_sequences": Wrong(
        ("read_indices", "(4,)", "(3,)"), {"read_indices": _Z(4).int()}
    ),
    "read_indices_in_float": Wrong(
        ("read_indices", "float32"), {"read_indices": _Z(N)}, error=TypeError
    ),
    "write_indices_of_two_dimensions": Wrong(
        ("write_indices", "[N]"), {"write_indices": _Z(N, 2).int()}
    ),
    "track_lens_in_bool": Wrong(
        ("track_lens", "bool"), {"track_lens": _Z(N).bool()}, error=TypeError
    ),
    "track_lens_alone": Wrong(
        ("track_lens is given and track_indices is None",), {"track_indices": None}
    ),
    "track_indices_alone": Wrong(
        ("track_indices is given and track_lens is None",), {"track_lens": None}
    ),
    "track_indices_of_other_sequences": Wrong(
        ("track_indices", "(3,)"), {"track_indices": _Z(1).int()}
    ),
    "cu_seqlens_of_other_sequences": Wrong(
        ("read_indices", "(3,)", "(2,)"), {"cu_seqlens": BOUNDS[1:]}
    ),
    "tensors_on_two_devices": Wrong(("pool is on meta",), {"pool": GOOD["pool"].to("meta")}),
    "scale_not_finite": Wrong(("scale", "finite"), {}, {"scale": float("inf")}),
    "no_such_tier": Wrong(("tier", "fast", "reference"), {}, {"tier": "fast"}),
    "no_pool": Wrong(("pool is None",), {"pool": None}, error=TypeError),
    "no_read_indices": Wrong(("read_indices is None",), {"read_indices": None}, error=TypeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_broken_rule_is_an_error_that_says_what_to_do(name: str) -> None:
    wrong = WRONG[name]
    args = [{**GOOD, **wrong.tensors}[n] for n in NAMES]
    with pytest.raises(wrong.error) as eager:
        pool_(*args, **wrong.scalars)
    text = str(eager.value)
    assert text.startswith("gdn_chunk_prefill.pool_: ")
    for word in wrong.words:
        assert word in text, text
    with pytest.raises(wrong.error) as explained:
        torch_attn_tiers.explain(pool_, *args, **wrong.scalars)
    assert str(explained.value) == text
    if name in ("tensors_on_two_devices", "no_pool", "no_read_indices"):
        return
    with FakeTensorMode() as mode, pytest.raises(wrong.error) as fake:
        pool_(*(None if t is None else mode.from_tensor(t) for t in args), **wrong.scalars)
    assert str(fake.value) == text


def test_conjugate_view_is_not_written_through() -> None:
    args = (*_tokens(), _pool()._neg_view(), READS[:1])
    with pytest.raises(ValueError, match="pool is a conjugate or negative view"):
        pool_(*args)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"read_indices": [7, 1, 2]}, "read_indices is .*below 7"),
        ({"write_indices": [0, 9, 2]}, "write_indices is .*below 7"),
        ({"track_indices": [1, -1, 8]}, "track_indices is .*below 7"),
        ({"track_lens": [63, 0, 0]}, r"track_lens is \[63, 0, 0\] for sequences of \[64, 0, 86\]"),
        ({"track_lens": [128, 0, 0]}, "track_lens is .*a multiple of 64 that the sequence reaches"),
        ({"track_lens": [-64, 0, 0]}, "track_lens is"),
        ({"write_indices": [4, 2, 4]}, "sequences 0 and 2 both write state 4"),
        ({"track_indices": [2, -1, 3]}, "sequences 0 and 1 both write state 2"),
        ({"track_indices": [1, -1, 1]}, "sequences 0 and 2 both write state 1"),
        ({"write_indices": [0, 2, -1]}, "sequence 2 reads state 0 of the pool and sequence 0 wri"),
        ({"track_indices": [0, -1, 3]}, "sequence 2 reads state 0 of the pool and sequence 0 wri"),
        ({"cu_seqlens": [0, 64, 63, 150]}, "cu_seqlens is"),
    ],
)
def test_indices_that_were_not_meant_are_an_error_when_checked(
    changes: dict[str, list[int]], words: str
) -> None:
    named = {**GOOD, **{n: torch.tensor(x) for n, x in changes.items()}}
    args = [named[n] for n in NAMES]
    args[5] = args[5].clone()
    pool_(*args)  # no error, no access out of bounds
    with torch_attn_tiers.options(check=True), pytest.raises(ValueError, match=words):
        pool_(*args)


def test_inputs_inside_the_pool_are_an_error_when_checked() -> None:
    args = [GOOD[n] for n in NAMES]
    g, pool = args[3], args[5].clone()
    args[3], args[5] = pool.view(-1)[: g.numel()].view_as(g), pool
    with torch_attn_tiers.options(check=True):
        with pytest.raises(ValueError, match="g overlaps pool in memory, and is read while that"):
            pool_(*args)


def test_right_indices_pass_the_check() -> None:
    with torch_attn_tiers.options(check=True):
        for name in CALLS:
            args, scalars = _call(name)
            pool_(*args, **scalars)
        args = list(_call("all")[0])
        args[8], args[9] = torch.tensor([64, 0, 86]), torch.tensor([4, 4, 0])
        pool_(*args)  # a sequence may name one place twice, and write where it read


# ------------------------------------------------------------------------------ explain, options


def test_explain_describes_the_call() -> None:
    args = tuple(t.to("meta") for t in _call("all")[0])
    explanation = torch_attn_tiers.explain(pool_, *args, device="cpu")
    text = str(explanation)
    for word in ("gdn_chunk_prefill.pool_ float32 B=1 T=150 N=3", "pool=float32,7", "tracked"):
        assert word in text
    assert explanation.chosen == "reference"
    named = dict(zip(NAMES, args, strict=True))
    assert torch_attn_tiers.explain("gdn_chunk_prefill.pool_", **named, device="cpu").chosen


def test_given_write_indices_are_no_other_problem_than_the_default() -> None:
    args = _call("all")[0]
    one = torch_attn_tiers.explain(pool_, *args[:7], None, *args[8:]).problem
    other = torch_attn_tiers.explain(pool_, *args[:7], args[6], *args[8:]).problem
    assert one == other
    assert one != torch_attn_tiers.explain(pool_, *args).problem


def test_tier_can_be_forced_by_an_option() -> None:
    args, _ = _call("all")
    with torch_attn_tiers.options(force="gdn_chunk_prefill:reference"):
        with torch_attn_tiers.record_dispatch() as calls:
            pool_(*args)
    assert [(call.op, call.tier) for call in calls] == [("gdn_chunk_prefill", "reference")]


def test_prepare_takes_meta_tensors() -> None:
    args = tuple(t.to("meta") for t in _call("all")[0])
    assert torch_attn_tiers.prepare(pool_, *args, device="cpu").chosen == "reference"


@pytest.mark.parametrize("tier", ["triton", "reference"])
def test_sequences_of_padding_may_share_a_place(tier: str) -> None:
    bounds = torch.tensor([0, 64, 70, 135, 150])

    def run(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        pool = _pool()
        return pool_(*_tokens(), pool, slots, None, None, None, bounds, tier=tier), pool

    alone = run(torch.tensor([3, -1, -1, 5]))
    shared = run(torch.tensor([3, 0, 0, 5]))
    tokens = [*range(64), *range(135, 150)]
    assert torch.equal(shared[0][:, tokens], alone[0][:, tokens])
    assert torch.equal(shared[1][1:], alone[1][1:])
