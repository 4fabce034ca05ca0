"""The recurrent step, host side: shapes and strides in, a plan of one launch out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts
from csrc_free_ops.gdn.gates import gates_kernel
from csrc_free_ops.gdn.recurrent import recurrent_kernel
from csrc_free_ops.launch import Launch, LaunchPlan
from csrc_free_ops.sizes import next_power_of_2

_GATES_BLOCK = 256
_MIB = 1 << 20


class RecurrentConfig(NamedTuple):
    """What the kernel is compiled for beyond the problem itself."""

    bv: int  # rows of S that a program keeps
    lanes: int  # threads that share a row of S, each with 16 bytes of it at a time
    num_warps: int
    unroll: int = 1  # tokens
    load_policy: str = ""  # Triton's eviction policy for reading S: "" or "evict_first"
    store_policy: str = ""  # and for writing it
    prefetch: bool = False  # asks for S before the kernel ahead has ended, where the host knows it
    max_registers: int | None = None  # a thread, so that more programs fit a multiprocessor


def default_config(
    q: TensorFacts, state: TensorFacts, device: DeviceFacts | None = None
) -> RecurrentConfig:
    """A tile of states ``[P,Hv,V,K]`` for tokens ``[B,Sq,Hq,K]``.

    With a device states may be asked for ahead of the kernel before, which needs no indices.

    Written from runs of `benchmarks/gdn_decode_configs.py` on an H200, with one token a row. From
    some bytes on there are programs enough to fill the GPU with larger tiles, and from some more
    on only the rate of the memory counts.
    """
    (B, Sq, _, K), (_, Hv, V) = q.shape, state.shape[:3]
    num_warps = 4 if K <= 128 else 8
    if state.stride[3] != 1 and state.stride[2] == 1:  # K-first memory: threads run along V
        return RecurrentConfig(min(next_power_of_2(V), 64), 2, num_warps)
    config = RecurrentConfig(min(next_power_of_2(V), 32), 8, num_warps, 1 if Sq == 1 else 2)
    size = B * Hv * V * K * state.dtype.itemsize
    if size >= 32 * _MIB:
        if state.dtype.itemsize == 4:
            return config._replace(lanes=16)
        config = config._replace(load_policy="evict_first", store_policy="evict_first")
        bv = min(next_power_of_2(V), 64)
        if device is not None and Sq == 1 and _can_prefetch(state, bv, device):
            return config._replace(bv=bv, prefetch=True)
        return config
    if size >= 4 * _MIB:
        return config._replace(bv=min(next_power_of_2(V), 64))
    return config


def unsupported(q: TensorFacts, v: TensorFacts, state: TensorFacts) -> str | None:
    """Why the kernel cannot take a legal problem, in words; None if it can."""
    Hv, V = v.shape[2:]
    if q.shape[0] * Hv * -(-V // default_config(q, state).bv) >= 2**31:
        return "more than 2^31 rows, heads and tiles"
    return None


def plan_gdn_decode(
    q: TensorFacts,
    k: TensorFacts,
    v: TensorFacts,
    g: TensorFacts,
    beta: TensorFacts,
    state: TensorFacts,
    device: DeviceFacts,
    *,
    A_log: TensorFacts | None = None,
    dt_bias: TensorFacts | None = None,
    new_state: TensorFacts | None = None,
    read_indices: TensorFacts | None = None,
    write_indices: TensorFacts | None = None,
    scale: float,
    qk_l2norm: bool = False,
    config: RecurrentConfig | None = None,
) -> GdnDecodePlan:
    """A plan over ``[B,Sq,Hq,K]``, ``[B,Sq,Hv,V]``, ``[B,Sq,Hv]`` and states ``[P,Hv,V,K]``.

    With A_log and dt_bias ``[Hv]`` g and beta stand for a and b. new_state is state unless given.

    Raises:
        ValueError: a configuration that prefetches states which it cannot.
    """
    B, Sq, Hq, K = q.shape
    Hv, V = v.shape[2:]
    new_state = new_state or state
    has_indices = read_indices is not None and write_indices is not None
    if config is None:
        config = default_config(q, state, None if has_indices else device)
    none = TensorFacts((), (0, 0), torch.int64, True)
    reads, writes = read_indices or none, write_indices or none
    write_each = len(writes.shape) == 2
    if config.prefetch and (has_indices or not _can_prefetch(state, config.bv, device)):
        raise ValueError(
            f"config.prefetch is {config.prefetch}; it must be False with indices, on GPUs before "
            "Hopper, and where a program's rows of S are no power of two of lines side by side"
        )
    ki = min(next_power_of_2(K), config.lanes * 16 // state.dtype.itemsize)

    tensors = dict(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log or g, dt_bias=dt_bias or g, state=state,
        new_state=new_state, read_indices=reads, write_indices=writes,
    )  # fmt: skip
    pointers = {name: (facts.dtype, facts.aligned) for name, facts in tensors.items()}
    for name in ("read_indices", "write_indices"):
        # Loaded one by one. A column of indices, unaligned, is copied to where a graph has it.
        pointers[name] = (pointers[name][0], False)
    launch = Launch(
        recurrent_kernel,
        grid=B * Hv * -(-V // config.bv),
        pointers={**pointers, "out": (v.dtype, True)},
        scalars=dict(
            rows=state.shape[0],
            scale=float(scale),
            **_strides("q", "bshd", q),
            **_strides("k", "bshd", k),
            **_strides("v", "bshd", v),
            **_strides("g", "bsh", g),
            **_strides("beta", "bsh", beta),
            A_stride=0 if A_log is None else A_log.stride[0],
            dt_stride=0 if dt_bias is None else dt_bias.stride[0],
            **_strides("s", "nh", state),
            **_strides("n", "nh", new_state),
            read_stride=reads.stride[0],
            write_stride_b=writes.stride[0],
            write_stride_s=writes.stride[1] if write_each else 0,
        ),
        constants=dict(
            S_V=state.stride[2], S_K=state.stride[3], N_V=new_state.stride[2],
            N_K=new_state.stride[3], HV=Hv, GROUP=Hv // Hq, K=K, V=V, SQ=Sq,
            BLOCK_S=next_power_of_2(Sq), KO=next_power_of_2(K) // ki, KI=ki, BV=config.bv,
            RAW=A_log is not None, L2NORM=qk_l2norm,
            HAS_INDICES=has_indices, WRITE_EACH=write_each, UNROLL=config.unroll,
            LOAD_POLICY=config.load_policy, STORE_POLICY=config.store_policy,
            PREFETCH=bool(config.prefetch), PDL=device.has_pdl,
        ),
        options=_options(config, device),
    )  # fmt: skip
    return GdnDecodePlan(device, launch)


def _can_prefetch(state: TensorFacts, bv: int, device: DeviceFacts) -> bool:
    """Whether bv rows of S lie side by side, and the kernel can ask for them before it waits."""
    V, K = state.shape[2:]
    lines, rest = divmod(bv * K * state.dtype.itemsize, 128)
    is_dense = state.stride[2:] == (K, 1) and V % bv == 0
    return device.has_pdl and is_dense and rest == 0 and lines == next_power_of_2(lines)


def _options(config: RecurrentConfig, device: DeviceFacts) -> dict[str, Any]:
    """Triton's options of compiling and launching."""
    options: dict[str, Any] = dict(num_warps=config.num_warps)
    if device.has_pdl:
        options["launch_pdl"] = True
    if config.max_registers is not None and device.is_nvidia:
        options["maxnreg"] = config.max_registers
    return options


class GdnDecodePlan(LaunchPlan):
    """A launch of the recurrent step."""

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor,
        new_state: Tensor,
        read_indices: Tensor | None,
        write_indices: Tensor | None,
        out: Tensor,
    ) -> None:
        """Writes out and new_state, by tensors like those that were planned for."""
        if self.launch.grid[0] == 0:
            return
        # An argument that the kernel does not use is stood in for by one that it has.
        self.launch(
            self.device.index,
            q,
            k,
            v,
            g,
            beta,
            g if A_log is None else A_log,
            g if dt_bias is None else dt_bias,
            state,
            new_state,
            out if read_indices is None else read_indices,
            out if write_indices is None else write_indices,
            out,
        )


def plan_gdn_gates(
    a: TensorFacts, b: TensorFacts, A_log: TensorFacts, dt_bias: TensorFacts, device: DeviceFacts
) -> GdnGatesPlan:
    """A plan over a and b ``[tokens,Hv]``, A_log and dt_bias ``[Hv]``."""
    tokens, Hv = a.shape
    tensors = dict(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    pointers = {name: (facts.dtype, facts.aligned) for name, facts in tensors.items()}
    launch = Launch(
        gates_kernel,
        grid=-(-tokens * Hv // _GATES_BLOCK),
        pointers={**pointers, "g": (torch.float32, True), "beta": (torch.float32, True)},
        scalars=dict(
            tokens=tokens,
            **_strides("a", "th", a),
            **_strides("b", "th", b),
            A_stride=A_log.stride[0],
            dt_stride=dt_bias.stride[0],
        ),
        constants=dict(HV=Hv, BLOCK=_GATES_BLOCK),
        options=dict(num_warps=4),
    )
    return GdnGatesPlan(device, launch)


class GdnGatesPlan(LaunchPlan):
    """A launch of the gates."""

    def run(
        self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor
    ) -> None:
        """Writes g and beta, float32 ``[tokens,Hv]``, contiguous."""
        if self.launch.grid[0]:
            self.launch(self.device.index, a, b, A_log, dt_bias, g, beta)


def _strides(name: str, dims: str, facts: TensorFacts) -> dict[str, int]:
    return {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, facts.stride)}
