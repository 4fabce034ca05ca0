"""What `bench gdn` compares: our operator and the public kernels over the same inputs.

Every side starts from what a model has: q and k before their l2norm, the logarithm of the gate, a
float32 state. What a library needs besides (its exp, its norm, memory for results) is inside its
time. A side called `kernel` leaves such work out, is there to be looked at, and is never compared.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.reference.gdn import l2norm
from torch_attn_tiers.cli.bench.clock import Call
from torch_attn_tiers.cli.bench.gdn_cases import CHUNK, HEAD_SIZE, GdnInputs

# Relative Frobenius error of out and of the last state in bfloat16; above it a result is wrong.
OUR_TOLERANCE = 5e-3
PEER_TOLERANCE = 1e-2
#: Of checkpoints.
LAYOUTS = ("fla", "compact")


@dataclass
class GdnSide:
    """One implementation, ready to run."""

    name: str
    calls: list[Call]  # one for each set of inputs; each returns out and leaves results
    #: Of the last call: out, the last state; then h, or the kept states if `tracked`.
    results: list[Tensor]
    peer: str | None = None  # the peer it stands for; None is ours
    form: str | None = None  # what it does beside out and last states; see FORMS
    compared: bool = True
    state_v_first: bool = True  # of results[1]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return OUR_TOLERANCE if self.peer is None else PEER_TOLERANCE

    @property
    def checked(self) -> list[Tensor]:
        """The results that are compared."""
        return self.results[: 3 if self.form in ("tracked", *LAYOUTS) else 2]

    def errors(self, inputs: GdnInputs) -> dict[str, float]:
        """Relative errors of what the last call has left; NaN if it holds one."""
        out, state = self.results[:2]
        wanted_out, wanted_state = inputs.reference
        if not self.state_v_first:
            state = state.transpose(-1, -2)
        pairs = {"out": (out.reshape(wanted_out.shape), wanted_out), "state": (state, wanted_state)}
        kept = [i for i, count in enumerate(inputs.case.track_lens) if count]
        if self.form == "tracked" and kept:
            pairs["tracked"] = (self.results[2][kept], inputs.tracked_states[kept])
        if self.form in LAYOUTS and (rows := inputs.case.rows_of_h(self.form)):
            h = self.results[2].flatten(0, -4)  # FLA's has a dimension for the batch
            pairs["h"] = (h[:rows], inputs.states(self.form))
        return {
            name: ((got.double() - wanted).norm() / wanted.norm()).item()
            for name, (got, wanted) in pairs.items()
        }


def _side(
    name: str, function: Callable[[int], tuple[Tensor, ...]], inputs: GdnInputs, **rest: Any
) -> GdnSide:
    """A side of a function that returns out and the last state for a set of inputs."""
    results: list[Tensor] = []

    def call(i: int) -> Tensor:
        results[:] = function(i)
        return results[0]

    calls: list[Call] = [functools.partial(call, i) for i in range(inputs.sets)]
    return GdnSide(name, calls, results, **rest)


#: What our sides may do beside outputs and last states: write checkpoints in a layout, or read and
#: write states in a pool, with one kept inside each prompt or none.
FORMS = (*LAYOUTS, "pool", "tracked")


def ours(inputs: GdnInputs, tier: str, form: str | None) -> GdnSide:
    """`attn_tiers::gdn_chunk_prefill`; tier "auto" leaves the choice to the package.

    Prepared, as a serving runtime would: tiers of a slow build wait for it.
    """
    import torch_attn_tiers

    named: dict[str, Any] = {"qk_l2norm": True, "state_v_first": True}
    if tier != "auto":
        named["tier"] = tier
    if form in ("pool", "tracked"):
        operator, rest, results = _pooled(inputs, form)
    else:
        operator, rest, results = _dense(inputs, form)
        if form is not None:
            named["h_dtype"] = torch.float32

    def tensors(i: int) -> tuple[Tensor, ...]:
        return inputs.q[i], inputs.k[i], inputs.v[i], inputs.g[i], inputs.beta[i], *rest

    def function(i: int) -> tuple[Tensor, ...]:
        return results(operator(*tensors(i), **named))

    since = time.perf_counter()
    torch_attn_tiers.prepare(operator, *tensors(0), **named)
    prepared = time.perf_counter()
    with torch_attn_tiers.record_dispatch() as records:
        function(0)
    notes = {
        "tier": records[-1].tier,
        "prepare_s": round(prepared - since, 2),
        "first_call_s": round(time.perf_counter() - prepared, 2),
    }
    name = "ours" if tier == "auto" else f"ours:{tier}"
    suffix = {None: "", "pool": ".pool", "tracked": ".pool_tracked"}
    name += suffix.get(form, f".h_{form}")
    return _side(name, function, inputs, form=form, notes=notes)


_Form = tuple[Any, tuple[Tensor, ...], Callable[[Any], tuple[Tensor, ...]]]


def _dense(inputs: GdnInputs, h_layout: str | None) -> _Form:
    """The operator, its arguments after beta, and its results."""
    packet = torch.ops.attn_tiers.gdn_chunk_prefill
    operator = getattr(packet, "default" if h_layout is None else f"h_{h_layout}")
    return operator, (inputs.initial_state, inputs.cu_seqlens), tuple


def _pooled(inputs: GdnInputs, form: str) -> _Form:
    """The same over a float32 pool of the initial, the last and the kept states."""
    case = inputs.case
    N = case.sequences
    pool = torch.cat([inputs.initial_state, *[torch.zeros_like(inputs.initial_state)] * 2])
    rows = torch.arange(3 * N, device=inputs.device)
    track: tuple[Any, ...] = (None, None)
    if form == "tracked":
        track = (torch.tensor(case.track_lens, device=inputs.device), rows[2 * N :])
    operator = torch.ops.attn_tiers.gdn_chunk_prefill.pool_
    rest = (pool, rows[:N], rows[N : 2 * N], *track, inputs.cu_seqlens)
    return operator, rest, lambda out: (out, pool[N : 2 * N], pool[2 * N :])


def fill_h(inputs: GdnInputs, layout: str) -> list[Call]:
    """Filling float32 checkpoints of the case, the least that writing them can cost.

    Two buffers take turns, as those do that our calls allocate in a graph: each is new while the
    last one is held.
    """
    case = inputs.case
    shape = (case.rows_of_h(layout), case.v_heads, HEAD_SIZE, HEAD_SIZE)
    buffers = [torch.empty(shape, device=inputs.device) for _ in range(2)]
    return [functools.partial(buffer.fill_, 0.0) for buffer in buffers]


def fla(inputs: GdnInputs) -> list[GdnSide]:
    """flash-linear-attention's Triton kernels, its l2norm inside.

    It reads cu_seqlens on the host and remembers the tensor: the warm-up before a capture does so.
    """
    os.environ["FLA_FLASH_QLA"] = "0"  # its own kernels
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return [_of_fla_signature("fla", chunk_gated_delta_rule, inputs)]


def flash_qla(inputs: GdnInputs) -> list[GdnSide]:
    """FlashQLA's TileLang kernels."""
    import flash_qla as library

    function = functools.partial(library.chunk_gated_delta_rule, auto_cp=True)
    return [_of_fla_signature("flash_qla", function, inputs)]


def _of_fla_signature(name: str, function: Callable[..., Any], inputs: GdnInputs) -> GdnSide:
    state = inputs.initial_state.transpose(-1, -2).contiguous()

    def call(i: int) -> tuple[Tensor, ...]:
        out, final_state = function(
            inputs.q[i], inputs.k[i], inputs.v[i], inputs.g[i], inputs.beta[i], scale=inputs.scale,
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
        return out, final_state

    return _side(name, call, inputs, peer=name, state_v_first=False)


def flashinfer(inputs: GdnInputs) -> list[GdnSide]:
    """FlashInfer's kernel with its l2norm and the exp that it needs; with checkpoints; alone."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    case = inputs.case
    counts = [0, *itertools.accumulate(n // CHUNK for n in case.lengths)]
    starts = torch.tensor(counts, device=inputs.device)
    rest: dict[str, Any] = {
        "scale": inputs.scale,
        "initial_state": inputs.initial_state,
        "output_final_state": True,
        "cu_seqlens": inputs.cu_seqlens,
    }

    def whole(i: int, **more: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = chunk_gated_delta_rule(
            inputs.q[i][0], inputs.k[i][0], inputs.v[i][0], g=torch.exp(inputs.g[i][0]),
            beta=inputs.beta[i][0], use_qk_l2norm_in_kernel=True, **rest, **more,
        )  # fmt: skip
        return results

    def with_h(i: int) -> tuple[Tensor, ...]:
        shape = (max(1, case.complete_chunks), case.v_heads, HEAD_SIZE, HEAD_SIZE)
        h = torch.empty(shape, device=inputs.device)
        results = whole(
            i, state_checkpoints=h, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=CHUNK
        )
        return *results, h

    normal = [tuple(l2norm(x)[0] for x in pair) for pair in zip(inputs.q, inputs.k, strict=True)]
    decay = [torch.exp(g[0]) for g in inputs.g]

    def kernel(i: int) -> tuple[Tensor, ...]:
        q, k = normal[i]
        results: tuple[Tensor, ...] = chunk_gated_delta_rule(
            q, k, inputs.v[i][0], g=decay[i], beta=inputs.beta[i][0], **rest
        )
        return results

    name = "flashinfer"
    return [
        _side(name, whole, inputs, peer=name),
        _side(f"{name}.h_compact", with_h, inputs, peer=name, form="compact"),
        _side(f"{name}:kernel", kernel, inputs, peer=name, compared=False),
    ]


@dataclass(frozen=True)
class GdnPeer:
    """A public implementation: how it is labelled, imported and built."""

    name: str
    label: str
    module: str  # what must be importable
    build: Callable[[GdnInputs], list[GdnSide]]

    def gap(self) -> str | None:
        """Why it cannot run here at all, judged without importing it."""
        found = importlib.util.find_spec(self.module.split(".")[0])
        return None if found else f"{self.module} is not installed"


PEERS = {
    peer.name: peer
    for peer in (
        GdnPeer("fla", "FLA", "fla", fla),
        GdnPeer("flashinfer", "FlashInfer", "flashinfer", flashinfer),
        GdnPeer("flash_qla", "FlashQLA", "flash_qla", flash_qla),
    )
}
