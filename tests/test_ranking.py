"""The order of tiers by a table: classes, the nearest one, versions, and what dispatch does."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import threading
import timeit
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import DeviceFacts
from tests.test_dispatch import Invented
from tests.test_predicates import CPU, PLAIN, Asked
from torch_attn_tiers import dispatch, explain, ranking, register_tier
from torch_attn_tiers.tier import tiers_of

pytestmark = pytest.mark.usefixtures("without_libraries")

pytest.importorskip("triton")

decode = torch.ops.attn_tiers.decode

H200 = DeviceFacts.of("sm_90")._replace(name="NVIDIA H200")
KIND = "query=bfloat16 cache=bfloat16 G=4 D=128 Dv=128 window=no Sq=1"
#: What `_qkv` below is.
SMALL = "query=float32 cache=float32 G=2 D=64 Dv=64 window=no Sq=2-16"

Write = Callable[..., pathlib.Path]


def _forget() -> None:
    ranking.forget()
    dispatch._plans.forget_decisions()


@pytest.fixture
def write(tables: pathlib.Path) -> Write:
    """Writes the table of a device, of the versions that are here but for those given."""

    def write_table(
        orders: Mapping[str, Mapping[str, str]],
        device: DeviceFacts = CPU,
        **versions: str,
    ) -> pathlib.Path:
        part = {"versions": {**ranking.versions("decode"), **versions}, "orders": orders}
        path = tables / f"{ranking.table_name(device)}.json"
        path.write_text(json.dumps({"ops": {"decode": part}}))
        _forget()
        return path

    return write_table


@pytest.fixture
def tiers() -> Iterator[list[Invented]]:
    """Tiers a, b and c ahead of all others."""
    invented = [Invented(name) for name in "abc"]
    handles = [register_tier(one.tier, before="flash") for one in invented]
    yield invented
    for handle in handles:
        handle.remove()


def _qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))


def _record(*args: Any, **kwargs: Any) -> torch_attn_tiers.DispatchRecord:
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*args, **kwargs)
    (call,) = calls
    return call


def _names(explanation: torch_attn_tiers.Explanation) -> list[str]:
    return [verdict.name for verdict in explanation.verdicts]


# -------------------------------------------------------------------------------------- classes


def _class(asked: Asked) -> str:
    return str(ranking.class_of(asked.explain(H200).problem))


def test_class_of_a_decode_step_in_words() -> None:
    assert _class(PLAIN) == f"{KIND} rows=32 T=4096"
    assert ranking.class_of(PLAIN.explain(H200).problem).sizes == (5, 12)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(Hq=56), "G=8"),
        (dict(Hq=24), "G=4"),
        (dict(Hq=8), "G=1"),
        (dict(D=80), "D=128"),
        (dict(D=40), "D=64 Dv=64"),
        (dict(D=192, Dv=128), "D=256 Dv=128"),
        (dict(dtype=torch.float32), "query=float32 cache=float32"),
        (dict(scalars={"left_window_size": 9}), "window=yes"),
        (dict(Sq=2), "Sq=2-16"),
        (dict(Sq=16), "Sq=2-16"),
        (dict(Sq=17), "Sq=17-"),
        (dict(scalars={"left_window_size": 127}), "window=yes"),
        (dict(scalars={"left_window_size": 5000}), "window=no"),
        (dict(B=1), "rows=8"),
        (dict(B=5), "rows=32"),
        (dict(B=6), "rows=64"),
        (dict(T=5000), "T=4096"),
        (dict(T=6000), "T=8192"),
        (dict(T=1), "T=1"),
    ],
)
def test_class_by_groups_head_sizes_rows_and_capacity(change: dict[str, Any], words: str) -> None:
    found = _class(dataclasses.replace(PLAIN, **change))
    assert f"{words} " in f"{found} "


@pytest.mark.parametrize("change", [dict(lengths=torch.int64), dict(scalars={"softcap": 30.0})])
def test_class_knows_nothing_else(change: dict[str, Any]) -> None:
    assert _class(dataclasses.replace(PLAIN, **change)) == _class(PLAIN)


def test_nearest_power_of_two_is_so_by_the_ratio() -> None:
    octaves = [ranking._octave(size) for size in (0, 1, 2, 3, 5, 6, 11, 12, 22, 23, 4096, 5792)]
    assert octaves == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 12, 12]
    assert ranking._octave(5793) == 13


def test_name_of_a_table_is_the_devices() -> None:
    assert ranking.table_name(H200) == "nvidia_h200"
    mi300x = DeviceFacts.of("gfx942")._replace(name="AMD Instinct MI300X (rev. 1)")
    assert ranking.table_name(mi300x) == "amd_instinct_mi300x_rev_1"
    assert ranking.table_name(DeviceFacts.of("sm_90")) == "sm_90"
    assert ranking.table_name(CPU) == "cpu"


# ------------------------------------------------------------------------------------ the order


def _order(asked: Asked, device: DeviceFacts = H200) -> tuple[list[str], str]:
    explanation = asked.explain(device)
    return _names(explanation), explanation.order


CASCADE = ["flash", "mea", "unfused"]


def test_without_a_table_the_cascade_holds(write: Write) -> None:
    assert _order(PLAIN) == (CASCADE, "the cascade's, no table for decode on NVIDIA H200")


def test_table_orders_what_it_names_on_the_places_of_these(
    write: Write, tiers: list[Invented]
) -> None:
    table = {KIND: {"rows=32 T=4096": "flash c a"}}
    write(table, H200)
    names, order = _order(PLAIN)
    places = iter(("flash", "c", "a"))
    assert names == [
        next(places) if name in ("a", "c", "flash") else name for name in ["a", "b", "c", *CASCADE]
    ]
    assert order == f"measured, nvidia_h200.json: {KIND} rows=32 T=4096"
    assert _order(PLAIN, H200._replace(index=1))[1] == order
    write({KIND: {"rows=32 T=4096": "gone b a"}}, H200)
    assert _order(PLAIN)[0][:3] == ["b", "a", "c"]


def test_cascade_that_changes_is_ordered_anew(write: Write, tiers: list[Invented]) -> None:
    write({KIND: {"rows=32 T=4096": "c b a"}}, H200)
    assert _order(PLAIN)[0][:3] == ["c", "b", "a"]
    with register_tier(Invented("d").tier, before="b"):
        assert _order(PLAIN)[0][:4] == ["c", "d", "b", "a"]
    assert _order(PLAIN)[0][:3] == ["c", "b", "a"]


@pytest.mark.parametrize(
    "measured, expected",
    [
        (["rows=32 T=4096", "rows=64 T=4096"], "rows=32 T=4096"),
        (["rows=64 T=4096", "rows=32 T=1024"], "rows=64 T=4096"),
        (["rows=16 T=4096", "rows=64 T=4096"], "rows=64 T=4096"),
        (["rows=32 T=2048", "rows=32 T=8192"], "rows=32 T=8192"),
        (["rows=128 T=16384", "rows=8 T=1024"], "rows=128 T=16384"),
        (["rows=256 T=4096"], None),
        (["rows=32 T=512"], None),
    ],
)
def test_nearest_class_within_a_factor_of_four_else_the_cascade(
    measured: list[str], expected: str | None, write: Write
) -> None:
    write({KIND: dict.fromkeys(measured, "mea flash")}, H200)
    names, order = _order(PLAIN)
    if expected is None:
        assert order == "the cascade's, nvidia_h200.json has no class near"
        assert names == CASCADE
    else:
        assert order == f"measured, nvidia_h200.json: {KIND} {expected}"
        assert names.index("mea") < names.index("flash")


@pytest.mark.parametrize(
    "other", [dict(Hq=64), dict(D=64), dict(Dv=64), dict(Sq=4), dict(dtype=torch.float32)]
)
def test_no_class_of_another_kind_stands_in(other: dict[str, Any], write: Write) -> None:
    write({KIND: {"rows=32 T=4096": "mea flash"}}, H200)
    assert "no class near" in _order(dataclasses.replace(PLAIN, **other))[1]


def test_largest_and_smallest_classes_are_open(write: Write) -> None:
    write({KIND: {"rows=512 T=131072": "mea flash", "rows=1 T=128": "mea flash"}}, H200)
    huge = dataclasses.replace(PLAIN, B=4096, T=1 << 20)
    tiny = dataclasses.replace(PLAIN, B=1, Hq=4, Hkv=1, T=3)
    assert _order(huge)[1].endswith("rows=512 T=131072")
    assert _order(tiny)[1].endswith("rows=1 T=128")


def test_float16_takes_the_order_of_bfloat16_if_it_has_none(write: Write) -> None:
    half = dataclasses.replace(PLAIN, dtype=torch.float16)
    write({KIND: {"rows=32 T=4096": "mea flash"}}, H200)
    assert _order(half)[1].endswith(f"{KIND} rows=32 T=4096")
    own = KIND.replace("bfloat16", "float16")
    write({KIND: {"rows=32 T=4096": "mea flash"}, own: {"rows=32 T=4096": "flash mea"}}, H200)
    assert _order(half) == (CASCADE, f"measured, nvidia_h200.json: {own} rows=32 T=4096")


# ------------------------------------------------------------------------------------- versions


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("library", ["torch", "triton", "kernels"])
def test_table_of_other_versions_is_ignored_with_one_warning(
    library: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write({KIND: {"rows=32 T=4096": "mea flash"}}, H200, **{library: "0.0.1"})
    names, order = _order(PLAIN)
    assert names == CASCADE
    assert order.startswith("the cascade's, nvidia_h200.json is ignored: measured with ")
    for device in (H200, H200._replace(index=1)):
        assert _order(dataclasses.replace(PLAIN, T=128), device)[0] == CASCADE
    (warning,) = _warnings(caplog)
    here = ranking.versions("decode")[library]
    assert f"{path} is ignored for decode: measured with {library} 0.0.1 (here {here})" in warning
    assert "python -m torch_attn_tiers tune" in warning


def test_library_on_one_side_only_makes_no_difference(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tier cannot run here, or was not measured; the order of the others is what it was."""
    write({KIND: {"rows=32 T=4096": "mea flash"}}, H200, **{"flashinfer-python": "0.7.2"})
    assert _order(PLAIN)[1].startswith("measured")
    here = {**ranking.versions("decode"), "flashinfer-python": "0.6.0"}
    monkeypatch.setattr(ranking, "versions", lambda op: here)
    _forget()
    assert "measured with flashinfer-python 0.7.2 (here 0.6.0)" in _order(PLAIN)[1]
    assert len(_warnings(caplog)) == 1


def test_versions_are_those_of_what_the_tiers_call(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"nvidia-cudnn-frontend": "1.32.0", "flashinfer-python": "0.7.2"}
    real = ranking.importlib.metadata.version
    monkeypatch.setattr(
        ranking.importlib.metadata, "version", lambda name: installed.get(name) or real(name)
    )
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert ranking.versions.__wrapped__("decode") == {
        **dict(ranking.library_versions()),
        **installed,
        "cudnn": "91900",
        "kernels": "1",
    }


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"ops": {"decode": {}}}', '{"ops": {"decode": {"versions": 3}}}']
)
def test_table_that_cannot_be_read_is_ignored_with_one_warning(
    text: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write({}, H200).write_text(text)
    for _ in range(2):
        names, order = _order(PLAIN)
        assert names == CASCADE and "nvidia_h200.json is ignored: cannot be read" in order
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("words", ["rows=32", "T=4096 rows=many", "32 4096"])
def test_table_with_a_class_that_is_none_is_ignored(words: str, write: Write) -> None:
    write({KIND: {words: "mea flash"}}, H200)
    assert "cannot be read" in _order(PLAIN)[1]


def test_table_of_other_operators_is_none_of_this_one(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write({}, H200).write_text(json.dumps({"ops": {"gdn_chunk_prefill": {}}}))
    assert _order(PLAIN)[1] == "the cascade's, no table for decode on NVIDIA H200"
    assert not _warnings(caplog)


def test_operator_that_tables_do_not_rank_has_the_cascades_order(write: Write) -> None:
    write({}, CPU)
    q, g, state = torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1), torch.zeros(1, 1, 16, 16)
    explanation = explain("gdn_decode", q, q, q, g, g, state, device="cpu")
    assert explanation.order == "the cascade's, no table for gdn_decode on cpu"


def test_threads_read_a_table_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write({KIND: {"rows=32 T=4096": "mea flash"}}, H200)
    reads: list[str] = []
    real = ranking._read
    monkeypatch.setattr(
        ranking, "_read", lambda device, op: (reads.append(op), real(device, op))[1]
    )
    threads = [threading.Thread(target=_order, args=(PLAIN,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == ["decode"]


# ------------------------------------------------------------------------------------- dispatch


def test_first_of_the_order_runs_and_the_record_says_by_what(
    write: Write, tiers: list[Invented]
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    a, b, c = tiers
    c.reason = "does not like this call"
    args = _qkv()
    record = _record(*args)
    assert record.tier == "b" and (a.builds, b.builds, c.builds) == (0, 1, 0)
    assert record.passed_over == {"c": ("does not like this call",)}
    assert record.order == f"measured, cpu.json: {SMALL} rows=4 T=128"
    assert _record(*args)[:2] == ("decode", "b")
    explanation = explain("decode", *args)
    assert _names(explanation)[:3] == ["c", "b", "a"] and explanation.chosen == "b"
    assert f"\norder: measured, cpu.json: {SMALL} rows=4 T=128" in str(explanation)


def test_log_says_by_which_order(
    write: Write, tiers: list[Invented], caplog: pytest.LogCaptureFixture
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    tiers[2].reason = "does not like this call"
    with caplog.at_level(logging.INFO, logger="torch_attn_tiers"):
        decode(*_qkv())
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("b runs decode float32")
    assert line.endswith(
        f"(passed over c: does not like this call; order: measured, cpu.json: {SMALL} rows=4 T=128)"
    )


def test_table_never_makes_a_tier_run_that_does_not_take_the_call(
    write: Write, tiers: list[Invented]
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a flash mea unfused"}})
    for tier in tiers:
        tier.reason = "no"
    assert _record(*_qkv()).tier == "unfused"
    with pytest.raises(torch_attn_tiers.TierNotEligibleError):
        decode(*_qkv(), tier="c")


def test_forced_and_disabled_tiers_are_so_whatever_the_order(
    write: Write, tiers: list[Invented]
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    record = _record(*_qkv(), tier="a")
    assert record.tier == "a" and not record.passed_over
    with torch_attn_tiers.options(disable="decode:c"):
        record = _record(*_qkv())
    assert record.tier == "b" and "disabled" in record.passed_over["c"][0]


def test_failed_build_leads_to_the_next_of_the_order(write: Write, tiers: list[Invented]) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    tiers[2].failure = RuntimeError("no such instruction")
    record = _record(*_qkv())
    assert record.tier == "b" and "no such instruction" in record.passed_over["c"][0]


def test_capture_waits_for_the_first_of_the_order(
    write: Write, tiers: list[Invented], monkeypatch: pytest.MonkeyPatch
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    args = _qkv()
    decode(*args, tier="a")
    monkeypatch.setattr("torch_attn_tiers.ops.decode.is_capturing", lambda device: True)
    record = _record(*args)
    assert (record.tier, record.cold) == ("a", True)
    assert record.passed_over == dict.fromkeys("cb", ("not ready in a CUDA graph capture",))


def test_slow_build_that_the_order_prefers_waits_to_be_asked_for(write: Write) -> None:
    slow = Invented("slow", slow_build=True)
    with register_tier(Invented("quick").tier, before="flash"):
        with register_tier(slow.tier, before="flash"):
            write({SMALL: {"rows=4 T=128": "slow quick"}})
            args = _qkv()
            record = _record(*args)
            assert record.tier == "quick" and "not prepared" in record.passed_over["slow"][0]
            assert torch_attn_tiers.prepare("decode", *args).chosen == "slow"
            assert _record(*args).tier == "slow"


def test_prepare_builds_the_first_of_the_order_only(write: Write, tiers: list[Invented]) -> None:
    write({SMALL: {"rows=4 T=128": "b c a"}})
    torch_attn_tiers.prepare("decode", *_qkv())
    assert [tier.builds for tier in tiers] == [0, 1, 0]


def test_tables_of_a_folder_that_is_named_come_first(
    write: Write, tiers: list[Invented], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    written = write({SMALL: {"rows=4 T=128": "c b a"}})
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setattr(ranking, "tables_folder", lambda: str(mine))
    _forget()
    assert _record(*_qkv()).tier == "c"  # it has none for this device
    text = written.read_text()
    (mine / written.name).write_text(text.replace("c b a", "b c a"))
    _forget()
    assert _record(*_qkv()).tier == "b"
    (mine / written.name).write_text(text.replace('"decode"', '"another"'))
    _forget()
    assert _record(*_qkv()).tier == "c"


def test_float16_goes_by_its_own_order_where_it_was_measured(write: Write) -> None:
    half = KIND.replace("bfloat16", "float16")
    write({KIND: {"rows=32 T=4096": "mea flash"}, half: {"rows=32 T=4096": "flash mea"}}, H200)
    for dtype, first in ((torch.bfloat16, "mea"), (torch.float16, "flash")):
        explanation = dataclasses.replace(PLAIN, dtype=dtype).explain(H200)
        order = [name for name in _names(explanation) if name in ("mea", "flash")]
        assert order[0] == first


def test_order_is_asked_for_when_the_plan_is_not_known(
    write: Write, tiers: list[Invented], monkeypatch: pytest.MonkeyPatch
) -> None:
    write({SMALL: {"rows=4 T=128": "c b a"}})
    asked: list[Any] = []

    def order_of(problem: Any, cascade: Any) -> ranking.Order:
        asked.append(problem)
        return ranking.order_of(problem, cascade)

    monkeypatch.setattr(dispatch, "order_of", order_of)
    args = _qkv()
    for _ in range(5):
        decode(*args)
    assert len(asked) == 1


def test_order_costs_less_than_five_microseconds(write: Write) -> None:
    write({KIND: {"rows=64 T=8192": "mea flash"}}, H200)
    problem = PLAIN.explain(H200).problem
    cascade = tiers_of("decode")
    times = timeit.repeat(lambda: ranking.order_of(problem, cascade), number=500, repeat=20)
    assert min(times) / 500 < 5e-6


# -------------------------------------------------------------------------------------- writing


def test_what_is_written_is_what_is_read(write: Write, tmp_path: pathlib.Path) -> None:
    problems = [
        dataclasses.replace(PLAIN, **change).explain(H200).problem
        for change in (dict(), dict(B=1), dict(D=64), dict(Sq=4, T=700))
    ]
    orders = {ranking.class_of(problem): ["mea", "flash"] for problem in problems}
    part = ranking.section(orders, {"versions": ranking.versions("decode"), "date": "today"})
    assert part["date"] == "today"
    (tmp_path / "nvidia_h200.json").write_text(json.dumps({"ops": {"decode": part}}))
    _forget()
    for problem in problems:
        order = ranking.order_of(problem, tiers_of("decode"))
        assert order.source == f"measured, nvidia_h200.json: {ranking.class_of(problem)}"
        names = [tier.name for tier in order.tiers]
        assert names.index("mea") < names.index("flash")


def test_tables_of_the_package_can_be_read() -> None:
    for path in ranking.FOLDER.glob("*.json"):
        for op, part in json.loads(path.read_text())["ops"].items():
            table = ranking._Table(path, op, part)
            assert table._measured and "kernels" in part["versions"]
