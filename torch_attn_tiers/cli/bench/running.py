"""What every bench does around its measurements: names, words, memory, files."""

from __future__ import annotations

import gc
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch


def names(
    text: str | None, known: dict[str, Any], option: str, default: Sequence[str]
) -> list[str]:
    """The names in a comma-separated option; "all" is every known one."""
    if text is None:
        return list(default)
    if text == "all":
        return list(known)
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def write(result: dict[str, Any], out: str | None) -> None:
    """Writes after every case, so that an interrupted run leaves what it has."""
    if out is not None:
        path = pathlib.Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
