"""The launches around a library's prefill: what is packed, what is finished, in the interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from csrc_free_ops.facts import DeviceFacts, device_facts, tensor_facts
from csrc_free_ops.reference.gdn import compact_starts, l2norm

pytest.importorskip("triton")

from csrc_free_ops.gdn.pack import Packed, PackPlan, plan_pack

Tensors = dict[str, Any]
HQ, HV, SIZE = 2, 4, 16


def _tokens(T: int, B: int = 1, dtype: torch.dtype = torch.float16, **changes: Any) -> Tensors:
    return {
        "q": torch.randn(B, T, HQ, SIZE).to(dtype),
        "k": torch.randn(B, T, HQ, SIZE).to(dtype),
        "v": torch.randn(B, T, HV, SIZE).to(dtype),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
        **changes,
    }


def _plan(tokens: Tensors, cu: torch.Tensor | None = None, **changes: Any) -> PackPlan:
    options: dict[str, Any] = {
        "cu_seqlens_dtype": None if cu is None else cu.dtype,
        "sequences": tokens["q"].shape[0] if cu is None else cu.shape[0] - 1,
        "qk_l2norm": False,
        "initial_state_dtype": None,
        "output_final_state": True,
        "has_h_starts": False,
        **changes,
    }
    facts = [tensor_facts(tokens[name]) for name in ("q", "k", "v", "g", "beta")]
    return plan_pack(*facts, device_facts("cpu"), **options)


def _pack(
    tokens: Tensors,
    cu: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    **changes: Any,
) -> Packed:
    plan = _plan(tokens, cu, has_h_starts=starts is not None, **changes)
    return plan.pack(*tokens.values(), cu, starts)


def _check(packed: Packed, tokens: Tensors, norm: bool = False, end: int | None = None) -> None:
    """Up to `end` what was given, dense; zeros after it."""
    for name, got in packed._asdict().items():
        assert got.is_contiguous() and got.data_ptr() % 16 == 0, name
    wanted = {name: x.flatten(0, 1) for name, x in tokens.items()}
    if norm:
        wanted.update(q=l2norm(wanted["q"]), k=l2norm(wanted["k"]))
    for name in ("q", "k", "v"):
        got, eps = getattr(packed, name), torch.finfo(wanted[name].dtype).eps
        tolerance = dict(rtol=eps, atol=eps) if norm and name != "v" else dict(rtol=0.0, atol=0.0)
        torch.testing.assert_close(got[:end], wanted[name][:end], **tolerance)
    torch.testing.assert_close(packed.decay[:end], wanted["g"][:end].float().exp())
    torch.testing.assert_close(packed.strength[:end], wanted["beta"][:end].float())
    if end is not None:
        for rows in (packed.q, packed.k, packed.v, packed.strength):
            assert not rows[end:].any()
        assert bool((packed.decay[end:] == 1).all())


# ------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_tokens_of_sequences_are_packed_and_the_rest_is_zero(
    cu_dtype: torch.dtype, dtype: torch.dtype, norm: bool
) -> None:
    tokens = _tokens(75, dtype=dtype)
    for x in tokens.values():
        x[:, 70:] = math.nan
    cu = torch.tensor([0, 65, 65, 70], dtype=cu_dtype)
    packed = _pack(tokens, cu, qk_l2norm=norm)
    _check(packed, tokens, norm, end=70)
    assert packed.bounds.dtype is torch.int64 and packed.bounds.tolist() == [0, 65, 65, 70]


def test_norms_of_zero_and_large_vectors() -> None:
    tokens = _tokens(20)
    tokens["q"][:, :5], tokens["k"][:, 5:10] = 0, 0
    tokens["k"][:, 10:] = 6e4
    _check(_pack(tokens, qk_l2norm=True), tokens, norm=True)


def test_slices_of_a_packed_projection_and_any_strides() -> None:
    packed = torch.randn(1, 40, 2 * HQ + HV + 1, SIZE).half()
    gates = torch.rand(1, 40, 3 * HV)
    tokens = {
        "q": packed[:, :, :HQ],
        "k": packed[:, :, HQ : 2 * HQ],
        "v": torch.randn(1, SIZE, HV, 40).half().permute(0, 3, 2, 1),
        "g": gates[..., :HV],
        "beta": gates[..., ::3],
    }
    _check(_pack(tokens, torch.tensor([0, 40])), tokens)
    _check(_pack(tokens), tokens)


def test_expanded_gates_of_the_inputs_dtype() -> None:
    gate = -torch.rand(1, 30, 1).bfloat16().expand(1, 30, HV)
    tokens = _tokens(30, dtype=torch.bfloat16, g=gate, beta=-gate)
    _check(_pack(tokens), tokens)


def test_rows_of_a_batch_are_sequences() -> None:
    tokens = _tokens(21, B=3)
    tokens["q"] = tokens["q"].transpose(1, 2).contiguous().transpose(1, 2)
    starts = torch.full((4,), -1)
    packed = _pack(tokens, starts=starts)
    _check(packed, tokens)
    assert packed.bounds.tolist() == [0, 21, 42, 63] and starts.tolist() == [0] * 4
    starts = torch.full((3,), -1)
    _pack(_tokens(130, B=2), starts=starts)
    assert starts.tolist() == [0, 2, 4]


def test_what_can_be_used_as_it_is_is_not_copied() -> None:
    """One row without cu_seqlens: nothing follows its tokens that the library could read."""
    tokens = _tokens(50)
    plan = _plan(tokens)
    assert plan.copies == (False, False, False) and len(plan.launches) == 1
    packed = plan.pack(*tokens.values(), None, None)
    _check(packed, tokens)
    for name in ("q", "k", "v"):
        assert getattr(packed, name).data_ptr() == tokens[name].data_ptr()
    assert _plan(tokens, qk_l2norm=True).copies == (True, True, False)
    shifted = torch.empty(tokens["v"].numel() + 1).half()[1:].view(tokens["v"].shape)
    assert _plan({**tokens, "v": shifted}).copies == (False, False, True)
    assert _plan(_tokens(25, B=2)).copies == (True, True, True)
    assert _plan(tokens, torch.tensor([0, 50])).copies == (True, True, True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_token_that_could_spread_is_zero_and_marked_by_its_strength(
    name: str, bad: float
) -> None:
    tokens = _tokens(40)
    tokens[name][0, 17, 1, 3] = bad
    packed = _pack(tokens, torch.tensor([0, 17, 40]))
    for rows in (packed.q, packed.k, packed.v, packed.decay):
        assert bool(rows.isfinite().all())
    heads = [2, 3] if name == "k" else [1]  # value heads that use the head of k
    marked = packed.strength.isnan().nonzero().tolist()
    assert marked == [[17, head] for head in heads]
    others = torch.arange(40) != 17
    assert torch.equal(packed.v[others], tokens["v"][0, others])


BOUNDS = {
    "none": [0],
    "one": [0, 70],
    "empty ones": [0, 0, 64, 64, 129, 200, 200],
    "many": list(range(0, 1200 * 64, 64)),
}


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "none"])
def test_starts_of_checkpoints(name: str) -> None:
    cu = torch.tensor(BOUNDS[name])
    T = int(cu[-1])
    gates = {n: torch.rand(1, 1, 1).expand(1, T, 1) for n in ("g", "beta")}
    rows = torch.zeros(1, 1, 1, 1).half().expand(1, T, 1, 1)
    starts = torch.full((len(cu),), -1)
    # By the program of bounds alone: the others have nothing to do with it.
    plan = _plan({"q": rows, "k": rows, "v": rows, **gates}, cu, has_h_starts=True)
    plan.launches[0].grid = (1, 1, 1)
    packed = plan.pack(rows, rows, rows, *gates.values(), cu, starts)
    assert torch.equal(packed.bounds, cu) and torch.equal(starts, compact_starts(cu))


@pytest.mark.parametrize(
    "given, bounds",
    [
        ([0, 9, 5], [0, 9, 9]),
        ([0, 5, 200], [0, 5, 70]),
        ([-7, 5, 9], [0, 5, 9]),
        ([0, 70, 0, 70, 0, 70], [0, 70, 70, 70, 70, 70]),
        ([70, 0], [70, 70]),
        ([10**6, -5], [70, 70]),
    ],
)
def test_bounds_lie_within_the_tokens_and_do_not_decrease(
    given: list[int], bounds: list[int]
) -> None:
    starts = torch.full((len(given),), -1)
    packed = _pack(_tokens(70), torch.tensor(given), starts)
    assert packed.bounds.tolist() == bounds
    assert starts.tolist() == compact_starts(torch.tensor(bounds)).tolist()
    assert int(starts[-1]) <= 70 // 64


# ------------------------------------------------------------------------------------ finishing


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_final", [True, False])
def test_what_the_library_leaves_is_written_and_nothing_else(
    has_final: bool, state_dtype: torch.dtype | None
) -> None:
    T, wide = 90, SIZE * 8  # states of a size that the kernel takes in whole pieces
    cu = torch.tensor([0, 0, 40, 40, 75, 75])
    plan = _plan(
        _tokens(T, v=torch.randn(1, T, HV, wide).half()), cu, initial_state_dtype=state_dtype,
        output_final_state=has_final,
    )  # fmt: skip
    out = torch.full((1, T, HV, wide), 3.0).half()
    out[:, 75:] = math.nan
    shape = (5, HV, wide, SIZE)
    final = torch.full(shape, -1.0) if has_final else None
    state = None if state_dtype is None else torch.randn(shape).to(state_dtype)
    plan.finish(cu, state, out, final)
    assert bool((out[:, :75] == 3).all()) and not out[:, 75:].any()
    if final is not None:
        for i in range(5):
            if i in (0, 2, 4):
                wanted = torch.zeros(shape[1:]) if state is None else state[i].float()
                assert torch.equal(final[i], wanted)
            else:
                assert bool((final[i] == -1).all())


def test_nothing_is_launched_afterwards_where_all_rows_have_tokens() -> None:
    plan = _plan(_tokens(20, B=2))
    assert len(plan.launches) == 1
    plan.finish(torch.tensor([0, 20, 40]), None, torch.empty(0), None)  # touches nothing


def test_grids_follow_from_shapes_and_the_device_alone() -> None:
    tokens = {n: x.to("meta") for n, x in _tokens(1000).items()}
    facts = [tensor_facts(x) for x in tokens.values()]
    plans = [
        plan_pack(
            *facts, device, cu_seqlens_dtype=torch.int32, sequences=sequences, qk_l2norm=True,
            initial_state_dtype=None, output_final_state=True, has_h_starts=False,
        )
        for device, sequences in itertools.product(
            (DeviceFacts.of("sm_90"), DeviceFacts.of("sm_120")), (3, 700)
        )
    ]  # fmt: skip
    assert [p.launches[0].grid[0] for p in plans] == [1 + 63 * HQ] * 4
    assert [p.launches[1].grid[0] for p in plans] == [528, 528, 680, 680]
    hopper = [plan.launches[0].specialization for plan in plans[:2]]
    assert hopper[0] == hopper[1]  # one compiled kernel for any number of sequences
