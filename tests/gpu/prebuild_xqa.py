"""Builds the XQA kernels that the tests run, several at once: `python -m tests.gpu.prebuild_xqa`.

nvcc takes some ten seconds for each; a test then loads what lies in FlashInfer's cache.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import sys
import time

import torch


def kernels(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)) -> list[tuple]:
    """(dtype, head size, group, page size, window) of every kernel that the tests run."""
    table = itertools.product(dtypes, (64, 128, 256), (1, 2, 4, 5, 8, 16), (128,), (False,))
    pages = [(torch.bfloat16, 128, 4, page, False) for page in (16, 32, 64)]
    windows = [(torch.bfloat16, size, 4, 128, True) for size in (64, 128, 256)]
    return [*table, *pages, *windows]


def build(kernel: tuple) -> str:
    """Builds one, in a process of its own; says how it went."""
    from csrc_free_ops.facts import device_facts
    from torch_attn_tiers.tiers.decode import xqa

    begin = time.perf_counter()
    try:
        xqa.KERNELS.load(xqa.Kernel(*kernel), device_facts("cuda"))
        outcome = "ok"
    except Exception as error:
        outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{xqa.Kernel(*kernel)}: {outcome} ({time.perf_counter() - begin:.1f} s)"


def main(workers: int) -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, max_tasks_per_child=1
    ) as pool:
        for line in pool.map(build, kernels()):
            print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MAX_JOBS", "2")  # of ninja, for each kernel
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
