"""PyTorch's memory-efficient attention: additive masks, float32, and many query rows.

Its bias lets ``0 * NaN`` through from a hidden key, so it takes nothing that hides keys whose
memory may hold anything: no lengths and no bool masks. Keys past a short mask are cut off instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csrc_free_ops.autocast import without_autocast
from csrc_free_ops.facts import TensorFacts
from csrc_free_ops.visibility import additive_mask, visible_keys
from torch_attn_tiers.problem import DecodeProblem, dtype_name
from torch_attn_tiers.tier import Tier
from torch_attn_tiers.tiers.decode.layout import DecodePlan, heads_first, output_shape

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The kernel reads 16 bytes at a time; PyTorch pads the rows of a bias to this many elements too.
_BIAS_ROW = 16
_MAX_GRID = 65535


def _device(problem: DecodeProblem) -> str | None:
    capability = problem.device.capability
    if not problem.device.is_nvidia or capability is None or capability < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    return None


def _dtype(problem: DecodeProblem) -> str | None:
    if problem.query.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, not {dtype_name(problem.query.dtype)}"
    if problem.is_float8:
        return f"takes caches in the query's dtype, not {dtype_name(problem.key.dtype)}"
    return None


def _lengths(problem: DecodeProblem) -> str | None:
    if problem.lengths_dtype is None:
        return None
    return "cannot keep NaN in keys past nonpad_kv_seqlen out of the result"


def _mask(problem: DecodeProblem) -> str | None:
    if problem.mask is None:
        return None
    dtype, query_dtype = problem.mask.dtype, problem.query.dtype
    if dtype is torch.bool:
        return "cannot keep NaN in keys that a bool mask hides out of the result"
    if not dtype.is_floating_point or torch.promote_types(dtype, query_dtype) != query_dtype:
        return f"a mask in {dtype_name(dtype)} would be rounded to {dtype_name(query_dtype)}"
    return None


def _features(problem: DecodeProblem) -> str | None:
    given = {
        "softcap": problem.softcap > 0,
        "sinks": problem.sinks_dtype is not None,
        "qk_matmul_output": problem.qk_mode is not None,
        "batch_invariant": problem.batch_invariant,
    }
    missing = [name for name, is_given in given.items() if is_given]
    return f"does not do {', '.join(missing)}" if missing else None


def _sizes(problem: DecodeProblem) -> str | None:
    if min(problem.B, problem.Sq, _used_keys(problem)) == 0:
        return "does not take empty inputs"
    if max(problem.B, problem.Hkv) > _MAX_GRID:
        return f"takes at most {_MAX_GRID} batch rows and KV heads"
    return None


def _alignment(problem: DecodeProblem) -> str | None:
    vector = 16 // problem.query.dtype.itemsize
    tensors = {"query": problem.query, "key": problem.key, "value": problem.value}
    for name, facts in tensors.items():
        if facts.shape[3] % vector:
            return f"{name} has head size {facts.shape[3]}, not a multiple of {vector}"
        if not _is_aligned(facts, vector):
            return f"{name} is not dense in its last dimension with 16-byte aligned rows"
    return None


def _is_aligned(facts: TensorFacts, vector: int) -> bool:
    batch, head, row, last = facts.stride
    return (
        facts.aligned
        and last == 1
        and 0 <= row < 2**31
        and not any(stride % vector for stride in (batch, head, row))
    )


def _used_keys(problem: DecodeProblem) -> int:
    """Keys up to the end of the mask: the rest is hidden from all."""
    return problem.T if problem.mask is None else problem.mask.shape[3]


def _build(problem: DecodeProblem) -> DecodePlan:
    Hq, Hkv, G, Sq = problem.Hq, problem.Hkv, problem.G, problem.Sq
    T = _used_keys(problem)
    shape = output_shape(problem)
    has_window = problem.left_window >= 0 or problem.right_window >= 0
    # The kernel's own causality is top left, over rows that are not folded.
    causal_flag = (
        problem.is_causal
        and problem.mask is None
        and not has_window
        and problem.past_len == 0
        and G == 1
    )
    needs_bias = problem.mask is not None or has_window or (problem.is_causal and not causal_flag)

    @without_autocast
    def plan(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nonpad_kv_seqlen: Tensor | None,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor:
        query = heads_first(query, Hq)
        # With the strides that were checked: the kernel looks at those of size-1 dimensions too.
        key = heads_first(key, Hkv).as_strided(problem.key.shape, problem.key.stride)[:, :, :T]
        value = heads_first(value, Hkv).as_strided(problem.value.shape, problem.value.stride)
        value = value[:, :, :T]
        visible = bias = None
        if needs_bias:
            visible = visible_keys(
                query,
                T,
                attn_mask=attn_mask,
                past_len=problem.past_len,
                is_causal=problem.is_causal,
                left_window_size=problem.left_window,
                right_window_size=problem.right_window,
            )
            bias = _folded_bias(problem, query, visible, attn_mask, T)
        # The G query heads of a KV head become rows of it, so that K and V are not expanded.
        rows = query.reshape(problem.B, Hkv, G * Sq, problem.D)
        attention = _attention(rows, key, value, bias, causal_flag, problem.scale)

        output = query.new_empty(shape)
        grouped = heads_first(output, Hq).unflatten(1, (Hkv, G))
        grouped.copy_(attention.unflatten(2, (G, Sq)))
        if visible is not None:  # a row that sees no key is NaN in the kernel, and zero by contract
            heads_first(output, Hq).masked_fill_(~visible.any(3, keepdim=True), 0.0)
        return output

    return plan


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """The kernel, on ``[B,Hkv,rows,D]``, ``[B,Hkv,T,D]`` and a bias ``[B,Hkv,rows,T]``."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, False, 0.0, is_causal, scale=scale
    )[0]


def _folded_bias(
    problem: DecodeProblem, query: Tensor, visible: Tensor, attn_mask: Tensor | None, T: int
) -> Tensor:
    """What is added to the logits, ``-inf`` where a key is hidden, as ``[B,Hkv,G*Sq,T]``."""
    B, Hkv, G, Sq = problem.B, problem.Hkv, problem.G, problem.Sq
    added = additive_mask(attn_mask, T, query.dtype)
    if isinstance(added, Tensor) and query.dtype != torch.float16:
        # The kernel multiplies by log2(e): finfo.min would become -inf, a row of nothing else NaN.
        added = added.clamp_min(torch.finfo(torch.float32).min / 2)
    bias = torch.where(visible, added, -torch.inf)
    batches, heads = bias.shape[0], bias.shape[1]  # 1 where nothing depends on it
    if heads == 1:
        grouped = bias.expand(batches, G, Sq, T).reshape(batches, 1, G * Sq, T)
    else:
        grouped = bias.expand(batches, heads, Sq, T).reshape(batches, Hkv, G * Sq, T)
    padded = query.new_zeros(*grouped.shape[:3], -(-T // _BIAS_ROW) * _BIAS_ROW)
    padded[..., :T] = grouped
    return padded[..., :T].expand(B, Hkv, G * Sq, T)


TIER = Tier(
    op="decode",
    name="mea",
    predicates=(_device, _dtype, _lengths, _mask, _features, _sizes, _alignment),
    build=_build,
    kernel_tier=False,
)
