"""`torch_attn_tiers.gdn_chunk_prefill`: named results, which tier, which layout of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests.fake_libraries import put
from torch_attn_tiers import GdnPrefill, GdnPrefillCompact, GdnPrefillFla, Tier
from torch_attn_tiers.problem import GdnProblem

OP = torch.ops.attn_tiers.gdn_chunk_prefill
TENSORS = (
    torch.randn(1, 130, 2, 8),
    torch.randn(1, 130, 2, 8) / 3,
    torch.randn(1, 130, 4, 12),
    -torch.rand(1, 130, 4),
    torch.rand(1, 130, 4),
)
STATE = torch.randn(2, 4, 8, 12)
BOUNDS = torch.tensor([0, 64, 130])


def call(*args: Any, **kwargs: Any) -> Any:
    kwargs = {"scale": None, "initial_state": STATE, "cu_seqlens": BOUNDS, **kwargs}
    return torch_attn_tiers.gdn_chunk_prefill(*(args or TENSORS), **kwargs)


@contextlib.contextmanager
def _flashinfer(reason: str | None = None, seen: list[GdnProblem] | None = None) -> Iterator[None]:
    """The reference under the name of the tier flashinfer, which takes what ``reason`` allows."""

    def predicate(problem: GdnProblem) -> str | None:
        if seen is not None:
            seen.append(problem)
        return reason

    real, *_, reference = torch_attn_tiers.tier.tiers_of("gdn_chunk_prefill")
    assert (real.name, reference.name) == ("flashinfer", "reference")
    tier = Tier(
        op="gdn_chunk_prefill",
        name="flashinfer",
        predicates=(predicate,),
        build=reference.build,
    )
    put(tier, instead_of=real)
    try:
        yield
    finally:
        put(real, instead_of=tier)


def test_results_are_those_of_the_operator_by_name() -> None:
    plain = call()
    assert type(plain) is GdnPrefill
    torch.testing.assert_close(tuple(plain), OP(*TENSORS, STATE, BOUNDS))
    fla = call(output_h=True, h_layout="fla", total_chunks=3, h_dtype=torch.float16)
    assert type(fla) is GdnPrefillFla and fla.h.dtype is torch.float16
    torch.testing.assert_close(fla.h[:, :3].float(), OP.h_fla(*TENSORS, STATE, BOUNDS)[2][:, :3],
                               rtol=1e-2, atol=1e-2)  # fmt: skip
    compact = call(output_h=True, h_layout="compact")
    assert type(compact) is GdnPrefillCompact and compact.h_cu_starts.tolist() == [0, 1, 2]
    torch.testing.assert_close(tuple(compact), OP.h_compact(*TENSORS, STATE, BOUNDS))


def test_every_option_reaches_the_operator() -> None:
    v_first = STATE.transpose(-1, -2).contiguous()
    got = call(
        scale=0.0, initial_state=v_first, qk_l2norm=True, output_final_state=False,
        state_v_first=True, output_h=True, h_layout="fla", total_chunks=2,
    )  # fmt: skip
    wanted = OP.h_fla(
        *TENSORS, v_first, BOUNDS, scale=0.0, qk_l2norm=True, output_final_state=False,
        state_v_first=True, total_chunks=2,
    )  # fmt: skip
    torch.testing.assert_close(tuple(got), wanted)
    assert not got.out.any() and got.final_state.shape == (0, 4, 12, 8)


@pytest.mark.parametrize(
    "named",
    [
        {"solution": "reference"},
        {"override": "reference"},
        {"override": "reference_gdn_chunk_prefill"},
        {"override": "reference_gdn_chunk_prefill", "solution": "reference"},
    ],
)
def test_solution_and_override_name_a_tier(named: dict[str, str]) -> None:
    with _flashinfer(), torch_attn_tiers.record_dispatch() as records:
        call()
        call(**named)
    assert [record.tier for record in records] == ["flashinfer", "reference"]


def test_solution_that_cannot_run_is_an_error_with_its_reasons() -> None:
    with _flashinfer("needs another machine"):
        with pytest.raises(torch_attn_tiers.TierNotEligibleError, match="another machine"):
            call(solution="flashinfer")
    with pytest.raises(ValueError, match="tier='fast'"):
        call(override="fast_gdn_chunk_prefill")


@pytest.mark.parametrize("name", ["override", "solution"])
def test_a_tier_is_asked_for_by_a_string(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 3; it must be a str or None"):
        call(**{name: 3})


def test_two_tiers_asked_for_are_an_error() -> None:
    with pytest.raises(ValueError, match="name two tiers"):
        call(override="reference_gdn_chunk_prefill", solution="flashinfer")


@pytest.mark.parametrize(
    "option", [{"h_dtype": torch.float32}, {"total_chunks": 3}, {"h_layout": "fla"}]
)
def test_option_about_checkpoints_without_them_is_an_error(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*output_h=True"):
        call(**option)


def test_unknown_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match="h_layout='dense'"):
        call(output_h=True, h_layout="dense")


def test_wrong_shapes_are_the_operators_error() -> None:
    with pytest.raises(ValueError, match="q has shape"):
        call(TENSORS[0][0], *TENSORS[1:], output_h=True)
    with pytest.raises(TypeError, match="q is None"):
        call(None, *TENSORS[1:], output_h=True)


# ------------------------------------------------------------------------------------- h_layout


def test_layout_is_fla_without_the_tier_flashinfer() -> None:
    assert type(call(output_h=True)) is GdnPrefillFla


def test_layout_is_compact_if_the_tier_flashinfer_takes_the_model() -> None:
    with _flashinfer():
        assert type(call(output_h=True)) is GdnPrefillCompact
        assert type(call(output_h=True, h_layout="fla")) is GdnPrefillFla
        assert type(call(output_h=True, solution="reference")) is GdnPrefillCompact
        with torch_attn_tiers.options(disable="gdn_chunk_prefill:flashinfer"):
            assert type(call(output_h=True)) is GdnPrefillFla
    with _flashinfer("not this model"):
        assert type(call(output_h=True)) is GdnPrefillFla


def test_layout_is_judged_without_tokens_and_sequences() -> None:
    seen: list[GdnProblem] = []
    with _flashinfer("no", seen):
        for length in (0, 1, 100, 130):
            tokens = [t[:, :length] for t in TENSORS]
            call(*tokens, initial_state=STATE[:1], cu_seqlens=None, output_h=True)
    judged = [p for p in seen if p.h_layout == "compact"]
    assert len(judged) == 1  # judged once for the model
    assert (judged[0].Hq, judged[0].Hv, judged[0].K, judged[0].V) == (2, 4, 8, 12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("h_layout", [None, "fla", "compact"])
def test_entry_point_compiles_into_one_graph(h_layout: str | None, dynamic: bool) -> None:
    torch._dynamo.reset()

    def layer(*tensors: torch.Tensor) -> Any:
        result = call(*tensors, output_h=True, h_layout=h_layout)
        return result.out * 2, result.h[..., :1, :, :, :] * 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(*TENSORS), layer(*TENSORS))


def test_entry_point_without_checkpoints_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    result = compiled(*TENSORS)
    torch.testing.assert_close(tuple(result), tuple(call(*TENSORS)))
