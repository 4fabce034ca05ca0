"""`tune` with real kernels, captured graphs and processes that compile; a second name for our own
kernels stands in for the libraries, which need not be here."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

import torch_attn_tiers
from csrc_free_ops.facts import device_facts
from torch_attn_tiers import dispatch, explain, ranking, register_tier
from torch_attn_tiers.cli.bench.clock import clock_for
from torch_attn_tiers.cli.tune.decode import DecodePoint
from torch_attn_tiers.cli.tune.gdn import GdnPoint
from torch_attn_tiers.cli.tune.session import Session, device_table
from torch_attn_tiers.tier import Tier
from torch_attn_tiers.tiers.decode import flash
from torch_attn_tiers.tiers.gdn import triton as gdn_triton

POINTS = [
    DecodePoint(3, 10, 4, 128, 128),
    DecodePoint(5, 10, 4, 128, 128),
    DecodePoint(1, 8, 8, 64, 64, 63),
]


@pytest.fixture
def twin() -> Iterator[Tier]:
    tier = Tier(
        op="decode",
        name="twin",
        predicates=flash.TIER.predicates,
        build=flash.TIER.build,
        ready=flash.TIER.ready,
    )
    with register_tier(tier, before="flash"):
        yield tier


def test_what_is_tuned_is_right_and_orders_the_calls(twin: Tier, tables: pathlib.Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    name = device_table(device)
    assert name == ranking.table_name(device_facts(device)) and "sm_" not in name
    session = Session(
        "decode", device, clock_for(device), tables / "result.json", tables / f"{name}.json"
    )
    result = session.run(POINTS)
    assert not session.failures() and result["complete"]
    for row in result["rows"]:
        tiers = {tier["tier"]: tier["us"] for tier in row["tiers"]}
        assert {"flash", "twin"} <= tiers.keys()
        for us in tiers.values():
            assert all(
                0 < t < 1000 for lengths in ("full", "uniform", "short") for t in us[lengths]
            )
            assert len(us["full"]) == 3
    ranking.forget()
    dispatch._plans.forget_decisions()
    for point, row in zip(POINTS, result["rows"]):
        tensors, scalars = point.call()
        explanation = explain("decode", *tensors, device=device, **scalars)
        assert explanation.order == f"measured, {name}.json: {row['class']}"
        ranked = [v.name for v in explanation.verdicts if v.name in row["order"]]
        assert ranked == row["order"]
        first = torch_attn_tiers.prepare("decode", *tensors, device=device, **scalars).chosen
        assert first == row["order"][0]


@pytest.fixture
def gdn_twin() -> Iterator[Tier]:
    ours = gdn_triton.TIER
    tier = Tier(
        op="gdn_chunk_prefill",
        name="twin",
        predicates=ours.predicates,
        build=ours.build,
        ready=ours.ready,
    )
    with register_tier(tier, before="triton"):
        yield tier


def test_prompts_are_tuned_and_ordered(gdn_twin: Tier, tables: pathlib.Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    name = device_table(device)
    session = Session(
        "gdn_chunk_prefill",
        device,
        clock_for(device),
        tables / "result.json",
        tables / f"{name}.json",
    )
    points = [GdnPoint(3, 8), GdnPoint(6, 8, "compact"), GdnPoint(5, 8, batch_invariant=True)]
    result = session.run(points)
    assert not session.failures() and result["complete"]
    ranking.forget()
    dispatch._plans.forget_decisions()
    for point, row in zip(points, result["rows"], strict=True):
        tiers = {tier["tier"]: tier["us"] for tier in row["tiers"]}
        assert {"triton", "twin"} <= tiers.keys()
        for us in tiers.values():
            assert us.keys() == set(point.length_names)
            assert all(0 < t < 5000 for times in us.values() for t in times)
        tensors, scalars = point.call()
        explanation = explain(point.overload, *tensors, device=device, **scalars)
        assert explanation.order == f"measured, {name}.json: {row['class']}"
        assert [v.name for v in explanation.verdicts if v.name in row["order"]] == row["order"]
