"""The table of cases of `attn_tiers::decode`: each function is one case, its name the behaviour.

A case makes one call from a `Maker`; the oracle says what must come out. The cases hold the rules
of the contract's section 1 one by one, and the smallest inputs that have shown faults in other
attention kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from tests.conformance.calls import Call, Maker

MASKED = -math.inf


@dataclasses.dataclass(frozen=True)
class Case:
    """A named call, and the tiers that have to be able to take it."""

    name: str
    make: Callable[[Maker], Call]
    flash: bool = True  # the Triton tier accepts it
    mea: bool = False  # PyTorch's memory-efficient attention accepts it (on a GPU)
    everywhere: bool = True  # False: too large for Triton's interpreter
    float8: bool = False  # float8 caches, which go with 16-bit queries only

    def meant_for(self, tier: str) -> bool:
        return {"flash": self.flash, "mea": self.mea, "unfused": True}.get(tier, False)

    def is_legal_in(self, dtype: torch.dtype) -> bool:
        """Whether the operator takes it with queries of this dtype."""
        return not self.float8 or dtype.itemsize == 2


CASES: list[Case] = []


def case(
    *,
    name: str | None = None,
    flash: bool = True,
    mea: bool = False,
    everywhere: bool = True,
    float8: bool = False,
) -> Callable[[Callable[[Maker], Call]], Callable[[Maker], Call]]:
    """Enters the function into the table."""

    def enter(make: Callable[[Maker], Call]) -> Callable[[Maker], Call]:
        CASES.append(Case(name or make.__name__, make, flash, mea, everywhere, float8))
        return make

    return enter


# ---------------------------------------------------------------------------------------- shapes


@case(mea=True)
def plain_grouped_heads(m: Maker) -> Call:
    return Call(m.qkv())


@case(mea=True)
def as_many_kv_heads_as_query_heads(m: Maker) -> Call:
    return Call(m.qkv(Hq=3, Hkv=3))


@case(mea=True)
def one_kv_head_for_all(m: Maker) -> Call:
    return Call(m.qkv(Hq=4, Hkv=1))


def _group(group: int) -> None:
    @case(name=f"group_of_{group}")
    def make(m: Maker) -> Call:
        lengths = m.lengths([m.T, 0, 7])
        return Call({**m.qkv(B=3, Hq=2 * group, Hkv=2), "nonpad_kv_seqlen": lengths})


for _g in (3, 5, 6, 7, 16, 20):
    _group(_g)


@case()
def group_times_rows_is_no_power_of_two(m: Maker) -> Call:
    lengths = m.lengths([m.T, 5])
    return Call({**m.qkv(Hq=10, Sq=3), "nonpad_kv_seqlen": lengths}, {"is_causal": True})


def _head_sizes(D: int, Dv: int, flash: bool = True, everywhere: bool = True) -> None:
    @case(name=f"head_sizes_{D}_and_{Dv}", flash=flash, everywhere=everywhere)
    def make(m: Maker) -> Call:
        T = m.pick(150, m.T)
        lengths = m.lengths([T, 5])
        return Call({**m.qkv(Hkv=1, Hq=2, T=T, D=D, Dv=Dv), "nonpad_kv_seqlen": lengths})


for _D, _Dv in [
    (8, 8), (40, 40), (72, 72), (80, 80), (96, 96), (248, 248), (256, 256),
    (64, 32), (32, 64), (128, 64), (64, 128), (192, 128), (256, 64), (24, 8),
]:  # fmt: skip
    _head_sizes(_D, _Dv)
_head_sizes(257, 257, flash=False)
_head_sizes(320, 64, flash=False)
_head_sizes(512, 512, flash=False)


def _query_rows(rows: int) -> None:
    @case(name=f"{rows}_query_rows_causal_bottom_right")
    def make(m: Maker) -> Call:
        lengths = m.lengths([m.T, rows, 11], torch.int64)
        call = {**m.qkv(B=3, Sq=rows), "nonpad_kv_seqlen": lengths}
        return Call(call, {"is_causal": True})


for _rows in (2, 3, 4, 5, 8, 13, 16, 17, 33):
    _query_rows(_rows)


@case(mea=True)
def many_query_rows_without_a_cache(m: Maker) -> Call:
    # Rounding P and Y to bfloat16 puts one row of 6000 above the tolerance: with seed 0 one of 160.
    m.reseed(m.pick(1, 0))
    return Call(m.qkv(B=1, Sq=m.pick(40, 300), T=m.pick(40, 300)), {"is_causal": True})


@case(mea=True)
def more_query_rows_than_keys(m: Maker) -> Call:
    return Call(m.qkv(B=1, Sq=21, T=5))


@case(mea=True)
def one_key(m: Maker) -> Call:
    return Call(m.qkv(T=1))


@case()
def one_key_of_capacity_and_one_row_without(m: Maker) -> Call:
    return Call({**m.qkv(T=1), "nonpad_kv_seqlen": m.lengths([1, 0])})


@case()
def capacity_of_one_more_than_a_block(m: Maker) -> Call:
    """The last split holds one key."""
    T = m.pick(129, 1025)
    return Call({**m.qkv(Hq=2, Hkv=1, T=T), "nonpad_kv_seqlen": m.lengths([T, T - 1])})


@case(everywhere=False)
def long_sequence_in_many_splits(m: Maker) -> Call:
    return Call({**m.qkv(B=1, T=30000), "nonpad_kv_seqlen": m.lengths([29999])})


@case(everywhere=False)
def short_sequence_in_a_large_capacity(m: Maker) -> Call:
    """Most splits are empty."""
    return Call({**m.qkv(B=4, T=32768), "nonpad_kv_seqlen": m.lengths([100, 1000, 0, 1])})


@case(everywhere=False)
def mixed_lengths_as_served(m: Maker) -> Call:
    lengths = [512, 8192, 0, 1, 4097, 63, 64, 65, 127, 128, 129, 8191, 2048, 300, 5000, 1000]
    call = m.qkv(B=16, Hq=8, Hkv=2, T=8192)
    return Call({**call, "nonpad_kv_seqlen": m.lengths(lengths)})


@case()
def empty_batch(m: Maker) -> Call:
    return Call(m.qkv(B=0))


@case()
def empty_batch_with_lengths(m: Maker) -> Call:
    return Call({**m.qkv(B=0), "nonpad_kv_seqlen": m.lengths([])})


@case()
def no_query_rows(m: Maker) -> Call:
    return Call(m.qkv(Sq=0))


@case()
def no_keys_give_zero(m: Maker) -> Call:
    return Call(m.qkv(T=0))


@case()
def no_keys_with_lengths_and_sinks_give_zero(m: Maker) -> Call:
    call = {**m.qkv(T=0, Sq=3), "nonpad_kv_seqlen": m.lengths([0, 4])}
    return Call({**call, "sinks": m.normal(4, dtype=torch.float32)}, {"is_causal": True})


# ---------------------------------------------------------------------------------------- rank 3


def _packed(m: Maker, B: int, Sq: int, T: int, Hq: int, Hkv: int, D: int, Dv: int) -> dict:
    return {
        "query": m.normal(B, Sq, Hq * D),
        "key": m.normal(B, T, Hkv * D),
        "value": m.normal(B, T, Hkv * Dv),
    }


@case(mea=True)
def rank_three(m: Maker) -> Call:
    call = _packed(m, 2, 1, m.T, 4, 2, m.D, m.D)
    return Call(call, {"q_num_heads": 4, "kv_num_heads": 2})


@case()
def rank_three_with_lengths_and_two_head_sizes(m: Maker) -> Call:
    call = _packed(m, 2, 3, m.T, 6, 2, 2 * m.D, m.D)
    call["nonpad_kv_seqlen"] = m.lengths([0, m.T - 2])
    return Call(call, {"q_num_heads": 6, "kv_num_heads": 2, "is_causal": True})


@case()
def rank_three_sliced_from_a_packed_projection(m: Maker) -> Call:
    Hq, Hkv, T, D = 4, 2, m.T, m.D
    packed = m.normal(2, T, (Hq + 2 * Hkv) * D)
    query, key, value = packed.split([Hq * D, Hkv * D, Hkv * D], dim=-1)
    call = {"query": query[:, -2:], "key": key, "value": value}
    call["nonpad_kv_seqlen"] = m.lengths([T, 9])
    return Call(call, {"q_num_heads": Hq, "kv_num_heads": Hkv, "is_causal": True})


@case(flash=False)
def rank_three_scores_are_rank_four(m: Maker) -> Call:
    call = _packed(m, 2, 3, m.pick(13, 130), 4, 2, m.D, m.D)
    scalars = {"q_num_heads": 4, "kv_num_heads": 2, "qk_matmul_output_mode": 1}
    return Call(call, scalars, "qk")


@case(mea=True)
def rank_three_with_past(m: Maker) -> Call:
    call = _packed(m, 2, 2, 3, 4, 2, m.D, 2 * m.D)
    call["past_key"] = m.normal(2, 2, 20, m.D)
    call["past_value"] = m.normal(2, 2, 20, 2 * m.D)
    return Call(call, {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": True}, "present")


# --------------------------------------------------------------------------------------- lengths


@case()
def lengths_zero_and_five_in_one_batch(m: Maker) -> Call:
    return Call({**m.qkv(T=16), "nonpad_kv_seqlen": m.lengths([0, 5])})


@case()
def lengths_as_int64(m: Maker) -> Call:
    return Call({**m.qkv(B=3), "nonpad_kv_seqlen": m.lengths([3, 0, m.T], torch.int64)})


@case()
def every_length_zero(m: Maker) -> Call:
    return Call({**m.qkv(Sq=3), "nonpad_kv_seqlen": m.lengths([0, 0])})


@case()
def lengths_outside_the_capacity_are_clamped(m: Maker) -> Call:
    lengths = m.lengths([-1, m.T + 1, -(2**31), 2**31 - 1])
    return Call({**m.qkv(B=4), "nonpad_kv_seqlen": lengths})


@case()
def int64_lengths_beyond_int32_are_clamped(m: Maker) -> Call:
    lengths = m.lengths([2**32 + 3, -(2**32) + 3, 2**62, 4], torch.int64)
    return Call({**m.qkv(B=4, Sq=2), "nonpad_kv_seqlen": lengths}, {"is_causal": True})


@case()
def clamped_lengths_move_the_causal_offset(m: Maker) -> Call:
    lengths = m.lengths([m.T + 100, -100])
    scalars = {"is_causal": True, "left_window_size": 3}
    return Call({**m.qkv(Sq=4), "nonpad_kv_seqlen": lengths}, scalars)


@case()
def lengths_as_a_strided_view(m: Maker) -> Call:
    table = m.lengths([[m.T, -7], [3, -7], [0, -7]])
    return Call({**m.qkv(B=3), "nonpad_kv_seqlen": table[:, 0]})


@case()
def one_length_expanded_over_the_batch(m: Maker) -> Call:
    return Call({**m.qkv(B=3), "nonpad_kv_seqlen": m.lengths([9]).expand(3)})


def _tail(bad: float, where: str) -> None:
    @case(name=f"{bad}_past_the_length_in_{where}")
    def make(m: Maker) -> Call:
        call, lengths = m.qkv(B=4, Sq=2), [m.T - 3, 5, 0, 1]
        for name in ("key", "value") if where == "both" else (where,):
            for b, n in enumerate(lengths):
                call[name][b, :, n:] = bad
        call["nonpad_kv_seqlen"] = m.lengths(lengths)
        return Call(call, {"is_causal": True})


for _bad, _where in [(math.nan, "key"), (math.nan, "value"), (math.inf, "both")]:
    _tail(_bad, _where)


@case()
def nan_past_the_length_with_every_other_feature(m: Maker) -> Call:
    call, lengths = m.qkv(B=3), [7, 0, m.T - 1]
    for b, n in enumerate(lengths):
        call["key"][b, :, n:] = math.nan
        call["value"][b, :, n:] = -math.inf
    call["nonpad_kv_seqlen"] = m.lengths(lengths)
    call["sinks"] = m.normal(4, dtype=torch.float32)
    call["attn_mask"] = m.normal(3, 4, 1, m.T, dtype=torch.float32)
    return Call(call, {"softcap": 2.0, "left_window_size": 4})


@case()
def mask_of_nan_past_the_length_is_not_read(m: Maker) -> Call:
    """A recycled mask buffer: what lies past the length is masked whatever it holds."""
    mask = m.normal(2, 1, 1, m.T, dtype=torch.float32)
    mask[1, ..., 5:] = math.nan
    return Call({**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 5]), "attn_mask": mask})


# --------------------------------------------------------------------------- causality and windows


@case(mea=True)
def causal_single_row_without_lengths_sees_key_zero_only(m: Maker) -> Call:
    return Call(m.qkv(), {"is_causal": True})


@case(mea=True)
def causal_without_lengths_is_top_left(m: Maker) -> Call:
    return Call(m.qkv(Sq=6), {"is_causal": True})


@case(mea=True)
def causal_top_left_with_more_rows_than_keys(m: Maker) -> Call:
    return Call(m.qkv(Sq=9, T=4), {"is_causal": True})


@case()
def causal_single_row_with_lengths_changes_nothing(m: Maker) -> Call:
    call = {**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 3])}
    return Call(call, {"is_causal": True})


@case()
def causal_with_fewer_keys_than_rows_empties_the_first_rows(m: Maker) -> Call:
    call = {**m.qkv(B=3, Sq=7), "nonpad_kv_seqlen": m.lengths([2, 0, 7])}
    return Call(call, {"is_causal": True})


def _window(name: str, left: int, right: int, causal: bool, lengths: bool, Sq: int = 5) -> None:
    @case(name=name, mea=not lengths)
    def make(m: Maker) -> Call:
        call: dict = m.qkv(B=3 if lengths else 1, Sq=Sq)
        if lengths:
            call["nonpad_kv_seqlen"] = m.lengths([m.T, 3, 0])
        scalars = {"left_window_size": left, "right_window_size": right, "is_causal": causal}
        return Call(call, scalars)


_window("left_window_counts_keys_before_the_current_one", 3, -1, True, True)
_window("left_window_of_zero_sees_itself_only", 0, -1, True, True)
_window("left_window_of_a_single_row", 4, -1, False, True, Sq=1)
_window("left_window_longer_than_the_cache", 2000, -1, True, True)
_window("left_window_without_lengths", 2, -1, False, False)
_window("right_window_without_causality", -1, 2, False, True)
_window("right_window_of_zero_is_causal", -1, 0, False, True)
_window("right_window_does_not_widen_causality", -1, 3, True, True)
_window("both_windows_not_causal", 2, 1, False, True)
_window("both_windows_without_lengths", 1, 2, False, False)


@case(mea=True)
def left_window_empties_rows_past_the_keys(m: Maker) -> Call:
    """Top left with more rows than keys: p - left lies past the last key."""
    return Call(m.qkv(B=1, Sq=12, T=4), {"left_window_size": 2})


@case()
def right_window_with_negative_offset_empties_rows(m: Maker) -> Call:
    call = {**m.qkv(Sq=8), "nonpad_kv_seqlen": m.lengths([2, 8])}
    return Call(call, {"right_window_size": 1})


@case()
def window_far_from_the_start_of_a_long_row(m: Maker) -> Call:
    """Only the last split has anything to do."""
    T = m.pick(300, 5000)
    call = {**m.qkv(Hq=2, Hkv=1, T=T), "nonpad_kv_seqlen": m.lengths([T - 1, 20])}
    return Call(call, {"left_window_size": 6})


# ---------------------------------------------------------------------- scale, softcap and sinks


@case(mea=True)
def scale_given(m: Maker) -> Call:
    return Call(m.qkv(), {"scale": 0.07})


@case(mea=True)
def scale_of_one(m: Maker) -> Call:
    return Call(m.qkv(D=16), {"scale": 1.0})


@case()
def softcap(m: Maker) -> Call:
    call = {**m.qkv(Sq=2), "nonpad_kv_seqlen": m.lengths([m.T, 6])}
    return Call(call, {"softcap": 1.5, "scale": 0.5, "is_causal": True})


@case()
def softcap_of_logits_in_the_thousands(m: Maker) -> Call:
    """exp(2 * 4400 / 50) is beyond float32."""
    call = m.qkv()
    call["query"] *= 8
    call["key"][:, :, ::3] *= 140
    return Call(call, {"softcap": 50.0, "scale": 1.0})


@case(mea=True)
def logits_in_the_thousands_without_softcap(m: Maker) -> Call:
    call = m.qkv()
    call["key"][:, :, 4] *= 200
    call["key"][:, :, 7] *= -200
    return Call(call, {"scale": 1.0})


@case()
def softcap_does_not_unmask(m: Maker) -> Call:
    """A softcap over masked logits would make them finite."""
    mask = m.flags(2, 1, 1, m.T)
    call = {**m.qkv(), "attn_mask": mask, "nonpad_kv_seqlen": m.lengths([m.T - 4, 9])}
    return Call(call, {"softcap": 0.7})


def _sinks(dtype: torch.dtype) -> None:
    @case(name=f"sinks_in_{str(dtype).removeprefix('torch.')}")
    def make(m: Maker) -> Call:
        call = {**m.qkv(Hq=6, Sq=2), "nonpad_kv_seqlen": m.lengths([0, m.T])}
        return Call({**call, "sinks": m.normal(6, dtype=dtype)}, {"is_causal": True})


for _dtype in (torch.float32, torch.float16, torch.bfloat16):
    _sinks(_dtype)


@case()
def sinks_above_every_logit(m: Maker) -> Call:
    return Call({**m.qkv(), "sinks": m.integers([9, 8, 7, 6], torch.float32)})


@case()
def sinks_far_below_every_logit_change_nothing(m: Maker) -> Call:
    return Call({**m.qkv(), "sinks": m.integers([-1000] * 4, torch.float32)})


@case()
def sinks_of_minus_infinity_are_none(m: Maker) -> Call:
    call = {**m.qkv(), "nonpad_kv_seqlen": m.lengths([0, 5])}
    return Call({**call, "sinks": torch.full((4,), MASKED, device=m.device)})


@case()
def sinks_as_a_strided_view(m: Maker) -> Call:
    return Call({**m.qkv(), "sinks": m.normal(4, 3, dtype=torch.float32)[:, 1]})


@case()
def sinks_on_fully_masked_rows_give_zero(m: Maker) -> Call:
    mask = m.flags(2, 1, 3, m.T)
    mask[0, 0, 1] = False
    return Call({**m.qkv(Sq=3), "attn_mask": mask, "sinks": m.normal(4, dtype=torch.float32)})


# ----------------------------------------------------------------------------------------- masks


def _mask(name: str, shape: str, kind: str, mea: bool = False) -> None:
    """`shape` in letters B H S T (sizes of the call) and 1."""

    @case(name=f"{kind}_mask_{name}", mea=mea)
    def make(m: Maker) -> Call:
        B, Hq, Sq = 2, 4, 3
        sizes = {"B": B, "H": Hq, "S": Sq, "T": m.T, "1": 1}
        dims = [sizes[letter] for letter in shape]
        mask = m.flags(*dims) if kind == "bool" else m.normal(*dims, dtype=torch.float32)
        return Call({**m.qkv(B=B, Hq=Hq, Sq=Sq), "attn_mask": mask})


for _kind in ("bool", "additive"):
    _mask("of_rank_one", "T", _kind)
    _mask("of_rank_two", "ST", _kind)
    _mask("of_rank_three_is_per_head", "HST", _kind)
    _mask("of_rank_four", "BHST", _kind)
    _mask("per_batch_over_all_heads", "B1ST", _kind)
    _mask("per_head_over_all_batches", "1H1T", _kind)
_mask("one_row_for_all", "1T", "bool")
_mask("all_ones_but_the_keys", "111T", "additive")


@case()
def rank_three_mask_with_as_many_heads_as_batches(m: Maker) -> Call:
    """Reading the first dimension as the batch would fit, and be wrong."""
    return Call({**m.qkv(B=4, Hq=4, Sq=2), "attn_mask": m.flags(4, 2, m.T)})


def _short_mask(name: str, keys: int, kind: str, lengths: bool = False) -> None:
    @case(name=name, mea=kind == "additive" and not lengths)
    def make(m: Maker) -> Call:
        call: dict = m.qkv(Sq=2)
        shape = (2, 1, 2, keys)
        call["attn_mask"] = m.flags(*shape) if kind == "bool" else m.normal(*shape)
        if kind == "bool":
            call["key"][:, :, keys:] = math.nan
            call["value"][:, :, keys:] = math.nan
        if lengths:
            call["nonpad_kv_seqlen"] = m.lengths([m.T, 4])
        return Call(call)


_short_mask("short_bool_mask_hides_the_rest_even_nan", 11, "bool")
_short_mask("short_additive_mask_hides_the_rest", 11, "additive")
_short_mask("short_mask_and_lengths_both_hold", 11, "additive", lengths=True)
_short_mask("mask_of_one_key_does_not_broadcast", 1, "additive")


@case()
def mask_of_no_keys_hides_all(m: Maker) -> Call:
    return Call({**m.qkv(), "attn_mask": m.flags(1, 0)})


@case()
def lowest_float_in_a_mask_is_not_minus_infinity(m: Maker) -> Call:
    """Rows where every key has it attend to all of them alike; elsewhere it hides."""
    mask = torch.zeros(2, 1, 2, m.T, device=m.device)
    mask[0, 0, 1] = torch.finfo(torch.float32).min
    mask[1, 0, 0, : m.T // 2] = torch.finfo(torch.float32).min
    return Call({**m.qkv(Sq=2), "attn_mask": mask})


@case()
def lowest_half_float_in_a_mask_hides_beside_others(m: Maker) -> Call:
    mask = torch.zeros(2, 1, 1, m.T, dtype=torch.float16, device=m.device)
    mask[1, ..., m.T // 2 :] = torch.finfo(torch.float16).min
    return Call({**m.qkv(), "attn_mask": mask})


@case()
def lowest_float_beside_minus_infinity(m: Maker) -> Call:
    mask = torch.full((2, 1, 1, m.T), MASKED, device=m.device)
    mask[..., 3:9] = torch.finfo(torch.float32).min
    return Call({**m.qkv(), "attn_mask": mask})


@case()
def float64_mask_beyond_float32_neither_hides_nor_overflows(m: Maker) -> Call:
    """Rows of nothing but the lowest value, one key raised beyond float32, one left beside -inf."""
    mask = torch.zeros(2, 1, 2, m.T, dtype=torch.float64, device=m.device)
    mask[0, 0, 0] = torch.finfo(torch.float64).min
    mask[0, 0, 1, 3] = 1e39
    mask[1, 0, 0] = MASKED
    mask[1, 0, 0, 2] = -1e39
    return Call({**m.qkv(Sq=2), "attn_mask": mask})


@case()
def lowest_float_in_a_mask_with_softcap_and_sinks(m: Maker) -> Call:
    mask = torch.full((1, 1, 1, m.T), torch.finfo(torch.float32).min, device=m.device)
    mask[..., 5] = 0.0
    call = {**m.qkv(), "attn_mask": mask, "sinks": m.normal(4, dtype=torch.float32)}
    return Call(call, {"softcap": 3.0})


@case(mea=True)
def additive_mask_of_minus_infinity_empties_rows(m: Maker) -> Call:
    mask = m.normal(2, 4, 3, m.T)
    mask[0, 1, 2] = MASKED
    mask[1, :, 0] = MASKED
    mask[1, :, 1, 4:] = MASKED
    return Call({**m.qkv(Sq=3), "attn_mask": mask})


@case()
def bool_mask_empties_rows(m: Maker) -> Call:
    mask = m.flags(2, 4, 3, m.T)
    mask[0, 1, 2] = False
    mask[1, :, 0] = False
    return Call({**m.qkv(Sq=3), "attn_mask": mask})


@case()
def mask_and_causality_together_empty_a_row(m: Maker) -> Call:
    """Neither alone does: the mask leaves only what causality hides."""
    mask = torch.ones(1, 1, 4, m.T, dtype=torch.bool, device=m.device)
    mask[..., 1, : m.T - 2] = False
    call = {**m.qkv(Sq=4), "attn_mask": mask, "nonpad_kv_seqlen": m.lengths([m.T, m.T])}
    return Call(call, {"is_causal": True})


@case()
def nan_in_keys_that_a_bool_mask_hides_from_everyone(m: Maker) -> Call:
    call = m.qkv(Sq=2)
    mask = m.flags(2, 1, 1, m.T)
    hidden = ~mask[:, 0, 0]
    for name in ("key", "value"):
        call[name].masked_fill_(hidden[:, None, :, None], math.nan)
    return Call({**call, "attn_mask": mask})


@case()
def nan_in_keys_hidden_from_one_kv_head_only(m: Maker) -> Call:
    """KV head 0 of batch 1 hides the first keys from its two query heads; the others see theirs."""
    call = m.qkv()
    mask = m.flags(2, 4, 1, m.T, share=0.8)
    mask[1, :2, :, :6] = False
    call["key"][1, 0, :6] = math.nan
    call["value"][1, 0, :6] = math.inf
    return Call({**call, "attn_mask": mask})


@case()
def nan_in_keys_hidden_by_mask_with_windows_and_lengths(m: Maker) -> Call:
    call, mask = m.qkv(), m.flags(m.T)
    for name in ("key", "value"):
        call[name].masked_fill_(~mask[:, None], math.nan)
    call["nonpad_kv_seqlen"] = m.lengths([m.T - 1, 13])
    return Call({**call, "attn_mask": mask}, {"left_window_size": 9})


def _mask_dtype(dtype: torch.dtype) -> None:
    @case(name=f"additive_mask_in_{str(dtype).removeprefix('torch.')}")
    def make(m: Maker) -> Call:
        mask = (3 * m.normal(2, 1, 2, m.T, dtype=torch.float32)).round().to(dtype)
        return Call({**m.qkv(Sq=2), "attn_mask": mask})


for _dtype in (
    torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64,
):  # fmt: skip
    _mask_dtype(_dtype)


@case()
def unsigned_mask_is_added(m: Maker) -> Call:
    """0 and 1 in uint8 are numbers, not flags."""
    return Call({**m.qkv(), "attn_mask": m.flags(2, 1, 1, m.T).to(torch.uint8)})


@case()
def expanded_mask_with_stride_zero(m: Maker) -> Call:
    mask = m.normal(2, 1, 1, m.T, dtype=torch.float32).expand(2, 4, 3, m.T)
    return Call({**m.qkv(Sq=3), "attn_mask": mask})


@case()
def mask_expanded_along_the_keys(m: Maker) -> Call:
    """Stride 0 on the last dimension: all keys of a row are seen, or none."""
    return Call({**m.qkv(Sq=3), "attn_mask": m.flags(2, 4, 3, 1).expand(2, 4, 3, m.T)})


@case()
def transposed_mask(m: Maker) -> Call:
    """The last dimension is not dense."""
    return Call({**m.qkv(Sq=3), "attn_mask": m.flags(2, m.T, 3).transpose(1, 2)[:, None]})


@case(mea=True)
def mask_sliced_from_a_wider_buffer(m: Maker) -> Call:
    return Call({**m.qkv(Sq=2), "attn_mask": m.normal(2, 1, 2, m.T + 7)[..., 3:-4]})


@case()
def everything_at_once(m: Maker) -> Call:
    call = m.qkv(B=3, Hq=6, Sq=3, Dv=64)
    call["nonpad_kv_seqlen"] = m.lengths([m.T - 2, 2, 0], torch.int64)
    call["attn_mask"] = m.normal(3, 1, 3, m.T - 5, dtype=torch.float32)
    call["attn_mask"][:, :, :, 4] = MASKED
    call["sinks"] = m.normal(6, dtype=torch.float16)
    scalars = {
        "is_causal": True, "scale": 0.3, "softcap": 4.0,
        "left_window_size": 20, "right_window_size": 1,
    }  # fmt: skip
    return Call(call, scalars)


# ------------------------------------------------------------------------------- past and present


def _with_past(m: Maker, P: int, L: int, Sq: int = 1, Dv: int | None = None) -> dict:
    call = m.qkv(Sq=Sq, T=L, Dv=Dv)
    call["past_key"] = m.normal(2, 2, P, m.D)
    call["past_value"] = m.normal(2, 2, P, Dv or m.D)
    return call


@case(mea=True)
def present_without_past_copies_the_inputs(m: Maker) -> Call:
    return Call(m.qkv(), {}, "present")


@case()
def present_without_past_but_with_lengths(m: Maker) -> Call:
    return Call({**m.qkv(), "nonpad_kv_seqlen": m.lengths([0, 7])}, {}, "present")


@case(mea=True)
def present_with_past(m: Maker) -> Call:
    return Call(_with_past(m, m.T, 1, Dv=2 * m.D), {}, "present")


@case(mea=True)
def present_with_empty_past(m: Maker) -> Call:
    return Call(_with_past(m, 0, 6), {"is_causal": True}, "present")


@case(mea=True)
def causal_single_row_with_past_hides_new_keys_but_the_first(m: Maker) -> Call:
    return Call(_with_past(m, 9, 4), {"is_causal": True}, "present")


@case(mea=True)
def causal_rows_with_past(m: Maker) -> Call:
    return Call(_with_past(m, m.T - 4, 4, Sq=4), {"is_causal": True}, "present")


@case(mea=True)
def window_with_past(m: Maker) -> Call:
    call = _with_past(m, m.T - 3, 3, Sq=3)
    return Call(call, {"left_window_size": 5, "right_window_size": 0}, "present")


@case()
def mask_over_past_and_new_keys(m: Maker) -> Call:
    return Call({**_with_past(m, 12, 3, Sq=3), "attn_mask": m.flags(3, 15)}, {}, "present")


@case(mea=True)
def present_of_strided_inputs_is_contiguous(m: Maker) -> Call:
    call = m.qkv(T=3)
    for name in ("key", "value"):
        call[name] = m.normal(2, 3, 2, m.D).transpose(1, 2)
        call[f"past_{name}"] = m.normal(2, 14, 2, m.D).transpose(1, 2)
    return Call(call, {}, "present")


# ---------------------------------------------------------------------------------- score outputs


def _scores(mode: int, name: str, **features: object) -> None:
    @case(name=f"scores_of_mode_{mode}_{name}", flash=False)
    def make(m: Maker) -> Call:
        T = m.pick(23, 230)
        call: dict = m.qkv(B=3, Sq=3, T=T)
        scalars = {"qk_matmul_output_mode": mode, "softcap": 2.0, "is_causal": True}
        if "past" in features:
            call["past_key"], call["past_value"] = m.normal(3, 2, 8, m.D), m.normal(3, 2, 8, m.D)
        if "lengths" in features:
            call["nonpad_kv_seqlen"] = m.lengths([0, 2, T - 1])
        if "nan" in features:
            call["key"][2, :, T - 1 :] = call["value"][2, :, T - 1 :] = math.nan
        if "mask" in features:
            call["attn_mask"] = m.normal(3, 1, 3, T - 2, dtype=torch.float32)
            call["attn_mask"][1, ..., 1:3] = MASKED
            call["sinks"] = m.normal(4, dtype=torch.float32)
        if "bool_mask" in features:
            call["attn_mask"] = m.flags(3, 4, 3, T)
            call["attn_mask"][0, 1, 2] = False
        return Call(call, scalars, "qk")


for _mode in range(4):
    _scores(_mode, "with_past", past=True)
    _scores(_mode, "with_lengths_and_nan_tail", lengths=True, nan=True)
    _scores(_mode, "with_lengths_mask_and_sinks", lengths=True, mask=True)
    _scores(_mode, "with_bool_mask", bool_mask=True)


@case(flash=False)
def raw_scores_stay_raw_under_softcap(m: Maker) -> Call:
    call = m.qkv(T=12)
    call["query"] *= 4
    return Call(call, {"softcap": 1.0}, "qk")


# ---------------------------------------------------------------------------------------- strides


@case(mea=True)
def caches_with_heads_inside_positions(m: Maker) -> Call:
    """[B, T, Hkv, D] caches, seen as [B, Hkv, T, D]."""
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.normal(2, m.T, 2, m.D).transpose(1, 2)
    return Call(call)


@case()
def key_and_value_in_two_layouts(m: Maker) -> Call:
    """Strides taken from K and used for V would read elsewhere."""
    call = {**m.qkv(), "nonpad_kv_seqlen": m.lengths([m.T, 5])}
    call["key"] = m.normal(2, m.T, 2, m.D).transpose(1, 2)
    return Call(call)


@case()
def key_and_value_interleaved(m: Maker) -> Call:
    """Both are views of one [B, T, 2, Hkv, D] buffer."""
    pair = m.normal(2, m.T, 2, 2, m.D)
    call = m.qkv()
    call["key"], call["value"] = (pair[:, :, i].transpose(1, 2) for i in (0, 1))
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case()
def key_and_value_halves_of_one_allocation(m: Maker) -> Call:
    call, pair = m.qkv(), m.normal(2, 2, 2, m.T, m.D)
    call["key"], call["value"] = pair[0], pair[1]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(mea=True)
def query_sliced_from_a_packed_projection(m: Maker) -> Call:
    Hq, Hkv = 4, 2
    packed = m.normal(2, 1, Hq + 2 * Hkv, m.D).transpose(1, 2)
    return Call({**m.qkv(), "query": packed[:, :Hq]})


@case(mea=True)
def all_three_sliced_from_a_packed_projection(m: Maker) -> Call:
    packed = m.normal(2, 7, 8, m.D).transpose(1, 2)
    query, key, value = packed.split([4, 2, 2], dim=1)
    return Call({"query": query, "key": key, "value": value}, {"is_causal": True})


@case()
def query_of_several_rows_with_heads_inside(m: Maker) -> Call:
    call = {**m.qkv(), "query": m.normal(2, 5, 4, m.D).transpose(1, 2)}
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])}, {"is_causal": True})


@case()
def batch_dimension_of_a_token_stream(m: Maker) -> Call:
    """The batch stride of the query is one token of [tokens, Hq, D]."""
    query = m.normal(5, 4, m.D)[1:4].unsqueeze(2)
    call = {**m.qkv(B=3), "query": query, "nonpad_kv_seqlen": m.lengths([m.T, 0, 5])}
    return Call(call)


@case()
def slice_of_a_larger_cache(m: Maker) -> Call:
    """Batch, heads and capacity all cut out of a larger allocation."""
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.normal(4, 5, m.T + 8, m.D)[1:3, 2:4, 3 : m.T + 3]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(mea=True)
def every_second_position_of_a_cache(m: Maker) -> Call:
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.normal(2, 2, 2 * m.T, m.D)[:, :, ::2]
    return Call(call)


@case()
def head_dimension_cut_from_a_wider_one(m: Maker) -> Call:
    """MLA-like: V is the first part of K."""
    wide = m.normal(2, 1, m.T, 2 * m.D)
    call = m.qkv(Hkv=1, D=2 * m.D, Dv=m.D)
    call["key"], call["value"] = wide, wide[..., : m.D]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(mea=True)
def heads_expanded_with_stride_zero(m: Maker) -> Call:
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.normal(2, 1, m.T, m.D).expand(2, 2, m.T, m.D)
    return Call(call)


@case()
def batch_expanded_with_stride_zero(m: Maker) -> Call:
    """A shared prefix: one cache for all sequences."""
    call = m.qkv(B=3)
    for name in ("key", "value"):
        call[name] = m.normal(1, 2, m.T, m.D).expand(3, 2, m.T, m.D)
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 0, 5])})


@case(mea=True)
def query_expanded_over_heads_and_batch(m: Maker) -> Call:
    return Call({**m.qkv(), "query": m.normal(1, 1, 1, m.D).expand(2, 4, 1, m.D)})


@case(mea=True)
def positions_expanded_with_stride_zero(m: Maker) -> Call:
    call = m.qkv()
    call["value"] = m.normal(2, 2, 1, m.D).expand(2, 2, m.T, m.D)
    return Call(call)


@case()
def base_pointers_off_alignment(m: Maker) -> Call:
    """Each tensor starts one element past a 16-byte boundary."""
    call = m.qkv()
    for name, tensor in call.items():
        moved = m.normal(tensor.numel() + 1)[1:].view(tensor.shape)
        call[name] = moved
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case()
def strides_off_alignment(m: Maker) -> Call:
    """Rows of D + 1 elements: no row but the first starts on a 16-byte boundary."""
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.normal(2, 2, m.T, m.D + 1)[..., : m.D]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(mea=True)
def one_key_whose_stride_is_one(m: Maker) -> Call:
    call = m.qkv(T=1)
    for name in ("key", "value"):
        call[name] = call[name].transpose(2, 3).contiguous().transpose(2, 3)
    return Call(call)


@case(mea=True)
def one_head_whose_stride_is_one(m: Maker) -> Call:
    """Keys and values side by side in each position, as slices."""
    call = m.qkv(Hkv=1)
    both = torch.cat((call["key"], call["value"]), 3)[:, 0].contiguous()
    both = both.unsqueeze(-1).permute(0, 3, 1, 2)
    call["key"], call["value"] = both[..., : m.D], both[..., m.D :]
    return Call(call)


@case()
def odd_strides_of_dimensions_of_size_one(m: Maker) -> Call:
    call = m.qkv(B=1, Hq=3, Hkv=1)
    call["query"] = call["query"].as_strided((1, 3, 1, m.D), (7, m.D, 3, 1))
    for name in ("key", "value"):
        call[name] = call[name].as_strided((1, 1, m.T, m.D), (5, 1, m.D, 1))
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T - 1])})


@case(flash=False)
def head_dimension_not_dense(m: Maker) -> Call:
    call = m.qkv(T=m.pick(13, m.T))
    call["key"] = m.normal(2, 2, m.D, call["key"].shape[2]).transpose(2, 3)
    return Call({**call, "nonpad_kv_seqlen": m.lengths([5, 0])})


@case(flash=False)
def query_and_value_not_dense(m: Maker) -> Call:
    call = m.qkv(T=m.pick(13, m.T))
    call["query"] = m.normal(2, 4, 1, 2 * m.D)[..., ::2]
    call["value"] = m.normal(2, 2, call["key"].shape[2], 3 * m.D)[..., ::3]
    return Call(call)


# --------------------------------------------------------------------------------- batch invariance


def _invariant(name: str, Sq: int, T: int | None = None, **scalars: object) -> None:
    @case(name=f"batch_invariant_{name}")
    def make(m: Maker) -> Call:
        capacity = m.pick(T or m.T, 3000)
        lengths = m.lengths([capacity, 0, 5])
        call = {**m.qkv(B=3, Sq=Sq, T=capacity), "nonpad_kv_seqlen": lengths}
        return Call(call, {"batch_invariant": True, **scalars})


_invariant("single_row", 1)
_invariant("long_row", 1, T=600)
_invariant("rows_with_window", 3, is_causal=True, left_window_size=6)


# ----------------------------------------------------------------------------------- float8 caches

FLOAT8 = torch.float8_e4m3fn


def _scales(m: Maker, kind: str, heads: int) -> torch.Tensor | None:
    """No scale, one for all, or one for each KV head, all far apart."""
    if kind == "none":
        return None
    return m.scales(0.3) if kind == "one" else m.scales(*(0.2 * 3**h for h in range(heads)))


def _float8_scales(k_scale: str, v_scale: str) -> None:
    @case(name=f"float8_k_scale_{k_scale}_v_scale_{v_scale}", float8=True)
    def make(m: Maker) -> Call:
        call: dict = m.qkv(B=3, cache_dtype=FLOAT8)
        call["nonpad_kv_seqlen"] = m.lengths([m.T, 0, 5])
        return Call({**call, "k_scale": _scales(m, k_scale, 2), "v_scale": _scales(m, v_scale, 2)})


for _k_scale, _v_scale in [
    ("none", "none"), ("one", "one"), ("per_head", "per_head"),
    ("none", "per_head"), ("per_head", "none"), ("one", "per_head"), ("none", "one"),
]:  # fmt: skip
    _float8_scales(_k_scale, _v_scale)


@case(float8=True)
def float8_without_lengths(m: Maker) -> Call:
    return Call({**m.qkv(Hq=3, Hkv=3, cache_dtype=FLOAT8), "k_scale": m.scales(0.5, 2.0, 0.1)})


def _float8_head_sizes(D: int, Dv: int, flash: bool = True) -> None:
    @case(name=f"float8_head_sizes_{D}_and_{Dv}", flash=flash, float8=True)
    def make(m: Maker) -> Call:
        T = m.pick(150, m.T)
        call: dict = m.qkv(Hkv=1, Hq=2, T=T, D=D, Dv=Dv, cache_dtype=FLOAT8)
        return Call({**call, "nonpad_kv_seqlen": m.lengths([T, 5]), "v_scale": m.scales(2.5)})


for _D, _Dv in [
    (8, 8), (24, 8), (64, 64), (72, 72), (96, 96), (256, 256), (64, 32), (192, 128), (33, 34),
    (64, 33), (8, 1),
]:  # fmt: skip
    _float8_head_sizes(_D, _Dv)
_float8_head_sizes(257, 64, flash=False)


def _float8_rows(Hq: int, rows: int) -> None:
    @case(name=f"float8_{Hq}_query_heads_and_{rows}_rows", float8=True)
    def make(m: Maker) -> Call:
        call: dict = m.qkv(B=3, Hq=Hq, Sq=rows, cache_dtype=FLOAT8)
        call["nonpad_kv_seqlen"] = m.lengths([m.T, rows, 11], torch.int64)
        scales = {"k_scale": m.scales(0.7, 0.2), "v_scale": m.scales(0.1, 4.0)}
        return Call({**call, **scales}, {"is_causal": True})


for _Hq, _rows in [(32, 1), (14, 1), (40, 1), (4, 4), (4, 17), (20, 5)]:
    _float8_rows(_Hq, _rows)


@case(float8=True)
def float8_values_of_every_byte(m: Maker) -> Call:
    """One key, so that each finite number comes out as it is, times the scale."""
    bytes_ = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    value = bytes_.view(FLOAT8).view(1, 1, 1, 254).to(m.device)
    call = m.qkv(B=1, Hq=2, Hkv=1, T=1, Dv=254)
    return Call({**call, "key": m.float8(1, 1, 1, m.D), "value": value, "v_scale": m.scales(0.25)})


@case(float8=True)
def float8_keys_of_every_byte(m: Maker) -> Call:
    """Each number is the logit of its key; a small scale keeps the largest from hiding the rest."""
    bytes_ = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    call = m.qkv(B=1, Hq=1, Hkv=1, T=254, D=8, Dv=64, cache_dtype=FLOAT8)
    call["query"] = torch.zeros_like(call["query"])
    call["query"][..., 3] = 1.0
    key = torch.zeros(1, 1, 254, 8, dtype=torch.uint8)
    key[0, 0, :, 3] = bytes_
    call["key"] = key.view(FLOAT8).to(m.device)
    return Call({**call, "k_scale": m.scales(2.0**-6)}, {"scale": 1.0})


@case(float8=True)
def float8_numbers_below_the_normal_ones(m: Maker) -> Call:
    """-7 to 7 times the smallest number, which the scales make integers of."""
    call: dict = m.qkv(B=1, D=64, cache_dtype=FLOAT8)
    for name in ("key", "value"):
        bits = torch.randint(0, 8, call[name].shape) + 128 * torch.randint(0, 2, call[name].shape)
        call[name] = bits.to(torch.uint8).view(FLOAT8).to(m.device)
    return Call({**call, "k_scale": m.scales(2.0**7), "v_scale": m.scales(2.0**9)})


@case(float8=True)
def float8_scales_as_strided_views(m: Maker) -> Call:
    table = m.scales(0.5, 9.0, 9.0, 2.0, 9.0, 9.0).view(2, 3)
    scales = {"k_scale": table[:, 0], "v_scale": table[1, :1].expand(2)}
    return Call({**m.qkv(cache_dtype=FLOAT8), **scales})


@case(float8=True)
def float8_nan_past_the_length(m: Maker) -> Call:
    call, lengths = m.qkv(B=4, Sq=2, cache_dtype=FLOAT8), [m.T - 3, 5, 0, 1]
    for name in ("key", "value"):
        for b, n in enumerate(lengths):
            call[name].view(torch.uint8)[b, :, n:] = 127
    call["nonpad_kv_seqlen"] = m.lengths(lengths)
    return Call({**call, "v_scale": m.scales(0.5, 2.0)}, {"is_causal": True})


@case(float8=True)
def float8_nan_in_a_key_and_a_value_that_are_seen(m: Maker) -> Call:
    """Of either sign: both are NaN, none is a number beyond 448."""
    call: dict = m.qkv(Hq=4, Hkv=4, cache_dtype=FLOAT8)
    key, value = (call[name].view(torch.uint8) for name in ("key", "value"))
    key[0, 0, 7, 3], key[0, 1, 9, 4] = 127, 255
    value[1, 2, 11, 5], value[1, 3, 12, 6] = 127, 255
    return Call(call)


@case(float8=True)
def float8_rows_without_keys_are_zero_whatever_the_scales(m: Maker) -> Call:
    call: dict = m.qkv(Sq=2, cache_dtype=FLOAT8)
    call["nonpad_kv_seqlen"] = m.lengths([0, 0])
    scales = {"k_scale": m.scales(math.nan, math.inf), "v_scale": m.scales(math.inf, math.nan)}
    return Call({**call, **scales, "sinks": m.normal(4, dtype=torch.float32)})


@case(float8=True)
def float8_nan_in_keys_that_a_bool_mask_hides(m: Maker) -> Call:
    call: dict = m.qkv(Sq=2, cache_dtype=FLOAT8)
    mask = m.flags(2, 1, 1, m.T)
    hidden = ~mask[:, 0, 0]
    for name in ("key", "value"):
        call[name].view(torch.uint8).masked_fill_(hidden[:, None, :, None], 127)
    return Call({**call, "attn_mask": mask, "v_scale": m.scales(0.1)})


@case(float8=True)
def float8_with_softcap_and_window(m: Maker) -> Call:
    """The softcap is of logits that the scale is in already."""
    call: dict = m.qkv(Sq=3, cache_dtype=FLOAT8)
    call["nonpad_kv_seqlen"] = m.lengths([m.T, 6])
    call["k_scale"] = m.scales(3.0, 0.5)
    return Call(call, {"softcap": 1.5, "is_causal": True, "left_window_size": 20})


@case(float8=True)
def float8_everything_at_once(m: Maker) -> Call:
    call: dict = m.qkv(B=3, Hq=6, Sq=3, Dv=64, cache_dtype=FLOAT8)
    call["nonpad_kv_seqlen"] = m.lengths([m.T - 2, 2, 0], torch.int64)
    call["attn_mask"] = m.normal(3, 1, 3, m.T - 5, dtype=torch.float32)
    call["attn_mask"][:, :, :, 4] = MASKED
    call["sinks"] = m.normal(6, dtype=torch.float16)
    call["k_scale"], call["v_scale"] = m.scales(2.0, 0.5), m.scales(0.3)
    scalars = {
        "is_causal": True, "scale": 0.3, "softcap": 4.0,
        "left_window_size": 20, "right_window_size": 1,
    }  # fmt: skip
    return Call(call, scalars)


@case(float8=True)
def float8_of_rank_three(m: Maker) -> Call:
    call: dict = {
        "query": m.normal(2, 3, 6 * m.D),
        "key": m.float8(2, m.T, 2 * m.D),
        "value": m.float8(2, m.T, 2 * 64),
        "nonpad_kv_seqlen": m.lengths([0, m.T - 2]),
        "k_scale": m.scales(0.5, 2.0),
        "v_scale": m.scales(3.0, 0.1),
    }
    return Call(call, {"q_num_heads": 6, "kv_num_heads": 2, "is_causal": True})


@case(float8=True)
def float8_past_and_new_keys_share_the_scales(m: Maker) -> Call:
    call: dict = m.qkv(Sq=2, T=3, Dv=2 * m.D, cache_dtype=FLOAT8)
    call["past_key"], call["past_value"] = m.float8(2, 2, 40, m.D), m.float8(2, 2, 40, 2 * m.D)
    call["k_scale"], call["v_scale"] = m.scales(0.5, 2.0), m.scales(3.0)
    return Call(call, {"is_causal": True}, "present")


@case(float8=True)
def float8_present_without_past(m: Maker) -> Call:
    call: dict = m.qkv(cache_dtype=FLOAT8)
    call["key"] = m.float8(2, m.T, 2, m.D).transpose(1, 2)
    return Call({**call, "v_scale": m.scales(0.5, 2.0)}, {}, "present")


def _float8_scores(mode: int) -> None:
    @case(name=f"float8_scores_of_mode_{mode}", flash=False, float8=True)
    def make(m: Maker) -> Call:
        call: dict = m.qkv(Sq=2, T=m.pick(23, 230), cache_dtype=FLOAT8)
        call["nonpad_kv_seqlen"] = m.lengths([9, 0])
        call["k_scale"], call["v_scale"] = m.scales(0.5, 2.0), m.scales(3.0)
        return Call(call, {"qk_matmul_output_mode": mode, "softcap": 2.0}, "qk")


for _mode in range(4):
    _float8_scores(_mode)


@case(float8=True)
def float8_positions_before_heads(m: Maker) -> Call:
    call: dict = m.qkv()
    for name in ("key", "value"):
        call[name] = m.float8(2, m.T, 2, m.D).transpose(1, 2)
    call["nonpad_kv_seqlen"] = m.lengths([m.T, 5])
    return Call({**call, "k_scale": m.scales(0.5, 2.0), "v_scale": m.scales(3.0, 0.1)})


@case(float8=True)
def float8_key_and_value_in_two_layouts(m: Maker) -> Call:
    call: dict = {**m.qkv(cache_dtype=FLOAT8), "nonpad_kv_seqlen": m.lengths([m.T, 5])}
    call["key"] = m.float8(2, m.T, 2, m.D).transpose(1, 2)
    return Call(call)


@case(float8=True)
def float8_key_and_value_interleaved(m: Maker) -> Call:
    pair = m.float8(2, m.T, 2, 2, m.D)
    call = m.qkv()
    call["key"], call["value"] = (pair[:, :, i].transpose(1, 2) for i in (0, 1))
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(float8=True)
def float8_slice_of_a_larger_cache(m: Maker) -> Call:
    call = m.qkv()
    for name in ("key", "value"):
        call[name] = m.float8(4, 5, m.T + 8, m.D)[1:3, 2:4, 3 : m.T + 3]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


@case(float8=True)
def float8_heads_and_positions_expanded(m: Maker) -> Call:
    call = m.qkv()
    call["key"] = m.float8(2, 1, m.T, m.D).expand(2, 2, m.T, m.D)
    call["value"] = m.float8(2, 2, 1, m.D).expand(2, 2, m.T, m.D)
    return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


def _float8_moved(name: str, elements: int, row: int) -> None:
    """Values are read two at a time where that is possible."""

    @case(name=name, float8=True)
    def make(m: Maker) -> Call:
        call = m.qkv()
        for tensor in ("key", "value"):
            whole = m.float8(2 * 2 * m.T * row + elements)
            call[tensor] = whole[elements:].view(2, 2, m.T, row)[..., : m.D]
        return Call({**call, "nonpad_kv_seqlen": m.lengths([m.T, 5])})


_float8_moved("float8_two_bytes_off_alignment", 2, 128)
_float8_moved("float8_rows_off_alignment", 0, 130)
_float8_moved("float8_at_an_odd_address", 1, 128)
_float8_moved("float8_rows_of_an_odd_stride", 0, 129)


@case(flash=False, float8=True)
def float8_head_dimension_not_dense(m: Maker) -> Call:
    call: dict = m.qkv(T=m.pick(13, m.T), cache_dtype=FLOAT8)
    call["value"] = m.float8(2, 2, call["key"].shape[2], 2 * m.D)[..., ::2]
    return Call({**call, "nonpad_kv_seqlen": m.lengths([5, 0])})


@case(float8=True)
def float8_batch_invariant(m: Maker) -> Call:
    T = m.pick(600, 3000)
    call: dict = m.qkv(B=3, T=T, cache_dtype=FLOAT8)
    call["nonpad_kv_seqlen"] = m.lengths([T, 0, 5])
    scales = {"k_scale": m.scales(0.5, 2.0), "v_scale": m.scales(3.0, 0.1)}
    return Call({**call, **scales}, {"batch_invariant": True})


@case(float8=True, everywhere=False)
def float8_long_sequence_in_many_splits(m: Maker) -> Call:
    call: dict = m.qkv(B=1, T=30000, cache_dtype=FLOAT8)
    return Call({**call, "nonpad_kv_seqlen": m.lengths([29999]), "v_scale": m.scales(0.5, 2.0)})


@case(float8=True, everywhere=False)
def float8_mixed_lengths_as_served(m: Maker) -> Call:
    lengths = [512, 8192, 0, 1, 4097, 63, 64, 65, 127, 128, 129, 8191, 2048, 300, 5000, 1000]
    call: dict = m.qkv(B=16, Hq=8, Hkv=2, T=8192, cache_dtype=FLOAT8)
    scales = {"k_scale": m.scales(0.5, 2.0), "v_scale": m.scales(3.0, 0.1)}
    return Call({**call, **scales, "nonpad_kv_seqlen": m.lengths(lengths)})


@case(float8=True)
def float8_empty_batch_and_no_keys(m: Maker) -> Call:
    return Call({**m.qkv(B=2, T=0, cache_dtype=FLOAT8), "k_scale": m.scales(0.5)})
