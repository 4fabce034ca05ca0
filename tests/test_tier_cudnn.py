"""The tier `cudnn` without cuDNN: a stand-in for the library, and devices that are not here."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attn_tiers
from tests import fake_libraries
from tests.conformance.calls import Call, Maker, poisoned_memory
from tests.fake_libraries import FakeGraph, FakeHandle, Faults, OrderedFakeGraph
from tests.library_cases import Arrangement, cudnn_arrangements
from tests.test_predicates import (
    DEVICES,
    FLOAT8,
    NO_LENGTHS,
    OLD,
    PLAIN,
    Asked,
    _meta,
    _reasons,
)
from torch_attn_tiers import ColdCaptureError, TierNotEligibleError, explain, register_tier
from torch_attn_tiers.tiers.decode import cudnn

decode = torch.ops.attn_tiers.decode
ARRANGEMENTS = list(cudnn_arrangements())
NVIDIA = [name for name in DEVICES if name.startswith("sm_")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Graphs without lengths are built, as after `prepare`: a test of its own is about that."""
    fake_libraries.forget()
    with torch_attn_tiers.options(jit=True):
        yield
    fake_libraries.forget()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that works."""
    fake_libraries.install_cudnn(monkeypatch)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tier runs here, by the stand-in. No lengths in threads: Triton's interpreter has one."""
    fake_libraries.install_cudnn(monkeypatch)
    with fake_libraries.on_a_cpu(monkeypatch, cudnn.TIER):
        yield


def _half(asked: Asked = PLAIN, **kwargs: Any) -> Asked:
    return dataclasses.replace(asked, **kwargs)


# ------------------------------------------------------------------------------ what it takes

TAKEN = {
    "decode step": PLAIN,
    "float16": _half(dtype=torch.float16),
    "int64 lengths": _half(lengths=torch.int64),
    "without lengths": NO_LENGTHS,
    "causal with lengths": _half(scalars={"is_causal": True}),
    "one head for all": _half(Hkv=1),
    "groups of 7": _half(Hq=28, Hkv=4),
    "head size 8": _half(D=8),
    "head sizes 192 and 128": _half(D=192, Dv=128),
    "head sizes 64 and 256": _half(D=64, Dv=256),
    "odd capacity": _half(T=333),
    "one key": _half(T=1),
    "positions before heads": _half(
        change=lambda t: t.update(key=_meta(4, 4096, 8, 128).transpose(1, 2))
    ),
    "interleaved keys and values": _half(
        change=lambda t: t.update(key=_meta(4, 8, 4096, 2, 128)[:, :, :, 0])
    ),
    "query out of a packed projection": _half(
        change=lambda t: t.update(
            query=_meta(4, 1, 40 * 128)[:, :, : 32 * 128].view(4, 1, 32, 128).transpose(1, 2)
        )
    ),
    "present": _half(overload="decode.present"),
    "any scale": _half(scalars={"scale": 0.3}),
}


@pytest.mark.parametrize("device", NVIDIA)
@pytest.mark.parametrize("name", TAKEN)
def test_takes_it_on_every_nvidia_gpu(name: str, device: str, library: None) -> None:
    explanation = TAKEN[name].explain(DEVICES[device])
    assert _reasons(explanation, "cudnn") == ""
    assert explanation.chosen == "cudnn"


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_takes_every_arrangement(arrangement: Arrangement, library: None) -> None:
    call = arrangement.make(Maker(torch.bfloat16))
    for name in NVIDIA:
        explanation = explain(call.op(), *call.args(), device=DEVICES[name], **call.scalars)
        assert explanation.chosen == "cudnn", str(explanation)


def _ran_by(*args: Any, **kwargs: Any) -> str:
    with torch_attn_tiers.record_dispatch() as records:
        decode(*args, **kwargs)
    return records[-1].tier


def test_cache_that_grows_builds_no_graph_at_each_step(runs: None) -> None:
    with torch_attn_tiers.options(jit=False):
        args = _step(lengths=None)
        verdicts = {verdict.name: verdict for verdict in explain("decode", *args).verdicts}
        assert "not prepared" in verdicts["cudnn"].reasons[0]
        assert _ran_by(*args) == "unfused"
        assert torch_attn_tiers.prepare("decode", *args).chosen == "cudnn"
        assert _ran_by(*args) == "cudnn"
        longer = _step(lengths=None, T=144)
        assert _ran_by(*longer) == "unfused" and _ran_by(*longer, tier="cudnn") == "cudnn"
        assert _ran_by(*longer) == "cudnn"
        assert _ran_by(*_step()) == "cudnn"  # one graph for all lengths


@pytest.mark.parametrize("sizes", [dict(B=65536), dict(Hq=65536)])
def test_more_rows_or_heads_than_a_grid_has_are_not_taken(
    sizes: dict[str, int], library: None
) -> None:
    explanation = _half(**sizes).explain(DEVICES["sm_90"])
    assert "at most 65535 batch rows and query heads" in _reasons(explanation, "cudnn")
    sizes = dict.fromkeys(sizes, 65535 // 8 * 8)
    assert _reasons(_half(**sizes).explain(DEVICES["sm_90"]), "cudnn") == ""


NOT_TAKEN = {
    "float32": (_half(dtype=torch.float32), "takes float16 and bfloat16, not float32"),
    "float8 caches": (FLOAT8, "takes caches in the query's dtype, not float8_e4m3fn"),
    "bool mask": (_half(mask=_meta(4, 1, 1, 4096, dtype=torch.bool)), "attn_mask"),
    "additive mask": (_half(mask=_meta(4, 1, 1, 4096)), "attn_mask"),
    "softcap": (_half(scalars={"softcap": 50.0}), "softcap"),
    "sinks": (_half(sinks=_meta(32, dtype=torch.float32)), "sinks"),
    "scores": (_half(overload="decode.qk"), "qk_matmul_output"),
    "right window": (
        _half(NO_LENGTHS, scalars={"right_window_size": 7}), "windows with nonpad_kv_seqlen only",
    ),
    "two rows": (_half(Sq=2, scalars={"is_causal": True}), "several query rows (Sq=2)"),
    "top-left causality": (_half(NO_LENGTHS, scalars={"is_causal": True}), "top-left causality"),
    "batch invariant": (_half(scalars={"batch_invariant": True}), "batch_invariant"),
    "head size 36": (_half(D=36), "key has head size 36"),
    "value head size 36": (_half(Dv=36), "value has head size 36"),
    "head size 264": (_half(D=264), "key has head size 264"),
    "value head size 264": (_half(D=64, Dv=264), "value has head size 264"),
    "query off by two bytes": (
        _half(change=lambda t: t.update(query=_meta(4 * 32 * 128 + 1)[1:].view(4, 32, 1, 128))),
        "query does not begin at a multiple of 16 bytes",
    ),
    "key off by two bytes": (
        _half(change=lambda t: t.update(key=_meta(4 * 8 * 524288 + 1)[1:].view(4, 8, 4096, 128))),
        "key does not begin at a multiple of 16 bytes",
    ),
    "value with an odd stride": (
        _half(change=lambda t: t.update(value=_meta(4, 8, 4096, 132)[..., :128])),
        "value has a stride of 132 elements",
    ),
    "key not dense": (
        _half(change=lambda t: t.update(key=_meta(4, 8, 128, 4096).transpose(2, 3))),
        "key is not dense in its last dimension",
    ),
    "expanded key": (
        _half(change=lambda t: t.update(key=_meta(4, 1, 4096, 128).expand(4, 8, 4096, 128))),
        "key is expanded",
    ),
    "no batch": (_half(B=0), "does not take empty inputs"),
    "no keys": (_half(T=0), "does not take empty inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_says_why_it_does_not_take_it(name: str, library: None) -> None:
    asked, words = NOT_TAKEN[name]
    for device in NVIDIA:
        explanation = asked.explain(DEVICES[device])
        reasons = _reasons(explanation, "cudnn")
        assert words in reasons and len(reasons.split()) >= 3 and "\n" not in reasons
        assert explanation.chosen not in (None, "cudnn")


def test_needs_an_nvidia_gpu(library: None) -> None:
    for device in (OLD, DEVICES["gfx942"]):
        assert "compute capability 8.0" in _reasons(PLAIN.explain(device), "cudnn")
    assert "compute capability 8.0" in str(explain("decode", *Maker(torch.float16).qkv().values()))


def test_a_cache_of_dimensions_of_size_one_is_aligned(library: None) -> None:
    """PyTorch leaves their strides open: 1 is no misalignment there."""
    key = _meta(4096, 128).as_strided((1, 1, 4096, 128), (1, 3, 128, 1))
    asked = _half(B=1, Hkv=1, change=lambda t: t.update(key=key, value=key))
    assert _reasons(asked.explain(DEVICES["sm_90"]), "cudnn") == ""


# ------------------------------------------------------------------------------------ the library


def _verdict() -> str:
    return _reasons(PLAIN.explain(DEVICES["sm_90"]), "cudnn")


def test_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.hide(monkeypatch, "cudnn")
    assert "the package nvidia-cudnn-frontend is not installed" == _verdict()


@pytest.mark.parametrize(
    ("frontend", "backend", "words"),
    [
        ("1.23.0", 91900, "needs nvidia-cudnn-frontend 1.24 or newer, 1.23.0 is installed"),
        ("1.24.0", 91900, ""),
        ("1.32.0", 91900, ""),
        ("2.0.0rc1", 100000, ""),
        ("1.32.0", 90201, "needs cuDNN 9.3.0 or newer, 9.2.1 is loaded"),
        ("1.32.0", 90300, ""),
        ("1.32.0", 91000, "cuDNN 9.10.0 is unusable"),
        ("1.32.0", 91001, "cuDNN 9.10.1 is unusable"),
        ("1.32.0", 91002, ""),
    ],
)
def test_versions(frontend: str, backend: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install_cudnn(monkeypatch, frontend, backend)
    assert words in _verdict() and bool(words) == bool(_verdict())
    assert (PLAIN.explain(DEVICES["sm_90"]).chosen == "cudnn") == (not words)


def test_import_that_fails_is_a_reason_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_libraries.install_cudnn(monkeypatch)
    tries: list[str] = []

    def broken(name: str) -> types.ModuleType:
        tries.append(name)
        raise OSError("libcudnn.so.9: cannot open\nshared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for _ in range(3):
            assert _verdict() == (
                "importing cudnn fails: OSError: libcudnn.so.9: cannot open shared object file"
            )
    assert tries == ["cudnn"] and len(caplog.records) == 1
    assert PLAIN.explain(DEVICES["sm_90"]).chosen == "flash"


def test_library_is_not_imported_for_what_the_tier_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_libraries.install_cudnn(monkeypatch)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imports {name}"))
    for asked, _ in NOT_TAKEN.values():
        asked.explain(DEVICES["sm_90"])
    PLAIN.explain(OLD)


def test_importing_the_package_imports_no_library() -> None:
    code = (
        "import sys, torch_attn_tiers, torch_attn_tiers.tiers.decode.cudnn, "
        "torch_attn_tiers.tiers.decode.xqa; "
        "assert not {'cudnn', 'flashinfer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------- it runs


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_agrees_with_the_oracle(arrangement: Arrangement, runs: None) -> None:
    call = arrangement.make(Maker(torch.float16))
    call.check("cudnn")
    with torch_attn_tiers.record_dispatch() as records:
        call.run()
    assert [record.tier for record in records] == ["cudnn"]


def _step(m: Maker | None = None, lengths: Any = (20, 0), **sizes: int) -> tuple[Any, ...]:
    m = m or Maker(torch.float16)
    tensors = m.qkv(**{"T": 32, "D": 64, **sizes}).values()
    return (*tensors, None if lengths is None else m.lengths(lengths))


def test_graph_says_what_cudnn_wants(runs: None) -> None:
    decode(*_step(), is_causal=True, scale=0.25)
    (graph,) = FakeGraph.built
    asked = graph.sdpa_arguments
    assert set(asked) == {
        "name", "q", "k", "v", "generate_stats", "attn_scale", "use_padding_mask", "seq_len_q",
        "seq_len_kv",
    }  # no causal flag, ever  # fmt: skip
    assert asked["attn_scale"] == 0.25
    for counts in (asked["seq_len_q"], asked["seq_len_kv"]):
        assert (counts.dim, counts.data_type) == ([2, 1, 1, 1], "INT32")
    assert graph.steps == [
        "validate", "build_operation_graph", "create_execution_plans", "check_support",
        "build_plans",
    ]  # fmt: skip
    assert (graph.out.dim, graph.out.stride, graph.out.output) == (
        [2, 4, 1, 64], [256, 64, 64, 1], True,
    )  # fmt: skip


@pytest.mark.parametrize("left", [0, 1, 7, 19])
def test_windows_once_they_are_verified(
    left: int, runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Maker(torch.float16)
    tensors = {**m.qkv(T=32, D=64), "nonpad_kv_seqlen": m.lengths([20, 3])}
    Call(tensors, {"left_window_size": left}).check("cudnn")
    (graph,) = FakeGraph.built
    assert graph.sdpa_arguments["diagonal_band_left_bound"] == left + 1
    assert graph.sdpa_arguments["diagonal_alignment"] == "BOTTOM_RIGHT"


def test_windows_that_a_release_has_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries.install_cudnn(monkeypatch, backend=91400)
    for T, words in (
        (1024, ""),
        (1040, "windows over more than 1024 keys are wrong in cuDNN 9.14"),
    ):
        explanation = _half(T=T, scalars={"left_window_size": 9}).explain(DEVICES["sm_90"])
        assert words in _reasons(explanation, "cudnn")
        assert (explanation.chosen == "cudnn") == (not words)
    without = _half(NO_LENGTHS, scalars={"right_window_size": 9}).explain(DEVICES["sm_90"])
    assert "windows with nonpad_kv_seqlen only" in _reasons(without, "cudnn")


@pytest.mark.parametrize(("is_causal", "seen"), [(False, 8), (True, 6)])
def test_length_of_an_internal_cache_is_a_number_of_the_host(
    is_causal: bool, seen: int, runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys, or with causality the past and one more; no kernel makes it."""
    given: list[list[int]] = []
    execute = FakeGraph.execute

    def watch(self: FakeGraph, buffers: Any, workspace: Any, *, handle: Any) -> None:
        given.append(buffers[cudnn._KEY_COUNTS].flatten().tolist())
        execute(self, buffers, workspace, handle=handle)

    monkeypatch.setattr(FakeGraph, "execute", watch)
    monkeypatch.setattr(cudnn, "RowGuard", lambda *_, **__: pytest.fail("counts on the device"))
    m = Maker(torch.float16)
    query, key, value = m.qkv(T=3, D=64).values()
    past = [m.normal(2, 2, 5, 64) for _ in range(2)]
    decode.present(query, key, value, *past, is_causal=is_causal)
    assert given == [[seen, seen]]


def test_empty_rows_are_zero_whatever_the_library_writes(runs: None) -> None:
    """The stand-in writes NaN there, as some versions do."""
    with poisoned_memory():
        y = decode(*_step(lengths=(0, 5)))
        none = decode(*_step(lengths=(-3, 0)))
    assert bool((y[0] == 0).all()) and bool(torch.isfinite(y[1]).all()) and bool((none == 0).all())


@pytest.mark.parametrize("lengths", [None, (7, 32)])
def test_buffers_in_order_where_the_frontend_takes_them(
    lengths: tuple[int, int] | None, runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn.FRONTEND.module(), "pygraph", OrderedFakeGraph)
    monkeypatch.setattr(OrderedFakeGraph, "orders", [])
    args = _step(lengths=lengths)
    y = decode(*args)
    assert OrderedFakeGraph.orders == [cudnn._TENSORS]
    torch.testing.assert_close(y, decode(*args, tier="unfused"), atol=0.01, rtol=0.01)


def test_graph_without_a_workspace(runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGraph, "workspace_size", 0)
    args = _step()
    y = decode(*args)
    torch.testing.assert_close(y, decode(*args, tier="unfused"), atol=0.01, rtol=0.01)


def test_calls_that_differ_do_not_share_a_graph(runs: None) -> None:
    """dtype, scale, strides, sizes: each is part of a graph."""
    m = Maker(torch.float16)
    query, key, value, lengths = _step(m)
    wide = m.normal(2, 2, 32, 128)
    packed = m.normal(2, 1, 10 * 64)[:, :, : 4 * 64].view(2, 1, 4, 64).transpose(1, 2)
    one_token = m.normal(2 * 64 + 192).as_strided(query.shape, (64, 64, 64, 1))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((query, key, value, lengths), {}),
        ((query.bfloat16(), key.bfloat16(), value.bfloat16(), lengths), {}),
        ((query, key, value, lengths), {"scale": 3 * 64**-0.5}),
        ((packed, key, value, lengths), {}),
        ((query, wide[..., :64], value, lengths), {}),
        ((query, key, wide[..., 64:], lengths), {}),
        ((query, key[:, :, :16], value[:, :, :16], lengths), {}),
        ((query, key.transpose(1, 2).contiguous().transpose(1, 2), value, lengths), {}),
        ((one_token, key, value, lengths), {}),
        ((query, key, value), {}),
        ((query[:1], key[:1], value[:1], lengths[:1]), {}),
    ]
    for count, (args, scalars) in enumerate(calls, 1):
        for _ in range(2):  # the second finds the first
            expected = decode(*args, tier="unfused", **scalars)
            actual = decode(*args, tier="cudnn", **scalars)
            torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)
        assert len(FakeGraph.built) == count


def test_default_scale_is_one_plan_however_it_is_said(runs: None) -> None:
    args = _step()
    for scale in (None, 64**-0.5, 0.125):
        decode(*args, scale=scale)
    assert len(FakeGraph.built) == 1


def test_build_that_fails_is_said_once_and_the_next_tier_runs(
    runs: None, caplog: pytest.LogCaptureFixture
) -> None:
    FakeGraph.faults = Faults(at_build=RuntimeError("no engine takes this"))
    args = _step()
    with caplog.at_level(logging.WARNING, logger="torch_attn_tiers"):
        for _ in range(2):
            with torch_attn_tiers.record_dispatch() as records:
                decode(*args)
            assert records[0].tier == "unfused"
    reason = "its build failed: RuntimeError: no engine takes this"
    assert records[0].passed_over["cudnn"] == (reason,)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(TierNotEligibleError, match="no engine takes this"):
        decode(*args, tier="cudnn")


def test_run_that_fails_is_raised(runs: None) -> None:
    args = _step()
    decode(*args)
    FakeGraph.faults = Faults(at_run=RuntimeError("illegal address"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal address"):
            decode(*args)


# --------------------------------------------------------------------------- threads and captures


def test_each_thread_has_a_handle_and_those_that_end_leave_theirs(runs: None) -> None:
    args = _step(lengths=None)
    decode(*args)
    barrier = threading.Barrier(3, timeout=20)

    def work() -> None:
        barrier.wait()
        for _ in range(3):
            decode(*args, tier="cudnn")
        barrier.wait()

    def round_of_threads() -> None:
        FakeGraph.executed.clear()
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handles = [handle for _, handle in FakeGraph.executed]
        assert len(set(map(id, handles))) == 3 and len(handles) == 9

    round_of_threads()
    made = len(FakeHandle.made)
    for _ in range(4):
        round_of_threads()
    assert len(FakeHandle.made) <= made + 1  # not three for each round
    assert len(FakeGraph.built) == 1


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to begin or end a capture."""

    def set_capturing(state: bool = True) -> None:
        for module in ("torch_attn_tiers.ops.decode", "torch_attn_tiers.tiers.decode.cudnn"):
            monkeypatch.setattr(f"{module}.is_capturing", lambda device: state)

    return set_capturing


def test_cold_capture_is_an_error_and_builds_nothing(runs: None, capturing: Any) -> None:
    args = _step()
    decode(*args, tier="unfused")
    capturing()
    assert explain("decode", *args).chosen is None
    with pytest.raises(ColdCaptureError, match=r"\(cudnn\)[\s\S]*prepare\('decode', ...\)"):
        decode(*args)
    assert not FakeGraph.built


@pytest.mark.parametrize("how", ["prepare", "call"])
def test_warm_capture_runs_the_plan(how: str, runs: None, capturing: Any) -> None:
    args = _step()
    if how == "prepare":
        torch_attn_tiers.prepare("decode", *args)
    else:
        decode(*args)
    capturing()
    with torch_attn_tiers.record_dispatch() as records:
        y = decode(*args)
    assert [(r.tier, r.cold, r.built) for r in records] == [("cudnn", False, False)]
    torch.testing.assert_close(y, decode(*args, tier="unfused"), atol=0.01, rtol=0.01)


def test_slower_kernel_that_is_ready_is_captured_cold(
    runs: None, capturing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.test_dispatch import Invented

    slower = Invented("slower")
    args = _step()
    with register_tier(slower.tier, before="mea"):
        decode(*args, tier="slower")
        capturing()
        with torch_attn_tiers.record_dispatch() as records:
            decode(*args)
        assert [(r.tier, r.cold) for r in records] == [("slower", True)]
        assert records[0].passed_over["cudnn"] == ("not ready in a CUDA graph capture",)
        assert any("slower is captured" in r.getMessage() for r in caplog.records)
        capturing(False)
        with torch_attn_tiers.record_dispatch() as records:
            decode(*args)
        assert records[0].tier == "cudnn"


def test_thread_without_a_handle_takes_the_spare_in_a_capture(runs: None, capturing: Any) -> None:
    args = _step(lengths=None)
    torch_attn_tiers.prepare("decode", *args)
    capturing()
    made = len(FakeHandle.made)
    errors: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=20)

    def work() -> None:
        try:
            barrier.wait()
            decode(*args)
        except BaseException as error:
            errors.append(error)
        barrier.wait()  # neither ends before both have run

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(FakeHandle.made) == made
    (error,) = errors  # one spare for two threads
    assert isinstance(error, ColdCaptureError) and "once in this thread" in str(error)


def test_graph_of_a_dropped_plan_goes_at_the_next_build(runs: None) -> None:
    """A plan may be dropped within a capture, where unloading its kernel would do harm."""
    args = _step()
    run = cudnn._build(explain("decode", *args, tier="cudnn").problem)
    graph = run.graph
    cudnn._DROPPED.clear()
    del run
    assert cudnn._DROPPED == [graph]
    decode(*args)
    assert not cudnn._DROPPED
