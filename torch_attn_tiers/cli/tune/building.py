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

#: Tiers whose builds leave nothing on disk that another process could use.
_WITHIN_A_PROCESS = frozenset({"cudnn"})


class Build(NamedTuple):
    """What one process is to compile: kernels that the points share are compiled once."""

    tier: str
    points: Sequence[Point]
    device: torch.device


def compile_ahead(builds: Iterable[Build], workers: int) -> list[str]:
    """Compiles into the caches of the compilers, in other processes; returns what failed."""
    wanted = [build for build in builds if build.tier not in _WITHIN_A_PROCESS]
    os.environ.setdefault("MAX_JOBS", "2")  # of ninja, for each kernel that nvcc compiles
    try:
        with concurrent.futures.ProcessPoolExecutor(
            max(1, min(workers, len(wanted))), mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            return [failure for failure in pool.map(prepare_all, wanted) if failure is not None]
    except BrokenProcessPool as error:  # this process then compiles what is missing
        return [in_words(error)]


def prepare_all(build: Build) -> str | None:
    """Prepares every point of a build; what failed first, in words."""
    failures = [
        failure
        for point in build.points
        if (failure := _prepare(point, build.tier, build.device)) is not None
    ]
    return f"{build.tier}: {failures[0]}" if failures else None


def plan_ahead(builds: Iterable[Build], workers: int) -> None:
    """Makes the plans of this process, in threads. What fails will fail again, and be reported."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for build in builds:
            for point in build.points:
                pool.submit(_prepare, point, build.tier, build.device)


def _prepare(point: Point, tier: str, device: torch.device) -> str | None:
    tensors, scalars = point.call()
    try:
        torch_attn_tiers.prepare(point.op, *tensors, device=device, tier=tier, **scalars)
    except Exception as error:
        return in_words(error)
    return None
