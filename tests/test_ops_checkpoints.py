"""`scatter_checkpoints_` as a PyTorch operator: fake, compile, export, errors, explain."""

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
from torch_attn_tiers import ColdCaptureError, DeviceFacts, dispatch
from torch_attn_tiers.checkpoints import CheckpointMetadata, scatter_checkpoints_

scatter = torch.ops.attn_tiers.scatter_checkpoints_

P, N, R, HV, K, V = 6, 3, 4, 2, 8, 12
NAMES = ("pool", "dst", "h", "h_src", "track_mask", "final_state", "final_mask")


def _args(count: int = N, rows: int = R) -> tuple[torch.Tensor, ...]:
    flags = torch.arange(count) % 3
    return (
        torch.randn(2 * count, HV, K, V),
        torch.arange(count) * 2,
        torch.randn(rows, HV, V, K).mT,
        torch.arange(count, dtype=torch.int32) % rows,
        flags == 0,
        torch.randn(count, HV, V, K).mT,
        flags == 1,
    )


CALLS: dict[str, tuple[torch.Tensor | None, ...]] = {
    "all": _args(),
    "without last states": _args()[:5],
    "bfloat16": (_args()[0].bfloat16(), *_args()[1:]),
    "strided": (torch.randn(P, K, HV, 2 * V)[..., ::2].transpose(1, 2), *_args()[1:]),
    "v first": tuple(t.mT if t.dim() == 4 else t for t in _args()),
    "no sequences": (_args()[0], *_args(0)[1:]),
}
with_calls = pytest.mark.parametrize("name", CALLS)


@with_calls
def test_opcheck(name: str) -> None:
    opcheck(scatter.default, copy.deepcopy(CALLS[name]))


def test_writing_is_seen_by_autograd() -> None:
    args = _args()
    version = args[0]._version
    scatter(*args)
    assert args[0]._version > version


@with_calls
def test_compiled_result_equals_the_eager_one(name: str) -> None:
    torch._dynamo.reset()
    args, others = (copy.deepcopy(CALLS[name]) for _ in range(2))
    torch.compile(lambda *args: scatter(*args), fullgraph=True, backend="aot_eager")(*args)
    scatter(*others)
    torch.testing.assert_close(args, others, rtol=0, atol=0)


def _serving_step(pool: torch.Tensor, tokens: Any, lengths: Any, slots: Any, layout: str) -> Any:
    """A layer's prefill of requests whose states come from a pool and whose pages go into it."""
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    result = torch_attn_tiers.gdn_chunk_prefill(
        *tokens, scale=None, initial_state=pool[slots], cu_seqlens=bounds, output_h=True,
        h_layout=layout,
    )  # fmt: skip
    metadata = CheckpointMetadata.build(lengths + 64, lengths * 0 + 64, 64, slots + 3)
    scatter_checkpoints_(pool, metadata.dst, result, metadata)
    return result.out + 1


def _tokens(length: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(1, length, 1, K),
        torch.randn(1, length, 1, K) / 3,
        torch.randn(1, length, HV, V),
        -torch.rand(1, length, HV),
        torch.rand(1, length, HV),
    )


@pytest.mark.parametrize("layout", ["fla", "compact"])
def test_compiled_step_writes_in_place_without_a_copy(layout: str) -> None:
    torch._dynamo.reset()
    args = (torch.randn(P, HV, K, V), _tokens(203), torch.tensor([64, 9, 130]), torch.arange(3))
    others = copy.deepcopy(args)
    address = args[0].data_ptr()
    compiled = torch.compile(_serving_step, fullgraph=True)
    got, (code, *_) = run_and_get_code(compiled, *args, layout)
    torch.testing.assert_close(got, _serving_step(*others, layout))
    torch.testing.assert_close(args[0], others[0])
    assert args[0].data_ptr() == address
    assert f"empty_strided_cpu(({P}, {HV}, {K}, {V})" not in code, "the pool is cloned"


def test_numbers_of_sequences_and_rows_recompile_once_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: scatter(*args), fullgraph=True, backend=counter)
    for count, rows in ((2, 5), (8, 3), (64, 100), (3, 4)):
        args = _args(count, rows)
        others = copy.deepcopy(args)
        compiled(*args)
        scatter(*others)
        torch.testing.assert_close(args, others, rtol=0, atol=0)
    assert counter.frame_count <= 2


def test_export_with_the_pool_as_a_buffer() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.zeros(P, HV, K, V))

        def forward(self, dst: Any, h: Any, h_src: Any, mask: Any) -> torch.Tensor:
            scatter(self.pool, dst, h, h_src, mask)
            return self.pool.sum()

    args = _args()[1:5]
    module = Layer()
    exported = torch.export.export(module, args).module()
    torch.testing.assert_close(exported(*args), module(*args))
    torch.testing.assert_close(exported.pool, module.pool)


def test_tensors_that_require_grad_are_one_clear_error() -> None:
    for which in (0, 2, 5):
        args = list(_args())
        args[which] = args[which].requires_grad_()
        with pytest.raises(RuntimeError, match="inference-only and an input requires grad"):
            scatter(*args)
        with pytest.raises(RuntimeError, match="inference-only and an input requires grad"):
            scatter(*(a.to("meta") for a in args))
        with torch.no_grad():
            scatter(*args)


# ------------------------------------------------------------------- which tier, and captures


def test_who_copies_on_which_device() -> None:
    pytest.importorskip("triton")
    meta = [t.to("meta") for t in _args()]
    gpu = torch_attn_tiers.explain(scatter, *meta, device=DeviceFacts.of("sm_90"))
    assert gpu.chosen == "triton"
    amd = torch_attn_tiers.explain(scatter, *meta, device=DeviceFacts.of("gfx942"))
    assert amd.chosen == "reference" and "not run on AMD GPUs yet" in amd.verdicts[0].reasons[0]
    here = torch_attn_tiers.explain(scatter, *_args())
    assert here.chosen == "reference"
    assert "float32 into float32 N=3 R=4 pool=(6, 2, 8, 12) final_state" in str(here)
    names = [verdict.name for verdict in here.verdicts]
    assert names == ["triton", "reference"]


def test_prepare_takes_meta_tensors() -> None:
    meta = [t.to("meta") for t in _args()]
    assert torch_attn_tiers.prepare("scatter_checkpoints_", *meta, device="cpu").chosen


def test_cold_kernel_in_a_capture_is_an_error_that_names_prepare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("torch_attn_tiers.ops.checkpoints.is_capturing", lambda device: True)
    gpu = DeviceFacts.of("sm_90")
    meta = [t.to("meta") for t in _args()]
    explanation = torch_attn_tiers.explain("scatter_checkpoints_", *meta, device=gpu)
    assert explanation.chosen is None and "ColdCaptureError" in str(explanation)
    with pytest.raises(ColdCaptureError, match=r"prepare\('scatter_checkpoints_', ...\)"):
        dispatch.decide(("none",), explanation.problem)


# ---------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One broken rule: what differs from a good call, and words that the error must hold."""

    words: tuple[str, ...]
    tensors: Mapping[str, Any]
    error: type[Exception] = ValueError


GOOD = dict(zip(NAMES, _args(), strict=True))
_Z = torch.zeros
WRONG = {
    "pool_of_rank_three": Wrong(("pool", "[P,Hv,K,V]"), {"pool": _Z(P, K, V)}),
    "h_of_rank_five": Wrong(("h", "[R,Hv,K,V]"), {"h": _Z(1, R, HV, K, V)}),
    "h_of_other_heads": Wrong(("h", "(4, 2, 8, 12)"), {"h": _Z(R, HV + 1, K, V)}),
    "h_with_the_other_axis_first": Wrong(("h", "like those of the pool"), {"h": _Z(R, HV, V, K)}),
    "dst_of_rank_two": Wrong(("dst", "[N]"), {"dst": _Z(N, 1).long()}),
    "h_src_of_other_sequences": Wrong(("h_src", "(3,)"), {"h_src": _Z(4).int()}),
    "track_mask_of_other_sequences": Wrong(("track_mask", "(3,)"), {"track_mask": _Z(4).bool()}),
    "final_state_of_other_sequences": Wrong(
        ("final_state", "(3, 2, 8, 12)"), {"final_state": _Z(4, HV, K, V)}
    ),
    "final_mask_of_other_sequences": Wrong(("final_mask", "(3,)"), {"final_mask": _Z(4).bool()}),
    "final_state_alone": Wrong(
        ("final_state is given and final_mask is None",), {"final_mask": None}
    ),
    "final_mask_alone": Wrong(
        ("final_mask is given and final_state is None",), {"final_state": None}
    ),
    "pool_in_float64": Wrong(("pool", "float64"), {"pool": GOOD["pool"].double()}, TypeError),
    "h_in_integers": Wrong(("h is int32",), {"h": GOOD["h"].int()}, TypeError),
    "final_state_in_float64": Wrong(
        ("final_state", "float64"), {"final_state": GOOD["final_state"].double()}, TypeError
    ),
    "dst_in_float": Wrong(("dst", "int32 or int64"), {"dst": _Z(N)}, TypeError),
    "h_src_in_bool": Wrong(("h_src", "bool"), {"h_src": _Z(N).bool()}, TypeError),
    "track_mask_in_integers": Wrong(("track_mask", "bool"), {"track_mask": _Z(N).int()}, TypeError),
    "final_mask_in_integers": Wrong(("final_mask", "bool"), {"final_mask": _Z(N).int()}, TypeError),
    "pool_that_is_expanded": Wrong(
        ("pool", "stride 0"), {"pool": _Z(1, HV, K, V).expand(P, HV, K, V)}
    ),
    "tensors_on_two_devices": Wrong(("h is on meta",), {"h": GOOD["h"].to("meta")}),
    "no_pool": Wrong(("pool is None",), {"pool": None}, TypeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_broken_rule_is_an_error_that_says_what_to_do(name: str) -> None:
    wrong = WRONG[name]
    args = [{**GOOD, **wrong.tensors}[n] for n in NAMES]
    with pytest.raises(wrong.error) as eager:
        scatter(*args)
    text = str(eager.value)
    assert text.startswith("scatter_checkpoints_")
    for word in wrong.words:
        assert word in text, text
    with pytest.raises(wrong.error) as explained:
        torch_attn_tiers.explain(scatter, *args)
    assert str(explained.value) == text
    if name in ("tensors_on_two_devices", "no_pool"):
        return
    with FakeTensorMode() as mode, pytest.raises(wrong.error) as fake:
        scatter(*(None if t is None else mode.from_tensor(t) for t in args))
    assert str(fake.value) == text


def test_no_such_tier() -> None:
    with pytest.raises(ValueError, match="tier='fast'; it must be None or one of triton, refer"):
        scatter(*_args(), tier="fast")


def test_check_option_finds_places_that_were_not_meant() -> None:
    args = list(_args())
    with torch_attn_tiers.options(check=True):
        scatter(*args)
        args[1] = torch.tensor([2, 2, 2])  # the third sequence writes nothing
        with pytest.raises(ValueError, match=r"dst is \[2, 2\] where a state is written; two"):
            scatter(*args)
        args[1] = torch.tensor([1, P, 9])
        with pytest.raises(ValueError, match=r"dst is \[1, 6\] .* a place must be below 6"):
            scatter(*args)
        args[1] = torch.tensor([-1, -1, 9])
        scatter(*args)
    args[1] = torch.tensor([1, P, 9])
    before = args[0].clone()
    scatter(*args)
    assert args[0][2:].equal(before[2:])


@pytest.mark.parametrize("row", [-1, R, 2**31 - 1])
def test_check_option_finds_states_that_h_has_no_row_for(row: int) -> None:
    """A runtime would take the place for filled."""
    args = list(_args())
    named = dict(zip(NAMES, args, strict=True))
    (i, *_) = (named["track_mask"] & ~named["final_mask"]).nonzero().flatten().tolist()
    args[3] = named["h_src"].clone()
    args[3][i] = row
    with torch_attn_tiers.options(check=True):
        with pytest.raises(ValueError, match=rf"h_src is \[.*{row}.*\].* from 0 to below {R}"):
            scatter(*args)
        args[1] = named["dst"].clone()
        args[1][i] = -1  # not kept: its row means nothing
        scatter(*args)


@pytest.mark.parametrize("name", ["h", "final_state"])
def test_check_option_finds_states_that_lie_in_the_pool(name: str) -> None:
    """A copy from place to place of one pool may read what it has just written."""
    named = dict(zip(NAMES, _args(), strict=True))
    named["pool"] = torch.randn(P, HV, K, V)
    count = named[name].shape[0]
    with torch_attn_tiers.options(check=True):
        named[name] = named["pool"][P - count :]
        with pytest.raises(ValueError, match=f"{name} overlaps pool in memory.*: pass a copy"):
            scatter(*named.values())
        named[name] = named[name].clone()
        scatter(*named.values())
