"""What docs/explain_decode.md says of the bench's cases is what `explain` says on an H200.

With both libraries and the device's table, all of them pretended. EXPECTTEST_ACCEPT=1 rewrites
the page.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests import fake_libraries
from torch_attn_tiers import dispatch, ranking
from torch_attn_tiers.cli.bench.cases import CASES, Case

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explain_decode.md"
H200 = DeviceFacts.of("sm_90")._replace(name="NVIDIA H200")
#: Whose whole text the page shows.
SHOWN = ("llama8b_b1_4k", "tiny")


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Both libraries and all versions are those of the table of the H200; returns them."""
    table = json.loads((ranking.FOLDER / f"{ranking.table_name(H200)}.json").read_text())
    versions = table["ops"]["decode"]["versions"]
    fake_libraries.install_xqa(monkeypatch, versions["flashinfer-python"])
    fake_libraries.install_cudnn(
        monkeypatch, versions["nvidia-cudnn-frontend"], int(versions["cudnn"])
    )
    monkeypatch.setattr(ranking, "versions", lambda op: versions)
    _forget()
    yield versions
    monkeypatch.undo()
    fake_libraries.forget()
    _forget()


def _forget() -> None:
    ranking.forget()
    dispatch._plans.forget_decisions()


def _explain(case: Case) -> torch_attn_tiers.Explanation:
    """Of the call that the bench makes."""
    cache = torch.empty(
        case.batch, case.kv_heads, case.capacity, case.head_dim, dtype=torch.bfloat16, device="meta"
    )
    query = cache.new_empty(case.batch, case.q_heads, 1, case.head_dim)
    lengths = cache.new_empty(case.batch, dtype=torch.int32)
    return torch_attn_tiers.explain("decode", query, cache, cache, lengths, device=H200)


def _texts() -> str:
    return "\n\n".join(
        f"`{name}`:\n\n```{{code-block}} text\n{_explain(CASES[name])}\n```" for name in SHOWN
    )


def _table(empty: pathlib.Path) -> str:
    """A row for each case: tiers in their order, those that do not take it by a numbered reason."""
    numbers: dict[str, int] = {}
    explanations = {case.name: _explain(case) for case in CASES.values()}
    classes = {}
    for name, explanation in explanations.items():
        source, _, measured = explanation.order.partition(": ")
        assert source == "measured, nvidia_h200.json", explanation.order
        classes[name] = measured.split()
    shared = [w for w in classes["tiny"] if all(w in words for words in classes.values())]
    rows = []
    for name, explanation in explanations.items():
        order = []
        for verdict in explanation.verdicts:
            notes = [numbers.setdefault(why, len(numbers) + 1) for why in verdict.reasons]
            order.append(f"{verdict.name}{''.join(f' ({note})' for note in notes)}")
        ran = [verdict.chosen for verdict in explanation.verdicts].index(True)
        rows.append(
            (
                f"`{name}`",
                " ".join(word for word in classes[name] if word not in shared),
                ", ".join(order),
                f"`{explanation.chosen}`",
                ", ".join(order[:ran]) or "none",
                f"`{_chosen_by_the_cascade(CASES[name], empty)}`",
            )
        )
    header = ("case", "class", "order", "runs", "passed over", "without the table")
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(
        [
            f"What all classes have in common is left out: `{' '.join(shared)}`.",
            "",
            *(f"| {line} |" for line in lines),
            "",
            *(f"{number}. {why}" for why, number in numbers.items()),
        ]
    )


def _chosen_by_the_cascade(case: Case, empty: pathlib.Path) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "FOLDER", empty)
        _forget()
        chosen = _explain(case).chosen
    _forget()
    return chosen


def _region(name: str, text: str, page: str) -> str:
    """The page with one region written anew."""
    pattern = rf"(<!-- explain:{name} -->\n).*?(<!-- /explain:{name} -->)"
    page, count = re.subn(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL)
    assert count == 1, f"{PAGE.name} has {count} regions {name}"
    return page


def test_page_says_what_explain_says(on_an_h200: dict[str, str], tmp_path: pathlib.Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in on_an_h200.items())
    written = _region("versions", f"`{versions}`", page)
    written = _region("texts", _texts(), written)
    written = _region("table", _table(tmp_path), written)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(written, encoding="utf-8")
    else:
        assert page == written, f"{PAGE.name} is stale: EXPECTTEST_ACCEPT=1 rewrites it"


def test_what_explain_chooses_is_what_the_bench_ran(on_an_h200: dict[str, str]) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "decode_h200.json").read_text())
    ran = {row["case"]: row["our_tier"] for row in result["cases"]}
    assert {name: _explain(case).chosen for name, case in CASES.items()} == ran
