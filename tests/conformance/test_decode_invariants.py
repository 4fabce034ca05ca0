"""What one call alone cannot show: the same bits, or the same answer, across several calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import torch_attn_tiers
from tests.conformance.calls import Call, Maker, poisoned_memory, require, same_bits
from tests.conformance.tiers import DECODE_TIERS

MakeMaker = Callable[..., Maker]
every_tier = pytest.mark.parametrize("tier", DECODE_TIERS)


def _in_turn(tier: str, *calls: Call) -> None:
    """Runs the calls one after the other, twice, and holds each against the oracle."""
    for call in calls:
        require(call, tier)
    for call in (*calls, *calls):
        call.check(tier)


# ------------------------------------------------------------------------------ batch invariance


@every_tier
@pytest.mark.parametrize("rows", [1, 3])
def test_batch_invariant_rows_do_not_depend_on_neighbours_batch_or_capacity(
    tier: str, rows: int, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    T = m.pick(620, 3000)  # more than one of the parts that a row is cut into
    call = m.qkv(B=4, Hq=2, Hkv=1, Sq=rows, T=T)
    lengths = m.lengths([T - 5, 0, m.pick(133, 1500), 6])
    scalars = {"batch_invariant": True, "is_causal": rows > 1}

    def y(tensors: dict, **more: object) -> torch.Tensor:
        one = Call(tensors, {**scalars, **more})
        require(one, tier)
        with poisoned_memory():
            return one.y(tier)

    together = y({**call, "nonpad_kv_seqlen": lengths})
    for b in range(4):
        alone = {name: tensor[b : b + 1] for name, tensor in call.items()}
        alone["nonpad_kv_seqlen"] = lengths[b : b + 1]
        assert same_bits(y(alone), together[b : b + 1]), "alone"
        n = max(int(lengths[b]), 1)
        for name in ("key", "value"):
            alone[name] = alone[name][:, :, :n].contiguous()
        assert same_bits(y(alone), together[b : b + 1]), "capacity cut to the length"
    reversed_ = {name: tensor.flip(0) for name, tensor in call.items()}
    reversed_["nonpad_kv_seqlen"] = lengths.flip(0)
    assert same_bits(y(reversed_).flip(0), together), "other neighbours"
    roomy = dict(call)
    for name in ("key", "value"):
        roomy[name] = torch.cat([call[name], m.normal(4, 1, m.pick(161, 5000), m.D)], dim=2)
    assert same_bits(y({**roomy, "nonpad_kv_seqlen": lengths}), together), "larger capacity"


# ------------------------------------------------------------------------------------- the tail


@every_tier
@pytest.mark.parametrize("junk", [math.nan, math.inf, 3.0e4])
def test_what_lies_past_the_length_never_changes_a_bit(
    tier: str, junk: float, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    call, lengths = m.qkv(B=3, Sq=2), [m.T - 6, 0, 3]
    call["nonpad_kv_seqlen"] = m.lengths(lengths)
    clean = Call(dict(call), {"is_causal": True})
    require(clean, tier)
    for name in ("key", "value"):
        call[name] = call[name].clone()
        for b, n in enumerate(lengths):
            call[name][b, :, n:] = junk
    dirty = Call(call, {"is_causal": True})
    with poisoned_memory():
        assert same_bits(clean.y(tier), dirty.y(tier))


@every_tier
def test_keys_hidden_by_a_bool_mask_never_change_a_bit(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    call, mask = m.qkv(), m.flags(2, 1, 1, m.T)
    clean = Call({**call, "attn_mask": mask})
    require(clean, tier)
    dirty = {
        name: call[name].masked_fill(~mask[:, 0, 0][:, None, :, None], math.nan)
        for name in ("key", "value")
    }
    with poisoned_memory():
        assert same_bits(clean.y(tier), Call({**call, **dirty, "attn_mask": mask}).y(tier))


@every_tier
def test_result_does_not_depend_on_what_memory_held_before(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    call = Call(
        {**m.qkv(B=3, Sq=3), "nonpad_kv_seqlen": m.lengths([0, 2, m.T])}, {"is_causal": True}
    )
    require(call, tier)
    before = call.y(tier)
    with poisoned_memory():
        assert same_bits(call.y(tier), before)


# -------------------------------------------------------------------- single rows and causality


@every_tier
def test_causality_changes_nothing_for_a_single_row_with_lengths(
    tier: str, maker: MakeMaker
) -> None:
    m = maker(torch.bfloat16)
    tensors = {**m.qkv(B=3), "nonpad_kv_seqlen": m.lengths([m.T, 0, 4])}
    plain, causal = Call(tensors), Call(tensors, {"is_causal": True})
    assert plain.reasons_against(tier) == causal.reasons_against(tier)
    require(plain, tier)
    assert same_bits(plain.y(tier), causal.y(tier))


def test_causality_does_not_change_the_tier_of_a_single_row(maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = {**m.qkv(B=3), "nonpad_kv_seqlen": m.lengths([m.T, 0, 4])}
    chosen = {
        torch_attn_tiers.explain(call.op(), *call.args(), **call.scalars).chosen
        for call in (Call(tensors), Call(tensors, {"is_causal": True}))
    }
    assert len(chosen) == 1


@every_tier
def test_default_scale_is_the_same_call_as_the_scale_given(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = m.qkv(D=40)
    default, given = Call(tensors), Call(tensors, {"scale": 1.0 / math.sqrt(40)})
    require(default, tier)
    assert same_bits(default.y(tier), given.y(tier))


# ---------------------------------------------------- a plan made for one call and used by another


@every_tier
def test_plan_is_not_shared_between_dtypes(tier: str, maker: MakeMaker) -> None:
    calls = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        m = maker(dtype)
        calls.append(Call({**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 3])}))
    _in_turn(tier, *calls)


@every_tier
def test_plan_is_not_shared_between_scalars(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = {**m.qkv(Sq=2), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    _in_turn(
        tier,
        Call(tensors),
        Call(tensors, {"scale": 3.0 / math.sqrt(m.D)}),
        Call(tensors, {"is_causal": True}),
        Call(tensors, {"left_window_size": 4}),
        Call(tensors, {"left_window_size": 5}),
        Call(tensors, {"right_window_size": 0}),
        Call(tensors, {"softcap": 1.0}),
        Call(tensors, {"softcap": 2.0}),
    )


@every_tier
def test_plan_is_not_shared_between_calls_with_other_tensors(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    qkv = m.qkv(Sq=2)
    lengths = m.lengths([m.T, 3])
    _in_turn(
        tier,
        Call({**qkv, "nonpad_kv_seqlen": lengths}),
        Call({**qkv, "nonpad_kv_seqlen": lengths.long()}),
        Call({**qkv, "nonpad_kv_seqlen": lengths, "attn_mask": m.flags(m.T)}),
        Call({**qkv, "nonpad_kv_seqlen": lengths, "attn_mask": m.flags(2, 1, 2, m.T)}),
        Call({**qkv, "nonpad_kv_seqlen": lengths, "attn_mask": m.normal(2, 1, 2, m.T)}),
        Call({**qkv, "nonpad_kv_seqlen": lengths, "sinks": m.normal(4)}),
        Call({**qkv, "nonpad_kv_seqlen": lengths, "sinks": m.normal(4, dtype=torch.float32)}),
    )


@every_tier
def test_plan_without_lengths_is_not_used_with_them(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    qkv = m.qkv(Sq=2)
    _in_turn(
        tier,
        Call(qkv, {"is_causal": True}),
        Call({**qkv, "nonpad_kv_seqlen": m.lengths([m.T, 3])}, {"is_causal": True}),
    )


@every_tier
def test_plan_is_not_shared_between_lengths_of_the_past(tier: str, maker: MakeMaker) -> None:
    """The same total, another causal offset."""
    m = maker(torch.float16)
    calls = []
    for past in (4, 9, 0):
        call = m.qkv(Sq=3, T=20 - past)
        call["past_key"], call["past_value"] = m.normal(2, 2, past, m.D), m.normal(2, 2, past, m.D)
        calls.append(Call(call, {"is_causal": True}, "present"))
    _in_turn(tier, *calls)


@every_tier
def test_plan_is_not_shared_between_layouts(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.bfloat16)
    qkv = {**m.qkv(Sq=2), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    pair = m.normal(2, m.T, 2, 2, m.D)
    packed = m.normal(2, 2, 8, m.D).transpose(1, 2)
    _in_turn(
        tier,
        Call(qkv),
        Call({**qkv, "key": pair[:, :, 0].transpose(1, 2)}),
        Call({**qkv, "value": pair[:, :, 1].transpose(1, 2)}),
        Call({**qkv, "query": packed[:, :4]}),
        Call({**qkv, "key": m.normal(2, 2, 2 * m.T, m.D)[:, :, : m.T]}),
        Call({**qkv, "key": m.normal(2, 1, m.T, m.D).expand(2, 2, m.T, m.D)}),
    )


@every_tier
def test_plan_of_aligned_tensors_is_not_used_off_alignment(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    qkv = {**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    calls = [Call(qkv)]
    for name in ("query", "key", "value"):
        shape = qkv[name].shape
        calls.append(Call({**qkv, name: m.normal(shape.numel() + 1)[1:].view(shape)}))
    _in_turn(tier, *calls)


@every_tier
def test_plan_is_not_shared_between_ranks(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    flat = {
        "query": m.normal(2, 2, 4 * m.D),
        "key": m.normal(2, m.T, 2 * m.D),
        "value": m.normal(2, m.T, 2 * m.D),
    }
    heads = {"query": 4, "key": 2, "value": 2}
    split = {
        name: tensor.unflatten(2, (heads[name], m.D)).transpose(1, 2)
        for name, tensor in flat.items()
    }
    _in_turn(
        tier,
        Call(flat, {"q_num_heads": 4, "kv_num_heads": 2}),
        Call(split),
        Call(
            {**flat, "key": flat["query"][:, :1], "value": flat["query"][:, :1]},
            {"q_num_heads": 4, "kv_num_heads": 4},
        ),
        Call(
            {**flat, "key": flat["query"][:, :1], "value": flat["query"][:, :1]},
            {"q_num_heads": 2, "kv_num_heads": 2},
        ),
    )


@every_tier
def test_odd_strides_of_size_one_dimensions_share_a_plan(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = {**m.qkv(B=1, Hq=3, Hkv=1), "nonpad_kv_seqlen": m.lengths([m.T])}
    call = Call(tensors)
    require(call, tier)
    call.run(tier)
    odd = dict(tensors)
    odd["key"] = tensors["key"].as_strided((1, 1, m.T, m.D), (3, 1, m.D, 1))
    with torch_attn_tiers.record_dispatch() as records:
        y = Call(odd, {"tier": tier}).run()
    assert [(r.tier, r.built) for r in records] == [(tier, False)]
    assert same_bits(y, call.y(tier))


@every_tier
def test_second_equal_call_builds_nothing(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = {**m.qkv(D=24), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    call = Call(tensors, {"tier": tier})
    require(call, tier)
    with torch_attn_tiers.record_dispatch() as records:
        call.run()
        call.run()
        Call({name: t.clone() for name, t in tensors.items()}, {"tier": tier}).run()
    assert [r.built for r in records][1:] == [False, False]


@every_tier
def test_lengths_changed_in_place_are_seen(tier: str, maker: MakeMaker) -> None:
    """A cache keyed by the identity of the tensor would answer for the old lengths."""
    m = maker(torch.bfloat16)
    lengths = m.lengths([m.T, 3])
    call = Call({**m.qkv(Sq=2), "nonpad_kv_seqlen": lengths}, {"is_causal": True})
    require(call, tier)
    for values in ([m.T, 3], [1, 7], [0, 0], [m.T, m.T]):
        lengths.copy_(m.lengths(values))
        call.check(tier)


@every_tier
def test_inputs_are_left_as_they_were(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    tensors = {
        **m.qkv(Sq=2),
        "nonpad_kv_seqlen": m.lengths([m.T, -3]),
        "attn_mask": m.normal(m.T),
        "sinks": m.normal(4),
    }
    call = Call(tensors, {"is_causal": True})
    require(call, tier)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    call.run(tier)
    assert all(same_bits(tensors[name], before[name]) for name in tensors)


@every_tier
def test_masks_and_sinks_are_not_ignored(tier: str, maker: MakeMaker) -> None:
    m = maker(torch.float16)
    qkv = {**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 9])}
    plain = Call(qkv)
    require(plain, tier)
    y = plain.y(tier)
    variants = (
        ({"attn_mask": m.flags(m.T)}, {}),
        ({"attn_mask": m.normal(m.T)}, {}),
        ({"sinks": m.normal(4)}, {}),
        ({}, {"softcap": 0.5}),
        ({}, {"scale": 1.5}),
        ({}, {"left_window_size": 2}),
    )
    ran = 0
    for tensors, scalars in variants:
        call = Call({**qkv, **tensors}, scalars)
        if not call.reasons_against(tier):
            assert not same_bits(call.y(tier), y), (list(tensors), scalars)
            ran += 1
    assert ran
