"""Choosing a tier: order, options, failed builds, plans and keys. Invented tiers, no GPU."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from torch_attn_tiers import Tier, TierNotEligibleError, dispatch, explain, register_tier
from torch_attn_tiers import tier as tier_module
from torch_attn_tiers.options import read_environment, tables_folder
from torch_attn_tiers.tier import all_names

pytestmark = pytest.mark.usefixtures("without_libraries")

decode = torch.ops.attn_tiers.decode


class Invented:
    """A tier that takes all it is told to take, and counts what happens to it."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.builds = 0
        self.runs = 0
        self.reason: str | None = None
        self.failure: BaseException | None = None
        self.ready = False
        self.on_build: Callable[[], None] = lambda: None
        kwargs.setdefault("predicates", (lambda problem: self.reason,))
        self.tier = Tier(
            op="decode", name=name, build=self._build, ready=lambda p: self.ready, **kwargs
        )

    def _build(self, problem: Any) -> Any:
        self.builds += 1
        if self.failure is not None:
            raise self.failure
        self.on_build()

        def plan(query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any) -> torch.Tensor:
            self.runs += 1
            return query.new_full((*query.shape[:3], value.shape[3]), float(self.builds))

        return plan


@pytest.fixture
def first() -> Iterator[Invented]:
    """A tier ahead of all others."""
    invented = Invented("first")
    with register_tier(invented.tier, before="flash"):
        yield invented


@pytest.fixture
def second(first: Invented) -> Iterator[Invented]:
    """The next one."""
    invented = Invented("second")
    with register_tier(invented.tier, before="flash"):
        yield invented


def _qkv(length: int = 5) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, length, 8) for heads in (4, 2, 2))


def _ran(*args: Any, **kwargs: Any) -> str:
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*args, **kwargs)
    (call,) = calls
    return call.tier


# ----------------------------------------------------------------------------------- the cascade


def test_first_eligible_tier_runs_and_is_built_once(first: Invented, second: Invented) -> None:
    args = _qkv()
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*args)
        decode(*args)
    assert [(c.op, c.tier, c.built, c.cold) for c in calls] == [
        ("decode", "first", True, False),
        ("decode", "first", False, False),
    ]
    assert (first.builds, first.runs, second.builds) == (1, 2, 0)


def test_reason_in_words_passes_a_tier_over(first: Invented, second: Invented) -> None:
    first.reason = "does not like this call"
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*_qkv())
    assert calls[0].tier == "second"
    assert calls[0].passed_over == {"first": ("does not like this call",)}


def test_records_nest_and_see_their_own_block(first: Invented) -> None:
    with torch_attn_tiers.record_dispatch() as outer:
        decode(*_qkv())
        with torch_attn_tiers.record_dispatch() as inner:
            decode(*_qkv())
    decode(*_qkv())
    assert (len(outer), len(inner)) == (2, 1)


def test_log_says_it_once_for_each_new_problem(
    first: Invented, second: Invented, caplog: pytest.LogCaptureFixture
) -> None:
    first.reason = "does not like this call"
    args = _qkv(length=7)
    with caplog.at_level(logging.INFO, logger="torch_attn_tiers"):
        decode(*args)
        decode(*args)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == (
        "second runs decode float32 B=2 Hq=4 Hkv=2 Sq=7 T=7 D=8 Dv=8 on cpu "
        "(passed over first: does not like this call; order: the cascade's, no table for decode on "
        "cpu)"
    )


def test_log_says_nothing_again_for_an_equal_problem_or_after_prepare(
    first: Invented, caplog: pytest.LogCaptureFixture
) -> None:
    args = _qkv(length=9)
    with caplog.at_level(logging.INFO, logger="torch_attn_tiers"):
        decode(*args)
        decode(*args, scale=8**-0.5)  # another flat key
        torch_attn_tiers.prepare("decode", *_qkv(length=10))  # forgets decisions
        decode(*args)
    assert len(caplog.records) == 1


def test_predicate_that_fails_is_a_reason_not_an_error() -> None:
    def broken(problem: Any) -> str | None:
        raise KeyError("oops")

    with register_tier(Invented("broken", predicates=(broken,)).tier, before="flash"):
        (verdict, *_) = explain("decode", *_qkv()).verdicts
        assert verdict.reasons == ("its predicate failed: KeyError: 'oops'",)
        assert _ran(*_qkv()) == "unfused"


@pytest.mark.parametrize("returned", [False, True, 5, ""])
def test_predicate_that_returns_no_words_is_named_in_the_reason(returned: Any) -> None:
    def odd(problem: Any) -> Any:
        return returned

    with register_tier(Invented("broken", predicates=(odd,)).tier, before="flash"):
        explanation = explain("decode", *_qkv())
        (reason,) = explanation.verdicts[0].reasons
        assert "TypeError: predicate" in reason and f"odd returned {returned!r}" in reason
        assert reason in str(explanation)
        assert _ran(*_qkv()) == "unfused"


# ------------------------------------------------------------------------------------- tier=


def test_tier_argument_forces_a_tier_and_still_checks_it(first: Invented, second: Invented) -> None:
    assert _ran(*_qkv(), tier="second") == "second"
    second.reason = "does not like this call"
    torch_attn_tiers.prepare("decode", *_qkv())  # forgets decisions
    with pytest.raises(TierNotEligibleError, match="second: does not like this call"):
        decode(*_qkv(), tier="second")


def test_error_of_a_forced_tier_lists_every_reason_and_the_others() -> None:
    query, key, value = (t.double() for t in _qkv())
    with pytest.raises(TierNotEligibleError) as error:
        decode(query, key, value, torch.tensor([1, 2]), tier="mea")
    text = str(error.value)
    assert "tier 'mea' was asked for" in text
    assert "needs an NVIDIA GPU" in text and "float64" in text and "nonpad_kv_seqlen" in text
    assert "use one that can: unfused" in text
    assert isinstance(error.value, ValueError)


def test_unknown_tier_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="tier='fast'; it must be None or one of flash, mea, unf"):
        decode(*_qkv(), tier="fast")


# -------------------------------------------------------------------------------------- options


def test_options_disable_and_force(first: Invented, second: Invented) -> None:
    args = _qkv()
    assert _ran(*args) == "first"
    with torch_attn_tiers.options(disable="decode:first"):
        assert _ran(*args) == "second"
        with torch_attn_tiers.options(force="decode:unfused"):
            assert _ran(*args) == "unfused"
            assert _ran(*args, tier="second") == "second"
            with torch_attn_tiers.options(force="", disable=""):
                assert _ran(*args) == "first"
        with pytest.raises(TierNotEligibleError, match="disabled by ATTN_TIERS_DISABLE"):
            decode(*args, tier="first")
    assert _ran(*args) == "first"


def test_options_are_of_one_thread(first: Invented, second: Invented) -> None:
    args = _qkv()
    ran: list[str] = []
    with torch_attn_tiers.options(disable="decode:first"):
        thread = threading.Thread(target=lambda: ran.append(_ran(*args)))
        thread.start()
        thread.join()
    assert ran == ["first"]


def test_options_with_an_error_leave_everything_as_it_was() -> None:
    for bad in (
        dict(disable="decode:fast"),
        dict(force="flash"),
        dict(force="decode:flash,decode:mea"),
        dict(disable="prefill:flash"),
    ):
        with pytest.raises(ValueError), torch_attn_tiers.options(**bad):
            pass
    assert _ran(*_qkv()) == "unfused"


@pytest.mark.parametrize(
    "wrong",
    [
        dict(disable=["decode:flash"]), dict(force=5), dict(disable=False),
        dict(jit="0"), dict(jit=1), dict(check="no"), dict(check=2),
    ],
)  # fmt: skip
def test_options_of_another_type_are_an_error(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError) as error, torch_attn_tiers.options(**wrong):
        pass
    assert str(error.value).startswith(f"options: {name} is {value!r}; it must be ")


def test_environment_sets_the_defaults(first: Invented, second: Invented) -> None:
    try:
        read_environment(all_names, {"ATTN_TIERS_DISABLE": "decode:first, decode:flash"})
        assert _ran(*_qkv()) == "second"
        read_environment(all_names, {"ATTN_TIERS_FORCE": "decode:unfused"})
        assert _ran(*_qkv()) == "unfused"
        assert explain("decode", *_qkv()).chosen == "unfused"
        read_environment(all_names, {"ATTN_TIERS_TABLES": "/some/folder"})
        assert tables_folder() == "/some/folder"
        for name, value in (
            ("ATTN_TIERS_DISABLE", "decode"),
            ("ATTN_TIERS_FORCE", "decode:first,decode:second"),
            ("ATTN_TIERS_JIT", "yes"),
            ("ATTN_TIERS_CHECK", "2"),
            ("ATTN_TIERS_FORCED", "decode:flash"),
        ):
            with pytest.raises(ValueError, match=name):
                read_environment(all_names, {name: value})
    finally:
        read_environment(all_names)


def test_unknown_name_in_the_environment_is_an_error_at_import() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import torch_attn_tiers"],
        env={**os.environ, "ATTN_TIERS_FORCE": "decode:fastest"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "ATTN_TIERS_FORCE: 'decode:fastest' is no tier; it must be one of" in result.stderr


def test_misspelt_variable_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError) as error:
        read_environment(all_names, {"ATTN_TIER_X": "", "ATTN_TIERS_DISABLED": "decode:flash"})
    assert str(error.value) == (
        "ATTN_TIERS_DISABLED='decode:flash': there is no such option; known are "
        "ATTN_TIERS_DISABLE, ATTN_TIERS_FORCE, ATTN_TIERS_JIT, ATTN_TIERS_CHECK, ATTN_TIERS_TABLES"
    )


def test_check_option_raises_for_lengths_that_would_be_clamped() -> None:
    args = _qkv()
    for bad in ([6, 1], [-1, 5]):
        lengths = torch.tensor(bad)
        decode(*args, lengths)
        with torch_attn_tiers.options(check=True):
            with pytest.raises(ValueError, match="each length must lie between 0 and .* 5"):
                decode(*args, lengths)
            decode(*args, torch.tensor([0, 5]))


# -------------------------------------------------------------------------------- failed builds


def test_failed_build_is_logged_once_and_the_next_tier_runs(
    first: Invented, second: Invented, caplog: pytest.LogCaptureFixture
) -> None:
    first.failure = RuntimeError("no such instruction")
    args = _qkv()
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        assert _ran(*args) == "second"
        assert _ran(*args) == "second"
        assert first.builds == 1
        torch_attn_tiers.prepare("decode", *args)
    assert first.builds == 2
    (record,) = caplog.records
    assert "first: its build failed: RuntimeError: no such instruction" in record.getMessage()
    verdict = explain("decode", *args).verdicts[0]
    assert verdict.reasons == ("its build failed: RuntimeError: no such instruction",)


def test_failed_build_is_of_one_problem(first: Invented) -> None:
    first.failure = RuntimeError("no such instruction")
    assert _ran(*_qkv(length=5)) == "unfused"
    first.failure = None
    assert _ran(*_qkv(length=5)) == "unfused"
    assert _ran(*_qkv(length=6)) == "first"


def test_failed_build_of_a_forced_tier_is_an_error_with_its_cause(first: Invented) -> None:
    first.failure = RuntimeError("no such instruction")
    with pytest.raises(TierNotEligibleError, match="no such instruction") as error:
        decode(*_qkv(), tier="first")
    assert error.value.__cause__ is first.failure


@pytest.mark.parametrize("how", ["prepare", "tier"])
def test_failed_build_is_tried_again_when_asked_for(how: str, first: Invented) -> None:
    first.failure = RuntimeError("no such instruction")
    args = _qkv()
    assert _ran(*args) == "unfused"
    first.failure = None
    assert _ran(*args) == "unfused"
    if how == "prepare":
        assert torch_attn_tiers.prepare("decode", *args).chosen == "first"
    else:
        assert _ran(*args, tier="first") == "first"
    assert explain("decode", *args).verdicts[0].eligible
    assert _ran(*args) == "first"


@pytest.mark.parametrize(
    "text",
    [
        "Triton Error [CUDA]: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
        "cudaErrorStreamCaptureUnsupported",
    ],
)
def test_build_that_a_capture_of_another_thread_forbids_is_tried_again(
    text: str, first: Invented
) -> None:
    args = _qkv()
    first.failure = RuntimeError(text)
    assert _ran(*args) == "unfused"
    first.failure = None
    assert explain("decode", *args).chosen == "first"
    assert _ran(*args) == "first"


_DEVICE_FAILURES = [
    torch.OutOfMemoryError("full"),
    MemoryError("full"),
    KeyboardInterrupt(),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("failure", _DEVICE_FAILURES, ids=repr)
def test_out_of_memory_and_interrupts_are_not_build_failures(
    first: Invented, failure: BaseException
) -> None:
    first.failure = failure
    with pytest.raises(type(failure)):
        decode(*_qkv())
    first.failure = None
    assert _ran(*_qkv()) == "first"


def test_failure_while_running_is_raised() -> None:
    def plan(*_: Any) -> Any:
        raise RuntimeError("illegal address")

    tier = Tier(op="decode", name="failing", predicates=(), build=lambda problem: plan)
    with register_tier(tier, before="flash"):
        with pytest.raises(RuntimeError, match="illegal address"):
            decode(*_qkv())
        assert explain("decode", *_qkv()).chosen == "failing"


def test_slow_build_waits_to_be_asked_for() -> None:
    for how in ("prepare", "tier", "jit"):
        slow = Invented("slow", slow_build=True)
        with register_tier(slow.tier, before="flash"):
            args = _qkv()
            assert _ran(*args) == "unfused"
            assert "not prepared" in explain("decode", *args).verdicts[0].reasons[0]
            if how == "prepare":
                assert torch_attn_tiers.prepare("decode", *args).chosen == "slow"
            elif how == "tier":
                assert _ran(*args, tier="slow") == "slow"
                torch_attn_tiers.prepare("decode", *args)
            else:
                with torch_attn_tiers.options(jit=True):
                    assert _ran(*args) == "slow"
                torch_attn_tiers.prepare("decode", *args)
            assert slow.builds == 1
            assert _ran(*args) == "slow"


# ---------------------------------------------------------------------------------------- plans


def _built(*args: Any, overload: str = "default", **kwargs: Any) -> bool:
    with torch_attn_tiers.record_dispatch() as calls:
        getattr(decode, overload)(*args, **kwargs)
    return calls[0].built


def test_plan_depends_on_every_fact(first: Invented) -> None:
    query, key, value = _qkv()
    lengths = torch.tensor([1, 2])
    assert _built(query, key, value)
    assert not _built(query.clone(), key.clone(), value.clone())
    wide = torch.randn(2, 2, 5, 16)
    changes: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "dtype": ((query.half(), key.half(), value.half()), {}),
        "length": ((query, key[:, :, :4].clone(), value[:, :, :4].clone()), {}),
        "strides of query": ((query.transpose(1, 2).contiguous().transpose(1, 2), key, value), {}),
        "strides of key": ((query, wide[..., :8], value), {}),
        "strides of value": ((query, key, wide[..., :8]), {}),
        "alignment": ((query, torch.randn(161)[1:].view(2, 2, 5, 8), value), {}),
        "lengths": ((query, key, value, lengths), {}),
        "dtype of lengths": ((query, key, value, lengths.int()), {}),
        "mask": ((query, key, value, None, torch.zeros(5)), {}),
        "bool mask": ((query, key, value, None, torch.ones(5, dtype=torch.bool)), {}),
        "mask of another shape": ((query, key, value, None, torch.zeros(5, 5)), {}),
        "sinks": ((query, key, value, None, None, torch.zeros(4)), {}),
        "dtype of sinks": ((query, key, value, None, None, torch.zeros(4).half()), {}),
        "scale": ((query, key, value), {"scale": 0.7}),
        "softcap": ((query, key, value), {"softcap": 0.7}),
        "causal": ((query, key, value), {"is_causal": True}),
        "left window": ((query, key, value), {"left_window_size": 2}),
        "right window": ((query, key, value), {"right_window_size": 2}),
        "batch invariant": ((query, key, value), {"batch_invariant": True}),
    }
    for name, (args, scalars) in changes.items():
        assert _built(*args, **scalars), name
        assert not _built(*args, **scalars), name


def test_calls_that_mean_the_same_share_a_plan(first: Invented) -> None:
    query, key, value = _qkv()
    assert _built(query, key, value)
    for scalars in (
        {"scale": 8**-0.5},
        {"softcap": 0.0, "left_window_size": -1},
        {"left_window_size": 4},  # reaches over everything
        {"right_window_size": 1 << 40},
    ):
        assert not _built(query, key, value, **scalars), scalars
    assert _built(query, key, value, is_causal=True)
    assert not _built(query, key, value, right_window_size=0)
    assert not _built(query, key, value, is_causal=True, right_window_size=3)


def test_causality_of_a_single_row_with_lengths_shares_a_plan(first: Invented) -> None:
    query, key, value = _qkv()
    args = (query[:, :, :1].clone(), key, value, torch.tensor([1, 2]))
    assert _built(*args)
    assert not _built(*args, is_causal=True)
    assert not _built(*args, right_window_size=0)
    assert _built(*args[:3])
    assert _built(*args[:3], is_causal=True)  # without lengths it sees key 0 only


def test_strides_of_dimensions_of_size_one_do_not_matter(first: Invented) -> None:
    query, key, value = (t[:1, :, :1].contiguous() for t in _qkv())
    assert _built(query, key, value)
    odd = key.as_strided(key.shape, (12345, key.stride(1), 3, 1))
    assert not _built(query, odd, value)


def test_plan_cache_is_bounded(first: Invented, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_PLANS", 4)
    lengths = range(1, 11)
    for length in lengths:
        decode(*_qkv(length))
    assert first.builds == len(lengths)
    explanation = explain("decode", *_qkv())
    assert explanation.plans - explanation.pinned_plans <= 4
    assert _built(*_qkv(1))  # dropped, and its flat key with it
    assert not _built(*_qkv(10))


def test_flat_keys_are_bounded(first: Invented, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_KEYS", 3)
    query, key, value = (t[:, :, :1] for t in _qkv())
    for stride in range(8, 20):
        odd = key.new_empty(1000).as_strided(key.shape, (2 * 8, 8, stride, 1))
        decode(query, odd, value)
    assert len(dispatch._plans.decisions) <= 3


def test_threads_that_meet_a_new_problem_build_it_once(first: Invented) -> None:
    args = _qkv()
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            barrier.wait()
            for _ in range(20):
                decode(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert first.builds == 1 and first.runs == 160


def test_decision_made_while_the_cascade_changed_is_not_kept(first: Invented) -> None:
    """A thread that decided on the old cascade would bring it back for its flat key."""
    args = _qkv()
    newer = Invented("newer")
    handles = []
    build = first._build

    def build_while_another_tier_comes(problem: Any) -> Any:
        handles.append(register_tier(newer.tier, before="first"))
        return build(problem)

    object.__setattr__(first.tier, "build", build_while_another_tier_comes)
    try:
        assert _ran(*args) == "first"
        assert _ran(*args) == "newer"
    finally:
        handles[0].remove()


def test_unfit_tier_that_is_forgotten_meanwhile_does_no_harm(first: Invented) -> None:
    class Fleeting(dict[Any, Any]):
        def __contains__(self, place: object) -> bool:
            return True  # and gone when asked for

    cache = dispatch._plans
    unfit, cache.unfit = cache.unfit, Fleeting()
    try:
        assert _ran(*_qkv()) == "first"
    finally:
        cache.unfit = unfit


def test_different_problems_are_built_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)

    def build(problem: Any) -> Any:
        both.wait()
        return lambda query, key, value, *_: query.new_zeros(*query.shape[:3], value.shape[3])

    tier = Tier(op="decode", name="slow", predicates=(), build=build, ready=lambda problem: False)
    ran: list[str] = []
    with register_tier(tier, before="flash"):
        calls = [threading.Thread(target=lambda n=n: ran.append(_tier_of(n))) for n in (5, 6)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert ran == ["slow", "slow"] and not dispatch._build_locks


def _tier_of(length: int) -> str:
    chosen = torch_attn_tiers.prepare("decode", *_qkv(length)).chosen
    assert chosen is not None
    return chosen


def test_threads_that_wait_for_a_build_that_fails_do_not_try_again(first: Invented) -> None:
    args = _qkv()
    first.failure = RuntimeError("no such instruction")
    build = first._build

    def slow_build(problem: Any) -> Any:
        time.sleep(0.2)
        return build(problem)

    object.__setattr__(first.tier, "build", slow_build)
    threads = [threading.Thread(target=decode, args=args) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.builds == 1


# -------------------------------------------------------------------------- explain and prepare


def test_explain_takes_the_operator_in_every_form() -> None:
    args = _qkv()
    for op in ("decode", "attn_tiers::decode", "decode.default", decode, decode.default):
        assert explain(op, *args).problem.call == "decode"
    for op in ("decode.present", "attn_tiers::decode.present", decode.present):
        assert explain(op, *args).problem.call == "decode.present"
    assert explain(decode.qk, *args, qk_matmul_output_mode=2).problem.qk_mode == 2
    for op in ("tensor_scatter", "prefill", torch.ops.aten.add):
        with pytest.raises(ValueError, match="it must be one of .*decode, decode.present"):
            explain(op, *args)


def test_explain_takes_tensors_by_name_and_refuses_unknown_ones() -> None:
    query, key, value = _qkv()
    by_name = explain("decode", query, key=key, value=value, sinks=torch.zeros(4))
    assert by_name.problem.sinks_dtype is torch.float32
    with pytest.raises(TypeError, match="qk_matmul_output_mode"):
        explain("decode", query, key, value, qk_matmul_output_mode=1)
    with pytest.raises(TypeError, match="past_key"):
        explain("decode", query, key, value, past_key=key)
    with pytest.raises(TypeError, match="given twice: key"):
        explain("decode", query, key, value, key=key)


@pytest.mark.parametrize(
    "count, changes, words",
    [
        (1, {}, "decode: missing: key, value; it takes query, key"),
        (3, {"key_": None}, "decode: unknown: key_; it takes query, key, .* keywords is_causal"),
        (9, {}, "decode: got 9 positional arguments; it takes query, key"),
        (2, {"value": None}, "decode: value is None; it must be a tensor"),
        (3, {"sinks": [1.0]}, "decode: sinks is of type list; it must be a tensor or None"),
        (3, {"scale": "1"}, "decode: scale is '1'; it must be a number or None"),
        (3, {"is_causal": 1}, "decode: is_causal is 1; it must be a bool"),
        (3, {"left_window_size": True}, "left_window_size is True; it must be an integer"),
        (3, {"tier": 3}, "decode: tier is 3; it must be a string or None"),
    ],
)
@pytest.mark.parametrize("ask", [explain, torch_attn_tiers.prepare])
def test_explain_and_prepare_bind_by_the_schema(
    ask: Any, count: int, changes: dict[str, Any], words: str
) -> None:
    args = (*_qkv(), *(None,) * 9)[:count]
    with pytest.raises(TypeError, match=words):
        ask("decode", *args, **changes)


def test_explain_of_meta_tensors_needs_a_device() -> None:
    args = [t.to("meta") for t in _qkv()]
    with pytest.raises(ValueError, match="say with device="):
        explain("decode", *args)
    assert explain("decode", *args, device="cpu").chosen == "unfused"
    hopper = torch_attn_tiers.DeviceFacts.of("sm_90")
    assert explain("decode", *args, device=hopper).problem.device is hopper
    assert str(hopper) == "cuda:0 (sm_90)" and hopper.shared_memory == 232448


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_device_that_is_not_here_is_an_error_that_names_its_facts(device: str) -> None:
    args = [t.to("meta") for t in _qkv()]
    for ask in (explain, torch_attn_tiers.prepare):
        with pytest.raises(ValueError, match=f"device is '{device}' .* DeviceFacts.of\\('sm_90'"):
            ask("decode", *args, device=device)


def test_facts_of_an_unknown_architecture_are_an_error() -> None:
    with pytest.raises(ValueError, match="arch is 'sm_75'; it must be one of sm_80, sm_86"):
        DeviceFacts.of("sm_75")


def test_explain_runs_and_builds_nothing(first: Invented) -> None:
    explanation = explain("decode", *_qkv())
    assert explanation.chosen == "first" and (first.builds, first.runs) == (0, 0)
    assert explanation.verdicts[0] == ("first", True, (), False, True)
    decode(*_qkv())
    assert explain("decode", *_qkv()).verdicts[0].ready


def test_prepare_builds_what_the_call_then_runs(first: Invented) -> None:
    meta = [t.to("meta") for t in _qkv()]
    explanation = torch_attn_tiers.prepare("decode", *meta, device="cpu")
    assert explanation.chosen == "first" and explanation.verdicts[0].ready
    assert (first.builds, first.runs) == (1, 0)
    assert not _built(*_qkv())
    with pytest.raises(TypeError, match="a device that is here"):
        torch_attn_tiers.prepare("decode", *meta, device=explanation.problem.device)


# ------------------------------------------------------------------------- tiers of other packages


def test_registered_tier_goes_where_it_is_told_and_away_again() -> None:
    def names() -> list[str]:
        return [v.name for v in explain("decode", *_qkv()).verdicts]

    before = names()
    assert before == ["flash", "mea", "unfused"]
    handle = register_tier(Invented("kernel").tier)
    other = register_tier(Invented("slowly", kernel_tier=False).tier)
    assert names() == ["flash", "kernel", "mea", "slowly", "unfused"]
    handle.remove()
    handle.remove()
    other.remove()
    assert names() == before


def test_register_tier_refuses_what_it_cannot_place() -> None:
    tier = Invented("flash").tier
    with pytest.raises(ValueError, match="already has a tier named 'flash'"):
        register_tier(tier)
    with pytest.raises(ValueError, match="before='fast' is no tier of decode: flash, mea"):
        register_tier(Invented("new").tier, before="fast")
    elsewhere = Tier(op="prefill", name="new", predicates=(), build=lambda problem: None)
    with pytest.raises(ValueError, match="op is 'prefill'"):
        register_tier(elsewhere)


@pytest.mark.parametrize(
    "fields, error, text",
    [
        (dict(name=""), ValueError, "name is ''; it must be a string of letters"),
        (dict(name="a,b:c"), ValueError, "name is 'a,b:c'"),
        (dict(name=None), ValueError, "name is None"),
        (dict(predicates=None), TypeError, "predicates is None; it must be a list or tuple of"),
        (dict(predicates=len), TypeError, "predicates is <built-in"),
        (dict(predicates=("words",)), TypeError, "predicates is "),
        (dict(build=None), TypeError, "build is None; it must be a function"),
        (dict(ready=True), TypeError, "ready is True; it must be a function"),
        (dict(release=5), TypeError, "release is 5; it must be a function or None"),
        (dict(kernel_tier="no"), TypeError, "kernel_tier is 'no'; it must be True or False"),
        (dict(slow_build=1), TypeError, "slow_build is 1; it must be True, False or a function"),
        (dict(slow_build=True), ValueError, "slow_build=True without ready"),
    ],
)
def test_register_tier_refuses_fields_of_another_kind(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    good: dict[str, Any] = dict(op="decode", name="new", predicates=(), build=lambda problem: None)
    with pytest.raises(error, match=text):
        register_tier(Tier(**{**good, **fields}))
    with pytest.raises(TypeError, match="tier is 'x'; it must be a torch_attn_tiers.Tier"):
        register_tier("x")  # type: ignore[arg-type]
    assert tier_module.tier_names("decode") == ("flash", "mea", "unfused")


def test_build_that_returns_no_plan_is_a_failed_build() -> None:
    tier = Tier(op="decode", name="none", predicates=(), build=lambda problem: None)  # type: ignore
    with register_tier(tier, before="flash"):
        assert _ran(*_qkv()) == "unfused"
        (reason,) = explain("decode", *_qkv()).verdicts[0].reasons
        assert reason == (
            "its build failed: TypeError: build returned None; it must return a function, the plan"
        )


@pytest.mark.parametrize(
    "plan, text",
    [
        (lambda q, *_: None, "its Y is of type NoneType; it must be a tensor"),
        (lambda q, *_: q[:1].clone(), r"shape \(1, 4, 5, 8\) .* of shape \(2, 4, 5, 8\)"),
        (lambda q, *_: q.double(), "its Y is float64 .* must be float32"),
        (lambda q, *_: q.mT.contiguous().mT, "strides .* contiguous"),
        (lambda q, *_: q, "its Y shares memory with an input"),
        (lambda q, *_: torch.empty_like(q, device="meta"), "its Y is on meta; it must be on cpu"),
    ],
)
def test_first_result_of_a_registered_tier_is_checked(plan: Any, text: str) -> None:
    tier = Tier(op="decode", name="odd", predicates=(), build=lambda problem: plan)
    with register_tier(tier, before="flash"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"(?s)tier 'odd' broke the contract.*{text}"):
                decode(*_qkv())


def test_products_of_a_registered_tier_are_checked_and_good_ones_once() -> None:
    results: list[Any] = []
    tier = Tier(op="decode", name="odd", predicates=(), build=lambda p: lambda *_: results.pop(0))
    query, key, value = _qkv()
    good = torch.zeros_like(query), torch.zeros(2, 4, 5, 5)
    with register_tier(tier, before="flash"):
        for bad in (good[0], (good[0], good[0])):
            results.append(bad)
            with pytest.raises(RuntimeError, match="tuple \\(Y, qk\\)|its qk is float32 of shape"):
                decode.qk(query, key, value)
        results.append(good)
        decode.qk(query, key, value)
        results.append((query, query))  # not looked at any more
        assert decode.qk(query, key, value)[3].shape == query.shape


def test_registering_changes_what_known_calls_run() -> None:
    args = _qkv()
    assert _ran(*args) == "unfused"
    with register_tier(Invented("new").tier):
        assert _ran(*args) == "new"
    assert _ran(*args) == "unfused"


class _Point:
    def __init__(self, name: str, loaded: Any) -> None:
        self.name, self.value, self.loaded = name, "somewhere:thing", loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_entry_points_are_loaded_once_and_a_broken_one_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handles = []
    points = [
        _Point("decode.broken", ImportError("no such module")),
        _Point("decode.plain", Invented("plain").tier),
        _Point("decode.called", lambda: handles.append(register_tier(Invented("called").tier))),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(tier_module, "_entry_point_names", None)
    assert {"decode:broken", "decode:plain", "decode:called"} <= all_names()
    monkeypatch.setattr(tier_module, "_entry_points_loaded", False)
    try:
        assert tier_module.tier_names("decode") == ("flash", "plain", "called", "mea", "unfused")
        assert tier_module.tier_names("decode") == ("flash", "plain", "called", "mea", "unfused")
        (record,) = caplog.records
        assert "decode.broken" in record.getMessage()
    finally:
        tier_module.TierHandle(points[1].loaded).remove()
        handles[0].remove()


def test_forcing_the_tier_of_a_broken_entry_point_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [_Point("decode.broken", ImportError("no such module"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(tier_module, "_entry_point_names", None)
    monkeypatch.setattr(tier_module, "_entry_points_loaded", False)
    query = torch.randn(1, 2, 1, 4)
    wanted = "broken: its entry point has registered no tier .* the log"
    with (
        torch_attn_tiers.options(force="decode:broken"),
        pytest.raises(TierNotEligibleError, match=wanted),
    ):
        torch.ops.attn_tiers.decode(query, query, query)


def test_another_thread_waits_until_all_entry_points_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = []
    loading = threading.Event()

    def slow() -> None:
        loading.set()
        assert "late" not in tier_module.tier_names("decode")  # asked for while loading
        time.sleep(0.2)
        handles.append(register_tier(Invented("late").tier))

    points = [_Point("decode.late", slow)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(tier_module, "_entry_points_loaded", False)
    thread = threading.Thread(target=tier_module.tier_names, args=("decode",))
    thread.start()
    loading.wait()
    try:
        assert "late" in tier_module.tier_names("decode")
    finally:
        thread.join()
        handles[0].remove()


def test_options_look_for_entry_points_once(monkeypatch: pytest.MonkeyPatch) -> None:
    all_names()
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    with torch_attn_tiers.options(disable="decode:mea,decode:flash", force="decode:unfused"):
        assert _ran(*_qkv()) == "unfused"


def test_the_first_run_of_a_plan_of_another_package_can_be_copied() -> None:
    built = dispatch._Built(lambda *tensors: None)
    tier = Invented("kernel").tier
    run = dispatch._FirstRun(built, tier, explain("decode", *_qkv()).problem)
    assert copy.copy(run).plan is run.plan
    with pytest.raises(AttributeError, match="nothing_of_it"):
        run.nothing_of_it  # noqa: B018
