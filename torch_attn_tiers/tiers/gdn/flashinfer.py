"""FlashInfer's prefill, by ``flashinfer.gdn_prefill.chunk_gated_delta_rule``.

Head sizes of 128 in 16 bits, checkpoints after each complete chunk. One launch of ours in front
makes what the library wants (``csrc_free_ops.gdn.pack``), one behind it does what it leaves out.
With a pool, one more on either side copies states (``csrc_free_ops.gdn.state_pool``).
Each combination of dtypes, heads and results is compiled when it first runs, in some ten seconds:
by ``prepare``, ``tier=`` or ``ATTN_TIERS_JIT=1`` only.

The library keeps scratch for each device and shares it among all streams. Calls wait for each other
by an event; what a graph replays does not, so that replays of one device must not overlap with
other calls.

No predicate sees these, as they are matters of values: the decay is taken as ``log2(exp(g) +
1e-10)``, which leaks 1e-10 of the state where everything is to be forgotten; and the triangular
inverse is float16 on compute capability 9.0, which holds for ``beta |k|² <= 2``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.facts import TensorFacts, contiguous_facts
from torch_attn_tiers.problem import GdnProblem, dtype_name
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.gdn.flashinfer_library import (
    FLASHINFER,
    HEAD_SIZE,
    VARIANTS,
    C,
    Call,
    h_rows,
    may_split,
    parameters,
    release_captured_scratch,
    scratch_of,
    tokens_of,
    variant_of,
)
from torch_attn_tiers.tiers.triton_runs import no_triton

#: The library's kernel for a compute capability: None there if it cannot be used.
_KERNELS = {
    (9, 0): "chunk_gated_delta_rule_sm90",
    (10, 0): "chunk_gated_delta_rule_sm100",
    (10, 3): "chunk_gated_delta_rule_sm100",
    (12, 0): "chunk_gated_delta_rule_sm120",
}
_CAPABILITIES = ", ".join(f"{major}.{minor}" for major, minor in _KERNELS)
#: The toolkit of PyTorch that the kernel for compute capability 10.x needs.
_CUDA_OF_BLACKWELL = 13
_DTYPES = (torch.float16, torch.bfloat16)
_INT32_MAX = 2**31 - 1
_PARAMETERS = frozenset(
    "q k v g beta scale initial_state output_final_state cu_seqlens output output_state".split()
)
_H_PARAMETERS = frozenset(
    ["state_checkpoints", "checkpoint_cu_starts", "checkpoint_every_n_tokens"]
)


# ---------------------------------------------------------------------------------------------
# Predicates. The last one imports the library, where the others have nothing against the problem
# ---------------------------------------------------------------------------------------------


def _library(problem: GdnProblem) -> str | None:
    return FLASHINFER.known_failure()


def _device(problem: GdnProblem) -> str | None:
    capability = problem.device.capability
    if not problem.device.is_nvidia or capability is None:
        return f"needs an NVIDIA GPU of compute capability {_CAPABILITIES}"
    if capability not in _KERNELS:
        major, minor = capability
        return f"needs compute capability {_CAPABILITIES}, the device has {major}.{minor}"
    if capability[0] == 10 and _cuda_major() < _CUDA_OF_BLACKWELL:
        return (
            f"needs a PyTorch of CUDA {_CUDA_OF_BLACKWELL} or newer on compute capability 10.x, "
            f"this one is of {torch.version.cuda}"
        )
    return None


def _cuda_major() -> int:
    return int((torch.version.cuda or "0").split(".")[0])


def _dtype(problem: GdnProblem) -> str | None:
    if problem.q.dtype not in _DTYPES:
        return f"takes float16 and bfloat16, not {dtype_name(problem.q.dtype)}"
    return None


def _head_sizes(problem: GdnProblem) -> str | None:
    if (problem.K, problem.V) != (HEAD_SIZE, HEAD_SIZE):
        return f"takes head sizes of {HEAD_SIZE}, not {problem.K} and {problem.V}"
    return None


def _not_empty(problem: GdnProblem) -> str | None:
    if problem.T == 0 or problem.N == 0:
        return "needs a token and a sequence"
    return None


def _scale(problem: GdnProblem) -> str | None:
    return "takes scale=0.0 for its default" if problem.scale == 0.0 else None


def _checkpoints(problem: GdnProblem) -> str | None:
    if problem.h_layout == "fla":
        return "writes the state after each complete chunk (h_compact), not before each (h_fla)"
    return None


def _pool(problem: GdnProblem) -> str | None:
    """The library keeps checkpoints at even distances: all of a prompt's, to have one of them."""
    if problem.pool is None or problem.pool.track_lens is None:
        return None
    return (
        "keeps a state inside a sequence by writing one for every 64 tokens only (h_compact), "
        "which pool_ does not do"
    )


def _state_dtypes(problem: GdnProblem) -> str | None:
    """The kernel of compute capability 10.x has one dtype for all states; the last is float32."""
    if problem.device.capability is None or problem.device.capability[0] != 10:
        return None
    state = problem.initial_state
    name = "initial_state" if problem.pool is None else "pool"
    dtypes = {name: None if state is None else state.dtype, "h": problem.h_dtype}
    for name, dtype in dtypes.items():
        if dtype not in (None, torch.float32):
            return f"{name} must be float32 on compute capability 10.x, not {dtype_name(dtype)}"
    return None


def _offsets(problem: GdnProblem) -> str | None:
    """The library's offsets have 32 bits."""
    state = problem.Hv * problem.K * problem.V
    if problem.N * state > _INT32_MAX:
        return "takes states of fewer than 2^31 elements"
    if problem.h_layout is not None and h_rows(problem) * state > _INT32_MAX:
        return "takes checkpoints of fewer than 2^31 elements"
    if may_split(problem) and tokens_of(problem) * problem.Hv * C > _INT32_MAX:
        return "takes fewer than 2^25 tokens times heads where it splits sequences"
    return None


_BASICS = (
    _library,
    no_triton,
    _device,
    _dtype,
    _head_sizes,
    _not_empty,
    _scale,
    _checkpoints,
    _pool,
    _state_dtypes,
    _offsets,
)


def _kernel(problem: GdnProblem) -> str | None:
    """What importing the library shows, where it could be used at all."""
    if any(basic(problem) is not None for basic in _BASICS):
        return None
    reason = FLASHINFER.reason()
    if reason is not None:
        return reason
    module = FLASHINFER.module()
    names = ["chunk_gated_delta_rule"]
    if problem.device.capability in _KERNELS:
        names.append(_KERNELS[problem.device.capability])
    for name in names:
        if getattr(module, name, None) is None:
            return (
                f"{FLASHINFER.module_name} has no {name}: it is too old, or nvidia-cutlass-dsl is "
                "missing or too old for it"
            )
    wanted = _PARAMETERS if problem.h_layout is None else _PARAMETERS | _H_PARAMETERS
    missing = sorted(wanted - parameters(module.chunk_gated_delta_rule))
    if missing:
        return f"its chunk_gated_delta_rule has no {', '.join(missing)}"
    return None


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def _pack_plan(problem: GdnProblem) -> Any:
    from csrc_free_ops.gdn.pack import plan_pack  # imports Triton, which takes a second

    state = problem.initial_state
    return plan_pack(
        problem.q,
        problem.k,
        problem.v,
        problem.g,
        problem.beta,
        problem.device,
        cu_seqlens_dtype=problem.cu_seqlens_dtype,
        sequences=problem.N,
        qk_l2norm=problem.qk_l2norm,
        initial_state_dtype=None if state is None else state.dtype,
        output_final_state=problem.output_final_state,
        has_h_starts=problem.h_layout is not None,
    )


def _pool_plan(problem: GdnProblem) -> Any:
    from csrc_free_ops.gdn.state_pool import StatePoolPlan

    assert problem.pool is not None and problem.initial_state is not None
    return StatePoolPlan(problem.initial_state, problem.pool, problem.N, problem.device)


def _is_dense(state: TensorFacts) -> bool:
    return state.aligned and state.stride == contiguous_facts(state.shape, state.dtype).stride


class _Run:
    """One problem, and how the library is called for it: by dense states."""

    def __init__(self, problem: GdnProblem) -> None:
        VARIANTS.load(problem)
        self.problem = problem
        self.call = Call(variant_of(problem), problem.scale)
        self.scratch = scratch_of(problem.device)
        self.pack = _pack_plan(problem)
        self.pack.compile()
        #: Rows of h that the operator is to allocate.
        self.h_rows = 0 if problem.h_layout is None else h_rows(problem)
        state = problem.initial_state
        self.copies_state = problem.pool is None and state is not None and not _is_dense(state)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        out: Tensor,
        final_state: Tensor | None,
        h: Tensor | None,
        h_cu_starts: Tensor | None,
    ) -> None:
        packed = self.pack.pack(q, k, v, g, beta, cu_seqlens, h_cu_starts)
        if initial_state is not None and self.copies_state:
            initial_state = initial_state.clone(memory_format=torch.contiguous_format)
        q, k, v, decay, strength, bounds = packed
        self.scratch.run(
            functools.partial(
                self.call, q, k, v, decay, strength, bounds, initial_state, out.flatten(0, 1),
                final_state, h, h_cu_starts,
            )
        )  # fmt: skip
        self.pack.finish(bounds, initial_state, out, final_state)


class _PoolRun:
    """The same over a pool, whose states are copied out of it before and into it after.

    The library has indices of its own, which may not be negative and are one for both.
    """

    def __init__(self, problem: GdnProblem) -> None:
        self.run = _Run(problem)
        self.states = _pool_plan(problem)
        self.states.compile()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        pool: Tensor,
        read_indices: Tensor,
        write_indices: Tensor,
        track_lens: Tensor | None,
        track_indices: Tensor | None,
        cu_seqlens: Tensor | None,
        out: Tensor,
    ) -> None:
        initial_state = self.states.read(pool, read_indices)
        final_state = torch.empty_like(initial_state, dtype=torch.float32)
        self.run(q, k, v, g, beta, initial_state, cu_seqlens, out, final_state, None, None)
        self.states.write(pool, write_indices, final_state)


def _ready(problem: GdnProblem) -> bool:
    """Whether building compiles nothing, and in a capture enlarges no scratch either."""
    if not problem.capturing:
        return VARIANTS.knows(problem)
    if not VARIANTS.covers(problem) or not _pack_plan(problem).is_compiled():
        return False
    return problem.pool is None or bool(_pool_plan(problem).is_compiled())


def _build(problem: GdnProblem) -> Plan:
    return _Run(problem) if problem.pool is None else _PoolRun(problem)


TIER = Tier(
    op="gdn_chunk_prefill",
    name="flashinfer",
    predicates=(*_BASICS, _kernel),
    build=_build,
    ready=_ready,
    slow_build=True,
    release=release_captured_scratch,
)
