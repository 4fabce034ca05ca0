"""The oracle against cases worked out by hand, because everything else is measured against it."""

from __future__ import annotations

import math

import pytest
import torch

from tests import oracle
from tests.tolerances import assert_close, relative_errors


def _column(*values: float) -> torch.Tensor:
    """[1, 1, len(values), 1]"""
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1, 1)


def test_two_equal_keys_average_their_values() -> None:
    y = oracle.decode(_column(1.0), _column(1.0, 1.0), _column(3.0, 5.0)).y
    assert y.item() == pytest.approx(4.0)


def test_logit_of_log_three_weighs_three_to_one() -> None:
    y = oracle.decode(_column(1.0), _column(math.log(3), 0.0), _column(4.0, 8.0), scale=1.0).y
    assert y.item() == pytest.approx(3 / 4 * 4 + 1 / 4 * 8)


def test_default_scale_is_one_over_root_of_head_size() -> None:
    query, value = torch.ones(1, 1, 1, 4), _column(4.0, 8.0)
    key = torch.stack([torch.full((4,), math.log(3) / 2), torch.zeros(4)]).reshape(1, 1, 2, 4)
    assert oracle.decode(query, key, value).y.item() == pytest.approx(5.0)


def test_sink_of_logit_zero_takes_a_share_without_value() -> None:
    y = oracle.decode(_column(0.0), _column(9.0, 9.0), _column(3.0, 6.0), sinks=torch.zeros(1)).y
    assert y.item() == pytest.approx(9 / 3)


def test_length_counts_keys_and_zero_length_is_zero() -> None:
    key = torch.zeros(2, 1, 3, 1)
    value = torch.tensor([1.0, 2.0, math.nan]).reshape(1, 1, 3, 1).expand(2, 1, 3, 1)
    y = oracle.decode(torch.ones(2, 1, 1, 1), key, value, nonpad_kv_seqlen=torch.tensor([0, 2])).y
    assert y.flatten().tolist() == [0.0, 1.5]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (None, [1.0, 1.5, 2.0]),  # top left
        (4, [1.5, 2.0, 2.5]),  # bottom right: the last row sees all four
        (2, [0.0, 1.0, 1.5]),  # offset -1: the first row sees nothing
        (9, [1.5, 2.0, 2.5]),  # clamped to the capacity before the offset is taken
    ],
)
def test_causal_offsets(length: int | None, expected: list[float]) -> None:
    lengths = None if length is None else torch.tensor([length])
    y = oracle.decode(
        _column(0.0, 0.0, 0.0),
        _column(0.0, 0.0, 0.0, 0.0),
        _column(1.0, 2.0, 3.0, 4.0),
        nonpad_kv_seqlen=lengths,
        is_causal=True,
    ).y
    assert y.flatten().tolist() == pytest.approx(expected)


def test_causal_offset_with_past_is_its_length() -> None:
    y = oracle.decode(
        _column(0.0), _column(0.0, 0.0), _column(3.0, 9.0), _column(0.0), _column(1.0),
        is_causal=True,
    ).y  # fmt: skip
    assert y.item() == pytest.approx(2.0)


def test_left_window_counts_keys_before_the_current_one() -> None:
    y = oracle.decode(
        _column(0.0), _column(0.0, 0.0, 0.0, 0.0), _column(1.0, 2.0, 3.0, 4.0),
        nonpad_kv_seqlen=torch.tensor([4]), left_window_size=1,
    ).y  # fmt: skip
    assert y.item() == pytest.approx(3.5)


def test_short_mask_hides_the_rest_and_minus_inf_is_not_finfo_min() -> None:
    query, key, value = _column(0.0), _column(0.0, 0.0, 0.0), _column(1.0, 2.0, 4.0)
    assert oracle.decode(query, key, value, attn_mask=torch.tensor([True])).y.item() == 1.0
    lowest = torch.full((3,), torch.finfo(torch.float32).min)
    assert oracle.decode(query, key, value, attn_mask=lowest).y.item() == pytest.approx(7 / 3)
    hidden = torch.full((3,), -math.inf)
    assert oracle.decode(query, key, value, attn_mask=hidden).y.item() == 0.0


def test_rank_three_mask_is_per_head() -> None:
    query, key = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 2, 1)
    value = torch.tensor([1.0, 2.0]).reshape(1, 1, 2, 1).expand(2, 2, 2, 1)
    mask = torch.tensor([[[True, False]], [[False, True]]])
    y = oracle.decode(query, key, value, attn_mask=mask).y
    assert y.reshape(2, 2).tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_score_modes() -> None:
    call = {"attn_mask": torch.tensor([[0.5, -math.inf]]), "scale": 2.0, "softcap": 4.0}
    args = _column(1.0), _column(1.0, 3.0), _column(1.0, 1.0)
    capped = [4 * math.tanh(0.5), 4 * math.tanh(1.5)]
    expected = {0: [2.0, 6.0], 1: capped, 2: [capped[0] + 0.5, -math.inf], 3: [1.0, 0.0]}
    for mode, scores in expected.items():
        qk = oracle.decode(*args, qk_matmul_output_mode=mode, **call).qk
        assert qk is not None
        assert qk.flatten().tolist() == pytest.approx(scores)


def test_scatter_drops_outside_and_wraps_in_a_circle() -> None:
    cache, update = torch.zeros(3, 4, 1), torch.tensor([1.0, 2.0]).reshape(1, 2, 1).expand(3, 2, 1)
    linear = oracle.tensor_scatter(cache, update, torch.tensor([3, -1, 1]))
    assert linear[..., 0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 2, 0]]
    circular = oracle.tensor_scatter(cache, update, torch.tensor([3, 5, 1]), write_mode="circular")
    assert circular[..., 0].tolist() == [[2, 0, 0, 1], [0, 1, 2, 0], [0, 1, 2, 0]]


def test_one_wrong_row_is_not_hidden_by_many_right_ones() -> None:
    expected = torch.ones(1000, 4)
    actual = expected.clone()
    actual[17] *= 1.01
    whole, row, index = relative_errors(actual, expected)
    assert whole < 5e-4 and row == pytest.approx(0.01, rel=1e-4) and index == 17
    with pytest.raises(AssertionError, match="row 17"):
        assert_close(actual, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e-30])
def test_a_row_that_should_be_zero_must_be_exactly_zero(bad: float) -> None:
    expected = torch.ones(3, 4)
    expected[1] = 0
    actual = expected.clone()
    assert_close(actual, expected)
    actual[1, 2] = bad
    with pytest.raises(AssertionError):
        assert_close(actual, expected)


# ------------------------------------------------------------------------------------------ float8


def test_float8_numbers_are_those_of_pytorch() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    theirs = bytes_.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(
        torch.from_numpy(oracle.float8_values()), theirs, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, 0.0),
        (17.0, 16.0),  # a tie between 16 and 18, whose last bits are 0 and 1
        (19.0, 20.0),
        (-17.1, -18.0),
        (2.0**-10, 0.0),  # half the smallest
        (3 * 2.0**-10, 2.0**-8),
        (447.0, 448.0),
        (1e30, 448.0),
        (-math.inf, -448.0),
        (math.nan, math.nan),
    ],
)
def test_rounding_to_float8(number: float, expected: float) -> None:
    rounded = oracle.to_float8(torch.tensor([number])).double().item()
    assert rounded == expected or (math.isnan(rounded) and math.isnan(expected))


def test_scales_belong_to_kv_heads() -> None:
    key = torch.zeros(1, 2, 1, 1)
    value = torch.tensor([2.0, 2.0]).view(1, 2, 1, 1).to(torch.float8_e4m3fn)
    y = oracle.decode(torch.zeros(1, 4, 1, 1), key, value, v_scale=torch.tensor([3.0, 0.5])).y
    assert y.flatten().tolist() == [6.0, 6.0, 1.0, 1.0]
    key = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).to(torch.float8_e4m3fn)
    value = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1).to(torch.float8_e4m3fn)
    log_three = torch.tensor(math.log(3), dtype=torch.float64)
    y = oracle.decode(torch.ones(1, 1, 1, 1), key, value, k_scale=log_three).y
    assert y.item() == pytest.approx(5.0)
