"""What `bench gdn_decode` compares: our operator and the public kernels over the same inputs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.reference import gdn_decode
from torch_attn_tiers.cli.bench.clock import Call

# Relative Frobenius error of out and of the last state; above it a result is wrong. Tokens, and in
# half of the cases states, are bfloat16.
OUR_TOLERANCE = 5e-3
PEER_TOLERANCE = 1e-2

_LEAST_BYTES = 128e6
_MOST_SETS = 64


@dataclass(frozen=True)
class StepCase:
    """One token for each of `batch` rows."""

    name: str
    batch: int
    dtype: torch.dtype  # of the states
    q_heads: int = 16
    v_heads: int = 32
    head_size: int = 128

    @property
    def state_bytes(self) -> int:
        """Of one set of states."""
        return self.batch * self.v_heads * self.head_size**2 * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """The fewest bytes of one step: states read and written, tokens read, out written."""
        heads = 2 * self.q_heads + 2 * self.v_heads  # of q, k, v, out
        tokens = self.batch * heads * self.head_size * torch.bfloat16.itemsize
        return 2 * self.state_bytes + tokens


CASES = {
    case.name: case
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    for batch in (1, 8, 64, 256)
    for case in (StepCase(f"b{batch}_{name}", batch, dtype),)
}


class StepInputs:
    """Tokens of one step, and several sets of states: at least 128 MB of them, and two.

    q, k `[B,1,Hq,D]`, v `[B,1,Hv,D]`, a, b `[B,1,Hv]` bfloat16; A_log, dt_bias `[Hv]` float32; a
    pool `[sets,B,Hv,D,D]` of states, V-first.
    """

    def __init__(self, case: StepCase, device: torch.device) -> None:
        self.case = case
        self.device = device
        B, Hq, Hv, D = case.batch, case.q_heads, case.v_heads, case.head_size
        self.sets = max(2, min(_MOST_SETS, -(-int(_LEAST_BYTES) // case.state_bytes)))
        generator = torch.Generator(device=device).manual_seed(4)
        make = functools.partial(torch.randn, device=device, generator=generator)
        self.q, self.k, self.v, self.a, self.b = (
            make(B, 1, *sizes, dtype=torch.bfloat16)
            for sizes in ((Hq, D), (Hq, D), (Hv, D), (Hv,), (Hv,))
        )
        self.A_log, self.dt_bias = make(Hv).sigmoid(), make(Hv).sigmoid()
        self.first = (make(B, Hv, D, D) * 0.1).to(case.dtype)
        self.states = self.first.expand(self.sets, B, Hv, D, D).contiguous()

    @property
    def scale(self) -> float:
        return self.case.head_size**-0.5

    def reset(self) -> None:
        """Every set holds the first states again."""
        self.states.copy_(self.first)

    def expected(self, steps: int) -> tuple[Tensor, Tensor]:
        """Output and states of one set after so many steps over the same tokens."""
        state, out = self.first.clone(), torch.empty_like(self.v, dtype=torch.float32)
        for _ in range(steps):
            gdn_decode(
                self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, state, state,
                None, None, out, scale=self.scale, qk_l2norm=True,
            )  # fmt: skip
        return out, state


@dataclass
class StepSide:
    """One implementation, ready to run."""

    name: str
    calls: list[Call]  # one for each set of states; each returns out
    peer: str | None = None  # the peer it stands for; None is ours
    in_place: bool = True  # in `StepInputs.states`; else `new_state` gives the last set's
    new_state: Callable[[], Tensor] | None = None  # [B,Hv,V,K]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return OUR_TOLERANCE if self.peer is None else PEER_TOLERANCE

    def errors(self, inputs: StepInputs, out: Tensor, steps: int) -> dict[str, float]:
        """Relative errors of the last set after so many steps; NaN if it holds one."""
        state = inputs.states[-1] if self.new_state is None else self.new_state()
        wanted_out, wanted_state = inputs.expected(steps)
        pairs = {"out": (out, wanted_out), "state": (state, wanted_state)}
        return {
            name: ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
            for name, (got, wanted) in pairs.items()
        }


def _bind(function: Callable[[int], Tensor], inputs: StepInputs) -> list[Call]:
    return [functools.partial(function, i) for i in range(inputs.sets)]


def ours(inputs: StepInputs, tier: str) -> list[StepSide]:
    """`attn_tiers::gdn_decode_.raw`; then the same in a pool, by indices.

    Tier "auto" leaves the choice to the package.
    """
    import torch_attn_tiers

    step = torch.ops.attn_tiers.gdn_decode_.raw
    rest: dict[str, Any] = {"qk_l2norm": True, "state_v_first": True}
    if tier != "auto":
        rest["tier"] = tier
    tokens = (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias)
    B = inputs.case.batch
    pool = inputs.states.flatten(0, 1)
    rows = [torch.arange(B, device=inputs.device) + i * B for i in range(inputs.sets)]
    indices = [row.to(torch.int32) for row in rows]

    def dense(i: int) -> Tensor:
        out: Tensor = step(*tokens, inputs.states[i], **rest)
        return out

    def pooled(i: int) -> Tensor:
        out: Tensor = step(*tokens, pool, indices[i], **rest)
        return out

    with torch_attn_tiers.record_dispatch() as records:
        dense(0)
    notes = {"tier": records[-1].tier}
    name = "ours" if tier == "auto" else f"ours:{tier}"
    return [
        StepSide(name, _bind(dense, inputs), notes=notes),
        StepSide(f"{name}.pool", _bind(pooled, inputs), notes=notes),
    ]


def fla(inputs: StepInputs) -> list[StepSide]:
    """flash-linear-attention's fused recurrent kernel in both layouts of the state.

    It writes a new state; each set keeps its last one, as a model would until the next step.
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def side(v_first: bool) -> StepSide:
        made: dict[int, Tensor] = {}
        states = inputs.states
        if not v_first:  # of its own, which it only reads; `inputs.states` have moved on by now
            states = inputs.first.mT.expand(inputs.sets, *inputs.first.mT.shape).contiguous()

        def call(i: int) -> Tensor:
            out, made[i] = fused_recurrent_gated_delta_rule(
                inputs.q, inputs.k, inputs.v, inputs.a, beta=inputs.b, scale=inputs.scale,
                initial_state=states[i], output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, A_log=inputs.A_log, dt_bias=inputs.dt_bias,
                use_beta_sigmoid_in_kernel=True, state_v_first=v_first,
            )  # fmt: skip
            return out

        def last() -> Tensor:
            return made[inputs.sets - 1] if v_first else made[inputs.sets - 1].mT

        name = f"fla:{'v' if v_first else 'k'}_first"
        return StepSide(name, _bind(call, inputs), "fla", False, last)

    return [side(True), side(False)]


def flashinfer(inputs: StepInputs) -> list[StepSide]:
    """FlashInfer's decode kernels over states of the batch, and over a pool by indices."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    out = torch.empty_like(inputs.v)
    rest: dict[str, Any] = {"scale": inputs.scale, "output": out, "use_qk_l2norm": True}
    pool = inputs.states.flatten(0, 1)
    B = inputs.case.batch
    rows = [torch.arange(B, device=inputs.device) + i * B for i in range(inputs.sets)]
    indices = [row.to(torch.int32) for row in rows]

    def step(state: Tensor | None, **more: Any) -> Tensor:
        gated_delta_rule_decode_pretranspose(
            inputs.q, inputs.k, inputs.v, state, inputs.A_log, inputs.a, inputs.dt_bias, inputs.b,
            **rest, **more,
        )  # fmt: skip
        return out

    def dense(i: int) -> Tensor:
        return step(inputs.states[i])

    def pooled(i: int) -> Tensor:
        return step(None, initial_state=pool, initial_state_indices=indices[i])

    return [
        StepSide("flashinfer", _bind(dense, inputs), "flashinfer"),
        StepSide("flashinfer:pool", _bind(pooled, inputs), "flashinfer"),
    ]


@dataclass(frozen=True)
class StepPeer:
    """A public implementation: how it is labelled, imported and built."""

    name: str
    label: str
    module: str  # what must be importable
    build: Callable[[StepInputs], list[StepSide]]
    float32_only: bool = False  # writes float32 states whatever it reads

    def gap(self) -> str | None:
        """Why it cannot run here at all, judged without importing it."""
        found = importlib.util.find_spec(self.module.split(".")[0])
        return None if found else f"{self.module} is not installed"


PEERS = {
    peer.name: peer
    for peer in (
        StepPeer("fla", "FLA", "fla", fla, float32_only=True),
        StepPeer("flashinfer", "FlashInfer", "flashinfer", flashinfer),
    )
}


def listed(case: StepCase) -> list[str]:
    """The peers without which a ratio for this case is not printed."""
    is_wide = case.dtype is torch.float32
    return [peer.name for peer in PEERS.values() if is_wide or not peer.float32_only]
