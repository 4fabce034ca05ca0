"""How FlashInfer's prefill is called: what it compiles kernels for, and the scratch they share."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, is_capturing
from csrc_free_ops.pools import outside_pools
from torch_attn_tiers.problem import GdnProblem
from torch_attn_tiers.tiers.decode.device_memory import current_stream
from torch_attn_tiers.tiers.decode.library import Library

FLASHINFER = Library("flashinfer-python", "flashinfer.gdn_prefill", oldest=(0,))

HEAD_SIZE = 128
#: Tokens between two checkpoints, and of the library's tiles.
C = 64
#: Tokens of the pieces of long sequences come in steps of so many.
_LONG_PIECE = 512


@functools.cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def tokens_of(problem: GdnProblem) -> int:
    return problem.B * problem.T


def may_split(problem: GdnProblem) -> bool:
    """Whether the library may split sequences: by their number and heads, of every device."""
    if problem.batch_invariant:
        return False
    return 2 * problem.N * problem.Hv < problem.device.multiprocessors


def h_rows(problem: GdnProblem) -> int:
    """Rows of h to allocate. The library looks at no bound: as many as chunks can be complete."""
    return max(1, problem.h_rows, problem.B * (problem.T // C))


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
    known = parameters(FLASHINFER.module().chunk_gated_delta_rule)
    options: dict[str, Any] = {}
    if "backend" in known:
        options["backend"] = "flashinfer"
    if variant.batch_invariant and "use_cp" in known:
        options["use_cp"] = False  # where a sequence is split depends on the others
    return options


class SharedScratch:
    """The library's scratch of one device: its calls run one after the other.

    Outside of captures a call waits for the last one on another stream. Within one it cannot: an
    event of before is not part of the graph. Scratch that a graph has captured is kept, as some
    releases free what a larger call has outgrown.
    """

    def __init__(self, device: DeviceFacts) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._stream: int | None = None
        self._event: Any = None
        self._captured: dict[int, Tensor] = {}  # by address

    def run(self, function: Callable[[], Any]) -> None:
        """Call a function that launches work on the scratch, on the current stream."""
        with self._lock:
            if is_capturing(self.device):
                function()
                self._captured.update((buffer.data_ptr(), buffer) for buffer in _buffers())
                return
            if self.device.type != "cuda":
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

    def release_captured(self) -> None:
        """Let go of the scratch of captured graphs."""
        with self._lock:
            self._captured.clear()


def _buffers() -> list[Tensor]:
    """What the library keeps between calls, as far as that can be told."""
    kept = getattr(sys.modules.get("flashinfer.utils"), "_cache_buf", None)
    if not isinstance(kept, dict):
        return []
    return [buffer for buffer in kept.values() if isinstance(buffer, Tensor)]


_SCRATCH: dict[tuple[str, int], SharedScratch] = {}
_SCRATCH_LOCK = threading.Lock()


def scratch_of(device: DeviceFacts) -> SharedScratch:
    """The scratch of a device."""
    place = (device.type, device.index)
    with _SCRATCH_LOCK:
        if place not in _SCRATCH:
            _SCRATCH[place] = SharedScratch(device)
        return _SCRATCH[place]


def release_captured_scratch() -> None:
    """Let go of the scratch of captured graphs, of every device."""
    with _SCRATCH_LOCK:
        for scratch in _SCRATCH.values():
            scratch.release_captured()


class Variants:
    """The variants that this process has compiled and tried, with the most tokens of each.

    Where sequences are split, scratch depends on the tokens, and must not grow in a capture.
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
        return variant.split_sequences == 0 or tokens_of(problem) <= tokens

    def load(self, problem: GdnProblem) -> None:
        """Compile for the problem and make its scratch, by a run that is checked.

        Not for use inside a capture, unless the problem is covered.
        """
        with self._lock:
            if not self.covers(problem):
                variant = variant_of(problem)
                covered = self._tokens.get(variant, 0)
                outside_pools(problem.device, functools.partial(_try, problem, covered))
                self._tokens[variant] = tokens_of(problem)

    def forget(self) -> None:
        """Know of none. For tests."""
        self._tokens.clear()


VARIANTS = Variants()


def _try(problem: GdnProblem, covered: int) -> list[Tensor]:
    """Run a chunk of the first sequence, the others empty, in memory of the problem's size.

    The keys of its tokens are unit vectors, no two alike, and are asked for at once; every value
    is 1 and replaces what was there. So each output is 1, and the last state where it was written.
    Then with fewer tokens, above ``covered``, what of them may take more scratch.
    """
    variant, device = variant_of(problem), problem.device
    where = torch.device(device.type, device.index)
    tokens, N, Hv = tokens_of(problem), problem.N, problem.Hv
    written = min(C, tokens)
    start = 0.0 if variant.state_dtype is None else 0.5

    def new(*shape: int, dtype: torch.dtype = variant.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=where)

    q = new(tokens, problem.Hq, HEAD_SIZE)
    q[:written] = torch.eye(HEAD_SIZE, device=where)[:written, None]
    v, out = (new(tokens, Hv, HEAD_SIZE) for _ in range(2))
    v[:written] = 1
    gates = new(tokens, Hv, dtype=torch.float32).fill_(1)
    bounds = torch.full((N + 1,), written, device=where)
    bounds[0] = 0
    states = (N, Hv, HEAD_SIZE, HEAD_SIZE)
    initial = final = h = starts = None
    if variant.state_dtype is not None:
        initial = new(*states, dtype=variant.state_dtype).fill_(start)
    if variant.has_final:
        final = new(*states, dtype=torch.float32)
    if variant.h_dtype is not None:
        h, starts = new(1, *states[1:], dtype=variant.h_dtype), bounds // C
    call, scratch = Call(variant, 1.0), scratch_of(device)

    def run(n: int) -> None:
        gate = gates[:n]
        scratch.run(
            functools.partial(
                call, q[:n], q[:n], v[:n], gate, gate, bounds, initial, out[:n], final, h, starts
            )
        )

    run(tokens)
    wanted = torch.full((HEAD_SIZE,), start, dtype=torch.float32, device=where)
    wanted[:written] = 1
    results = [(out[:written], torch.ones((), dtype=torch.float32, device=where))]
    results += [(state[:1], wanted) for state in (final, h if written == C else None)
                if state is not None]  # fmt: skip
    for result, expected in results:
        if not torch.allclose(result.float(), expected, atol=0.02):
            raise RuntimeError(
                f"flashinfer.gdn_prefill.chunk_gated_delta_rule is wrong for unit keys ({variant})"
            )
    if variant.split_sequences:
        for fewer in _fewer_tokens(tokens, covered, device.multiprocessors):
            run(fewer)
    return []


def _fewer_tokens(tokens: int, covered: int, multiprocessors: int) -> range:
    """Numbers of tokens, at the most ``tokens``, one of which takes the most scratch.

    A sequence is split into pieces whose length is a multiple of 64 up to 512, then one of 512 that
    makes fewer pieces than there are multiprocessors: it grows in steps, and the number of pieces
    falls at each of them.
    """
    first = C * (covered // C + 1)
    return range(first, min(tokens, _LONG_PIECE * multiprocessors + 1), C)


class Call:
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
                "checkpoint_every_n_tokens": C,
            }
        self.function(
            q, k, v, g=decay, beta=strength, initial_state=initial_state, cu_seqlens=bounds,
            output=out, output_state=final_state, **self.options, **checkpoints,
        )  # fmt: skip
