"""What `explain`, `record_dispatch` and the log say, word for word, on any machine.

EXPECTTEST_ACCEPT=1 rewrites the expected blocks.
"""

# ruff: noqa: E501  (whole texts)
from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

import torch_attn_tiers
from tests.conformance.gdn_plans import plans_anew
from tests.test_predicates import CPU, DEVICES, INTERPRETER, NO_LENGTHS, OLD, PLAIN, Asked, _meta

expecttest = pytest.importorskip("expecttest")
pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("libraries_are_absent")


def test_explain_of_a_decode_step() -> None:
    expecttest.assert_expected_inline(
        str(PLAIN.explain(DEVICES["sm_90"])),
        """\
decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed
   cudnn    no: the package nvidia-cudnn-frontend is not installed
-> flash    not built yet
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result
   unfused  not built yet
order: the cascade's, no table for decode on sm_90""",
    )


def test_explain_on_other_gpus_and_on_none() -> None:
    texts = [
        str(PLAIN.explain(device)) for device in (DEVICES["sm_120"], DEVICES["gfx942"], OLD, CPU)
    ]
    expecttest.assert_expected_inline(
        "\n\n".join(texts),
        """\
decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_120)
   xqa      no: the package flashinfer-python is not installed
   cudnn    no: the package nvidia-cudnn-frontend is not installed
-> flash    not built yet
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result
   unfused  not built yet
order: the cascade's, no table for decode on sm_120

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (gfx942)
   xqa      no: the package flashinfer-python is not installed; needs an NVIDIA GPU of compute capability 9.0, 10.x or 12.x
   cudnn    no: the package nvidia-cudnn-frontend is not installed; needs an NVIDIA GPU of compute capability 8.0 or newer
   flash    no: not run on AMD GPUs yet: only when asked for by tier='flash'
   mea      no: needs an NVIDIA GPU of compute capability 8.0 or newer; cannot keep NaN in keys past nonpad_kv_seqlen out of the result
-> unfused  not built yet
order: the cascade's, no table for decode on gfx942

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_75)
   xqa      no: the package flashinfer-python is not installed; needs compute capability 9.0, 10.x or 12.x, the device has 7.5
   cudnn    no: the package nvidia-cudnn-frontend is not installed; needs an NVIDIA GPU of compute capability 8.0 or newer
   flash    no: needs compute capability 8.0 or newer, the device has 7.5
   mea      no: needs an NVIDIA GPU of compute capability 8.0 or newer; cannot keep NaN in keys past nonpad_kv_seqlen out of the result
-> unfused  not built yet
order: the cascade's, no table for decode on sm_75

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cpu
   xqa      no: the package flashinfer-python is not installed; needs an NVIDIA GPU of compute capability 9.0, 10.x or 12.x
   cudnn    no: the package nvidia-cudnn-frontend is not installed; needs an NVIDIA GPU of compute capability 8.0 or newer
   flash    no: no CPU kernel: runs there by Triton's interpreter only (TRITON_INTERPRET=1)
   mea      no: needs an NVIDIA GPU of compute capability 8.0 or newer; cannot keep NaN in keys past nonpad_kv_seqlen out of the result
-> unfused  ready
order: the cascade's, no table for decode on cpu""",
    )


def test_explain_of_a_problem_with_everything_on() -> None:
    asked = dataclasses.replace(
        NO_LENGTHS, Sq=4, Dv=64, mask=_meta(4, 1, 4, 4096), sinks=_meta(32, dtype=torch.float32),
        scalars={"is_causal": True, "softcap": 30.0, "left_window_size": 127, "batch_invariant": True},
    )  # fmt: skip
    expecttest.assert_expected_inline(
        str(asked.explain(DEVICES["sm_90"])),
        """\
decode bfloat16 B=4 Hq=32 Hkv=8 Sq=4 T=4096 D=128 Dv=64 mask=bfloat16 sinks causal softcap=30 batch_invariant on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed; several query rows (Sq=4) are not verified, it takes one; takes one head size for key and value, not 128 and 64; does not do attn_mask, softcap; top-left causality without a cache shows key 0 only, which is not verified; does not promise batch_invariant: its splits depend on the batch
   cudnn    no: the package nvidia-cudnn-frontend is not installed; several query rows (Sq=4) are not verified, it takes one; does not do attn_mask, softcap, sinks; top-left causality without a cache shows key 0 only, which is not verified; does not promise batch_invariant: its splits depend on the batch
-> flash    not built yet
   mea      no: does not do softcap, sinks, batch_invariant
   unfused  not built yet
order: the cascade's, no table for decode on sm_90""",
    )


def test_explain_of_scores_and_of_layouts_that_no_kernel_takes() -> None:
    scores = dataclasses.replace(PLAIN, overload="decode.qk", scalars={"qk_matmul_output_mode": 3})
    wide = dataclasses.replace(PLAIN, D=512)
    transposed = dataclasses.replace(
        PLAIN, change=lambda t: t.update(key=_meta(4, 8, 128, 4096).transpose(2, 3))
    )
    texts = [str(asked.explain(DEVICES["sm_90"])) for asked in (scores, wide, transposed)]
    expecttest.assert_expected_inline(
        "\n\n".join(texts),
        """\
decode.qk bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 qk_mode=3 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed; does not do qk_matmul_output
   cudnn    no: the package nvidia-cudnn-frontend is not installed; does not do qk_matmul_output
   flash    no: does not write qk_matmul_output
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result; does not do qk_matmul_output
-> unfused  not built yet
order: the cascade's, no table for decode on sm_90

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=512 Dv=512 lengths=int32 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed; takes head sizes 64, 128 and 256, not 512
   cudnn    no: the package nvidia-cudnn-frontend is not installed; key has head size 512; it must be a multiple of 8, at most 256
   flash    no: head sizes D=512, Dv=512 exceed 256
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result
-> unfused  not built yet
order: the cascade's, no table for decode on sm_90

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed; key is not dense in its last dimension, its stride is 4096; reads value by the strides of key, which differ
   cudnn    no: the package nvidia-cudnn-frontend is not installed; key is not dense in its last dimension, its stride is 4096
   flash    no: the last dimension of key has stride 4096, not 1
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result; key is not dense in its last dimension with 16-byte aligned rows
-> unfused  not built yet
order: the cascade's, no table for decode on sm_90""",
    )


def test_explain_of_a_forced_tier() -> None:
    forced = dataclasses.replace(PLAIN, dtype=torch.float16, scalars={"tier": "flash"})
    impossible = dataclasses.replace(PLAIN, scalars={"tier": "mea"})
    texts = [str(forced.explain(INTERPRETER)), str(impossible.explain(DEVICES["sm_90"]))]
    expecttest.assert_expected_inline(
        "\n\n".join(texts),
        """\
decode float16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cpu
   xqa      no: the package flashinfer-python is not installed; needs an NVIDIA GPU of compute capability 9.0, 10.x or 12.x
   cudnn    no: the package nvidia-cudnn-frontend is not installed; needs an NVIDIA GPU of compute capability 8.0 or newer
-> flash    ready
   mea      no: needs an NVIDIA GPU of compute capability 8.0 or newer; cannot keep NaN in keys past nonpad_kv_seqlen out of the result
   unfused  ready
order: the cascade's, no table for decode on cpu

decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed
   cudnn    no: the package nvidia-cudnn-frontend is not installed
   flash    not built yet
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result
   unfused  not built yet
order: the cascade's, no table for decode on sm_90
this call would raise TierNotEligibleError: decode: tier 'mea' was asked for and cannot run this call.""",
    )


def test_explain_of_a_disabled_tier() -> None:
    with torch_attn_tiers.options(disable="decode:flash"):
        text = str(PLAIN.explain(DEVICES["sm_90"]))
    expecttest.assert_expected_inline(
        text,
        """\
decode bfloat16 B=4 Hq=32 Hkv=8 Sq=1 T=4096 D=128 Dv=128 lengths=int32 on cuda:0 (sm_90)
   xqa      no: the package flashinfer-python is not installed
   cudnn    no: the package nvidia-cudnn-frontend is not installed
   flash    no: disabled by ATTN_TIERS_DISABLE or options(disable=...)
   mea      no: cannot keep NaN in keys past nonpad_kv_seqlen out of the result
-> unfused  not built yet
order: the cascade's, no table for decode on sm_90""",
    )


def test_error_of_a_forced_tier_lists_its_reasons_and_the_others() -> None:
    query, cache = torch.zeros(1, 4, 1, 512).double(), torch.zeros(1, 2, 9, 512).double()
    with pytest.raises(torch_attn_tiers.TierNotEligibleError) as caught:
        torch.ops.attn_tiers.decode(query, cache, cache, tier="mea")
    expecttest.assert_expected_inline(
        str(caught.value),
        """\
decode: tier 'mea' was asked for and cannot run this call.
  mea: needs an NVIDIA GPU of compute capability 8.0 or newer
  mea: takes float16, bfloat16 and float32, not float64
Leave tier= out, or use one that can: unfused.
Problem: decode float64 B=1 Hq=4 Hkv=2 Sq=1 T=9 D=512 Dv=512 on cpu""",
    )


# ----------------------------------------------------------------------------- what it is made of


def test_explain_takes_the_op_by_name_packet_or_overload() -> None:
    args = [_meta(1, 4, 1, 64), _meta(1, 2, 9, 64), _meta(1, 2, 9, 64)]
    ops = (
        "decode", "attn_tiers::decode", torch.ops.attn_tiers.decode,
        torch.ops.attn_tiers.decode.default,
    )  # fmt: skip
    texts = {str(torch_attn_tiers.explain(op, *args, device="cpu")) for op in ops}
    assert len(texts) == 1
    for op in ("decode.present", torch.ops.attn_tiers.decode.present):
        assert torch_attn_tiers.explain(op, *args, device="cpu").chosen == "unfused"


def test_explain_of_an_unknown_op_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"decode"):
        torch_attn_tiers.explain("decoder", _meta(1))


def test_explain_of_meta_tensors_asks_for_a_device() -> None:
    args = [_meta(1, 4, 1, 64), _meta(1, 2, 9, 64), _meta(1, 2, 9, 64)]
    with pytest.raises(ValueError, match="device="):
        torch_attn_tiers.explain("decode", *args)


def test_verdicts_are_in_the_order_of_the_cascade() -> None:
    names = [verdict.name for verdict in PLAIN.explain(DEVICES["sm_90"]).verdicts]
    cascade = ("xqa", "cudnn", "flash", "mea", "unfused")
    assert tuple(names) == cascade


def test_exactly_one_verdict_is_chosen_and_it_is_eligible() -> None:
    for asked in (PLAIN, NO_LENGTHS, Asked(D=512)):
        for device in (*DEVICES.values(), CPU, OLD):
            explanation = asked.explain(device)
            (chosen,) = [verdict for verdict in explanation.verdicts if verdict.chosen]
            assert chosen.eligible and chosen.name == explanation.chosen


def test_explaining_runs_nothing_and_builds_nothing() -> None:
    args = [torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 9, 64), torch.zeros(1, 2, 9, 64)]
    with torch_attn_tiers.record_dispatch() as records:
        before = torch_attn_tiers.explain("decode", *args)
        after = torch_attn_tiers.explain("decode", *args)
    assert not records and before.plans == after.plans


def test_record_says_what_ran_and_what_was_passed_over() -> None:
    query, cache = torch.zeros(1, 4, 1, 48), torch.zeros(1, 2, 9, 48)
    with torch_attn_tiers.record_dispatch() as records:
        torch.ops.attn_tiers.decode(query, cache, cache)
        torch.ops.attn_tiers.decode.present(query, cache, cache)
    assert [(r.op, r.tier, r.cold) for r in records] == [("decode", "unfused", False)] * 2
    for record in records:
        assert set(record.passed_over) == {"xqa", "cudnn", "flash", "mea"}
        assert all(reasons for reasons in record.passed_over.values())
        assert record.problem.query.shape == (1, 4, 1, 48)
    torch.ops.attn_tiers.decode(query, cache, cache)
    assert len(records) == 2, "a recording ends with its block"


def test_recordings_may_be_nested() -> None:
    query, cache = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16)
    with torch_attn_tiers.record_dispatch() as outer:
        torch.ops.attn_tiers.decode(query, cache, cache)
        with torch_attn_tiers.record_dispatch() as inner:
            torch.ops.attn_tiers.decode(query, cache, cache)
    assert (len(outer), len(inner)) == (2, 1)


def test_log_says_once_for_each_new_problem_what_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans_anew(monkeypatch)  # whoever ran these before has logged them
    query, cache = torch.zeros(1, 4, 1, 56), torch.zeros(1, 2, 9, 56)
    with caplog.at_level(logging.INFO, logger="torch_attn_tiers"):
        for _ in range(3):
            torch.ops.attn_tiers.decode(query, cache, cache)
        torch.ops.attn_tiers.decode(query, cache[:, :, :8], cache[:, :, :8])
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all("unfused" in text for text in texts)
    expecttest.assert_expected_inline(
        texts[0],
        """unfused runs decode float32 B=1 Hq=4 Hkv=2 Sq=1 T=9 D=56 Dv=56 on cpu (passed over xqa: the package flashinfer-python is not installed (and 4 more); cudnn: the package nvidia-cudnn-frontend is not installed (and 2 more); flash: Triton's interpreter runs on the CPU when asked for only, by tier='flash'; mea: needs an NVIDIA GPU of compute capability 8.0 or newer; order: the cascade's, no table for decode on cpu)""",
    )


def test_a_packet_is_explained_as_the_overload_that_a_call_of_it_runs() -> None:
    packet = torch.ops.attn_tiers.decode
    q, kv = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 4, 16)
    for keywords in ({}, {"past_key": kv, "past_value": kv}, {"qk_matmul_output_mode": 2}):
        with torch_attn_tiers.record_dispatch() as calls:
            packet(q, kv, kv, **keywords)
        for ask in (torch_attn_tiers.explain, torch_attn_tiers.prepare):
            assert ask(packet, q, kv, kv, **keywords).problem == calls[0].problem
    with pytest.raises(TypeError, match="decode: unknown: past_keys"):
        torch_attn_tiers.explain(packet, q, kv, kv, past_keys=kv)


@pytest.mark.parametrize("device", ["sm_90", 0, -1, 1.5])
def test_a_device_that_is_none_is_refused_in_words(device: object) -> None:
    if torch.cuda.is_available() and device == 0:
        pytest.skip("that is a device here")
    kv = _meta(1, 2, 4, 16)
    # A build of PyTorch for CUDA takes 0 for cuda:0, GPU or not; another one knows no such device.
    named = "(0;|'cuda:0' and there are 0 CUDA devices)" if device == 0 else f"{device!r};"
    with pytest.raises(ValueError, match=rf"device is {named} .*DeviceFacts.of\('sm_90'\)"):
        torch_attn_tiers.explain("decode", kv, kv, kv, device=device)


def test_a_forced_tier_that_cannot_run_says_who_forced_it() -> None:
    kv = torch.randn(1, 2, 4, 16)
    with pytest.raises(torch_attn_tiers.TierNotEligibleError, match="Leave tier= out, or use"):
        torch.ops.attn_tiers.decode(kv, kv, kv, tier="cudnn")
    with torch_attn_tiers.options(force="decode:cudnn"):
        match = r"Take it out of ATTN_TIERS_FORCE or options\(force=\), and leave tier= out"
        with pytest.raises(torch_attn_tiers.TierNotEligibleError, match=match):
            torch.ops.attn_tiers.decode(kv, kv, kv)


def test_no_query_row_is_not_several() -> None:
    asked = dataclasses.replace(PLAIN, Sq=0)
    xqa = asked.explain(DEVICES["sm_90"]).verdicts[0]
    assert "there is no query row (Sq=0), it takes one" in xqa.reasons


@pytest.mark.parametrize(
    "scalars",
    [
        {"left_window_size": np.int64(2), "is_causal": np.bool_(True)},
        {"scale": np.float32(0.25), "softcap": np.array(5.0)},
    ],
)
def test_numbers_of_numpy_are_taken_as_the_operator_takes_them(scalars: dict[str, Any]) -> None:
    q, kv = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16)
    with torch_attn_tiers.record_dispatch() as calls:
        torch.ops.attn_tiers.decode(q, kv, kv, **scalars)
    assert torch_attn_tiers.explain("decode", q, kv, kv, **scalars).problem == calls[0].problem
    with pytest.raises(TypeError, match="left_window_size is 2.0; it must be an integer"):
        torch_attn_tiers.explain("decode", q, kv, kv, left_window_size=np.float32(2))
