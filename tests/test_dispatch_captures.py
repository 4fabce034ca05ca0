"""Readiness in CUDA graph captures, with an invented capture. Real ones are in tests/gpu."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops import facts
from tests.test_dispatch import Invented
from torch_attn_tiers import ColdCaptureError, DeviceFacts, dispatch, explain, register_tier
from torch_attn_tiers.tier import Tier
from torch_attn_tiers.tiers import products
from torch_attn_tiers.tiers.decode import unfused
from torch_attn_tiers.tiers.gdn import reference

pytestmark = pytest.mark.usefixtures("without_libraries")

decode = torch.ops.attn_tiers.decode


@pytest.fixture
def fast() -> Iterator[Invented]:
    invented = Invented("fast")
    with register_tier(invented.tier, before="flash"):
        yield invented


@pytest.fixture
def slower(fast: Invented) -> Iterator[Invented]:
    invented = Invented("slower")
    with register_tier(invented.tier, before="flash"):
        yield invented


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to begin or end a capture."""

    def set_capturing(state: bool = True) -> None:
        for module in ("torch_attn_tiers.ops.decode", "torch_attn_tiers.ops.tensor_scatter"):
            monkeypatch.setattr(f"{module}.is_capturing", lambda device: state)

    return set_capturing


def _qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))


def _record(*args: Any, **kwargs: Any) -> torch_attn_tiers.DispatchRecord:
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*args, **kwargs)
    (call,) = calls
    return call


def test_cold_capture_is_an_error_that_names_prepare(fast: Invented, capturing: Any) -> None:
    capturing()
    args = _qkv()
    explanation = explain("decode", *args)
    assert explanation.chosen is None
    assert "this call would raise ColdCaptureError: decode: a CUDA graph" in str(explanation)
    with pytest.raises(ColdCaptureError) as error:
        decode(*args)
    text = str(error.value)
    assert "torch_attn_tiers.prepare('decode', ...)" in text and "(fast)" in text
    with pytest.raises(ColdCaptureError, match="prepare\\('decode.present', ...\\)"):
        decode.present(*args)
    assert fast.builds == 0


@pytest.mark.parametrize("how", ["prepare", "call"])
def test_prepared_or_run_before_it_is_captured(how: str, fast: Invented, capturing: Any) -> None:
    args = _qkv()
    if how == "prepare":
        torch_attn_tiers.prepare("decode", *(t.to("meta") for t in args), device="cpu")
    else:
        decode(*args)
    capturing()
    assert explain("decode", *args).chosen == "fast"
    record = _record(*args)
    assert (record.tier, record.cold, record.built) == ("fast", False, False)


def test_a_tier_that_builds_without_compiling_is_captured(fast: Invented, capturing: Any) -> None:
    capturing()
    fast.ready = True
    record = _record(*_qkv())
    assert (record.tier, record.cold, record.built) == ("fast", False, True)


def test_slower_kernel_that_is_ready_is_captured_cold_with_one_warning(
    fast: Invented, slower: Invented, capturing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args = _qkv()
    decode(*args, tier="slower")
    capturing()
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for _ in range(3):
            record = _record(*args)
            assert record.tier == "slower" and record.cold
            assert record.passed_over == {"fast": ("not ready in a CUDA graph capture",)}
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "slower is captured" in warning.getMessage() and "fast" in warning.getMessage()
    capturing(False)
    assert _record(*args).tier == "fast"  # a cold decision is not kept


def test_unfused_never_stands_in_for_a_cold_kernel(fast: Invented, capturing: Any) -> None:
    args = _qkv()
    decode(*args, tier="unfused")
    capturing()
    with pytest.raises(ColdCaptureError):
        decode(*args)
    record = _record(*args, tier="unfused")  # asked for by name it is another matter
    assert record.tier == "unfused" and not record.cold


def test_unfused_is_captured_if_no_kernel_takes_the_call(fast: Invented, capturing: Any) -> None:
    fast.reason = "does not like this call"
    capturing()
    record = _record(*_qkv())
    assert record.tier == "unfused" and not record.cold


def test_forced_tier_that_is_cold_is_an_error(fast: Invented, capturing: Any) -> None:
    capturing()
    with pytest.raises(ColdCaptureError):
        decode(*_qkv(), tier="fast")


@pytest.fixture
def slow() -> Iterator[Invented]:
    """A tier that no call builds by itself."""
    invented = Invented("slow", slow_build=True)
    with register_tier(invented.tier, before="flash"):
        yield invented


@pytest.fixture
def behind(slow: Invented) -> Iterator[Invented]:
    """The kernel tier after it."""
    invented = Invented("behind")
    with register_tier(invented.tier, before="flash"):
        yield invented


def test_slow_build_that_is_not_prepared_is_as_in_eager_calls(
    slow: Invented, behind: Invented, capturing: Any
) -> None:
    args = _qkv()
    decode(*args, tier="behind")
    capturing()
    for is_capturing in (True, False):
        capturing(is_capturing)
        record = _record(*args)
        assert (record.tier, record.cold) == ("behind", False)
        (reason,) = record.passed_over["slow"]
        assert "not prepared" in reason


def test_decision_of_a_capture_ends_with_the_capture(
    slow: Invented, behind: Invented, capturing: Any
) -> None:
    """Its slow part is done, so that eager calls would build it at once: cold, not unprepared."""
    object.__setattr__(slow.tier, "ready", lambda problem: not problem.capturing)
    args = _qkv()
    decode(*args, tier="behind")
    capturing()
    record = _record(*args)
    assert (record.tier, record.cold) == ("behind", True)
    assert record.passed_over["slow"] == ("not ready in a CUDA graph capture",)
    capturing(False)
    assert _record(*args).tier == "slow"


def test_nothing_stands_in_for_a_cold_tier_of_a_slow_build(slow: Invented, capturing: Any) -> None:
    object.__setattr__(slow.tier, "ready", lambda problem: not problem.capturing)
    capturing()
    with pytest.raises(ColdCaptureError, match=r"\(slow\)"):
        decode(*_qkv())


@pytest.mark.parametrize("how", ["prepare", "tier", "jit"])
def test_slow_build_is_reconsidered_once_another_call_has_prepared_it(
    how: str, slow: Invented
) -> None:
    """What is compiled serves other problems too, whose decisions were made without it."""
    args, others = _qkv(), tuple(torch.randn(3, heads, 5, 8) for heads in (4, 2, 2))
    assert _record(*args).tier == "unfused"
    slow.on_build = lambda: setattr(slow, "ready", True)
    if how == "prepare":
        torch_attn_tiers.prepare("decode", *others)
    elif how == "tier":
        decode(*others, tier="slow")
    else:
        with torch_attn_tiers.options(jit=True):
            decode(*others)
    assert _record(*args).tier == "slow"
    kept = dict(dispatch._plans.decisions)
    decode(*(torch.randn(4, heads, 5, 8) for heads in (4, 2, 2)))  # compiles nothing new
    assert kept.items() <= dispatch._plans.decisions.items()


def test_failed_build_in_a_capture_leads_to_the_next_rule(
    fast: Invented, slower: Invented, capturing: Any
) -> None:
    fast.ready = slower.ready = True
    fast.failure = RuntimeError("no")
    capturing()
    assert _record(*_qkv()).tier == "slower"


def test_prepare_in_a_capture_is_an_error(fast: Invented, capturing: Any) -> None:
    capturing()
    with pytest.raises(RuntimeError, match="call prepare before the capture"):
        torch_attn_tiers.prepare("decode", *_qkv())


def test_check_option_reads_nothing_during_a_capture(capturing: Any) -> None:
    capturing()
    with torch_attn_tiers.options(check=True):
        decode(*_qkv(), torch.tensor([99, 99]))
        cache = torch.zeros(2, 3, 4)
        torch.ops.attn_tiers.tensor_scatter_(cache, cache[:, :1].clone(), torch.tensor([9, 9]))


def test_pinned_plans_stay_beyond_the_bound_until_released(
    fast: Invented, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_PLANS", 2)
    cache = dispatch._PlanCache()
    problems = [
        explain("decode", *_qkv(), scale=scale).problem for scale in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    ]
    pinned = cache.add(fast.tier, problems[0], lambda: None)
    cache.pin(pinned)
    cache.pin(pinned)
    for problem in problems[1:]:
        cache.add(fast.tier, problem, lambda: None)
    assert len(cache.pinned) == 1 and len(cache.plans) == 3
    assert cache.plans[fast.tier, problems[0]] is pinned
    assert cache.release() == 1
    assert not cache.pinned and len(cache.plans) == 2


def test_release_tells_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    invented = Invented("keeper", release=lambda: released.append(True))
    with register_tier(invented.tier):
        assert torch_attn_tiers.release_captured_plans() == 0
    assert released == [True]


def test_release_goes_on_after_a_tier_that_fails(fast: Invented) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    released = []
    args = _qkv()
    decode(*args)
    dispatch._plans.pin(dispatch._plans.plans[fast.tier, explain("decode", *args).problem])
    with register_tier(Invented("broken", release=broken).tier, before="fast"):
        with register_tier(Invented("keeper", release=lambda: released.append(True)).tier):
            assert torch_attn_tiers.release_captured_plans() == 1
    assert released == [True]


def test_explanation_counts_pinned_plans(fast: Invented) -> None:
    args = _qkv()
    decode(*args)
    built = dispatch._plans.plans[fast.tier, explain("decode", *args).problem]
    before = explain("decode", *args).pinned_plans
    dispatch._plans.pin(built)
    explanation = explain("decode", *args)
    assert explanation.pinned_plans == before + 1
    assert f"plans held by captured graphs: {before + 1}" in str(explanation)
    assert torch_attn_tiers.release_captured_plans() == before + 1


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices on which a handle for products has been made, of which there is none so far."""
    made: list[int] = []
    monkeypatch.setattr(products, "_thread", products._Thread())
    monkeypatch.setattr(
        products, "_multiply", lambda i: (made.append(i), products._thread.devices.add(i))
    )
    return made


def _elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _problems(op: str, args: Iterable[torch.Tensor]) -> list[Any]:
    """On two devices."""
    metas = [t.to("meta") for t in args]
    devices = [DeviceFacts.of("sm_90", index) for index in (0, 1)]
    return [explain(op, *metas, device=device).problem for device in devices]


def _prompt() -> tuple[torch.Tensor, ...]:
    q, gate = torch.randn(1, 5, 2, 8), torch.rand(1, 5, 2)
    return q, q, q, -gate, gate


@pytest.mark.parametrize(
    "tier, op, args",
    [
        (unfused.TIER, "decode", _qkv()),
        (reference.TIER, "gdn_chunk_prefill", _prompt()),
    ],
)
def test_what_multiplies_is_ready_on_a_gpu_once_this_thread_has_built_there(
    tier: Tier, op: str, args: tuple[torch.Tensor, ...], multiplied: list[int]
) -> None:
    """cuBLAS makes its handle at the first product of a thread, which a capture forbids."""
    first, second = _problems(op, args)
    assert not tier.ready(first)
    for _ in range(2):
        tier.build(first)
    assert multiplied == [0]
    assert tier.ready(first) and not tier.ready(second)
    assert tier.ready(explain(op, *args).problem)
    assert not _elsewhere(lambda: tier.ready(first))


def test_thread_that_has_run_a_plan_is_ready(multiplied: list[int]) -> None:
    (problem, _) = _problems("decode", _qkv())
    plan = unfused.TIER.build(problem)

    def run_elsewhere() -> tuple[bool, bool]:
        before = unfused.TIER.ready(problem)
        plan(*_qkv(), None, None, None, None, None)
        return before, unfused.TIER.ready(problem)

    assert _elsewhere(run_elsewhere) == (False, True)
    assert multiplied == [0]


def test_plan_of_another_thread_makes_no_tier_ready_that_multiplies(
    multiplied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem, _) = _problems("decode", _qkv())
    problem = dataclasses.replace(problem, requested="unfused")
    monkeypatch.setattr(dispatch, "current_cuda_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    decision = dispatch.decide("a key of this test", problem)
    tensors = (*_qkv(), None, None, None, None, None)
    decision(*tensors)
    capturing = dataclasses.replace(problem, capturing=True)

    def capture_elsewhere() -> None:
        with pytest.raises(ColdCaptureError, match="no kernel for this call is built .unfused"):
            dispatch.decide("another key", capturing)
        known = dispatch.known("a key of this test")
        assert known is not None
        with pytest.raises(ColdCaptureError, match="unfused"):
            known(*tensors)
        dispatch.decide("another key", problem)  # as `prepare` does
        assert multiplied == [0, 0]
        known(*tensors)

    _elsewhere(capture_elsewhere)
    dispatch._plans.forget_decisions()
    torch_attn_tiers.release_captured_plans()


def test_unfused_is_built_although_cublas_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes every call: what goes wrong with cuBLAS is for the call to say."""
    monkeypatch.setattr(products, "_thread", products._Thread())
    problem = _problems("decode", _qkv())[0]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(torch, "ones", fail)
    assert callable(unfused.TIER.build(problem)) and not unfused.TIER.ready(problem)


def test_capture_is_looked_for_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(facts, "current_cuda_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    states = [facts.is_capturing(DeviceFacts.of("sm_90", index)) for index in (0, 1, 2)]
    assert states == [False, True, False]
    assert not facts.is_capturing(facts.device_facts("cpu"))
