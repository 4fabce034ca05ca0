"""Keeping states of the gated delta net for a prefix cache: which row goes to which place.

A runtime that shares prefixes of prompts keeps, of each prompt, the state at a page boundary, in a
pool. :class:`CheckpointMetadata` says which row of ``h`` that state is, in either layout of
``gdn_chunk_prefill``, and :func:`scatter_checkpoints_` copies it. All of it happens on the device,
in shapes that depend on the number of sequences only, so that it can be captured.

Example:
    >>> import torch
    >>> from torch_attn_tiers import gdn_chunk_prefill
    >>> from torch_attn_tiers.checkpoints import CheckpointMetadata, scatter_checkpoints_
    >>> seq_lens, prefix_lens = torch.tensor([350, 100]), torch.tensor([192, 0])
    >>> slots = torch.tensor([5, 2])  # places of the pool that are free
    >>> metadata = CheckpointMetadata.build(seq_lens, prefix_lens, 64, slots)
    >>> metadata.track_lens.tolist()  # the state after so many tokens of each extension is kept
    [128, 64]
    >>> q, k = torch.randn(2, 1, 258, 2, 16)
    >>> v, gate = torch.randn(1, 258, 4, 8), torch.rand(1, 258, 4)
    >>> result = gdn_chunk_prefill(
    ...     q, k, v, -gate, gate, scale=None, initial_state=torch.zeros(2, 4, 16, 8),
    ...     cu_seqlens=torch.tensor([0, 158, 258]), qk_l2norm=True, output_h=True)
    >>> pool = torch.zeros(9, 4, 16, 8)
    >>> scatter_checkpoints_(pool, metadata.dst, result, metadata)
    >>> pool.flatten(1).any(1).nonzero().flatten().tolist()
    [2, 5]
"""

from __future__ import annotations

import numbers
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn_tiers.gdn import GdnPrefillCompact, GdnPrefillFla
from torch_attn_tiers.ops.checks import (
    require_dense,
    require_integers,
    require_same_device,
    require_shape,
    require_type,
)
from torch_attn_tiers.ops.gdn import C

_BUILD = "CheckpointMetadata.build"
_SCATTER = "scatter_checkpoints_"


class CheckpointMetadata(NamedTuple):
    """Which state of each of ``N`` sequences is kept, and where: tensors ``[N]`` on the device."""

    #: bool: the state is a row of ``h``.
    track_mask: Tensor
    #: bool: the state is the last one, which the extension ends with.
    final_mask: Tensor
    #: int64: its row of ``h`` in the compact layout. Without ``track_mask`` it means nothing.
    track_ssm_h_src: Tensor
    #: int64: the same in the FLA layout, of ``h[0]``.
    track_ssm_h_src_fla: Tensor
    #: int64: its place in the pool, of ``track_slots``; -1 where neither mask is set.
    dst: Tensor
    #: int64: tokens of the extension after which it is the state; 0 where neither mask is set.
    track_lens: Tensor

    @classmethod
    def build(
        cls, seq_lens: Tensor, prefix_lens: Tensor, page_size: int, track_slots: Tensor
    ) -> CheckpointMetadata:
        """Works out the state of each sequence at its last whole page.

        A sequence is extended by ``seq_lens - prefix_lens`` tokens, those that a call of
        ``gdn_chunk_prefill`` gets. If its last page boundary lies among them and that is where a
        chunk ends, or the extension does, the state there is kept.

        Args:
            seq_lens: ``[N]`` int32 or int64, tokens of each sequence after the call.
            prefix_lens: ``[N]``, those of them that came before the call. A prefix longer than its
                sequence counts as no extension.
            page_size: tokens of a page, a multiple of 64.
            track_slots: ``[N]`` int32 or int64, places of the pool; a negative one keeps nothing.

        Raises:
            ValueError: page_size is no multiple of 64, or shapes or devices differ.
            TypeError: page_size is no int, or another argument no dense tensor of int32 or int64.
        """
        page_size = _checked_page_size(page_size)
        named = dict(seq_lens=seq_lens, prefix_lens=prefix_lens, track_slots=track_slots)
        for name, tensor in named.items():
            _require_tensor(_BUILD, name, tensor)
        require_dense(_BUILD, named, **named)
        for name, tensor in named.items():
            require_integers(_BUILD, name, tensor)
            shape = (seq_lens.shape[0],) if seq_lens.dim() else (1,)
            require_shape(_BUILD, name, tensor, shape, "[N], one for each sequence")
        require_same_device(_BUILD, **named)

        seq_lens, prefix_lens = seq_lens.long(), prefix_lens.long()
        extend = (seq_lens - prefix_lens).clamp(min=0)
        track = seq_lens // page_size * page_size - prefix_lens
        track_mask = (track > 0) & (track < extend) & (track % C == 0)
        final_mask = (track > 0) & (track == extend)
        kept = track_mask | final_mask
        return cls(
            track_mask,
            final_mask,
            _rows_before(extend // C) + track // C - 1,
            _rows_before((extend - 1) // C + 1) + track // C,
            torch.where(kept, track_slots.long(), -1),
            torch.where(kept, track, 0),
        )


def _checked_page_size(page_size: int) -> int:
    # Compiled for any page size, it is a symbol, of which Dynamo can make no text: none is made
    # but where it is raised, and there index() makes it a number.
    if not isinstance(page_size, int) and isinstance(page_size, numbers.Integral):
        page_size = int(page_size)  # of NumPy
    if not isinstance(page_size, int) or isinstance(page_size, bool):
        raise TypeError(f"{_BUILD}: page_size is {page_size!r}; it must be an int")
    if page_size <= 0 or page_size % C != 0:
        raise ValueError(
            f"{_BUILD}: page_size={index(page_size)}; it must be a multiple of {C}, the tokens "
            "from one checkpoint to the next"
        )
    if page_size >= 2**63:  # the lengths are int64
        raise ValueError(f"{_BUILD}: page_size={index(page_size)}; it must be below 2^63")
    return page_size


def _require_tensor(function: str, name: str, value: Any) -> None:
    """``TypeError`` unless ``value`` is a tensor."""
    kind = "None" if value is None else f"of type {type(value).__name__}"
    require_type(isinstance(value, Tensor), f"{function}: {name} is {kind}; it must be a tensor")


def _rows_before(rows: Tensor) -> Tensor:
    """Rows of ``h`` before those of each sequence."""
    return rows.cumsum(0) - rows


def scatter_checkpoints_(
    pool: Tensor,
    dst: Tensor,
    result: GdnPrefillFla | GdnPrefillCompact | tuple[Tensor, ...] | Tensor,
    metadata: CheckpointMetadata,
) -> None:
    """Writes the state that ``metadata`` names of each sequence into ``pool[dst]``, in one launch.

    Args:
        pool: ``[P,Hv,K,V]``, or ``[P,Hv,V,K]`` for a result of ``state_v_first=True``. float32,
            bfloat16 or float16, any strides.
        dst: ``[N]`` int32 or int64, places of the pool, as ``metadata.dst``. One that the pool does
            not have, as -1, writes nothing.
        result: what ``gdn_chunk_prefill`` returned with checkpoints: 3 values (FLA layout) or 4
            (compact layout), with a final state. Or its ``h`` alone, ``[1,R,Hv,K,V]`` or
            ``[R,Hv,K,V]``: sequences of ``metadata.final_mask`` are left to the caller then.
        metadata: of the sequences of that call. Rows that ``h`` does not have write nothing.

    Raises:
        ValueError, TypeError: the result has no checkpoints or no final state, or the operator's
            rules are broken, see :mod:`torch_attn_tiers.ops.checkpoints`.
        RuntimeError: an input requires grad.
    """
    require_type(
        isinstance(metadata, CheckpointMetadata),
        f"{_SCATTER}: metadata is of type {type(metadata).__name__}; it must be what "
        "CheckpointMetadata.build returned",
    )
    h, final_state = _states(result)
    _require_tensor(_SCATTER, "dst", dst)
    require_shape(_SCATTER, "dst", dst, tuple(metadata.dst.shape), "[N], as metadata.dst")
    fla = h.dim() == 5
    torch.ops.attn_tiers.scatter_checkpoints_(
        pool,
        dst,
        h[0] if fla else h,
        metadata.track_ssm_h_src_fla if fla else metadata.track_ssm_h_src,
        metadata.track_mask,
        final_state,
        None if final_state is None else metadata.final_mask,
    )


def _states(result: tuple[Tensor, ...] | Tensor) -> tuple[Tensor, Tensor | None]:
    """``h`` and, unless it is given alone, the final state of a result in either form."""
    ranks: tuple[int, ...]
    if isinstance(result, Tensor):
        h, final_state, ranks = result, None, (4, 5)
    else:
        require_type(
            isinstance(result, tuple),
            f"{_SCATTER}: result is of type {type(result).__name__}; it must be what "
            "gdn_chunk_prefill returned with output_h=True, or its h",
        )
        if len(result) not in (3, 4):
            raise ValueError(
                f"{_SCATTER}: result has {len(result)} values; it must be that of a "
                "gdn_chunk_prefill with checkpoints, of 3 or 4: call it with output_h=True"
            )
        final_state, h = result[1], result[2]
        # None would pass for a result without one, and what ends at a page boundary be lost.
        _require_tensor(_SCATTER, "final_state of result", final_state)
        _require_tensor(_SCATTER, "h of result", h)
        ranks = (5,) if len(result) == 3 else (4,)
    if h.dim() not in ranks or (h.dim() == 5 and h.shape[0] != 1):
        raise ValueError(
            f"{_SCATTER}: h has shape {tuple(h.shape)}; it must be [1,R,Hv,K,V] in the FLA layout "
            "(results of 3 values) or [R,Hv,K,V] in the compact one (of 4)"
        )
    return h, final_state
