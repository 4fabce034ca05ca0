"""The order of the tiers of `gdn_chunk_prefill` by a table."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests import fake_gdn_library, fake_libraries
from tests.test_ranking import CPU, _forget
from tests.test_tier_flashinfer import PLAIN, Asked
from torch_attn_tiers import explain, ranking
from torch_attn_tiers.problem import GdnProblem
from torch_attn_tiers.tier import tiers_of

pytest.importorskip("triton")

OP = "gdn_chunk_prefill"
H200 = DeviceFacts.of("sm_90")._replace(name="NVIDIA H200")
KIND = "dtype=bfloat16 K=128 V=128 h=no batch_invariant=no"
#: Of `PLAIN`: 4 sequences of 1024 tokens, 32 heads.
SIZES = "rows=128 tokens=1024"


@pytest.fixture(autouse=True)
def folder(tables: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    fake_libraries.forget()
    yield tables
    monkeypatch.undo()
    fake_libraries.forget()


def _write(
    folder: pathlib.Path, orders: Mapping[str, Mapping[str, str]], device: DeviceFacts = H200
) -> None:
    part = {"versions": ranking.versions(OP), "orders": orders}
    path = folder / f"{ranking.table_name(device)}.json"
    path.write_text(json.dumps({"ops": {OP: part}}))
    _forget()


def _explain(asked: Asked, device: DeviceFacts = H200) -> torch_attn_tiers.Explanation:
    call = asked.call()
    scalars = {name: value for name, value in call.scalars.items() if name != "tier"}
    return explain(call.op(), *call.args(), device=device, **scalars)


def _class(asked: Asked) -> str:
    return str(ranking.class_of(_explain(asked).problem))


def test_class_of_prompts_in_words() -> None:
    found = ranking.class_of(_explain(PLAIN).problem)
    assert str(found) == f"{KIND} {SIZES}" and found.sizes == (7, 10)
    assert ranking.ProblemClass.parse(OP, str(found)) == found


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dtype=torch.float16), "dtype=float16"),
        (dict(dtype=torch.float32), "dtype=float32"),
        (dict(K=96, V=40), "K=128 V=64"),
        (dict(overload="h_fla"), "h=fla"),
        (dict(overload="h_compact"), "h=compact"),
        (dict(scalars={"batch_invariant": True}), "batch_invariant=yes"),
        (dict(N=1), "rows=32 tokens=4096"),
        (dict(N=1, Hv=48), "rows=64 tokens=4096"),
        (dict(N=32, Hv=8, Hq=2), "rows=256 tokens=128"),
        (dict(cu=None), "rows=128 tokens=4096"),  # T of each row
        (dict(T=0), "tokens=1"),
        (dict(N=0), "rows=1 tokens=4096"),
        (dict(cu=None, N=0), "rows=1 tokens=1"),
    ],
)
def test_class_by_dtype_head_sizes_checkpoints_rows_and_tokens(
    change: dict[str, Any], words: str
) -> None:
    assert f" {words} " in f" {_class(dataclasses.replace(PLAIN, **change))} "


@pytest.mark.parametrize(
    "change",
    [
        dict(cu=torch.int64),
        dict(state=None),
        dict(state=torch.bfloat16),
        dict(Hq=8),
        dict(scalars={"qk_l2norm": True, "output_final_state": False}),
    ],
)
def test_class_knows_nothing_else(change: dict[str, Any]) -> None:
    assert _class(dataclasses.replace(PLAIN, **change)) == _class(PLAIN)


def test_calls_over_a_pool_are_a_kind_of_their_own() -> None:
    q, g = (torch.empty(1, 64, 2, *rest, device="meta") for rest in ((128,), ()))
    pool = torch.empty(5, 2, 128, 128, device="meta")
    reads = torch.empty(1, dtype=torch.int32, device="meta")
    bounds = torch.empty(2, dtype=torch.int32, device="meta")
    problem = explain(
        f"{OP}.pool_", q, q, q, g, g, pool, reads, cu_seqlens=bounds, device=H200
    ).problem
    assert isinstance(problem, GdnProblem) and " h=pool " in str(ranking.class_of(problem))


def _names(explanation: torch_attn_tiers.Explanation) -> list[str]:
    return [verdict.name for verdict in explanation.verdicts]


CASCADE = ["flashinfer", "triton", "reference"]


def test_without_a_table_the_cascade_holds() -> None:
    explanation = _explain(PLAIN)
    assert _names(explanation) == CASCADE
    assert explanation.order == f"the cascade's, no table for {OP} on NVIDIA H200"


def test_table_orders_the_kernel_tiers(folder: pathlib.Path) -> None:
    _write(folder, {KIND: {SIZES: "triton flashinfer"}})
    explanation = _explain(PLAIN)
    assert _names(explanation) == ["triton", "flashinfer", "reference"]
    assert explanation.order == f"measured, nvidia_h200.json: {KIND} {SIZES}"
    half = _explain(dataclasses.replace(PLAIN, dtype=torch.float16))
    assert _names(half)[0] == "triton"
    compact = _explain(dataclasses.replace(PLAIN, overload="h_compact"))
    assert _names(compact) == CASCADE and compact.order.endswith("has no class near")


def test_nearest_class_and_open_ends(folder: pathlib.Path) -> None:
    _write(folder, {KIND: {"rows=512 tokens=8192": "triton", "rows=8 tokens=128": "triton"}})
    for change, sizes in (
        (dict(T=1 << 20, N=64), "rows=512 tokens=8192"),
        (dict(T=6, N=1, Hv=1, Hq=1), "rows=8 tokens=128"),
        (dict(T=8 * 8000, N=8), "rows=512 tokens=8192"),
    ):
        order = _explain(dataclasses.replace(PLAIN, **change)).order
        assert order == f"measured, nvidia_h200.json: {KIND} {sizes}"
    assert _explain(PLAIN).order.endswith("has no class near")


def test_table_never_makes_a_tier_run_that_does_not_take_the_call(folder: pathlib.Path) -> None:
    """Here none but the reference runs, whatever a table says."""
    _write(folder, {KIND: {SIZES: "triton flashinfer reference"}}, CPU)
    call = dataclasses.replace(PLAIN, T=4, N=1, Hv=2, Hq=1).call()
    tensors = [None if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in call.args()]
    with torch_attn_tiers.record_dispatch() as records:
        torch.ops.attn_tiers.gdn_chunk_prefill(*tensors)
    assert records[0].tier == "reference" and records[0].passed_over.keys() == {
        "flashinfer", "triton"
    }  # fmt: skip


def test_table_of_another_library_is_ignored(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gdn_library.install_gdn(monkeypatch, "0.7.2")
    ranking.versions.cache_clear()
    try:
        _write(folder, {KIND: {SIZES: "triton flashinfer"}})
        assert ranking.versions(OP)["flashinfer-python"] == "0.7.2"
        assert _names(_explain(PLAIN))[0] == "triton"
        fake_gdn_library.install_gdn(monkeypatch, "0.8.0")
        ranking.versions.cache_clear()
        _forget()
        explanation = _explain(PLAIN)
        assert _names(explanation) == CASCADE
        assert "measured with flashinfer-python 0.7.2 (here 0.8.0)" in explanation.order
    finally:
        ranking.versions.cache_clear()


def test_versions_are_those_of_the_library_and_of_our_kernels() -> None:
    versions = ranking.versions(OP)
    assert versions["kernels"] == str(ranking.KERNEL_REVISIONS[OP])
    assert {"torch", "triton", "kernels"} <= versions.keys() and "cudnn" not in versions


def test_what_is_written_is_what_is_read(folder: pathlib.Path) -> None:
    problems = [
        _explain(dataclasses.replace(PLAIN, **change)).problem
        for change in (dict(), dict(N=1), dict(overload="h_compact"), dict(T=300, N=2))
    ]
    orders = {ranking.class_of(problem): ["triton", "flashinfer"] for problem in problems}
    part = ranking.section(orders, {"versions": ranking.versions(OP)})
    (folder / "nvidia_h200.json").write_text(json.dumps({"ops": {OP: part}}))
    _forget()
    for problem in problems:
        order = ranking.order_of(problem, tiers_of(OP))
        assert order.source == f"measured, nvidia_h200.json: {ranking.class_of(problem)}"
        assert [tier.name for tier in order.tiers] == ["triton", "flashinfer", "reference"]
