"""The Python in README.md and docs/ runs as it stands, and so do the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import csrc_free_ops
import torch_attn_tiers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page: Path) -> str:
    """The code of all ```python fences, each line at its own number, as a traceback shows it."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence and not inside else inside and not fence
    return "\n".join(lines)


def module_names() -> list[str]:
    names = []
    for package in (csrc_free_ops, torch_attn_tiers):
        found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        names += [package.__name__, *(module.name for module in found)]
    return [name for name in names if not re.search(r"__main__|\.kernels", name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_page_runs(page: Path) -> None:
    exec(compile(python_blocks(page), str(page), "exec"), {"__name__": "__page__"})


def test_the_pages_hold_code() -> None:
    """Guards the fences above: a page whose blocks are no longer found would pass."""
    assert sum(bool(python_blocks(page).strip()) for page in PAGES) >= 4


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
