"""The tier `xqa` without FlashInfer: a stand-in for the library, and devices that are not here."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import TensorFacts, tensor_facts
from tests import fake_libraries
from tests.conformance.calls import Call, Maker, poisoned_memory
from tests.fake_libraries import FakeXqa, Faults
from tests.library_cases import Arrangement, xqa_arrangements
from tests.test_predicates import (
    DEVICES,
    FLOAT8,
    NO_LENGTHS,
    PLAIN,
    SCALED,
    Asked,
    _meta,
    _reasons,
)
from torch_attn_tiers import TierNotEligibleError, explain
from torch_attn_tiers.tiers.decode import xqa

decode = torch.ops.attn_tiers.decode
ARRANGEMENTS = list(xqa_arrangements())
TAKES = ("sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fake_libraries.forget()
    yield
    fake_libraries.forget()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeXqa:
    """A library that works, and a compiler."""
    return fake_libraries.install_xqa(monkeypatch)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeXqa]:
    """The tier runs here, by the stand-in."""
    fake = fake_libraries.install_xqa(monkeypatch)
    with fake_libraries.on_a_cpu(monkeypatch, xqa.TIER):
        yield fake


def _but(asked: Asked = PLAIN, **kwargs: Any) -> Asked:
    return dataclasses.replace(asked, **kwargs)


def _verdict(asked: Asked, device: str = "sm_90") -> str:
    return _reasons(asked.explain(DEVICES[device]), "xqa")


def _asked_for(asked: Asked = PLAIN, **scalars: Any) -> Asked:
    """The same with `tier=`, which is how an unprepared kernel is allowed."""
    return _but(asked, scalars={**asked.scalars, **scalars, "tier": "xqa"})


# ------------------------------------------------------------------------------ what it takes

TAKEN = {
    "decode step": PLAIN,
    "float16": _but(dtype=torch.float16),
    "int64 lengths": _but(lengths=torch.int64),
    "without lengths": NO_LENGTHS,
    "causal with lengths": _but(scalars={"is_causal": True}),
    "sinks": _but(sinks=_meta(32, dtype=torch.bfloat16)),
    "window": _but(scalars={"left_window_size": 1023}),
    "pages of 16": _but(T=4096 + 16),
    "present": _but(overload="decode.present"),
    "positions before heads": _but(
        change=lambda t: t.update(
            key=_meta(4, 4096, 8, 128).transpose(1, 2), value=_meta(4, 4096, 8, 128).transpose(1, 2)
        )
    ),
    "query out of a packed projection": _but(
        change=lambda t: t.update(
            query=_meta(4, 1, 40 * 128)[:, :, : 32 * 128].view(4, 1, 32, 128).transpose(1, 2)
        )
    ),
}


@pytest.mark.parametrize("device", TAKES)
@pytest.mark.parametrize("name", TAKEN)
def test_takes_it_if_asked(name: str, device: str, library: FakeXqa) -> None:
    assert _verdict(_asked_for(TAKEN[name]), device) == ""


@pytest.mark.parametrize("device", TAKES)
def test_takes_its_table_of_head_sizes_and_groups(device: str, library: FakeXqa) -> None:
    for size, group, dtype in itertools.product(
        (64, 128, 256), (1, 2, 4, 5, 8, 16), (torch.float16, torch.bfloat16)
    ):
        asked = _but(D=size, Hq=group * 8, dtype=dtype)
        verdict = _verdict(_asked_for(asked), device)
        assert verdict == "" or (size, dtype) == (64, torch.bfloat16)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS[::7], ids=str)
def test_takes_every_arrangement(arrangement: Arrangement, library: FakeXqa) -> None:
    call = arrangement.make(Maker(torch.float16 if arrangement.D == 64 else torch.bfloat16))
    scalars = {**call.scalars, "tier": "xqa"}
    explanation = explain(call.op(), *call.args(), device=DEVICES["sm_90"], **scalars)
    assert explanation.chosen == "xqa", str(explanation)


NOT_TAKEN = {
    "float32": (_but(dtype=torch.float32), "takes float16 and bfloat16, not float32"),
    "bfloat16, head size 64": (_but(D=64), "off by up to 6.6e-3"),
    "mask": (_but(mask=_meta(4, 1, 1, 4096, dtype=torch.bool)), "attn_mask"),
    "softcap": (_but(scalars={"softcap": 50.0}), "softcap"),
    "scores": (_but(overload="decode.qk"), "qk_matmul_output"),
    "two rows": (_but(Sq=2, scalars={"is_causal": True}), "several query rows (Sq=2)"),
    "top-left causality": (_but(NO_LENGTHS, scalars={"is_causal": True}), "top-left causality"),
    "right window": (_but(NO_LENGTHS, scalars={"right_window_size": 7}), "nonpad_kv_seqlen only"),
    "batch invariant": (_but(scalars={"batch_invariant": True}), "batch_invariant"),
    "head size 80": (_but(D=80), "takes head sizes 64, 128 and 256, not 80"),
    "two head sizes": (_but(Dv=64), "one head size for key and value, not 128 and 64"),
    "group of 3": (_but(Hq=24), "takes 1, 2, 4, 5, 8 and 16 query heads for each KV head, not 3"),
    "capacity 4100": (_but(T=4100), "a multiple of 16, not 4100"),
    "other strides for value": (
        _but(change=lambda t: t.update(value=_meta(4, 4096, 8, 128).transpose(1, 2))),
        "reads value by the strides of key",
    ),
    "strides that are no multiple of the head size": (
        _but(
            change=lambda t: t.update(
                key=_meta(4, 8, 4096, 192)[..., :128], value=_meta(4, 8, 4096, 192)[..., :128]
            )
        ),
        "multiples of the head size, not ",
    ),
    "query off by two bytes": (
        _but(change=lambda t: t.update(query=_meta(4 * 32 * 128 + 1)[1:].view(4, 32, 1, 128))),
        "query does not begin at a multiple of 16 bytes",
    ),
    "expanded cache": (
        _but(
            change=lambda t: t.update(
                key=_meta(4, 1, 4096, 128).expand(4, 8, 4096, 128),
                value=_meta(4, 1, 4096, 128).expand(4, 8, 4096, 128),
            )
        ),
        "key is expanded",
    ),
    "no keys": (_but(T=0), "does not take empty inputs"),
    "many rows": (_but(B=70000, T=16), "at most 65535 batch rows"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_says_why_it_does_not_take_it(name: str, library: FakeXqa) -> None:
    asked, words = NOT_TAKEN[name]
    for device in TAKES:
        reasons = _verdict(asked, device)
        assert words in reasons and "\n" not in reasons
        assert asked.explain(DEVICES[device]).chosen not in (None, "xqa")


@pytest.mark.parametrize(
    ("device", "words"),
    [("sm_80", "9.0, 10.x or 12.x, the device has 8.0"), ("gfx942", "needs an NVIDIA GPU")],
)
def test_devices_that_it_does_not_run_on(device: str, words: str, library: FakeXqa) -> None:
    assert words in _verdict(PLAIN, device)


def test_small_pages_of_wide_heads_are_not_for_compute_capability_12(library: FakeXqa) -> None:
    asked = _asked_for(_but(D=256, T=32))
    assert "pages of 32 is wrong" in _verdict(asked, "sm_120")
    assert _verdict(asked, "sm_90") == "" == _verdict(_asked_for(_but(D=256, T=64)), "sm_120")


# ------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(
    ("capacity", "page_size"),
    [(4096, 128), (64, 64), (192, 64), (96, 32), (48, 16), (16, 16), (17, None), (8, None)],
)
def test_page_size_is_the_largest_that_divides_the_capacity(
    capacity: int, page_size: int | None
) -> None:
    assert xqa.page_size_of(capacity) == page_size


def _facts(cache: torch.Tensor) -> TensorFacts:
    return tensor_facts(cache)


CACHES = {
    "heads first": torch.randn(3, 2, 64, 16),
    "positions first": torch.randn(3, 64, 2, 16).transpose(1, 2),
    "one head": torch.randn(3, 1, 64, 16),
    "one row": torch.randn(1, 2, 64, 16)[:, :, :32],
    "part of a longer cache": torch.randn(3, 2, 112, 16)[:, :, 16:80],
    "half of an interleaved cache": torch.randn(3, 64, 2, 2, 16)[:, :, 1].transpose(1, 2),
    "every other row": torch.randn(6, 2, 64, 16)[::2],
    "every other position": torch.randn(3, 2, 128, 16)[:, :, ::2],
    "heads of a larger cache": torch.randn(3, 7, 64, 16)[:, 2:4],
}


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("name", CACHES)
def test_pages_by_overlapping_strides_are_the_cache(name: str, page_size: int) -> None:
    cache = CACHES[name]
    B, heads, T, D = cache.shape
    pages = xqa.pages_of(_facts(cache), page_size)
    assert pages.per_row == T // page_size
    view = cache.as_strided(pages.size, pages.stride)  # fits into the storage, or raises
    assert view.data_ptr() == cache.data_ptr()
    for b, j in itertools.product(range(B), range(pages.per_row)):
        page = view[b * pages.batch_step + j * pages.page_step]
        expected = cache[b, :, j * page_size : (j + 1) * page_size].transpose(0, 1)
        assert torch.equal(page, expected)


def test_pages_of_common_layouts_are_as_few_as_can_be() -> None:
    first = xqa.pages_of(_facts(torch.empty(3, 2, 64, 16)), 16)
    assert (first.stride, first.batch_step, first.page_step) == ((256, 16, 1024, 1), 8, 1)
    last = xqa.pages_of(_facts(torch.empty(3, 64, 2, 16).transpose(1, 2)), 16)
    assert (last.stride, last.batch_step, last.page_step) == ((512, 32, 16, 1), 4, 1)


# ------------------------------------------------------------------------- library and compiler


def test_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.hide(monkeypatch, "flashinfer")
    assert "the package flashinfer-python is not installed" == _verdict(PLAIN)


@pytest.mark.parametrize(
    ("version", "asked", "words"),
    [
        ("0.5.3", PLAIN, "needs flashinfer-python 0.6 or newer, 0.5.3 is installed"),
        ("0.6.0", PLAIN, ""),
        ("0.6.16", _but(scalars={"left_window_size": 99}), "race before flashinfer-python 0.6.17"),
        ("0.6.17", _but(scalars={"left_window_size": 99}), ""),
        ("0.6.16.post1", _but(Hq=128), "groups of more than 8"),
        ("0.7.2.post1", _but(Hq=128), ""),
    ],
)
def test_versions(version: str, asked: Asked, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install_xqa(monkeypatch, version)
    reasons = _verdict(_asked_for(asked))
    assert words in reasons and bool(words) == bool(reasons)


def test_missing_compiler_is_a_reason(library: FakeXqa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xqa, "_has_nvcc", lambda: False)
    monkeypatch.setattr(xqa, "_has_built_kernels", lambda: False)
    assert "needs nvcc to build its kernel" in _verdict(_asked_for())
    monkeypatch.setattr(xqa, "_has_built_kernels", lambda: True)
    assert _verdict(_asked_for()) == ""
    monkeypatch.undo()
    fake_libraries.forget()


def test_compiler_is_looked_for_where_the_library_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    real = xqa.os.path.exists
    monkeypatch.setattr(
        "os.path.exists", lambda path: not str(path).startswith("/usr/local/cuda") and real(path)
    )
    assert not xqa._has_nvcc.__wrapped__()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert xqa._has_nvcc.__wrapped__()


def test_nothing_is_imported_before_a_build(
    library: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the library takes seconds, and the tier would not be prepared anyway."""
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imports {name}"))
    assert "not prepared" in _verdict(PLAIN)
    for asked, _ in NOT_TAKEN.values():
        asked.explain(DEVICES["sm_90"])


def test_import_that_fails_is_a_reason(
    runs: FakeXqa, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Any:
        raise ImportError("undefined symbol: cudaGraph")

    monkeypatch.setattr("importlib.import_module", broken)
    args = _step()
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        assert torch_attn_tiers.prepare("decode", *args).chosen == "unfused"
        assert torch_attn_tiers.prepare("decode", *_step(T=64)).chosen == "unfused"
    text = str(explain("decode", *args))
    assert "importing flashinfer.xqa fails: ImportError: undefined symbol" in text
    assert sum("flashinfer-python is not used" in r.getMessage() for r in caplog.records) == 1


# ---------------------------------------------------------------------------------- its builds


def _step(lengths: Any = (20, 0), **sizes: int) -> tuple[Any, ...]:
    m = Maker(torch.float16)
    tensors = m.qkv(**{"T": 32, "D": 64, **sizes}).values()
    return (*tensors, None if lengths is None else m.lengths(lengths))


def _ran(*args: Any, **kwargs: Any) -> str:
    with torch_attn_tiers.record_dispatch() as calls:
        decode(*args, **kwargs)
    return calls[0].tier


def test_is_not_built_unasked(runs: FakeXqa) -> None:
    args = _step()
    assert _ran(*args) == "unfused" and not runs.kernels
    (verdict, *_) = explain("decode", *args).verdicts
    assert "not prepared" in verdict.reasons[0]


@pytest.mark.parametrize("how", ["prepare", "tier", "jit"])
def test_is_built_when_asked(how: str, runs: FakeXqa) -> None:
    args = _step()
    assert _ran(*args) == "unfused"
    if how == "prepare":
        assert torch_attn_tiers.prepare("decode", *args).chosen == "xqa"
    elif how == "tier":
        assert _ran(*args, tier="xqa") == "xqa"
        torch_attn_tiers.prepare("decode", *args)
    else:
        with torch_attn_tiers.options(jit=True):
            assert _ran(*args) == "xqa"
        torch_attn_tiers.prepare("decode", *args)
    assert len(runs.kernels) == 1
    assert _ran(*args) == "xqa"


def test_a_kernel_that_is_loaded_serves_other_problems(runs: FakeXqa) -> None:
    """Batch, scale, lengths and the number of pages are no part of it."""
    torch_attn_tiers.prepare("decode", *_step())
    for args in (_step(B=1, lengths=[3]), _step(T=96), _step(lengths=None), _step(Hq=2, Hkv=1)):
        assert _ran(*args) == "xqa"
    assert len(runs.kernels) == 1
    for args in (_step(T=64), _step(D=128), _step(Hkv=1), tuple(
        t.bfloat16() if t.is_floating_point() else t for t in _step()
    )):  # fmt: skip
        assert _ran(*args) == "unfused"
    assert _ran(*_step(), left_window_size=3) == "unfused"


def test_build_that_fails_is_said_once_and_the_next_tier_runs(
    runs: FakeXqa, caplog: pytest.LogCaptureFixture
) -> None:
    runs.faults = Faults(at_build=RuntimeError("nvcc: error"))
    args = _step()
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for _ in range(2):
            assert torch_attn_tiers.prepare("decode", *args).chosen == "unfused"
            assert _ran(*args) == "unfused"
    assert len(caplog.records) == 1 and "nvcc: error" in caplog.records[0].getMessage()
    with pytest.raises(TierNotEligibleError, match="nvcc: error"):
        decode(*args, tier="xqa")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_makes_no_difference(dtype: torch.dtype, runs: FakeXqa) -> None:
    args = _step()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch_attn_tiers.prepare("decode", *args).chosen == "xqa"
    finally:
        torch.set_default_dtype(before)
    assert _ran(*args) == "xqa"


def test_kernel_that_is_wrong_is_not_used(runs: FakeXqa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_libraries, "_attention", lambda query, *_: query * 0)
    assert torch_attn_tiers.prepare("decode", *_step()).chosen == "unfused"
    assert "is wrong for equal keys" in str(explain("decode", *_step()))


def test_run_that_fails_is_raised(runs: FakeXqa) -> None:
    args = _step()
    torch_attn_tiers.prepare("decode", *args)
    runs.faults = Faults(at_run=RuntimeError("illegal address"))
    with pytest.raises(RuntimeError, match="illegal address"):
        decode(*args)


def test_kernel_of_another_device_is_a_reason(
    library: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xqa.KERNELS, "loaded_on", lambda kernel: 0)
    assert _verdict(PLAIN) == ""
    second = DEVICES["sm_90"]._replace(index=1)
    assert "for one device in a process, which is cuda:0" in _reasons(PLAIN.explain(second), "xqa")


# -------------------------------------------------------------------------------------- it runs


@pytest.mark.parametrize("arrangement", ARRANGEMENTS[::5], ids=str)
def test_agrees_with_the_oracle(arrangement: Arrangement, runs: FakeXqa) -> None:
    arrangement.make(Maker(torch.float16)).check("xqa")


def test_float8_caches_are_not_for_the_hopper_kernel(library: FakeXqa) -> None:
    assert "rounds the query too to float8 on compute capability 9.0" in _verdict(
        _asked_for(FLOAT8), "sm_90"
    )
    assert FLOAT8.explain(DEVICES["sm_90"]).chosen == "flash"


@pytest.mark.parametrize("device", ["sm_100", "sm_120"])
def test_float8_caches_are_taken_where_the_query_keeps_its_bits(
    device: str, library: FakeXqa
) -> None:
    one = _but(SCALED, v_scale=SCALED.k_scale)
    for asked in (FLOAT8, one, _but(one, scalars={"left_window_size": 99}), _but(one, D=256)):
        assert _verdict(_asked_for(asked), device) == ""
    for asked, words in (
        (SCALED, "takes one v_scale for all heads, not one for each"),
        (_but(SCALED, k_scale=SCALED.v_scale), "takes one k_scale for all heads"),
    ):
        assert words in _verdict(_asked_for(asked), device)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kinds", ["none none", "one one", "one none", "none one"])
@pytest.mark.parametrize("lengths", [(20, 0, 32), None])
def test_float8_caches_agree_with_the_oracle(
    lengths: Any, kinds: str, scale: float | None, runs: FakeXqa
) -> None:
    m = Maker(torch.float16)
    tensors: dict[str, Any] = m.qkv(B=3, T=32, D=64, cache_dtype=torch.float8_e4m3fn)
    if lengths is not None:
        tensors["nonpad_kv_seqlen"] = m.lengths(lengths)
    for name, kind, value in zip(("k_scale", "v_scale"), kinds.split(), (0.37, 2.9)):
        tensors[name] = m.scales(value) if kind == "one" else None
    tensors["sinks"] = m.normal(4)
    Call(tensors, {} if scale is None else {"scale": scale}).check("xqa")
    if scale is None and tensors["k_scale"] is not None:  # its kernel reads the scale itself
        assert runs.calls[-1]["q_scale"].data_ptr() == tensors["k_scale"].data_ptr()


def test_float8_rows_without_keys_are_zero_whatever_the_scale(runs: FakeXqa) -> None:
    m = Maker(torch.float16)
    tensors: dict[str, Any] = m.qkv(T=32, D=64, cache_dtype=torch.float8_e4m3fn)
    tensors.update(nonpad_kv_seqlen=m.lengths([0, 0]), v_scale=m.scales(math.nan))
    Call(tensors).check("xqa")


def test_kernels_over_float8_are_kernels_of_their_own(runs: FakeXqa) -> None:
    query, key, value, lengths = _step()
    torch_attn_tiers.prepare("decode", query, key, value, lengths)
    caches = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    assert _ran(query, *caches, lengths) == "unfused"
    torch_attn_tiers.prepare("decode", query, *caches, lengths)
    assert _ran(query, *caches, lengths) == "xqa" and len(runs.kernels) == 2


def test_empty_rows_are_zero_whatever_the_library_leaves(runs: FakeXqa) -> None:
    with poisoned_memory():
        y = decode(*_step(lengths=(0, 5)), tier="xqa")
        none = decode(*_step(lengths=(-3, 0)), tier="xqa")
    assert bool((y[0] == 0).all()) and bool(torch.isfinite(y[1]).all()) and bool((none == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("left", [-1, 0, 7])
def test_sinks_and_windows(left: int, dtype: torch.dtype, runs: FakeXqa) -> None:
    m = Maker(torch.float16)
    tensors = {**m.qkv(T=32, D=64), "nonpad_kv_seqlen": m.lengths([20, 3]),
               "sinks": m.normal(4, dtype=dtype)}  # fmt: skip
    Call(tensors, {"left_window_size": left}).check("xqa")
    call = runs.calls[-1]
    assert call["window"] == left + 1 and call["sinks"].shape == (2, 2)


@pytest.mark.parametrize(("is_causal", "seen"), [(False, 32), (True, 30)])
def test_length_of_an_internal_cache_is_a_number_of_the_host(
    is_causal: bool, seen: int, runs: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xqa, "RowGuard", lambda *_, **__: pytest.fail("counts on the device"))
    m = Maker(torch.float16)
    query, key, value = m.qkv(T=3, D=64).values()
    past = [m.normal(2, 2, 29, 64) for _ in range(2)]
    decode.present(query, key, value, *past, is_causal=is_causal, tier="xqa")
    assert runs.calls[-1]["seq_lens"].view(torch.int32).tolist() == [[seen], [seen]]


def test_caches_are_not_copied(runs: FakeXqa) -> None:
    query, key, value, lengths = _step()
    decode(query, key, value, lengths, tier="xqa")
    call = runs.calls[-1]
    assert call["k_cache"].data_ptr() == key.data_ptr()
    assert call["q"].data_ptr() == query.data_ptr()
    assert call["table"].tolist() == [[0], [2]]


def test_plans_of_a_layout_share_a_page_table(
    runs: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xqa, "PAGE_TABLES", xqa.PageTables())  # plans of other tests keep theirs

    def plan(B: int, T: int = 32) -> Any:
        args = _step(B=B, T=T, lengths=[T] * B)
        return xqa.TIER.build(explain("decode", *args, tier="xqa").problem)

    first, larger = plan(3), plan(5)
    assert first.table.tensors[0].shape == (4, 1) and first.table_rows.shape == (3, 1)
    assert larger.table.tensors[0].shape == (8, 1)
    assert plan(8).table is larger.table and plan(2).table is larger.table
    assert plan(2).table_rows.tolist() == larger.table_rows[:2].tolist()
    assert plan(2, T=48).table is not larger.table
    device, pages = larger.problem.device, larger.pages
    assert xqa.PAGE_TABLES.rows_of(device, pages, 2) is larger.table
    for other in (
        xqa.PAGE_TABLES.rows_of(device._replace(index=device.index + 1), pages, 2),
        xqa.PAGE_TABLES.rows_of(device, pages._replace(page_step=pages.page_step + 1), 2),
        xqa.PAGE_TABLES.rows_of(device, pages._replace(batch_step=pages.batch_step + 1), 2),
    ):
        assert other is not larger.table
    gone = weakref.ref(larger.table)
    assert gone() is not None
    del larger
    assert gone() is None  # with the last plan that has it


def test_loaded_kernel_does_not_wait_for_one_that_is_being_built(
    runs: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_attn_tiers.prepare("decode", *_step())
    building, may_end = threading.Event(), threading.Event()

    def slow(*args: Any) -> list[torch.Tensor]:
        building.set()
        assert may_end.wait(60)
        return []

    monkeypatch.setattr(xqa, "_try", slow)
    other = explain("decode", *_step(T=64), tier="xqa").problem
    thread = threading.Thread(target=xqa.TIER.build, args=(other,))
    thread.start()
    assert building.wait(60)
    loaded = explain("decode", *_step(B=3, lengths=[32] * 3), tier="xqa").problem
    xqa.TIER.build(loaded)  # a new problem of a kernel that is there
    may_end.set()
    thread.join()


def test_semaphores_and_scratch_belong_to_a_stream(
    runs: FakeXqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter([11, 22, 11, 22])
    monkeypatch.setattr(xqa, "current_stream", lambda device: next(streams))
    args = _step()
    for _ in range(4):
        decode(*args, tier="xqa")
    one, two, three, four = (
        (call["semaphores"].data_ptr(), call["scratch"].data_ptr()) for call in runs.calls[-4:]
    )
    assert one == three and two == four and not set(one) & set(two)


def test_larger_batches_get_more_semaphores(runs: FakeXqa) -> None:
    for B in (1, 40, 2):
        decode(*_step(B=B, lengths=[5] * B), tier="xqa")
        assert runs.calls[-1]["semaphores"].numel() >= 2 * B


# ------------------------------------------------------------------------------------ captures


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to begin or end a capture."""

    def set_capturing(state: bool = True) -> None:
        for module in ("torch_attn_tiers.ops.decode", "torch_attn_tiers.tiers.decode.xqa"):
            monkeypatch.setattr(f"{module}.is_capturing", lambda device: state)

    return set_capturing


class _Arena:
    """Counts what captured calls are given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def for_captured_call(self, count: int) -> torch.Tensor:
        self.given.append(torch.zeros(count, dtype=torch.int32))
        return self.given[-1]

    def release_captured(self) -> None:
        self.given.clear()


def test_every_captured_call_has_semaphores_and_scratch_of_its_own(
    runs: FakeXqa, capturing: Any
) -> None:
    args = _step()
    torch_attn_tiers.prepare("decode", *args)
    memory = xqa.working_memory(explain("decode", *args).problem.device)
    memory._arena = arena = _Arena()
    capturing()
    kept = [decode(*args) for _ in range(2)]
    first, second = runs.calls[-2:]
    for name in ("semaphores", "scratch"):
        assert first[name].data_ptr() != second[name].data_ptr()
    assert len(arena.given) == 2 and len(kept) == 2
    torch_attn_tiers.release_captured_plans()
    assert not arena.given


def test_cold_kernel_is_never_built_in_a_capture(runs: FakeXqa, capturing: Any) -> None:
    args = _step()
    capturing()
    assert _ran(*args) == "unfused"  # not prepared: no kernel tier takes the call
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match="prepare"):
        decode(*args, tier="xqa")
    with torch_attn_tiers.options(jit=True), pytest.raises(torch_attn_tiers.ColdCaptureError):
        decode(*args)
    assert not runs.kernels


def test_loaded_kernel_without_a_plan_is_cold_in_a_capture(runs: FakeXqa, capturing: Any) -> None:
    """Its page table would lie in the graph's pool. Nothing else stands in for it."""
    torch_attn_tiers.prepare("decode", *_step())
    other = _step([3, 0, 5], B=3)
    capturing()
    assert _ran(*_step()) == "xqa"
    with pytest.raises(torch_attn_tiers.ColdCaptureError, match="prepare"):
        decode(*other)
    capturing(False)
    assert _ran(*other) == "xqa"


def test_scratch_is_large_enough_for_the_widest_kernel() -> None:
    """Partial rows of half precision, with a maximum and a sum each, one set for each block."""
    device = DEVICES["sm_90"]
    for B, Hkv, T in itertools.product((1, 3, 16, 132), (1, 8), (256, 131072)):
        splits = min(max(1, device.multiprocessors // (B * Hkv)), math.ceil(T / 256))
        blocks = B * Hkv * splits if splits > 1 else 0
        assert 2 * blocks * 16 * (256 * 2 + 8) <= xqa.scratch_bytes(device)
