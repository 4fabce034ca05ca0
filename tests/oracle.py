"""The meaning of `attn_tiers::decode` and of the cache writes in float64, one row at a time.

Written from the contract with NumPy and loops over batch, head and query row; it shares no code
with the library, reads no key that a row cannot see, and is slow on purpose.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch


class DecodeResult(NamedTuple):
    """Float64 results; `present_*` keep the inputs' dtype, because they are copies."""

    y: torch.Tensor
    present_key: torch.Tensor
    present_value: torch.Tensor
    qk: torch.Tensor | None


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key: torch.Tensor | None = None,
    past_value: torch.Tensor | None = None,
    nonpad_kv_seqlen: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qk_matmul_output_mode: int | None = None,
    **_ignored: Any,  # tier, batch_invariant: they change how, never what
) -> DecodeResult:
    """Attention of `query` over `concat(past, new)` keys; see the contract, section 1."""
    rank = query.dim()
    if rank == 3:
        assert q_num_heads is not None and kv_num_heads is not None
        query = _split_heads(query, q_num_heads)
        key = _split_heads(key, kv_num_heads)
        value = _split_heads(value, kv_num_heads)
    past = 0
    if past_key is not None:
        assert past_value is not None
        past = past_key.shape[2]
        key = torch.cat([past_key, key], dim=2)
        value = torch.cat([past_value, value], dim=2)
    present_key, present_value = key.detach().clone(), value.detach().clone()

    q, k, v = _float64(query), _float64(key), _float64(value)
    batch, q_heads, q_length, head_size = q.shape
    kv_heads, capacity, value_size = k.shape[1], k.shape[2], v.shape[3]
    group = q_heads // kv_heads if kv_heads else 1
    if scale is None:
        scale = 1.0 / math.sqrt(head_size)

    y = np.zeros((batch, q_heads, q_length, value_size))
    qk = np.zeros((batch, q_heads, q_length, capacity))
    for b in range(batch):
        if nonpad_kv_seqlen is not None:
            length = min(max(int(nonpad_kv_seqlen[b]), 0), capacity)
            offset = length - q_length
        else:
            length = capacity
            offset = past
        for h in range(q_heads):
            with np.errstate(invalid="ignore"):  # a scale may be infinite
                keys = k[b, h // group] * _scale_of(k_scale, h // group)
                values = v[b, h // group] * _scale_of(v_scale, h // group)
            sink = -math.inf if sinks is None else float(sinks[h])
            for i in range(q_length):
                visible = np.arange(capacity) < length
                if is_causal:
                    visible &= np.arange(capacity) <= i + offset
                if left_window_size >= 0:
                    visible &= np.arange(capacity) >= i + offset - left_window_size
                if right_window_size >= 0:
                    visible &= np.arange(capacity) <= i + offset + right_window_size
                bias = np.zeros(capacity)
                if attn_mask is not None:
                    allowed, bias = _mask_row(attn_mask, b, h, i, capacity)
                    visible &= allowed
                row, scores = _attend(
                    q[b, h, i],
                    keys,
                    values,
                    visible,
                    bias,
                    sink,
                    scale,
                    softcap,
                    qk_matmul_output_mode,
                )
                y[b, h, i] = row
                if scores is not None:
                    qk[b, h, i] = scores
    result = torch.from_numpy(y)
    if rank == 3:
        result = result.transpose(1, 2).reshape(batch, q_length, q_heads * value_size)
    return DecodeResult(
        result,
        present_key,
        present_value,
        None if qk_matmul_output_mode is None else torch.from_numpy(qk),
    )


def _attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    bias: np.ndarray,
    sink: float,
    scale: float,
    softcap: float,
    mode: int | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """One output row, and the row of scores in the form that `mode` asks for."""

    def scores_of(some_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raw = scale * (some_keys @ q)
        return raw, softcap * np.tanh(raw / softcap) if softcap > 0 else raw

    seen = np.flatnonzero(visible)
    row = np.zeros(values.shape[1])
    weights = np.zeros(len(seen))
    logits = scores_of(keys[seen])[1] + bias[seen]
    if len(seen):
        top = max(float(logits.max()), sink)
        numerators = np.exp(logits - top)
        weights = numerators / (numerators.sum() + math.exp(sink - top))
        row = weights @ values[seen]
    if mode is None:
        return row, None
    if mode in (0, 1):
        return row, scores_of(keys)[mode]
    out = np.full(len(keys), -np.inf if mode == 2 else 0.0)
    out[seen] = logits if mode == 2 else weights
    return row, out


def _scale_of(scales: torch.Tensor | None, kv_head: int) -> float:
    """What a float8 number of this head stands for, as a multiple of itself."""
    if scales is None:
        return 1.0
    return float(scales if scales.dim() == 0 else scales[kv_head])


def _mask_row(
    mask: torch.Tensor, b: int, h: int, i: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """(allowed, bias) over all keys for one query row; the mask is aligned from the right."""
    row = mask
    for index in (b, h, i)[3 - (mask.dim() - 1) :]:
        row = row[0 if row.shape[0] == 1 else index]
    allowed, bias = np.zeros(capacity, dtype=bool), np.zeros(capacity)
    values = row.detach().cpu()
    given = values.shape[0]
    if mask.dtype == torch.bool:
        allowed[:given] = values.numpy()
    else:
        numbers = values.double().numpy()
        allowed[:given] = numbers != -np.inf
        bias[:given] = np.where(numbers == -np.inf, 0.0, numbers)
    return allowed, bias


def _split_heads(packed: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length, width = packed.shape
    return packed.reshape(batch, length, heads, width // heads).transpose(1, 2)


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(device="cpu", dtype=torch.float64).numpy()


def tensor_scatter(
    past_cache: torch.Tensor,
    update: torch.Tensor,
    write_indices: torch.Tensor | None = None,
    *,
    axis: int = -2,
    write_mode: str = "linear",
) -> torch.Tensor:
    """The cache after the write, as a new CPU tensor; see the contract, section 2."""
    cache, update = past_cache.detach().cpu().clone(), update.detach().cpu()
    axis = axis % cache.dim()
    capacity = cache.shape[axis]
    for b in range(cache.shape[0]):
        start = 0 if write_indices is None else int(write_indices[b])
        for s in range(update.shape[axis]):
            position = start + s
            if write_mode == "circular":
                position %= capacity
            elif start < 0 or position >= capacity:
                continue  # outside; a negative index skips its row, whatever the update's length
            cache[b].select(axis - 1, position).copy_(update[b].select(axis - 1, s))
    return cache


def float8_values() -> np.ndarray:
    """The 256 numbers of float8_e4m3fn by their byte, from its definition."""
    bytes_ = np.arange(256)
    sign, exponent, mantissa = bytes_ >> 7, bytes_ >> 3 & 15, bytes_ & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where((exponent == 15) & (mantissa == 7), np.nan, values)
    return np.where(sign == 1, -values, values)


def to_float8(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest float8_e4m3fn, at a tie the even one; beyond 448 that, and NaN for NaN."""
    x = _float64(numbers).reshape(-1)
    positive = float8_values()[:127]  # up to 448, in order
    size = np.abs(np.where(np.isnan(x), 0.0, x))
    above = np.minimum(np.searchsorted(positive, size), 126)
    below = np.maximum(above - 1, 0)
    to_above, to_below = positive[above] - size, size - positive[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(is_above | (size >= 448), above, below) | np.where(np.signbit(x), 128, 0)
    codes = np.where(np.isnan(x), 127, codes).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).reshape(numbers.shape)


def quantised(
    update: torch.Tensor, scale: torch.Tensor | None, heads_dim: int | None = None
) -> torch.Tensor:
    """``update / scale`` in float8; the division in float32, as the contract has it."""
    x = update.detach().cpu().to(torch.float32)
    if scale is not None:
        scale = scale.detach().cpu()
        if scale.dim() == 1:
            assert heads_dim is not None
            shape = [1] * x.dim()
            shape[heads_dim] = -1
            scale = scale.view(shape)
        x = x / scale
    return to_float8(x)
