"""What the tiers of other libraries share: one query row over one stretch of keys."""

from __future__ import annotations

import torch

from csrc_free_ops.facts import TensorFacts
from torch_attn_tiers.problem import DecodeProblem, dtype_name

_HALVES = (torch.float16, torch.bfloat16)
INT32_MAX = 2**31 - 1


def query_dtype(problem: DecodeProblem) -> str | None:
    if problem.query.dtype not in _HALVES:
        return f"takes float16 and bfloat16, not {dtype_name(problem.query.dtype)}"
    return None


def cache_dtype(problem: DecodeProblem) -> str | None:
    if query_dtype(problem) is None and problem.key.dtype is not problem.query.dtype:
        return f"takes caches in the query's dtype, not {dtype_name(problem.key.dtype)}"
    return None


def rows(problem: DecodeProblem) -> str | None:
    if problem.Sq == 1:
        return None
    if problem.Sq == 0:
        return "there is no query row (Sq=0), it takes one"
    return f"several query rows (Sq={problem.Sq}) are not verified, it takes one"


def sizes(problem: DecodeProblem) -> str | None:
    if min(problem.B, problem.Sq, problem.T) == 0:
        return "does not take empty inputs"
    if problem.T > INT32_MAX:
        return f"counts keys in 32 bits, the capacity is {problem.T}"
    return None


def causality(problem: DecodeProblem) -> str | None:
    """Causality that is one number of keys is no flag to a library, but a length."""
    if not problem.is_causal or problem.lengths_dtype is not None or problem.past_len:
        return None
    return "top-left causality without a cache shows key 0 only, which is not verified"


def batch_invariance(problem: DecodeProblem) -> str | None:
    if problem.batch_invariant:
        return "does not promise batch_invariant: its splits depend on the batch"
    return None


def missing_features(problem: DecodeProblem, **given: bool) -> str | None:
    """A reason that names what is asked for and never done: masks, softcap and scores."""
    asked = {
        "attn_mask": problem.mask is not None,
        "softcap": problem.softcap > 0,
        "qk_matmul_output": problem.qk_mode is not None,
        **given,
    }
    missing = [name for name, is_asked in asked.items() if is_asked]
    return f"does not do {', '.join(missing)}" if missing else None


def alignment(problem: DecodeProblem) -> str | None:
    """Where a pointer or stride is no multiple of 16 bytes, Hopper kernels read wrong values."""
    for name, facts in (
        ("query", problem.query),
        ("key", problem.key),
        ("value", problem.value),
    ):
        reason = _misaligned(facts)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _misaligned(facts: TensorFacts) -> str | None:
    *outer, last = facts.stride
    if last != 1:
        return f"is not dense in its last dimension, its stride is {last}"
    if not facts.aligned:
        return "does not begin at a multiple of 16 bytes"
    for stride in outer:
        if stride == 0:
            return "is expanded: it has a stride of 0"
        if stride * facts.dtype.itemsize % 16:
            return f"has a stride of {stride} elements, not a multiple of 16 bytes"
    return None


def known_count(problem: DecodeProblem) -> int:
    """Keys that the query row sees where no lengths are given: one number for the whole batch.

    With a past of P keys the row stands at P, so that causality shows P + 1 keys of all; without
    it, all of them.
    """
    if problem.is_causal:
        return min(problem.T, problem.past_len + 1)
    return problem.T
