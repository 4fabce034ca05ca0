"""FlashInfer's prefill, by ``flashinfer.gdn_prefill.chunk_gated_delta_rule``.

Head sizes of 128 in 16 bits, checkpoints after each complete chunk. One launch of ours in front
makes what the library wants (``csrc_free_ops.gdn.pack``), one behind it does what it leaves out.
Each combination of dtypes, heads and results is compiled when it first runs, in some ten seconds:
by ``prepare``, ``tier=`` or ``ATTN_TIERS_JIT=1`` only.

Where there are few sequences and heads the library splits sequences, through scratch that it keeps
for each device and shares among all streams. Calls wait for each other by an event; what a graph
replays does not, so that replays of one device must not overlap with other calls.

No predicate sees these, as they are matters of values: the decay is taken as ``log2(exp(g) +
1e-10)``, which leaks 1e-10 of the state where everything is to be forgotten; and the triangular
inverse is float16 on compute capability 9.0, which holds for ``beta |k|² <= 2``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, TensorFacts, contiguous_facts, is_capturing
from csrc_free_ops.pools import outside_pools
from torch_attn_tiers.problem import GdnProblem, dtype_name
from torch_attn_tiers.tier import Plan, Tier
from torch_attn_tiers.tiers.decode.device_memory import current_stream
from torch_attn_tiers.tiers.decode.library import Library
from torch_attn_tiers.tiers.triton_runs import no_triton

FLASHINFER = Library("flashinfer-python", "flashinfer.gdn_prefill", oldest=(0,))

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
_HEAD_SIZE = 128
#: Tokens between two checkpoints, and of the library's tiles.
_C = 64
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
    if (problem.K, problem.V) != (_HEAD_SIZE, _HEAD_SIZE):
        return f"takes head sizes of {_HEAD_SIZE}, not {problem.K} and {problem.V}"
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
    return None if problem.pool is None else "reads and writes no pool yet"


def _state_dtypes(problem: GdnProblem) -> str | None:
    """The kernel of compute capability 10.x has one dtype for all states; the last is float32."""
    if problem.device.capability is None or problem.device.capability[0] != 10:
        return None
    state = problem.initial_state
    dtypes = {"initial_state": None if state is None else state.dtype, "h": problem.h_dtype}
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
    if may_split(problem) and _tokens(problem) * problem.Hv * _C > _INT32_MAX:
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
    missing = sorted(wanted - _parameters(module.chunk_gated_delta_rule))
    if missing:
        return f"its chunk_gated_delta_rule has no {', '.join(missing)}"
    return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# ---------------------------------------------------------------------------------------------
# What the library is asked for
# ---------------------------------------------------------------------------------------------


def _tokens(problem: GdnProblem) -> int:
    return problem.B * problem.T


def may_split(problem: GdnProblem) -> bool:
    """Whether the library may split sequences: by their number and heads, of every device."""
    if problem.batch_invariant:
        return False
    return 2 * problem.N * problem.Hv < problem.device.multiprocessors


def h_rows(problem: GdnProblem) -> int:
    """Rows of h to allocate. The library looks at no bound: as many as chunks can be complete."""
    return max(1, problem.h_rows, problem.B * (problem.T // _C))


class Variant(NamedTuple):
    """What decides which kernels the library compiles, or more than that."""

    device: tuple[str, int]
    dtype: torch.dtype
    Hq: int
    Hv: int
    state_dtype: torch.dtype | None  # of the initial state
    has_final: bool
    h_dtype: torch.dtype | None
    #: Of these the library may split some, by rules of its own; 0 if it splits none.
    split_sequences: int
    batch_invariant: bool


def variant_of(problem: GdnProblem) -> Variant:
    """The variant of a problem that all predicates pass."""
    state = problem.initial_state
    return Variant(
        (problem.device.type, problem.device.index),
        problem.q.dtype,
        problem.Hq,
        problem.Hv,
        None if state is None else state.dtype,
        problem.output_final_state,
        problem.h_dtype,
        problem.N if may_split(problem) else 0,
        problem.batch_invariant,
    )


def _options(variant: Variant) -> dict[str, Any]:
    """The library's choice of kernels, where it lets one choose."""
    parameters = _parameters(FLASHINFER.module().chunk_gated_delta_rule)
    options: dict[str, Any] = {}
    if "backend" in parameters:
        options["backend"] = "flashinfer"
    if variant.batch_invariant and "use_cp" in parameters:
        options["use_cp"] = False  # where a sequence is split depends on the others
    return options


class SharedScratch:
    """The library's scratch of one device: its calls run one after the other.

    Outside of captures a call waits for the last one on another stream. Within one it cannot: an
    event of before is not part of the graph.
    """

    def __init__(self, device: DeviceFacts) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._stream: int | None = None
        self._event: Any = None

    def run(self, function: Callable[[], Any]) -> None:
        """Call a function that launches work on the scratch, on the current stream."""
        with self._lock:
            if self.device.type != "cuda" or is_capturing(self.device):
                function()
                return
            stream, handle = (
                torch.cuda.current_stream(self.device.index),
                current_stream(self.device),
            )
            if self._event is None:
                self._event = torch.cuda.Event()
            elif self._stream != handle:
                stream.wait_event(self._event)
            function()
            self._event.record(stream)
            self._stream = handle


_SCRATCH: dict[tuple[str, int], SharedScratch] = {}
_SCRATCH_LOCK = threading.Lock()


def scratch_of(device: DeviceFacts) -> SharedScratch:
    """The scratch of a device."""
    place = (device.type, device.index)
    with _SCRATCH_LOCK:
        if place not in _SCRATCH:
            _SCRATCH[place] = SharedScratch(device)
        return _SCRATCH[place]


class Variants:
    """The variants that this process has compiled and tried, with the most tokens of each.

    Scratch grows with the tokens where sequences are split, and must not do so in a capture.
    """

    def __init__(self) -> None:
        self._tokens: dict[Variant, int] = {}
        self._lock = threading.Lock()

    def knows(self, problem: GdnProblem) -> bool:
        """Whether the problem would compile nothing."""
        return variant_of(problem) in self._tokens

    def covers(self, problem: GdnProblem) -> bool:
        """Whether it would neither compile anything nor enlarge the scratch."""
        variant = variant_of(problem)
        tokens = self._tokens.get(variant)
        if tokens is None:
            return False
        return variant.split_sequences == 0 or _tokens(problem) <= tokens

    def load(self, problem: GdnProblem) -> None:
        """Compile for the problem and make its scratch, by a run that is checked.

        Not for use inside a capture, unless the problem is covered.
        """
        with self._lock:
            if not self.covers(problem):
                outside_pools(problem.device, functools.partial(_try, problem))
                self._tokens[variant_of(problem)] = _tokens(problem)

    def forget(self) -> None:
        """Know of none. For tests."""
        self._tokens.clear()


VARIANTS = Variants()


def _try(problem: GdnProblem) -> list[Tensor]:
    """Run a chunk of the first sequence, the others empty, in memory of the problem's size.

    The keys of its tokens are unit vectors, no two alike, and are asked for at once; every value
    is 1 and replaces what was there. So each output is 1, and the last state where it was written.
    """
    variant, device = variant_of(problem), problem.device
    where = torch.device(device.type, device.index)
    tokens, N, Hv = _tokens(problem), problem.N, problem.Hv
    written = min(_C, tokens)
    start = 0.0 if variant.state_dtype is None else 0.5

    def new(*shape: int, dtype: torch.dtype = variant.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=where)

    q = new(tokens, problem.Hq, _HEAD_SIZE)
    q[:written] = torch.eye(_HEAD_SIZE, device=where)[:written, None]
    v, out = (new(tokens, Hv, _HEAD_SIZE) for _ in range(2))
    v[:written] = 1
    gates = new(tokens, Hv, dtype=torch.float32).fill_(1)
    bounds = torch.full((N + 1,), written, device=where)
    bounds[0] = 0
    states = (N, Hv, _HEAD_SIZE, _HEAD_SIZE)
    initial = final = h = starts = None
    if variant.state_dtype is not None:
        initial = new(*states, dtype=variant.state_dtype).fill_(start)
    if variant.has_final:
        final = new(*states, dtype=torch.float32)
    if variant.h_dtype is not None:
        h, starts = new(1, *states[1:], dtype=variant.h_dtype), bounds // _C
    call = _Call(variant, 1.0)
    scratch_of(device).run(
        functools.partial(call, q, q, v, gates, gates, bounds, initial, out, final, h, starts)
    )
    wanted = torch.full((_HEAD_SIZE,), start, device=where)
    wanted[:written] = 1
    results = [(out[:written], torch.ones((), device=where))]
    results += [(state[:1], wanted) for state in (final, h if written == _C else None)
                if state is not None]  # fmt: skip
    for result, expected in results:
        if not torch.allclose(result.float(), expected, atol=0.02):
            raise RuntimeError(
                f"flashinfer.gdn_prefill.chunk_gated_delta_rule is wrong for unit keys ({variant})"
            )
    return []


class _Call:
    """The library's function with the arguments that a variant fixes."""

    def __init__(self, variant: Variant, scale: float) -> None:
        self.function = FLASHINFER.module().chunk_gated_delta_rule
        self.options = {
            "scale": scale,
            "output_final_state": variant.has_final,
            **_options(variant),
        }

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        strength: Tensor,
        bounds: Tensor,
        initial_state: Tensor | None,
        out: Tensor,
        final_state: Tensor | None,
        h: Tensor | None,
        h_cu_starts: Tensor | None,
    ) -> None:
        checkpoints: dict[str, Any] = {}
        if h is not None:
            checkpoints = {
                "state_checkpoints": h,
                "checkpoint_cu_starts": h_cu_starts,
                "checkpoint_every_n_tokens": _C,
            }
        self.function(
            q, k, v, g=decay, beta=strength, initial_state=initial_state, cu_seqlens=bounds,
            output=out, output_state=final_state, **self.options, **checkpoints,
        )  # fmt: skip


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


def _is_dense(state: TensorFacts) -> bool:
    return state.aligned and state.stride == contiguous_facts(state.shape, state.dtype).stride


class _Run:
    """One problem, and how the library is called for it."""

    def __init__(self, problem: GdnProblem) -> None:
        VARIANTS.load(problem)
        self.problem = problem
        self.call = _Call(variant_of(problem), problem.scale)
        self.scratch = scratch_of(problem.device)
        self.pack = _pack_plan(problem)
        self.pack.compile()
        #: Rows of h that the operator is to allocate.
        self.h_rows = 0 if problem.h_layout is None else h_rows(problem)
        state = problem.initial_state
        self.copies_state = state is not None and not _is_dense(state)

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


def _ready(problem: GdnProblem) -> bool:
    """Whether building compiles nothing, and in a capture enlarges no scratch either."""
    if not problem.capturing:
        return VARIANTS.knows(problem)
    return VARIANTS.covers(problem) and bool(_pack_plan(problem).is_compiled())


def _build(problem: GdnProblem) -> Plan:
    return _Run(problem)


TIER = Tier(
    op="gdn_chunk_prefill",
    name="flashinfer",
    predicates=(*_BASICS, _kernel),
    build=_build,
    ready=_ready,
    slow_build=True,
)
