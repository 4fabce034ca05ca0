"""What each tier says to a problem on devices that are not here: the table of (problem, verdict).

`explain` takes meta tensors and invented `DeviceFacts`, so that the predicates of every GPU are
tested on any machine. A reason is matched by a word or two of it; the whole text is in
test_explain.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests.conformance.calls import Maker
from tests.conformance.cases import CASES, Case

pytest.importorskip("triton")

KIB = 1024


def _cuda(major: int, minor: int, multiprocessors: int, shared: int) -> DeviceFacts:
    return DeviceFacts(
        type="cuda", index=0, capability=(major, minor), arch=f"sm_{major}{minor}",
        multiprocessors=multiprocessors, shared_memory=shared * KIB, l2_bytes=50 << 20,
        interpret=False,
    )  # fmt: skip


DEVICES = {arch: DeviceFacts.of(arch) for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")}
OLD = _cuda(7, 5, 40, 64)
CPU = DeviceFacts("cpu", 0, None, "cpu", 8, 99 * KIB, 0, False)
INTERPRETER = CPU._replace(interpret=True)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclasses.dataclass
class Asked:
    """A call on meta tensors."""

    B: int = 4
    Hq: int = 32
    Hkv: int = 8
    Sq: int = 1
    T: int = 4096
    D: int = 128
    Dv: int | None = None
    dtype: torch.dtype = torch.bfloat16
    lengths: torch.dtype | None = torch.int32
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cache_dtype: torch.dtype | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    overload: str = "decode"
    change: Callable[[dict[str, torch.Tensor]], object] | None = None
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)

    def explain(self, device: DeviceFacts) -> torch_attn_tiers.Explanation:
        cache_dtype = self.cache_dtype or self.dtype
        qkv = {
            "query": _meta(self.B, self.Hq, self.Sq, self.D, dtype=self.dtype),
            "key": _meta(self.B, self.Hkv, self.T, self.D, dtype=cache_dtype),
            "value": _meta(self.B, self.Hkv, self.T, self.Dv or self.D, dtype=cache_dtype),
        }
        if self.change is not None:
            self.change(qkv)
        lengths = None if self.lengths is None else _meta(self.B, dtype=self.lengths)
        past = () if self.overload == "decode" else (None, None)
        return torch_attn_tiers.explain(
            self.overload, *qkv.values(), *past, lengths, self.mask, self.sinks,
            self.k_scale, self.v_scale, device=device, **self.scalars,
        )  # fmt: skip


PLAIN = Asked()
NO_LENGTHS = dataclasses.replace(PLAIN, lengths=None)
FLOAT8 = Asked(cache_dtype=torch.float8_e4m3fn)
SCALED = dataclasses.replace(
    FLOAT8, k_scale=_meta(1, dtype=torch.float32)[0], v_scale=_meta(8, dtype=torch.float32)
)


def _reasons(explanation: torch_attn_tiers.Explanation, tier: str) -> str:
    (verdict,) = [v for v in explanation.verdicts if v.name == tier]
    assert verdict.eligible == (not verdict.reasons)
    return "; ".join(verdict.reasons)


# ------------------------------------------------------------------------ problems that flash takes

TAKEN_BY_FLASH = {
    "decode step": PLAIN,
    "without lengths": NO_LENGTHS,
    "float16": dataclasses.replace(PLAIN, dtype=torch.float16),
    "float32": dataclasses.replace(PLAIN, dtype=torch.float32),
    "float32, head size 256": dataclasses.replace(PLAIN, dtype=torch.float32, D=256),
    "int64 lengths": dataclasses.replace(PLAIN, lengths=torch.int64),
    "groups of 7": dataclasses.replace(PLAIN, Hq=28, Hkv=4),
    "groups of 128": dataclasses.replace(PLAIN, Hq=128, Hkv=1),
    "head size 80": dataclasses.replace(PLAIN, D=80),
    "head size 256": dataclasses.replace(PLAIN, D=256),
    "head sizes 192 and 128": dataclasses.replace(PLAIN, D=192, Dv=128),
    "speculative rows": dataclasses.replace(PLAIN, Sq=16, scalars={"is_causal": True}),
    "continued prefill": dataclasses.replace(PLAIN, Sq=512, scalars={"is_causal": True}),
    "bool mask": dataclasses.replace(PLAIN, mask=_meta(4, 1, 1, 4096, dtype=torch.bool)),
    "additive mask": dataclasses.replace(PLAIN, mask=_meta(4, 1, 1, 4096)),
    "sinks": dataclasses.replace(PLAIN, sinks=_meta(32, dtype=torch.float32)),
    "softcap": dataclasses.replace(PLAIN, scalars={"softcap": 50.0}),
    "window": dataclasses.replace(PLAIN, scalars={"left_window_size": 1023}),
    "batch invariant": dataclasses.replace(PLAIN, scalars={"batch_invariant": True}),
    "positions before heads": dataclasses.replace(
        PLAIN, change=lambda t: t.update(key=_meta(4, 4096, 8, 128).transpose(1, 2))
    ),
    "present": dataclasses.replace(PLAIN, overload="decode.present"),
    "float8 caches": FLOAT8,
    "float8 caches with scales": SCALED,
    "float8 caches under a float16 query": dataclasses.replace(SCALED, dtype=torch.float16),
    "float8 caches, head size 256": dataclasses.replace(SCALED, D=256),
    "float8 caches, odd head size": dataclasses.replace(FLOAT8, Dv=127),
    "float8 caches, mask": dataclasses.replace(
        FLOAT8, mask=_meta(4, 1, 1, 4096, dtype=torch.float64), D=256
    ),
    "float8 caches, continued prefill": dataclasses.replace(
        SCALED, Sq=512, scalars={"is_causal": True}
    ),
    "float8 caches, present": dataclasses.replace(SCALED, overload="decode.present"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TAKEN_BY_FLASH)
def test_flash_takes_it_on_every_gpu(name: str, device: str) -> None:
    asked = TAKEN_BY_FLASH[name]
    if device == "gfx942":
        asked = dataclasses.replace(asked, scalars={**asked.scalars, "tier": "flash"})
    explanation = asked.explain(DEVICES[device])
    assert _reasons(explanation, "flash") == ""
    assert explanation.chosen == "flash"
    assert _reasons(explanation, "unfused") == ""


def test_flash_is_not_chosen_by_itself_on_an_amd_gpu() -> None:
    explanation = PLAIN.explain(DEVICES["gfx942"])
    assert _reasons(explanation, "flash").startswith("not run on AMD GPUs yet")
    assert explanation.chosen == "unfused"
    with torch_attn_tiers.options(force="decode:flash"):
        assert PLAIN.explain(DEVICES["gfx942"]).chosen == "flash"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance_case_is_taken_by_the_tiers_it_is_meant_for(case: Case) -> None:
    """What `--require-tiers` insists on is what the predicates promise."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        if not case.is_legal_in(dtype):
            continue
        call = case.make(Maker(dtype))
        for name, device in DEVICES.items():
            explanation = torch_attn_tiers.explain(
                call.op(), *call.args(), device=device, **call.scalars
            )
            for tier in ("flash", "mea", "unfused"):
                if case.meant_for(tier) and not (tier != "unfused" and name == "gfx942"):
                    assert _reasons(explanation, tier) == "", (name, dtype)


# ---------------------------------------------------------------------- problems that it does not

NOT_TAKEN_BY_FLASH = {
    "float64": (dataclasses.replace(PLAIN, dtype=torch.float64), "float64"),
    "head size 257": (dataclasses.replace(PLAIN, D=257), "257"),
    "value head size 512": (dataclasses.replace(PLAIN, Dv=512), "512"),
    "scores": (dataclasses.replace(PLAIN, overload="decode.qk"), "qk_matmul_output"),
    "key not dense": (
        dataclasses.replace(
            PLAIN, change=lambda t: t.update(key=_meta(4, 8, 128, 4096).transpose(2, 3))
        ),
        "key",
    ),
    "value not dense": (
        dataclasses.replace(
            PLAIN, change=lambda t: t.update(value=_meta(4, 8, 4096, 256)[..., ::2])
        ),
        "value",
    ),
    "query not dense": (
        dataclasses.replace(PLAIN, change=lambda t: t.update(query=_meta(4, 32, 1, 256)[..., ::2])),
        "query",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NOT_TAKEN_BY_FLASH)
def test_flash_says_why_it_does_not_take_it(name: str, device: str) -> None:
    asked, words = NOT_TAKEN_BY_FLASH[name]
    explanation = asked.explain(DEVICES[device])
    assert _reasons(explanation, "unfused") == ""
    assert explanation.chosen == "unfused"
    forced = dataclasses.replace(asked, scalars={**asked.scalars, "tier": "flash"})
    assert words in _reasons(forced.explain(DEVICES[device]), "flash")


def test_flash_does_not_run_before_ampere() -> None:
    explanation = PLAIN.explain(OLD)
    assert "8.0" in _reasons(explanation, "flash")
    assert explanation.chosen == "unfused"


def test_flash_is_not_for_a_cpu() -> None:
    explanation = PLAIN.explain(CPU)
    assert "cpu" in _reasons(explanation, "flash").lower()
    assert explanation.chosen == "unfused"


def test_interpreter_serves_flash_when_it_is_asked_for_only() -> None:
    half = dataclasses.replace(PLAIN, dtype=torch.float16)
    explanation = half.explain(INTERPRETER)
    assert _reasons(explanation, "flash") and explanation.chosen == "unfused"
    forced = dataclasses.replace(half, scalars={"tier": "flash"}).explain(INTERPRETER)
    assert forced.chosen == "flash"


def test_option_forces_the_interpreter_as_the_argument_does() -> None:
    half = dataclasses.replace(PLAIN, dtype=torch.float16)
    with torch_attn_tiers.options(force="decode:flash"):
        assert half.explain(INTERPRETER).chosen == "flash"
    assert half.explain(INTERPRETER).chosen == "unfused"


# ------------------------------------------------------------------------------------------- mea


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_mea_takes_additive_masks_without_lengths(device: str) -> None:
    for asked in (
        NO_LENGTHS,
        dataclasses.replace(NO_LENGTHS, mask=_meta(4, 1, 1, 4096)),
        dataclasses.replace(NO_LENGTHS, dtype=torch.float32),
        dataclasses.replace(NO_LENGTHS, Sq=64),
    ):
        assert _reasons(asked.explain(DEVICES[device]), "mea") == ""


NOT_TAKEN_BY_MEA = {
    "lengths": (PLAIN, "nonpad_kv_seqlen"),
    "bool mask": (
        dataclasses.replace(NO_LENGTHS, mask=_meta(4, 1, 1, 4096, dtype=torch.bool)), "bool",
    ),
    "sinks": (dataclasses.replace(NO_LENGTHS, sinks=_meta(32, dtype=torch.float32)), "sinks"),
    "softcap": (dataclasses.replace(NO_LENGTHS, scalars={"softcap": 50.0}), "softcap"),
    "float64": (dataclasses.replace(NO_LENGTHS, dtype=torch.float64), "float64"),
    "scores": (dataclasses.replace(NO_LENGTHS, overload="decode.qk"), "qk_matmul_output"),
    "float8 caches": (dataclasses.replace(FLOAT8, lengths=None), "float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NOT_TAKEN_BY_MEA)
def test_mea_says_why_it_does_not_take_it(name: str, device: str) -> None:
    asked, words = NOT_TAKEN_BY_MEA[name]
    assert words in _reasons(asked.explain(DEVICES[device]), "mea")


def test_mea_is_not_for_a_cpu() -> None:
    assert _reasons(NO_LENGTHS.explain(CPU), "mea")


# --------------------------------------------------------------------------------------- options


def test_disabled_tier_says_so_and_the_next_one_is_chosen() -> None:
    device = DEVICES["sm_90"]
    with torch_attn_tiers.options(disable="decode:flash"):
        explanation = PLAIN.explain(device)
    assert "disable" in _reasons(explanation, "flash")
    assert explanation.chosen == "unfused"
    assert PLAIN.explain(device).chosen == "flash"


def test_forced_tier_that_is_not_eligible_is_chosen_by_nobody() -> None:
    asked = dataclasses.replace(PLAIN, D=512, scalars={"tier": "flash"})
    assert asked.explain(DEVICES["sm_90"]).chosen is None


def test_problem_says_what_its_caches_and_scales_are() -> None:
    text = SCALED.explain(DEVICES["sm_90"]).problem.describe()
    assert "decode bfloat16 " in text and " caches=float8_e4m3fn " in text
    assert " k_scale=one v_scale=per head " in text
    assert SCALED.explain(DEVICES["sm_90"]).problem != FLOAT8.explain(DEVICES["sm_90"]).problem


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_causality_of_a_single_row_with_lengths_changes_no_verdict(
    causal: bool, device: str
) -> None:
    plain = PLAIN.explain(DEVICES[device])
    asked = dataclasses.replace(PLAIN, scalars={"is_causal": causal}).explain(DEVICES[device])
    assert asked.verdicts == plain.verdicts


def test_every_reason_is_a_sentence_of_words() -> None:
    every = [asked for asked, _ in (*NOT_TAKEN_BY_FLASH.values(), *NOT_TAKEN_BY_MEA.values())]
    for asked in every:
        for device in (*DEVICES.values(), CPU, OLD):
            for verdict in asked.explain(device).verdicts:
                for reason in verdict.reasons:
                    assert len(reason.split()) >= 3 and "\n" not in reason, reason
