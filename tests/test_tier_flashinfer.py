"""The tier `flashinfer` of `gdn_chunk_prefill` without the library: a stand-in, other devices."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests import fake_gdn_library, fake_libraries
from tests.conformance.calls import Maker, poisoned_memory, same_bits
from tests.conformance.gdn_calls import GdnCall, prompts
from tests.fake_gdn_library import FakeGdn
from tests.fake_libraries import Faults
from tests.gdn_library_cases import CASES, state_layouts
from tests.test_predicates import DEVICES
from tests.tolerances import assert_gdn_close
from torch_attn_tiers import GdnPrefillCompact, GdnPrefillFla, TierNotEligibleError
from torch_attn_tiers.tiers.gdn import flashinfer, flashinfer_library

pytest.importorskip("triton")

OP = torch.ops.attn_tiers.gdn_chunk_prefill
TAKES = ("sm_90", "sm_100", "sm_120")
CALL = "gdn_chunk_prefill"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fake_libraries.forget()
    yield
    fake_libraries.forget()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that is there, and a PyTorch of CUDA 13."""
    monkeypatch.setattr(flashinfer, "_cuda_major", lambda: 13)
    return fake_gdn_library.install_gdn(monkeypatch)


@pytest.fixture
def runs(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGdn]:
    """The tier runs here, by the stand-in."""
    with fake_libraries.on_a_cpu(monkeypatch, flashinfer.TIER):
        yield module.chunk_gated_delta_rule


@dataclasses.dataclass
class Asked:
    """A call on meta tensors: a model's heads, 4 sequences."""

    T: int = 4096
    N: int = 4
    Hq: int = 16
    Hv: int = 32
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    state: torch.dtype | None = torch.float32
    cu: torch.dtype | None = torch.int32
    overload: str = "default"
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)

    def call(self) -> GdnCall:
        def meta(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        B = 1 if self.cu is not None else self.N
        gate = meta(B, self.T, self.Hv, dtype=torch.float32)
        states = (self.N, self.Hv, self.K, self.V)
        return GdnCall(
            {
                "q": meta(B, self.T, self.Hq, self.K),
                "k": meta(B, self.T, self.Hq, self.K),
                "v": meta(B, self.T, self.Hv, self.V),
                "g": gate,
                "beta": gate,
                "initial_state": None if self.state is None else meta(*states, dtype=self.state),
                "cu_seqlens": None if self.cu is None else meta(self.N + 1, dtype=self.cu),
            },
            {"tier": "flashinfer", **self.scalars},
            self.overload,
        )

    def reasons(self, device: DeviceFacts | str = "sm_90") -> str:
        call = self.call()
        facts = DEVICES[device] if isinstance(device, str) else device
        explanation = torch_attn_tiers.explain(
            call.op(), *call.args(), device=facts, **call.scalars
        )
        (verdict,) = [v for v in explanation.verdicts if v.name == "flashinfer"]
        return "; ".join(verdict.reasons)


PLAIN = Asked()


def _but(**changes: Any) -> Asked:
    return dataclasses.replace(PLAIN, **changes)


# ------------------------------------------------------------------------------ what it takes

TAKEN = {
    "prompts of a model": PLAIN,
    "float16": _but(dtype=torch.float16),
    "int64 bounds": _but(cu=torch.int64),
    "rows of a batch": _but(cu=None, T=200),
    "as many heads": _but(Hv=16),
    "three value heads": _but(Hv=48),
    "no state": _but(state=None),
    "no final state": _but(scalars={"output_final_state": False}),
    "norms": _but(scalars={"qk_l2norm": True}),
    "negative scale": _but(scalars={"scale": -2.0}),
    "batch invariant": _but(scalars={"batch_invariant": True}),
    "checkpoints": _but(overload="h_compact"),
    "fewer rows": _but(overload="h_compact", scalars={"total_chunks": 3}),
    "one token": _but(T=1, N=1),
}


@pytest.mark.parametrize("device", TAKES)
@pytest.mark.parametrize("name", TAKEN)
def test_takes_it_if_asked(name: str, device: str, module: Any) -> None:
    assert TAKEN[name].reasons(device) == ""


@pytest.mark.parametrize("device", TAKES)
@pytest.mark.parametrize("name", ["state", "h"])
def test_states_in_16_bits_are_not_for_compute_capability_10(
    name: str, device: str, module: Any
) -> None:
    half = {"scalars": {"h_dtype": torch.bfloat16}} if name == "h" else {"state": torch.float16}
    reasons = _but(overload="h_compact" if name == "h" else "default", **half).reasons(device)
    assert ("must be float32 on compute capability 10.x" in reasons) is (device == "sm_100")


def test_takes_any_strides(module: Any) -> None:
    call = PLAIN.call()
    packed = torch.empty(1, 4096, 16 + 16 + 32, 130, dtype=torch.bfloat16, device="meta")
    turned = torch.empty(1, 128, 32, 4096, dtype=torch.bfloat16, device="meta")
    for q, k, v in (
        (*packed[..., 1:129].split([16, 16, 32], 2),),
        (call.tensors["q"], call.tensors["k"], turned.permute(0, 3, 2, 1)),
    ):
        one = call.with_(q=q, k=k, v=v)
        explanation = torch_attn_tiers.explain(
            one.op(), *one.args(), device=DEVICES["sm_90"], **one.scalars
        )
        assert explanation.chosen == "flashinfer", str(explanation)


NOT_TAKEN = {
    "float32": (_but(dtype=torch.float32), "takes float16 and bfloat16, not float32"),
    "narrow keys": (_but(K=64), "takes head sizes of 128, not 64 and 128"),
    "wide values": (_but(V=256), "takes head sizes of 128, not 128 and 256"),
    "no tokens": (_but(T=0), "needs a token and a sequence"),
    "no sequences": (_but(N=0), "needs a token and a sequence"),
    "scale of zero": (_but(scalars={"scale": 0.0}), "takes scale=0.0 for its default"),
    "states before chunks": (_but(overload="h_fla"), "after each complete chunk (h_compact)"),
    "many states": (_but(N=4096), "states of fewer than 2^31 elements"),
    "many checkpoints": (
        _but(overload="h_compact", T=4096 * 64),
        "checkpoints of fewer than 2^31 elements",
    ),
    "many rows asked for": (
        _but(overload="h_compact", scalars={"total_chunks": 4096}),
        "checkpoints of fewer than 2^31 elements",
    ),
    "many tokens that are split": (_but(T=1 << 20, N=1), "2^25 tokens times heads"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_says_why_it_does_not_take_it(name: str, module: Any) -> None:
    asked, words = NOT_TAKEN[name]
    for device in TAKES:
        reasons = asked.reasons(device)
        assert words in reasons and "\n" not in reasons


@pytest.mark.parametrize(
    "asked", [_but(N=4095), _but(overload="h_compact", T=4095 * 64), _but(T=(1 << 20) - 1, N=1)]
)
def test_sizes_just_below_the_limits_are_taken(asked: Asked, module: Any) -> None:
    assert asked.reasons() == ""


def test_splits_are_no_matter_where_none_may_be(module: Any) -> None:
    assert _but(T=1 << 20, N=1, scalars={"batch_invariant": True}).reasons() == ""
    assert _but(T=1 << 20, N=3).reasons() == ""  # 96 heads of sequences: half the device and more


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("sm_80", "9.0, 10.0, 10.3, 12.0, the device has 8.0"),
        ("gfx942", "needs an NVIDIA GPU"),
        (DEVICES["sm_120"]._replace(capability=(12, 1), arch="sm_121"), "the device has 12.1"),
    ],
)
def test_devices_that_it_does_not_run_on(
    device: DeviceFacts | str, words: str, module: Any
) -> None:
    assert words in PLAIN.reasons(device)


def test_compute_capability_10_needs_cuda_13(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_cuda_major", lambda: 12)
    facts = DEVICES["sm_100"]._replace(capability=(10, 3), arch="sm_103")
    for device in (DEVICES["sm_100"], facts):
        assert "needs a PyTorch of CUDA 13 or newer" in PLAIN.reasons(device)
    assert PLAIN.reasons("sm_90") == "" == PLAIN.reasons("sm_120")


# ------------------------------------------------------------------------------------ the library


def test_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.hide(monkeypatch, "flashinfer")
    assert "the package flashinfer-python is not installed" in PLAIN.reasons()


@pytest.mark.parametrize("device", TAKES)
@pytest.mark.parametrize("is_there", [True, False])
def test_kernel_of_the_device_has_to_be_there(device: str, is_there: bool, module: Any) -> None:
    """The import works without the packages that the kernels need, and leaves None."""
    name = f"chunk_gated_delta_rule_{device.replace('_', '')}"
    if is_there:
        setattr(module, name, None)
    else:
        delattr(module, name)
    for other in TAKES:
        assert (f"has no {name}" in PLAIN.reasons(other)) is (other == device)


def test_function_without_the_parameters_is_a_reason(module: Any) -> None:
    def older(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any,
        initial_state: Any,
        output_final_state: Any,
        cu_seqlens: Any,
        output: Any,
        output_state: Any,
    ) -> None:
        """As it was before checkpoints."""  # fmt: skip

    module.chunk_gated_delta_rule = older
    assert PLAIN.reasons() == ""
    assert "has no checkpoint_cu_starts, checkpoint_every_n_tokens, state_checkpoints" in (
        _but(overload="h_compact").reasons()
    )
    module.chunk_gated_delta_rule = lambda q, k, v: None
    assert "has no beta, cu_seqlens, g, " in PLAIN.reasons()


def test_nothing_is_imported_for_what_it_cannot_take(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imports {name}"))
    for asked, _ in NOT_TAKEN.values():
        asked.reasons()


def test_import_that_fails_is_a_reason_said_once(
    runs: FakeGdn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Any:
        raise ImportError("No module named 'cutlass'")

    monkeypatch.setattr("importlib.import_module", broken)
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for T in (5, 6):
            assert _prepare(_prompt([T])).chosen == "reference"
    text = str(torch_attn_tiers.explain(CALL, *_prompt([5]).args()))
    assert "importing flashinfer.gdn_prefill fails: ImportError: No module named 'cutlass'" in text
    assert sum("flashinfer-python is not used" in r.getMessage() for r in caplog.records) == 1


# ----------------------------------------------------------------------------------------- builds


def _prompt(lengths: list[int] | None, seed: int = 0, **sizes: Any) -> GdnCall:
    """A call that the tier takes."""
    return prompts(Maker(torch.float16, seed=seed), lengths, **{"K": 128, "V": 128, **sizes})


def _prepare(call: GdnCall) -> torch_attn_tiers.Explanation:
    return torch_attn_tiers.prepare(call.op(), *call.args(), **call.scalars)


def _ran(call: GdnCall, **scalars: Any) -> str:
    with torch_attn_tiers.record_dispatch() as records:
        call.op()(*call.args(), **{**call.scalars, **scalars})
    return records[0].tier


def test_is_not_built_unasked(runs: FakeGdn) -> None:
    call = _prompt([70, 5])
    assert _ran(call) == "reference" and not runs.kernels
    (verdict, *_) = torch_attn_tiers.explain(call.op(), *call.args()).verdicts
    assert verdict.name == "flashinfer" and "not prepared" in verdict.reasons[0]


@pytest.mark.parametrize("how", ["prepare", "tier", "jit"])
def test_is_built_when_asked(how: str, runs: FakeGdn) -> None:
    call = _prompt([70, 5])
    assert _ran(call) == "reference"
    if how == "prepare":
        assert _prepare(call).chosen == "flashinfer"
    elif how == "tier":
        assert _ran(call, tier="flashinfer") == "flashinfer"
    else:
        with torch_attn_tiers.options(jit=True):
            assert _ran(call) == "flashinfer"
    assert len(runs.kernels) == 1
    assert _ran(call) == "flashinfer"


def test_a_variant_that_is_compiled_serves_other_prompts(runs: FakeGdn) -> None:
    """Tokens, sequences, the dtype of bounds, norms and scale are no part of it."""
    _prepare(_prompt([70, 5]))
    kernels = set(runs.kernels)
    for call in (
        _prompt([300, 1, 9]),
        _prompt(None, B=3, T=9),
        _prompt([70, 5], cu_dtype=torch.int64),
        _prompt([70, 5], qk_l2norm=True, scale=2.0),
    ):
        assert _ran(call) == "flashinfer"
    assert runs.kernels == kernels
    for call in (
        _prompt([70, 5], state=None),
        _prompt([70, 5], state=torch.bfloat16),
        _prompt([70, 5], output_final_state=False),
        _prompt([70, 5]).with_("h_compact"),
        _prompt([70, 5], batch_invariant=True),
        _prompt([70]),  # which may be split
    ):
        assert _ran(call) == "reference"
        assert _prepare(call).chosen == "flashinfer"
        known = set(runs.kernels)
        assert _ran(call) == "flashinfer" and runs.kernels == known


def test_build_that_fails_is_said_once_and_the_next_tier_runs(
    runs: FakeGdn, caplog: pytest.LogCaptureFixture
) -> None:
    runs.faults = Faults(at_build=RuntimeError("ptxas fatal"))
    call = _prompt([70, 5])
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for _ in range(2):
            assert _prepare(call).chosen == "reference"
            assert _ran(call) == "reference"
    assert len(caplog.records) == 1 and "ptxas fatal" in caplog.records[0].getMessage()
    with pytest.raises(TierNotEligibleError, match="ptxas fatal"):
        _ran(call, tier="flashinfer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_makes_no_difference(dtype: torch.dtype, runs: FakeGdn) -> None:
    call = _prompt([70, 5])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert _prepare(call).chosen == "flashinfer"
    finally:
        torch.set_default_dtype(before)
    assert _ran(call) == "flashinfer"


def test_kernel_that_is_wrong_is_not_used(runs: FakeGdn) -> None:
    runs.wrong = True
    call = _prompt([70, 5])
    assert _prepare(call).chosen == "reference"
    assert "is wrong for unit keys" in str(torch_attn_tiers.explain(call.op(), *call.args()))


def test_run_that_fails_is_raised(runs: FakeGdn) -> None:
    call = _prompt([70, 5])
    _prepare(call)
    runs.faults = Faults(at_run=RuntimeError("illegal address"))
    with pytest.raises(RuntimeError, match="illegal address"):
        _ran(call)


@pytest.mark.parametrize("lengths", [[1], [63, 2], [64], [200, 0]])
@pytest.mark.parametrize("state", [None, torch.float32, torch.float16])
def test_what_is_tried_first_passes_for_every_variant(
    state: torch.dtype | None, lengths: list[int], runs: FakeGdn
) -> None:
    for overload, has_final in (("default", True), ("default", False), ("h_compact", True)):
        call = _prompt(lengths, state=state, output_final_state=has_final).with_(overload)
        assert _prepare(call).chosen == "flashinfer"


# ------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name: str, runs: FakeGdn) -> None:
    call = CASES[name](Maker(torch.float16))
    for overload in ("default", "h_compact"):
        call.with_(overload).check("flashinfer")


def test_initial_state_of_any_layout(runs: FakeGdn) -> None:
    call = _prompt([70, 0, 5])
    for view, is_v_first, is_copied in state_layouts(call):
        call.with_(initial_state=view, state_v_first=is_v_first).check("flashinfer")
        passed = runs.calls[-1]["initial_state"]
        assert (passed.data_ptr() != view.data_ptr()) is is_copied


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_sequence_that_is_not_finite_spoils_no_other(name: str, bad: float, runs: FakeGdn) -> None:
    """Its first tokens lie in the last tile of the sequence before it."""
    call = _prompt([70, 30, 65])
    clean = call.run("flashinfer")
    x = call.tensors[name].clone()  # type: ignore[union-attr]
    if name == "initial_state":
        x[1] = bad
    else:
        x[:, 70:80] = bad
    out, final = call.with_(**{name: x}).run("flashinfer")
    assert same_bits(out[:, :70], clean[0][:, :70]) and same_bits(out[:, 100:], clean[0][:, 100:])
    assert same_bits(final[[0, 2]], clean[1][[0, 2]])
    assert not bool(out[:, 70:100].isfinite().all())


@pytest.mark.parametrize("total_chunks", [0, 1, 2, 3, 9])
def test_states_beyond_the_rows_of_h_are_dropped_without_a_copy(
    total_chunks: int, runs: FakeGdn
) -> None:
    call = _prompt([130, 64, 5]).with_("h_compact", total_chunks=total_chunks)
    call.check("flashinfer")
    h = call.run("flashinfer")[2]
    passed = runs.calls[-1]["state_checkpoints"]
    assert h.shape[0] == total_chunks and passed.shape[0] == max(3, total_chunks)
    assert h.untyped_storage().data_ptr() == passed.untyped_storage().data_ptr()


def test_checkpoints_of_prompts_shorter_than_a_chunk(runs: FakeGdn) -> None:
    call = _prompt([3, 9]).with_("h_compact")
    call.check("flashinfer")
    assert call.run("flashinfer")[2].shape[0] == 0


@pytest.mark.parametrize("h_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoints_have_the_dtype_asked_for(h_dtype: torch.dtype, runs: FakeGdn) -> None:
    _prompt([130, 64]).with_("h_compact", h_dtype=h_dtype).check("flashinfer")


@pytest.mark.parametrize("overload", ["default", "h_compact"])
@pytest.mark.parametrize("bounds", [[0, 9, 5], [0, 5, 200], [-7, 5, 9], [150, 0], [10**6, -5]])
def test_bounds_that_break_the_rules_do_not_reach_the_library(
    bounds: list[int], overload: str, runs: FakeGdn
) -> None:
    call = _prompt(None, T=150, state=None).with_(overload)
    call.with_(cu_seqlens=torch.tensor(bounds)).run("flashinfer")


def test_library_is_told_which_kernels_to_take(runs: FakeGdn) -> None:
    call = _prompt([70])
    call.run("flashinfer")
    assert runs.calls[-1]["backend"] == "flashinfer" and runs.calls[-1]["use_cp"] == "auto"
    call.with_(batch_invariant=True).run("flashinfer")
    assert runs.calls[-1]["use_cp"] is False


def test_library_without_the_arguments_for_that_is_not_given_them(
    runs: FakeGdn, module: Any
) -> None:
    def older(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any,
        initial_state: Any,
        output_final_state: Any,
        cu_seqlens: Any,
        output: Any,
        output_state: Any,
    ) -> None:
        runs(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens,
             output=output, output_state=output_state, backend="flashinfer")  # fmt: skip

    module.chunk_gated_delta_rule = older
    _prompt([70, 3], batch_invariant=True).check("flashinfer")


def test_results_are_written_in_place(runs: FakeGdn) -> None:
    with poisoned_memory():
        out, final, h, starts = _prompt([70, 64]).with_("h_compact").run("flashinfer")
    call = runs.calls[-1]
    for got, passed in ((out, "output"), (final, "output_state"), (h, "state_checkpoints"),
                        (starts, "checkpoint_cu_starts")):  # fmt: skip
        assert got.data_ptr() == call[passed].data_ptr(), passed


# ----------------------------------------------------------------------------- h_layout of a model


def test_layout_is_compact_for_models_that_the_tier_takes(runs: FakeGdn) -> None:
    def layout(T: int, K: int = 128, **scalars: Any) -> type:
        call = _prompt(None, T=T, K=K, V=K)
        named = {"initial_state": None, "cu_seqlens": None, "scale": None, **scalars}
        tensors = [call.tensors[name] for name in ("q", "k", "v", "g", "beta")]
        return type(torch_attn_tiers.gdn_chunk_prefill(*tensors, output_h=True, **named))  # type: ignore[arg-type]

    assert layout(70) is GdnPrefillCompact  # whether or not it is prepared
    assert layout(0) is GdnPrefillCompact  # though it takes no call without tokens
    assert layout(70, scale=0.0) is GdnPrefillCompact  # nor that one
    assert layout(70, K=64) is GdnPrefillFla
    with torch_attn_tiers.options(disable="gdn_chunk_prefill:flashinfer"):
        assert layout(70) is GdnPrefillFla


# -------------------------------------------------------------------------------------- captures


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Call it to begin or end a capture."""

    def set_capturing(state: bool = True) -> None:
        for name in ("torch_attn_tiers.ops.gdn", "torch_attn_tiers.tiers.gdn.flashinfer_library"):
            monkeypatch.setattr(f"{name}.is_capturing", lambda device: state)

    return set_capturing


def test_nothing_is_compiled_in_a_capture(runs: FakeGdn, capturing: Any) -> None:
    capturing()
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match="prepare"):
        _ran(_prompt([70, 5]), tier="flashinfer")
    assert not runs.kernels


def test_variant_that_is_compiled_is_ready_for_any_prompts_in_a_capture(
    runs: FakeGdn, capturing: Any
) -> None:
    _prepare(_prompt([70, 5]))
    capturing()
    known = set(runs.kernels)
    for lengths in ([70, 5], [300, 1, 9], [6, 7, 8, 9]):
        assert _ran(_prompt(lengths)) == "flashinfer"
    assert runs.kernels == known


def test_scratch_does_not_grow_in_a_capture(runs: FakeGdn, capturing: Any) -> None:
    """Where sequences may be split it grows with the tokens: it is made for the most prepared."""
    _prepare(_prompt([130]))
    grown = list(runs.scratch)
    assert grown
    capturing()
    assert _ran(_prompt([130])) == _ran(_prompt([70])) == "flashinfer"
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match="prepare"):
        _ran(_prompt([200]), tier="flashinfer")
    assert runs.scratch == grown
    capturing(False)
    assert _ran(_prompt([200])) == "flashinfer"  # outside it may
    capturing()
    grown = list(runs.scratch)
    assert _ran(_prompt([200])) == _ran(_prompt([190])) == "flashinfer"
    assert runs.scratch == grown


def test_fewer_tokens_that_take_more_scratch_are_covered(runs: FakeGdn, capturing: Any) -> None:
    """The stand-in splits 192 tokens into three pieces of 64, 200 into two of 128."""
    _prepare(_prompt([200]))
    capturing()
    grown = list(runs.scratch)
    for tokens in (64, 100, 128, 190, 192, 200):
        assert _ran(_prompt([tokens])) == "flashinfer"
    assert runs.scratch == grown


def test_tokens_that_are_tried_for_their_scratch() -> None:
    fewer = flashinfer_library._fewer_tokens
    assert list(fewer(200, 0, 132)) == [64, 128, 192] and list(fewer(64, 0, 132)) == []
    assert list(fewer(300, 200, 132)) == [256]
    assert fewer(1 << 20, 0, 132)[-1] == 512 * 132


# --------------------------------------------------------------------------------------- streams


class _Cuda:
    """The streams and events of a device, as a list of what was said to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.stream = 1
        self.capturing = False
        cuda = self

        class Event:
            def record(self, stream: Any) -> None:
                cuda.said.append(f"record {stream.number}")

        class Stream:
            def __init__(self, number: int) -> None:
                self.number = number

            def wait_event(self, event: Event) -> None:
                cuda.said.append(f"wait {self.number}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream(cuda.stream))
        monkeypatch.setattr(flashinfer_library, "current_stream", lambda device: cuda.stream)
        monkeypatch.setattr(flashinfer_library, "is_capturing", lambda device: cuda.capturing)


def test_call_waits_for_the_last_one_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch)
    scratch = flashinfer_library.SharedScratch(DEVICES["sm_90"])

    def call(stream: int) -> list[str]:
        cuda.stream = stream
        cuda.said.clear()
        scratch.run(lambda: cuda.said.append("call"))
        return list(cuda.said)

    assert call(1) == ["call", "record 1"]
    assert call(1) == ["call", "record 1"]
    assert call(2) == ["wait 2", "call", "record 2"]
    assert call(2) == ["call", "record 2"]
    cuda.capturing = True
    assert call(3) == ["call"]
    cuda.capturing = False
    assert call(2) == ["call", "record 2"]
    assert call(1) == ["wait 1", "call", "record 1"]


def test_scratch_of_a_capture_outlives_a_larger_call(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = types.ModuleType("flashinfer.utils")
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utils)
    monkeypatch.setattr(flashinfer_library, "is_capturing", lambda device: True)
    scratch = flashinfer.scratch_of(DEVICES["sm_90"])
    scratch.run(lambda: None)  # a release without such a dictionary
    utils._cache_buf = {"gdn": torch.empty(8), "other": None}  # type: ignore[attr-defined]
    outgrown = weakref.ref(utils._cache_buf["gdn"])  # type: ignore[attr-defined]
    for _ in range(2):
        scratch.run(lambda: None)
    utils._cache_buf["gdn"] = torch.empty(16)  # type: ignore[attr-defined]
    assert outgrown() is not None
    torch_attn_tiers.release_captured_plans()
    assert outgrown() is None


def test_devices_have_scratch_of_their_own() -> None:
    first, second = DEVICES["sm_90"], DEVICES["sm_90"]._replace(index=1)
    assert flashinfer.scratch_of(first) is flashinfer.scratch_of(first)
    assert flashinfer.scratch_of(first) is not flashinfer.scratch_of(second)


def test_variants_are_of_one_device(module: Any) -> None:
    call = PLAIN.call()
    first, second = (
        torch_attn_tiers.explain(call.op(), *call.args(), device=facts, **call.scalars).problem
        for facts in (DEVICES["sm_90"], DEVICES["sm_90"]._replace(index=1))
    )
    assert flashinfer.variant_of(first) != flashinfer.variant_of(second)  # type: ignore[arg-type]


def test_sequence_by_itself_equals_that_in_a_batch(runs: FakeGdn) -> None:
    call = _prompt([1, 63, 0, 64, 129], T=260, batch_invariant=True)
    out, final = call.run("flashinfer")
    bounds = [0, 1, 64, 64, 128, 257]
    for i, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if first < end:
            cut = {n: call.tensors[n][:, first:end] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
            state = call.tensors["initial_state"]
            assert state is not None
            alone = call.with_(**cut, initial_state=state[i : i + 1], cu_seqlens=None)
            one_out, one_final = alone.run("flashinfer")
            assert_gdn_close(out[:, first:end], one_out, inputs=out.dtype, what="out")
            assert_gdn_close(final[i : i + 1], one_final, inputs=out.dtype, what="state")
