"""The frozen facts of a call that a tier's predicates may see: never a tensor, never its values."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, PoolIndices, TensorFacts


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What every operator's problem has.

    Two problems are equal if one plan serves both, so the fields that say how the call came about
    take no part in the comparison.
    """

    op: str
    device: DeviceFacts
    #: Versions of the libraries that plans depend on.
    versions: tuple[tuple[str, str], ...] = ()

    #: The overload as a user names it, e.g. "decode.present".
    call: str = field(compare=False)
    #: The tier asked for by ``tier=`` or an option.
    requested: str | None = field(default=None, compare=False)
    #: Builds of many seconds are allowed within a call.
    jit: bool = field(default=False, compare=False)
    #: A CUDA graph capture is under way.
    capturing: bool = field(default=False, compare=False)

    def describe(self) -> str:
        """The problem on one line."""
        return f"{self.call} on {self.device}"

    def against_result(self, result: Any, tensors: Sequence[Tensor | None]) -> str | None:
        """What is wrong with the result of a plan that was given ``tensors``, in words."""
        return None


@dataclass(frozen=True, kw_only=True)
class DecodeProblem(Problem):
    """One ``decode`` call, in canonical form.

    Tensors are described as 4-D views whatever the rank of the call, the default scale is filled
    in, and causality or a window that hides nothing is not there.
    """

    op: str = "decode"
    query: TensorFacts  # [B,Hq,Sq,D]
    key: TensorFacts  # [B,Hkv,T,D], past keys included; float8_e4m3fn, or the query's dtype
    value: TensorFacts  # [B,Hkv,T,Dv], of the same dtype
    #: Rank of the query and of Y: 3 or 4.
    rank: int
    #: int32 or int64 with ``nonpad_kv_seqlen``, else None.
    lengths_dtype: torch.dtype | None
    #: [B,Hq,Sq,Tm] with stride 0 where it is broadcast; keys from Tm on are masked.
    mask: TensorFacts | None
    sinks_dtype: torch.dtype | None
    #: Shapes of the scales of float8 caches, () or (Hkv,); None is a scale of 1.
    k_scale: tuple[int, ...] | None = None
    v_scale: tuple[int, ...] | None = None
    is_causal: bool
    #: Keys before the query rows: P with ``past_key``, else 0. No meaning with lengths.
    past_len: int
    scale: float
    softcap: float
    left_window: int
    right_window: int
    #: ``qk_matmul_output_mode``; None if the products are not asked for.
    qk_mode: int | None
    batch_invariant: bool

    @property
    def is_float8(self) -> bool:
        """Whether the caches are float8_e4m3fn, under a 16-bit query."""
        return self.key.dtype is torch.float8_e4m3fn

    @property
    def B(self) -> int:
        return self.query.shape[0]

    @property
    def Hq(self) -> int:
        return self.query.shape[1]

    @property
    def Hkv(self) -> int:
        return self.key.shape[1]

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    @property
    def Sq(self) -> int:
        return self.query.shape[2]

    @property
    def T(self) -> int:
        return self.key.shape[2]

    @property
    def D(self) -> int:
        return self.query.shape[3]

    @property
    def Dv(self) -> int:
        return self.value.shape[3]

    def describe(self) -> str:
        """The problem on one line."""
        words = [
            f"{self.call} {dtype_name(self.query.dtype)}",
            f"B={self.B} Hq={self.Hq} Hkv={self.Hkv} Sq={self.Sq} T={self.T}",
            f"D={self.D} Dv={self.Dv}",
        ]
        if self.is_float8:
            words.append(f"caches={dtype_name(self.key.dtype)}")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is not None:
                words.append(f"{name}={'per head' if scale else 'one'}")
        if self.lengths_dtype is not None:
            words.append(f"lengths={dtype_name(self.lengths_dtype)}")
        if self.mask is not None:
            words.append(f"mask={dtype_name(self.mask.dtype)}")
        if self.sinks_dtype is not None:
            words.append("sinks")
        if self.past_len:
            words.append(f"past={self.past_len}")
        if self.is_causal:
            words.append("causal")
        if self.left_window >= 0 or self.right_window >= 0:
            words.append(f"window=({self.left_window},{self.right_window})")
        if self.softcap > 0:
            words.append(f"softcap={self.softcap:g}")
        if self.qk_mode is not None:
            words.append(f"qk_mode={self.qk_mode}")
        if self.batch_invariant:
            words.append("batch_invariant")
        return " ".join(words) + f" on {self.device}"

    def against_result(self, result: Any, tensors: Sequence[Tensor | None]) -> str | None:
        """What is wrong with the result of a plan that was given ``tensors``, in words."""
        B, Hq, Sq = self.B, self.Hq, self.Sq
        Y = (B, Hq, Sq, self.Dv) if self.rank == 4 else (B, Sq, Hq * self.Dv)
        if self.qk_mode is None:
            return self._against("Y", result, Y, tensors)
        if not isinstance(result, tuple) or len(result) != 2:
            return f"it returned {type(result).__name__}; it must be the tuple (Y, qk)"
        return self._against("Y", result[0], Y, tensors) or self._against(
            "qk", result[1], (B, Hq, Sq, self.T), tensors
        )

    def _against(
        self, name: str, got: Any, shape: tuple[int, ...], tensors: Sequence[Tensor | None]
    ) -> str | None:
        if not isinstance(got, Tensor):
            return f"its {name} is of type {type(got).__name__}; it must be a tensor"
        dtype = self.query.dtype
        if tuple(got.shape) != shape or got.dtype is not dtype or not got.is_contiguous():
            return (
                f"its {name} is {dtype_name(got.dtype)} of shape {tuple(got.shape)} and strides "
                f"{got.stride()}; it must be {dtype_name(dtype)} of shape {shape}, contiguous"
            )
        where = tensors[0]
        if where is not None and got.device != where.device:
            return f"its {name} is on {got.device}; it must be on {where.device}"
        memory = got.untyped_storage().data_ptr()
        if got.numel() and any(
            t is not None and t.untyped_storage().data_ptr() == memory for t in tensors
        ):
            return f"its {name} shares memory with an input; it must be new"
        return None


@dataclass(frozen=True, kw_only=True)
class _DeltaRuleProblem(Problem):
    """Tokens of one call under the gated delta rule, and their sizes."""

    q: TensorFacts  # [B,T,Hq,K], T tokens (Sq in a decode step)
    k: TensorFacts
    v: TensorFacts  # [B,T,Hv,V]
    g: TensorFacts  # [B,T,Hv]
    beta: TensorFacts

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def Hq(self) -> int:
        return self.q.shape[2]

    @property
    def Hv(self) -> int:
        return self.v.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]


@dataclass(frozen=True, kw_only=True)
class GdnProblem(_DeltaRuleProblem):
    """One ``gdn_chunk_prefill`` call, in canonical form.

    States and checkpoints are described V-first, as they lie in memory, whichever way the call asks
    for them, and the default scale is filled in. Of ``pool_`` the initial state is the pool, which
    the last states go to as well, and write indices that are not given are the read indices.
    """

    op: str = "gdn_chunk_prefill"
    initial_state: TensorFacts | None  # [N,Hv,V,K]; with a pool [P,Hv,V,K]
    #: int32 or int64; None if each row of the batch is a sequence.
    cu_seqlens_dtype: torch.dtype | None
    N: int
    scale: float
    qk_l2norm: bool
    output_final_state: bool
    #: "fla" or "compact"; None if no checkpoints are asked for.
    h_layout: str | None = None
    #: Rows of ``h``: states beyond are dropped.
    h_rows: int = 0
    h_dtype: torch.dtype | None = None
    #: The states are those of a pool, read and written by index.
    pool: PoolIndices | None = None
    batch_invariant: bool
    #: How the caller sees states. No tier needs to know.
    state_v_first: bool = field(default=False, compare=False)

    @property
    def T(self) -> int:
        return self.q.shape[1]

    def describe(self) -> str:
        """The problem on one line. The traits have the names that serving runtimes give them."""
        words = [
            f"{self.call} {dtype_name(self.q.dtype)}",
            f"B={self.B} T={self.T} N={self.N} Hq={self.Hq} Hv={self.Hv}",
            f"head_dim={self.K} head_v_dim={self.V}",
            f"head_v_eq_head_k={self.K == self.V} num_v_gte_num_q={self.Hv >= self.Hq}",
            f"qk_l2norm={self.qk_l2norm} output_h={self.h_layout is not None}",
        ]
        if self.h_layout is not None and self.h_dtype is not None:
            words.append(f"h={self.h_layout},{dtype_name(self.h_dtype)},{self.h_rows}")
        if self.initial_state is not None and self.pool is None:
            words.append(f"initial_state={dtype_name(self.initial_state.dtype)}")
        elif self.initial_state is not None and self.pool is not None:
            words.append(
                f"pool={dtype_name(self.initial_state.dtype)},{self.initial_state.shape[0]}"
            )
            if self.pool.track_lens is not None:
                words.append("tracked")
        if self.cu_seqlens_dtype is not None:
            words.append(f"cu_seqlens={dtype_name(self.cu_seqlens_dtype)}")
        if not self.output_final_state:
            words.append("no final_state")
        if self.batch_invariant:
            words.append("batch_invariant")
        return " ".join(words) + f" on {self.device}"


@dataclass(frozen=True, kw_only=True)
class GdnDecodeProblem(_DeltaRuleProblem):
    """One ``gdn_decode`` or ``gdn_decode_`` call, in canonical form.

    States are described V-first, whichever way the call asks for them, the default scale is filled
    in, and write indices that are not given are the read indices.
    """

    op: str = "gdn_decode"
    A_log: TensorFacts | None  # [Hv]; g and beta are then before the gates' formula
    dt_bias: TensorFacts | None
    state: TensorFacts  # [P,Hv,V,K]
    #: The state is written where it is read from; else a new one is made.
    in_place: bool
    read_indices: TensorFacts | None  # [B]
    write_indices: TensorFacts | None  # [B] or [B,Sq]
    scale: float
    qk_l2norm: bool
    #: How the caller sees states. No tier needs to know.
    state_v_first: bool = field(default=False, compare=False)

    @property
    def Sq(self) -> int:
        return self.q.shape[1]

    def describe(self) -> str:
        """The problem on one line."""
        words = [
            f"{self.call} {dtype_name(self.q.dtype)}",
            f"B={self.B} Sq={self.Sq} Hq={self.Hq} Hv={self.Hv} K={self.K} V={self.V}",
            f"state={dtype_name(self.state.dtype)}",
        ]
        if self.read_indices is not None:
            words.append(f"pool={self.state.shape[0]}")
        if self.write_indices is not None and len(self.write_indices.shape) == 2:
            words.append("a state for each token")
        if self.qk_l2norm:
            words.append("qk_l2norm")
        return " ".join(words) + f" on {self.device}"


@dataclass(frozen=True, kw_only=True)
class GdnGatesProblem(Problem):
    """One ``gdn_gates`` call, its leading dimensions made one."""

    op: str = "gdn_gates"
    a: TensorFacts  # [tokens,Hv]
    b: TensorFacts
    A_log: TensorFacts  # [Hv]
    dt_bias: TensorFacts

    def describe(self) -> str:
        """The problem on one line."""
        tokens, Hv = self.a.shape
        return f"{self.call} {dtype_name(self.a.dtype)} tokens={tokens} Hv={Hv} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class CheckpointProblem(Problem):
    """One ``scatter_checkpoints_`` call. All states have their last two axes in one order."""

    op: str = "scatter_checkpoints_"
    pool: TensorFacts  # [P,Hv,K,V]
    dst: TensorFacts  # [N]
    h: TensorFacts  # [R,Hv,K,V]
    h_src: TensorFacts  # [N]
    track_mask: TensorFacts  # [N]
    final_state: TensorFacts | None  # [N,Hv,K,V]
    final_mask: TensorFacts | None  # [N]

    def describe(self) -> str:
        """The problem on one line."""
        words = [
            f"{self.call} {dtype_name(self.h.dtype)} into {dtype_name(self.pool.dtype)}",
            f"N={self.dst.shape[0]} R={self.h.shape[0]} pool={tuple(self.pool.shape)}",
        ]
        if self.final_state is not None:
            words.append("final_state")
        return " ".join(words) + f" on {self.device}"


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def library_versions() -> tuple[tuple[str, str], ...]:
    """Installed versions of PyTorch and Triton."""
    versions = [("torch", str(torch.__version__))]
    for name in ("triton",):
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions)
