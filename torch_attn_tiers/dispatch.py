"""From a problem to the plan that runs it: options, readiness in captures, records.

An operator looks its call up by a flat key (:func:`known`), which costs a few microseconds. On a
miss it builds its problem and asks :func:`decide`. Nothing here knows what an operator computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, current_cuda_device, device_facts
from csrc_free_ops.facts import is_capturing as is_capturing  # for operators, with the rest
from torch_attn_tiers import tier as registry
from torch_attn_tiers.binding import bind
from torch_attn_tiers.errors import ColdCaptureError, TierNotEligibleError
from torch_attn_tiers.options import current
from torch_attn_tiers.problem import Problem
from torch_attn_tiers.ranking import Order, order_of
from torch_attn_tiers.tier import Plan, Tier

log = logging.getLogger("torch_attn_tiers")

#: Plans kept besides those that captured graphs use.
MAX_PLANS = 512
#: Flat keys kept; several may lead to one plan.
MAX_KEYS = 8192
#: Failed builds remembered.
MAX_UNFIT = 4096
#: A build that takes longer is logged.
LOG_BUILD_SECONDS = 0.05

Reasons = dict[str, tuple[str, ...]]


class DispatchRecord(NamedTuple):
    """One call that ran under :func:`record_dispatch`."""

    op: str
    tier: str
    problem: Problem
    #: Tiers ahead of the one that ran, and why they did not.
    passed_over: Reasons
    #: Captured while a faster kernel tier was not ready.
    cold: bool
    #: This call built the plan.
    built: bool
    #: Where the order of the tiers comes from, in words.
    order: str


class TierVerdict(NamedTuple):
    """What :func:`explain` says of one tier."""

    name: str
    eligible: bool
    reasons: tuple[str, ...]
    #: Running it now would build nothing that could break a capture.
    ready: bool
    chosen: bool


class Explanation(NamedTuple):
    """Every tier's verdict on one problem, the tier to try first in front. ``print`` it."""

    problem: Problem
    verdicts: list[TierVerdict]
    #: Plans in the cache, and how many of them captured graphs hold.
    plans: int
    pinned_plans: int
    #: The error that the call would raise; None if a tier would run.
    error: str | None = None
    #: Where the order of the verdicts comes from, in words; empty if the operator has no tiers.
    order: str = ""

    @property
    def chosen(self) -> str | None:
        """The tier that would run, or None if the call would be an error."""
        return next((verdict.name for verdict in self.verdicts if verdict.chosen), None)

    def __str__(self) -> str:
        width = max(len(verdict.name) for verdict in self.verdicts)
        lines = [self.problem.describe()]
        for name, eligible, reasons, ready, chosen in self.verdicts:
            state = (
                ("ready" if ready else "not built yet") if eligible else "no: " + "; ".join(reasons)
            )
            lines.append(f"{'->' if chosen else '  '} {name:<{width}}  {state}")
        if self.order:
            lines.append(f"order: {self.order}")
        if self.error is not None:
            lines.append(f"this call would raise {self.error}")
        if self.pinned_plans:
            lines.append(f"plans held by captured graphs: {self.pinned_plans}")
        return "\n".join(lines)


class _Built:
    """A plan in the cache."""

    __slots__ = ("plan", "pinned", "used", "said", "warned", "keys")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pinned = False  # a capture has used it
        self.used = True  # since the cache last looked for something to drop
        self.said = False  # that it runs
        self.warned = False  # that it was captured cold
        self.keys: list[Hashable] = []  # the flat keys that lead here


class Decision:
    """The outcome of choosing. Call it with the operator's tensors to run the plan."""

    __slots__ = (
        "problem", "tier", "passed_over", "cold", "fresh", "built", "order", "cuda_index",
        "lasting", "looks_for_captures",
    )  # fmt: skip

    def __init__(
        self,
        problem: Problem,
        tier: Tier,
        passed_over: Reasons,
        cold: bool,
        fresh: bool,
        built: _Built,
        order: str,
    ) -> None:
        self.problem: Any = problem  # of the operator's own kind
        self.tier = tier
        self.passed_over = passed_over
        self.cold = cold
        self.fresh = fresh  # built by the call that decided
        self.built = built
        self.order = order
        self.lasting = True  # an equal call to come would be decided alike
        self.cuda_index = problem.device.index if problem.device.type == "cuda" else None
        #: By every call: another thread may have decided, and not every tier is ready for all.
        self.looks_for_captures = not tier.kernel_tier

    def __call__(self, *tensors: Tensor | None) -> Any:
        built = self.built
        built.used = True
        if self.cuda_index is not None:
            if self.cuda_index != current_cuda_device():
                with torch.cuda.device(self.cuda_index):
                    return self(*tensors)
            if (
                not built.pinned or self.looks_for_captures
            ) and torch.cuda.is_current_stream_capturing():
                if self.looks_for_captures and not _is_ready(self.tier, self.problem):
                    raise _cold_capture(self.problem, [self.tier])
                _plans.pin(built)
        if _recordings:
            self._record()
        return built.plan(*tensors)

    def _record(self) -> None:
        record = DispatchRecord(
            self.problem.op,
            self.tier.name,
            self.problem,
            self.passed_over,
            self.cold,
            self.fresh,
            self.order,
        )
        for recording in tuple(_recordings):
            recording.append(record)

    def again(self) -> Decision:
        """The same for calls to come."""
        return Decision(
            self.problem, self.tier, self.passed_over, self.cold, False, self.built, self.order
        )


class _PlanCache:
    """Plans by tier and problem, and decisions by flat key. Bounded; safe in threads.

    Looking up takes no lock. What to drop is found by second chance: first in, first out, but an
    entry used since the last round goes round once more.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.decisions: dict[Hashable, Decision] = {}
        self.plans: dict[tuple[Tier, Problem], _Built] = {}
        self.unfit: dict[tuple[Tier, Problem], str] = {}
        self.pinned: list[_Built] = []
        self.generation = 0  # how often decisions were forgotten

    def remember(self, key: Hashable, decision: Decision, generation: int) -> None:
        """Keep a decision, unless all were forgotten since ``generation``, while it was made."""
        with self.lock:
            if generation != self.generation:
                return
            if len(self.decisions) >= MAX_KEYS:
                self.forget_decisions()
            self.decisions[key] = decision
            decision.built.keys.append(key)

    def forget_decisions(self) -> None:
        with self.lock:
            self.generation += 1
            self.decisions.clear()
            for built in self.plans.values():
                built.keys.clear()

    def add(self, tier: Tier, problem: Problem, plan: Plan) -> _Built:
        with self.lock:
            built = self.plans[tier, problem] = _Built(plan)
            self.shrink()
            return built

    def shrink(self) -> None:
        """Drop plans until no more than MAX_PLANS are left besides the pinned ones."""
        pinned = sum(built.pinned for built in self.plans.values())
        excess = len(self.plans) - pinned - MAX_PLANS
        while excess > 0:
            place = next(iter(self.plans))
            built = self.plans.pop(place)
            if built.used or built.pinned:
                built.used = False
                self.plans[place] = built  # to the end
                continue
            for key in built.keys:
                self.decisions.pop(key, None)
            excess -= 1

    def pin(self, built: _Built) -> None:
        with self.lock:
            if not built.pinned:
                built.pinned = True
                self.pinned.append(built)

    def release(self) -> int:
        with self.lock:
            count = len(self.pinned)
            for built in self.pinned:
                built.pinned = False
            self.pinned.clear()
            self.shrink()
            return count

    def mark_fit(self, tier: Tier, problem: Problem) -> None:
        with self.lock:
            if self.unfit.pop((tier, problem), None) is not None:
                self.forget_decisions()  # some stand for the tiers after this one

    def mark_unfit(self, tier: Tier, problem: Problem, reason: str) -> None:
        with self.lock:
            while len(self.unfit) >= MAX_UNFIT:
                self.unfit.pop(next(iter(self.unfit)))
            self.unfit[tier, problem] = reason


_plans = _PlanCache()
#: Held while one plan is built: two threads may want the same one.
_build_locks: dict[tuple[Tier, Problem], threading.RLock] = {}
_recordings: list[list[DispatchRecord]] = []
_recordings_lock = threading.Lock()


class _Call(NamedTuple):
    """How :func:`explain` and :func:`prepare` go about a call ("decode.present")."""

    problem_of: Callable[..., Any]
    explain: Callable[[Any], Explanation]
    prepare: Callable[[Any], None]


_calls: dict[str, _Call] = {}

#: The decision for a flat key, or None. Atomic, without a lock.
known = _plans.decisions.get
registry.on_change(_plans.forget_decisions)


def define_call(
    name: str,
    problem_of: Callable[..., Any],
    explain: Callable[[Any], Explanation] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Tell :func:`explain` and :func:`prepare` how to read a call.

    ``problem_of`` takes the operator's arguments, the positional ones all given, and
    ``facts=DeviceFacts | None`` in place of the device of the tensors. ``explain`` and ``prepare``
    are those of an operator without tiers.
    """
    _calls[name] = _Call(problem_of, explain or _explain, prepare or _prepare)


def decide(key: Hashable, problem: Problem) -> Decision:
    """Choose and build for a problem whose flat key is not known.

    Raises:
        TierNotEligibleError: the tier asked for cannot run it, or none can.
        ColdCaptureError: a capture is under way and no kernel tier is ready.
    """
    generation = _plans.generation
    decision = _first_that_builds(problem, _examine(problem))
    _say(decision)
    if decision.lasting:
        _plans.remember(key, decision.again(), generation)
    return decision


class _Examined(NamedTuple):
    """Every tier of an operator with its reasons against a problem, the one to try first ahead."""

    verdicts: dict[Tier, tuple[str, ...]]
    order: Order


def _examine(problem: Problem, preparing: bool = False) -> _Examined:
    options = current()
    order = order_of(problem, registry.tiers_of(problem.op))
    verdicts = {}
    for tier in order.tiers:
        reasons = tier.reasons(problem)
        if (tier.op, tier.name) in options.disable:
            reasons.insert(0, "disabled by ATTN_TIERS_DISABLE or options(disable=...)")
        asked_for = preparing or problem.requested == tier.name
        unfit = _plans.unfit.get((tier, problem))
        if unfit is not None and not asked_for:  # who asks for a tier has its build tried again
            reasons.append(unfit)
        may_build = asked_for or problem.jit
        if not reasons and not may_build and _waits_for_prepare(tier, problem):
            reasons.append("not prepared: call torch_attn_tiers.prepare or set ATTN_TIERS_JIT=1")
        verdicts[tier] = tuple(reasons)
    return _Examined(verdicts, order)


def _waits_for_prepare(tier: Tier, problem: Problem) -> bool:
    return tier.builds_slowly(problem) and not _is_prepared(tier, problem)


def _candidates(problem: Problem, verdicts: dict[Tier, tuple[str, ...]]) -> list[Tier]:
    """Tiers to try, best first: the one asked for, or all that are eligible."""
    eligible = [tier for tier, reasons in verdicts.items() if not reasons]
    if problem.requested is None:
        return eligible
    return [tier for tier in eligible if tier.name == problem.requested]


def _first_that_builds(problem: Problem, examined: _Examined) -> Decision:
    verdicts, order = examined
    candidates = _candidates(problem, verdicts)
    cause: Exception | None = None
    lasting = True
    while candidates:
        chosen = _pick(problem, candidates)
        cold = chosen is not candidates[0]
        try:
            built, fresh = _build(chosen, problem)
        except _BuildFailed as failure:
            cause = failure.error
            lasting = lasting and failure.kind is _Failure.OF_THE_TIER
            verdicts = {**verdicts, chosen: (failure.reason,)}
            candidates.remove(chosen)
            continue
        passed_over: Reasons = {}
        if problem.requested is None:
            for tier in order.tiers[: order.tiers.index(chosen)]:
                if verdicts[tier]:
                    passed_over[tier.name] = verdicts[tier]
            for tier in candidates[: candidates.index(chosen)]:
                passed_over[tier.name] = ("not ready in a CUDA graph capture",)
        decision = Decision(problem, chosen, passed_over, cold, fresh, built, order.source)
        decision.lasting = lasting and not cold
        return decision
    raise TierNotEligibleError(_not_eligible_message(problem, verdicts)) from cause


def _pick(problem: Problem, candidates: list[Tier]) -> Tier:
    """The tier to build: the first, but in a capture the first kernel tier that is ready."""
    first = candidates[0]
    if not problem.capturing or _is_ready(first, problem):
        return first
    for tier in candidates:
        if tier.kernel_tier and _is_ready(tier, problem):
            return tier
    raise _cold_capture(problem, [tier for tier in candidates if not _is_ready(tier, problem)])


def _cold_capture(problem: Problem, cold: list[Tier]) -> ColdCaptureError:
    names = ", ".join(tier.name for tier in cold)
    return ColdCaptureError(
        f"{problem.call}: a CUDA graph is being captured and no kernel for this call is built "
        f"({names}); building one now would break the capture.\n"
        f"Before the capture, call torch_attn_tiers.prepare({problem.call!r}, ...) with the "
        "arguments of this call, or run the call once; or choose another tier with tier=.\n"
        f"Problem: {problem.describe()}"
    )


class _Failure(enum.Enum):
    """What a failed build says about the tier."""

    OF_THE_TIER = "it cannot take the problem"
    OF_THE_MOMENT = "a capture forbade it: another call may try again"
    NONE = "nothing: out of memory, or what ran before has failed; raised"


class _BuildFailed(Exception):
    def __init__(self, reason: str, error: Exception, kind: _Failure) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.kind = kind


#: PyTorch's type for what the device reports, an error of an earlier kernel above all.
_DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", ())


def build_failure(error: Exception) -> bool:
    """Whether a failed build speaks against what was built, and not of the moment only.

    Raises:
        Exception: ``error``, if it is no build failure at all.
    """
    kind = _failure_of_build(error)
    if kind is _Failure.NONE:
        raise error
    return kind is _Failure.OF_THE_TIER


def _failure_of_build(error: Exception) -> _Failure:
    """By type, and by text: Triton and libraries raise RuntimeError for whatever CUDA reports."""
    text = str(error).lower()
    raised = (torch.OutOfMemoryError, MemoryError, ColdCaptureError)
    if isinstance(error, raised) or "out of memory" in text:
        return _Failure.NONE
    if any(words in text for words in ("is capturing", "during capture", "streamcapture")):
        return _Failure.OF_THE_MOMENT  # a capture of this or of another thread
    return _Failure.NONE if isinstance(error, _DEVICE_ERROR) else _Failure.OF_THE_TIER


def _is_ready(tier: Tier, problem: Problem) -> bool:
    """A kernel that is built is so for all threads; what other tiers rest on need not be."""
    if tier.kernel_tier and (tier, problem) in _plans.plans:
        return True
    try:
        return tier.ready(problem)
    except Exception:
        log.exception("tier %s: ready() failed on %s", tier.name, problem.describe())
        return False


def _is_prepared(tier: Tier, problem: Problem) -> bool:
    """Whether a call outside captures would find the slow part of the build done.

    A capture makes a tier cold and not unprepared: what it decides is true of eager calls too.
    """
    return _is_ready(tier, dataclasses.replace(problem, capturing=False))


def _build(tier: Tier, problem: Problem) -> tuple[_Built, bool]:
    """The plan and whether it was built now. Threads that want the same one wait for one build."""
    place = tier, problem
    known_failure = _plans.unfit.get(place)
    with _plans.lock:
        lock = _build_locks.setdefault(place, threading.RLock())
    try:
        with lock:
            built = _plans.plans.get(place)
            if built is not None and _is_ready(tier, problem):
                return built, False
            failure = _plans.unfit.get(place)
            if failure is not None and failure is not known_failure:  # while this thread waited
                raise _BuildFailed(failure, RuntimeError(failure), _Failure.OF_THE_TIER)
            return _build_now(tier, problem, known_failure), True
    finally:
        _build_locks.pop(place, None)


def _build_now(tier: Tier, problem: Problem, known_failure: str | None) -> _Built:
    begin = time.perf_counter()
    may_serve_others = _waits_for_prepare(tier, problem)
    try:
        with _on_device(problem.device):
            plan = tier.build(problem)
        if not callable(plan):
            raise TypeError(f"build returned {plan!r}; it must return a function, the plan")
    except Exception as error:
        kind = _failure_of_build(error)
        if kind is _Failure.NONE:
            raise
        reason = f"its build failed: {type(error).__name__}: {error}"
        if kind is _Failure.OF_THE_TIER:
            _plans.mark_unfit(tier, problem, reason)
        if reason != known_failure:
            log.warning("tier %s: %s (%s)", tier.name, reason, problem.describe(), exc_info=error)
        raise _BuildFailed(reason, error, kind) from error
    _plans.mark_fit(tier, problem)
    if may_serve_others:
        _plans.forget_decisions()  # some passed this tier over as not prepared
    seconds = time.perf_counter() - begin
    if seconds > LOG_BUILD_SECONDS:
        log.info("built %s in %.2f s: %s", tier.name, seconds, problem.describe())
    built = _plans.add(tier, problem, plan)
    if registry.is_registered(tier):
        built.plan = _FirstRun(built, tier, problem)
    return built


class _FirstRun:
    """Stands for the plan of another package until what it returns has been checked once."""

    def __init__(self, built: _Built, tier: Tier, problem: Problem) -> None:
        self.built, self.plan, self.tier, self.problem = built, built.plan, tier, problem

    def __getattr__(self, name: str) -> Any:
        if name == "plan":  # of an instance that is being copied, and has none yet
            raise AttributeError(name)
        return getattr(self.plan, name)  # an operator may ask a plan for more than to run

    def __call__(self, *tensors: Tensor | None) -> Any:
        result = self.plan(*tensors)
        wrong = self.problem.against_result(result, tensors)
        if wrong is not None:
            raise RuntimeError(
                f"tier {self.tier.name!r} broke the contract of a plan: {wrong}. It is a tier of "
                f"another package: report it there, or use tier= or ATTN_TIERS_DISABLE="
                f"{self.tier.op}:{self.tier.name}.\nProblem: {self.problem.describe()}"
            )
        self.built.plan = self.plan
        return result


def _on_device(device: DeviceFacts) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.device(device.index)
    return contextlib.nullcontext()


def _not_eligible_message(problem: Problem, verdicts: dict[Tier, tuple[str, ...]]) -> str:
    if problem.requested is None:
        lines = [f"{problem.call}: no tier can run this call."]
        shown = verdicts
    else:
        lines = [
            f"{problem.call}: tier {problem.requested!r} was asked for and cannot run this call."
        ]
        shown = {tier: verdicts[tier] for tier in verdicts if tier.name == problem.requested}
    lines += [f"  {tier.name}: {reason}" for tier, reasons in shown.items() for reason in reasons]
    if not shown:  # the name is an entry point's
        lines.append(
            f"  {problem.requested}: its entry point has registered no tier of that name; if it is "
            "broken, the log of torch_attn_tiers says how"
        )
    others = [tier.name for tier, reasons in verdicts.items() if not reasons]
    if others:
        leave = "Leave tier= out"
        if problem.requested is not None and current().forced(problem.op) == problem.requested:
            leave = "Take it out of ATTN_TIERS_FORCE or options(force=), and leave tier= out"
        lines.append(f"{leave}, or use one that can: {', '.join(others)}.")
    lines.append(f"Problem: {problem.describe()}")
    return "\n".join(lines)


def _first_of(reasons: Sequence[str]) -> str:
    more = len(reasons) - 1
    return f"{reasons[0]} (and {more} more)" if more else reasons[0]


def _say(decision: Decision) -> None:
    """Log a decision, once for each plan: who runs, who does not and why, and by what order.

    One reason for each tier is enough for a line; `explain` and records have them all.
    """
    built = decision.built
    if built.warned if decision.cold else (built.said or not log.isEnabledFor(logging.INFO)):
        return
    passed_over = "; ".join(f"{n}: {_first_of(r)}" for n, r in decision.passed_over.items())
    because = f"passed over {passed_over}; " if passed_over else ""
    told = (decision.tier.name, decision.problem.describe(), because, decision.order)
    if decision.cold:
        built.warned = True
        log.warning(
            "%s is captured cold, a faster tier is not ready: call prepare before the capture; "
            "%s (%sorder: %s)",
            *told,
        )
    else:
        built.said = True
        log.info("%s runs %s (%sorder: %s)", *told)


def explain(op: Any, *args: Any, device: Any = None, **kwargs: Any) -> Explanation:
    """Every tier's verdict on a call, which is not run.

    Args:
        op: the operator, as ``"decode"``, ``"decode.present"`` or ``torch.ops.attn_tiers.decode``
            (of this the first overload that takes the arguments, as in a call).
            Of a cache write the verdicts are those of its kernel and of its reference.
        args, kwargs: the operator's own arguments. Meta tensors will do, with ``device=``.
        device: what to explain for in place of the tensors' device: a device that is here, or
            :class:`DeviceFacts` of another, as ``DeviceFacts.of("sm_90")``.

    Raises:
        ValueError, TypeError, RuntimeError: as the operator would for these arguments.

    Example:
        >>> import torch, torch_attn_tiers
        >>> q = torch.empty(1, 8, 1, 64, device="meta")
        >>> kv = torch.empty(1, 2, 16, 64, device="meta")
        >>> torch_attn_tiers.explain("decode", q, kv, kv, device="cpu").chosen
        'unfused'
    """
    call, problem = _problem(op, args, kwargs, device)
    return call.explain(problem)


def prepare(op: Any, *args: Any, device: Any = None, **kwargs: Any) -> Explanation:
    """Build the plan of a call and compile its kernels ahead of time, without running it.

    Takes what :func:`explain` takes. Slow builds are done too. Call it before a CUDA graph capture
    with arguments like those of the captured call: the same shapes, strides, dtypes and options.

    Returns:
        The explanation afterwards: its ``chosen`` tier is ready.

    Raises:
        ValueError, TypeError, RuntimeError: as the operator would for these arguments.
        RuntimeError: a capture is under way.
    """
    if isinstance(device, DeviceFacts):
        raise TypeError(
            "prepare: device is DeviceFacts; give a device that is here, as device='cuda'"
        )
    call, problem = _problem(op, args, kwargs, device)
    if problem.capturing:
        raise RuntimeError(
            "prepare: a CUDA graph is being captured; call prepare before the capture"
        )
    call.prepare(problem)
    return call.explain(problem)


def _prepare(problem: Problem) -> None:
    _first_that_builds(problem, _examine(problem, preparing=True))
    _plans.forget_decisions()  # some may stand for a tier that this one now beats


def _explain(problem: Problem) -> Explanation:
    verdicts, order = _examine(problem)
    chosen = None
    candidates = _candidates(problem, verdicts)
    raised = None
    if not candidates:
        message = _not_eligible_message(problem, verdicts)
        raised = f"TierNotEligibleError: {message.splitlines()[0]}"
    else:
        try:
            chosen = _pick(problem, candidates)
        except ColdCaptureError as error:
            raised = f"ColdCaptureError: {str(error).splitlines()[0]}"
    rows = [
        TierVerdict(
            tier.name,
            not reasons,
            reasons,
            not reasons and _is_ready(tier, problem),
            tier is chosen,
        )
        for tier, reasons in verdicts.items()
    ]
    return Explanation(problem, rows, len(_plans.plans), len(_plans.pinned), raised, order.source)


def _problem(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any
) -> tuple[_Call, Problem]:
    name = str(op).replace("::", ".").removeprefix("attn_tiers.").removesuffix(".default")
    if name not in _calls:
        raise ValueError(f"op is {op!s}; it must be one of {', '.join(_calls)}")
    facts = device
    if device is not None and not isinstance(device, DeviceFacts):
        facts = _facts_of(device)
    if isinstance(op, torch._ops.OpOverloadPacket):
        name = _overload_of(op, name, args, kwargs)
    tensors, scalars = bind(name, args, kwargs)
    call = _calls[name]
    return call, call.problem_of(*tensors, facts=facts, **scalars)


def _overload_of(packet: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The overload that a call of the packet is: the first that takes the arguments."""
    for overload in packet.overloads():
        candidate = name if overload == "default" else f"{name}.{overload}"
        if candidate in _calls:
            with contextlib.suppress(TypeError):
                bind(candidate, args, kwargs)
                return candidate
    return name


def _facts_of(device: Any) -> DeviceFacts:
    try:
        return device_facts(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device is {device!r}; it must be a device that is here, as 'cpu' or 'cuda:0', or "
            "the facts of one, as DeviceFacts.of('sm_90')"
        ) from error


def facts_for(tensor: Tensor, facts: DeviceFacts | None) -> DeviceFacts:
    """Facts of the tensor's device, or ``facts`` in their place."""
    if facts is not None:
        return facts
    if tensor.device.type == "meta":
        raise ValueError("the tensors are on the meta device: say with device= what they stand for")
    return device_facts(tensor.device)


@contextlib.contextmanager
def record_dispatch() -> Iterator[list[DispatchRecord]]:
    """Collect what runs within a ``with`` block, in all threads, call by call.

    Of operators with tiers; cache writes have none, and are not recorded.

    Example:
        >>> import torch, torch_attn_tiers
        >>> q, kv = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 16, 64)
        >>> with torch_attn_tiers.record_dispatch() as calls:
        ...     _ = torch.ops.attn_tiers.decode(q, kv, kv)
        >>> [(call.op, call.tier) for call in calls]
        [('decode', 'unfused')]
    """
    recording: list[DispatchRecord] = []
    with _recordings_lock:
        _recordings.append(recording)
    try:
        yield recording
    finally:
        with _recordings_lock:  # by identity: two recordings may be equal
            _recordings[:] = [other for other in _recordings if other is not recording]


def release_captured_plans() -> int:
    """Let go of the plans that captured graphs have used; returns how many.

    Call it once those graphs will not be replayed any more.
    """
    for op in registry.ops():
        for tier in registry.tiers_of(op):
            if tier.release is not None:
                try:
                    tier.release()
                except Exception:  # of another package, perhaps: the rest must go all the same
                    log.exception("tier %s: release() failed", tier.name)
    return _plans.release()
