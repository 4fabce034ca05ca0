"""``attn_tiers::decode`` in plain PyTorch: the ONNX ``Attention`` operator over a KV cache.

Letters: ``B`` batch, ``Hq``/``Hkv`` query and KV heads, ``G = Hq/Hkv``, ``Sq`` query rows, ``T``
keys (the capacity of the cache), ``D``/``Dv`` head sizes. Query head ``h`` reads KV head
``h // G``.

Nothing here reads a value of a tensor on the host, so all of it can be captured into a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_free_ops.autocast import without_autocast
from csrc_free_ops.visibility import additive_mask, visible_keys

#: Keys that :func:`decode_batch_invariant` takes at a time. Any constant will do.
_CHUNK = 128


@without_autocast
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    nonpad_kv_seqlen: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    past_len: int = 0,
    is_causal: bool = False,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention output ``[B,Hq,Sq,Dv]`` and the logits asked for (``None`` without a mode).

    Args:
        query: ``[B,Hq,Sq,D]``; float16, bfloat16, float32 or float64.
        key, value: ``[B,Hkv,T,D]`` and ``[B,Hkv,T,Dv]``; the query's dtype, or float8_e4m3fn.
        nonpad_kv_seqlen: ``[B]``, the number of valid keys of each batch row.
        attn_mask: bool (True attends) or a number (added), aligned from the right with
            ``[B,Hq,Sq,T]``; a last dimension shorter than ``T`` hides the rest.
        sinks: ``[Hq]``, a logit that joins the denominator and has no value.
        k_scale, v_scale: ``[]`` or ``[Hkv]``, what the numbers of a float8 cache are multiplied by.
        past_len: how many keys come before those of the query rows, without lengths.
        qk_matmul_output_mode: 0 scaled products, 1 after softcap, 2 after the mask,
            3 after softmax.

    Both results have the query's dtype. Softmax and sums run in float32 (float64 for float64).
    """
    B, Hq, Sq, D = query.shape
    Hkv, T, Dv = key.shape[1], key.shape[2], value.shape[3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    # The G query heads of a KV head are so many more rows over the same keys.
    grouped_rows = (B, Hkv, Hq // Hkv * Sq)

    visible = visible_keys(
        query,
        T,
        nonpad_kv_seqlen,
        attn_mask,
        past_len,
        is_causal,
        left_window_size,
        right_window_size,
    ).expand(B, Hq, Sq, T)

    # Logits. A product with a hidden key may be NaN: the select drops it.
    rows = query.to(dtype).reshape(*grouped_rows, D)
    keys = dequantised(key, k_scale, dtype)
    products = scale * (rows @ keys.transpose(2, 3)).view(B, Hq, Sq, T)
    capped = softcap * torch.tanh(products / softcap) if softcap > 0 else products
    logits = torch.where(visible, capped + additive_mask(attn_mask, T, dtype), -torch.inf)

    # Softmax. A row that sees no key is zero, whatever its logits.
    probabilities = softmax_with_sinks(logits, sinks)
    probabilities = torch.where(visible.any(3, keepdim=True), probabilities, 0.0)

    # Values. A probability of 0 would still let a NaN through, so a row of V that no query row of
    # its KV head sees is replaced first.
    key_is_seen = visible.reshape(*grouped_rows, T).any(2)
    values = dequantised(value, v_scale, dtype)
    seen_value = torch.where(key_is_seen[..., None], values, 0.0)
    output = (probabilities.view(*grouped_rows, T) @ seen_value).view(B, Hq, Sq, Dv)

    if qk_matmul_output_mode is None:
        return output.to(query.dtype), None
    stages = (products, capped, _masked(logits, visible, query.dtype), probabilities)
    return output.to(query.dtype), stages[qk_matmul_output_mode].to(query.dtype)


def dequantised(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A cache ``[..,Hkv,T,D]`` in ``dtype``, multiplied by the scale of each head, or of all."""
    numbers = cache.to(dtype)
    if scale is None:
        return numbers
    return numbers * (scale if scale.dim() == 0 else scale[:, None, None])


def _masked(logits: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits as they are returned in ``dtype``: -inf says hidden, and nothing else does."""
    return torch.where(visible, logits.clamp(min=torch.finfo(dtype).min), -torch.inf)


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys; the sink of a head is one more logit in its denominator."""
    if sinks is None:
        return torch.softmax(logits, 3)
    B, Hq, Sq, _ = logits.shape
    column = sinks.to(logits.dtype).view(1, Hq, 1, 1).expand(B, Hq, Sq, 1)
    return torch.softmax(torch.cat([logits, column], 3), 3)[..., :-1]


@without_autocast
def decode_batch_invariant(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    nonpad_kv_seqlen: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    past_len: int = 0,
    is_causal: bool = False,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`decode`, with bits of a batch row that depend on no other row, nor on ``B`` or ``T``.

    Each operation is on one batch row and one chunk of keys, copied to new memory: a library sees
    the same shapes, strides and alignment whatever surrounds them. Chunks are added up in order,
    and one without a visible key adds exactly zero.
    """
    B, Hq, Sq, _ = query.shape
    T, Dv = key.shape[2], value.shape[3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    visible = visible_keys(
        query,
        T,
        nonpad_kv_seqlen,
        attn_mask,
        past_len,
        is_causal,
        left_window_size,
        right_window_size,
    ).expand(B, Hq, Sq, T)
    bias = query.new_zeros((), dtype=dtype) + additive_mask(attn_mask, T, dtype)
    bias = bias.expand(B, Hq, Sq, T)

    output = query.new_empty(B, Hq, Sq, Dv)
    stage = None if qk_matmul_output_mode is None else query.new_empty(B, Hq, Sq, T)
    for b in range(B):
        row_output, row_stages = _decode_row(
            query[b],
            dequantised(key[b], k_scale, dtype),
            dequantised(value[b], v_scale, dtype),
            visible[b],
            bias[b],
            sinks,
            scale,
            softcap,
            dtype,
        )
        output[b] = row_output
        if stage is not None and qk_matmul_output_mode is not None:
            stage[b] = row_stages[qk_matmul_output_mode][..., :T]
    return output, stage


def _decode_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output ``[Hq,Sq,Dv]`` of one batch row and the four stages of its logits, ``T`` padded."""
    Hq, Sq, D = query.shape
    Hkv, _, Dv = value.shape
    grouped_rows = (Hkv, Hq // Hkv * Sq)
    rows = query.to(dtype).clone(memory_format=torch.contiguous_format).view(*grouped_rows, D)
    visible_chunks = _chunks(visible, 2)

    products, capped, logits = [], [], []
    for key_chunk, seen, added in zip(_chunks(key, 1), visible_chunks, _chunks(bias, 2)):
        product = scale * (rows @ key_chunk.transpose(1, 2)).view(Hq, Sq, _CHUNK)
        products.append(product)
        capped.append(softcap * torch.tanh(product / softcap) if softcap > 0 else product)
        logits.append(torch.where(seen, capped[-1] + added, -torch.inf))

    # The softmax by hand: its maximum is exact in any order, its sum goes from chunk to chunk.
    sink = query.new_full((Hq, 1, 1), -torch.inf, dtype=dtype)
    if sinks is not None:
        sink = sinks.to(dtype).view(Hq, 1, 1)
    maximum = sink.expand(Hq, Sq, 1)
    for chunk in logits:
        maximum = torch.maximum(maximum, chunk.amax(2, keepdim=True))
    denominator = torch.exp(sink - maximum)
    weights = []
    for chunk, seen in zip(logits, visible_chunks):
        weights.append(torch.where(seen, torch.exp(chunk - maximum), 0.0))
        denominator = denominator + weights[-1].sum(2, keepdim=True)

    output = rows.new_zeros(Hq, Sq, Dv)
    for weight, seen, value_chunk in zip(weights, visible_chunks, _chunks(value, 1)):
        key_is_seen = seen.view(*grouped_rows, _CHUNK).any(1)
        seen_value = torch.where(key_is_seen[..., None], value_chunk, 0.0)
        output = output + (weight.view(*grouped_rows, _CHUNK) @ seen_value).view(Hq, Sq, Dv)

    row_sees_a_key = visible.any(2, keepdim=True)
    output = torch.where(row_sees_a_key, output / denominator, 0.0)
    probabilities = [torch.where(row_sees_a_key, w / denominator, 0.0) for w in weights]
    empty = rows.new_empty(Hq, Sq, 0)
    returned = [_masked(x, seen, query.dtype) for x, seen in zip(logits, visible_chunks)]
    stages = (products, capped, returned, probabilities)
    return output, tuple(torch.cat([empty, *stage], 2) for stage in stages)


def _chunks(tensor: Tensor, dim: int) -> list[Tensor]:
    """Pieces of ``_CHUNK`` along ``dim``, each in new memory, the last one padded with zeros."""
    pieces = []
    for piece in tensor.split(_CHUNK, dim) if tensor.shape[dim] else ():
        shape = list(piece.shape)
        shape[dim] = _CHUNK
        chunk = piece.new_zeros(shape)
        chunk.narrow(dim, 0, piece.shape[dim]).copy_(piece)
        pieces.append(chunk)
    return pieces
