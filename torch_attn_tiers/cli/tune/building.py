"""Kernels and plans made before anything is timed, several at once."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

import torch_attn_tiers
from torch_attn_tiers.cli.bench.running import in_words
from torch_attn_tiers.cli.tune.points import Point
from torch_attn_tiers.tier import tiers_of

#: Tiers whose builds leave nothing on disk that another process could use. cuDNN's frontend holds
#: Python's lock while it builds, so that threads would not help either.
_WITHIN_A_PROCESS = frozenset({("decode", "cudnn"), ("gdn_chunk_prefill", "flashinfer")})
#: Plans made here while others compile: with those to come, no more than a process keeps.
_MOST_PLANS = 256


class Build(NamedTuple):
    """What one process is to compile: kernels that the points share are compiled once."""

    tier: str
    points: Sequence[Point]
    device: torch.device


def build_ahead(builds: Iterable[Build], plans: Iterable[Build], workers: int) -> list[str]:
    """Compiles into the caches of the compilers, in other processes; returns what failed.

    Meanwhile this process makes ``plans``, the first ones first, of the tiers for which nobody else
    can. A plan that fails will fail again where it is measured, and be reported.
    """
    elsewhere = sorted((build for build in builds if not _is_only_here(build)), key=_is_quick)
    os.environ.setdefault("MAX_JOBS", "2")  # of ninja, for each kernel that nvcc compiles
    failures = []
    try:
        with concurrent.futures.ProcessPoolExecutor(
            max(1, min(workers, len(elsewhere))), mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            compiled = [pool.submit(prepare_all, build) for build in elsewhere]
            try:
                here = [(p, plan) for plan in plans if _is_only_here(plan) for p in plan.points]
                for point, plan in here[:_MOST_PLANS]:
                    if all(one.done() for one in compiled):
                        break
                    prepare(point, plan.tier, plan.device)
                failures = [one.result() for one in compiled]
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()  # or this one would wait for what they have begun
                raise
    except BrokenProcessPool as error:  # this process then compiles what is missing
        failures.append(in_words(error))
    return [failure for failure in failures if failure is not None]


def prepare_all(build: Build) -> str | None:
    """Prepares every point of a build; what failed first, in words."""
    failures = [
        failure
        for point in build.points
        if (failure := prepare(point, build.tier, build.device)) is not None
    ]
    return f"{build.tier}: {failures[0]}" if failures else None


def prepare(point: Point, tier: str, device: torch.device) -> str | None:
    """Makes the plan of a point; what failed, in words."""
    tensors, scalars = point.call()
    try:
        torch_attn_tiers.prepare(point.overload, *tensors, device=device, tier=tier, **scalars)
    except Exception as error:
        return in_words(error)
    return None


def _is_only_here(build: Build) -> bool:
    return (build.points[0].op, build.tier) in _WITHIN_A_PROCESS


def _is_quick(build: Build) -> bool:
    """The slow ones come first: all else is then compiled beside them."""
    return not any(
        tier.slow_build for tier in tiers_of(build.points[0].op) if tier.name == build.tier
    )
