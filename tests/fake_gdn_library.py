"""A stand-in for `flashinfer.gdn_prefill`, which runs on a CPU.

It takes what the library takes and trusts what it trusts: bounds, and rows of checkpoints, where an
access past the memory is an error here. It works on tiles of 64 tokens as the kernel of compute
capability 9.0 does, so that what follows a sequence in its last tile is multiplied by zero, the
last tile of all is stored whole, and the state of an empty sequence is not written.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from csrc_free_ops.reference.gdn import gdn_chunk
from tests.fake_libraries import Faults, install
from tests.interpreted_memory import OutOfBounds, extent

TILE = 64
_STATES = (torch.float32, torch.bfloat16, torch.float16)
#: What an unmasked store leaves in tokens of no sequence.
JUNK = 7.0


class FakeGdn:
    """`chunk_gated_delta_rule`: its parameters, and what the tier may rely on."""

    __name__ = "chunk_gated_delta_rule"

    def __init__(self) -> None:
        self.faults = Faults()
        self.calls: list[dict[str, Any]] = []
        #: What was compiled, by what the library compiles by.
        self.kernels: set[tuple[Any, ...]] = set()
        #: Elements of the scratch, each time that it grew.
        self.scratch: list[int] = []
        self.wrong = False

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        output: torch.Tensor | None = None,
        output_state: torch.Tensor | None = None,
        state_checkpoints: torch.Tensor | None = None,
        checkpoint_cu_starts: torch.Tensor | None = None,
        checkpoint_every_n_tokens: int = 0,
        use_cp: Any = "auto",
        state_indices: torch.Tensor | None = None,
        _cp_chunk_len: int | None = None,
        backend: str = "auto",
        max_seqlen: int | None = None,
    ) -> Any:
        given = {name: x for name, x in locals().items() if name != "self"}
        self._check(given)
        self._compile(given)
        self.calls.append(given)
        if self.faults.at_run is not None:
            raise self.faults.at_run
        self._run(given)

    # ----------------------------------------------------------------------------------- its rules

    def _check(self, given: dict[str, Any]) -> None:
        q, k, v, output = (given[name] for name in ("q", "k", "v", "output"))
        bounds = given["cu_seqlens"]
        tokens, heads, size = q.shape
        assert k.shape == q.shape and v.shape[::2] == (tokens, size) and output.shape == v.shape
        assert size == 128 and v.shape[1] % heads == 0 and tokens > 0 and bounds.shape[0] > 1
        gates = (tokens, v.shape[1])
        for name in ("g", "beta"):
            assert given[name].dtype is torch.float32 and given[name].shape == gates
        assert given["scale"] not in (None, 0.0)
        assert len({x.dtype for x in (q, k, v, output)}) == 1
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert given["use_qk_l2norm_in_kernel"] is False and given["backend"] == "flashinfer"
        states = (bounds.shape[0] - 1, v.shape[1], size, size)
        for name in ("initial_state", "output_state"):
            assert given[name] is None or tuple(given[name].shape) == states
        assert (given["output_state"] is None) is not given["output_final_state"]
        if given["checkpoint_every_n_tokens"]:
            assert given["checkpoint_every_n_tokens"] == TILE
            assert given["state_checkpoints"].shape[1:] == states[1:]
            assert given["state_checkpoints"].shape[0] >= 1
            assert given["checkpoint_cu_starts"].shape == bounds.shape
        else:
            assert given["state_checkpoints"] is None is given["checkpoint_cu_starts"]
        tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        for name, x in tensors.items():
            align = 8 if name in ("cu_seqlens", "checkpoint_cu_starts") else 16
            assert x.is_contiguous() and x.data_ptr() % align == 0, name
        for name in ("initial_state", "output_state", "state_checkpoints"):
            assert given[name] is None or given[name].dtype in _STATES
        written = [tensors[n] for n in ("output", "output_state", "state_checkpoints")
                   if n in tensors]  # fmt: skip
        for one in written:
            first, end = extent(one)
            for name, x in tensors.items():
                low, high = extent(x)
                assert x is one or high <= first or end <= low, f"{name} is written over"
        values = bounds.tolist()
        if values[0] < 0 or values[-1] > tokens or values != sorted(values):
            raise OutOfBounds(f"bounds {values} of {tokens} tokens")

    def _compile(self, given: dict[str, Any]) -> None:
        def dtype(name: str) -> torch.dtype | None:
            return None if given[name] is None else given[name].dtype

        heads = given["v"].shape[1]
        sequences = given["cu_seqlens"].shape[0] - 1
        splits = given["use_cp"] is not False and 2 * sequences * heads < 8
        kernel = (
            dtype("q"), dtype("initial_state"), dtype("output_state"), dtype("state_checkpoints"),
            dtype("cu_seqlens"), dtype("checkpoint_cu_starts"), splits,
            (heads > 8) + (heads > 16) if splits else None,
        )  # fmt: skip
        if kernel not in self.kernels:
            if self.faults.at_build is not None:
                raise self.faults.at_build
            self.kernels.add(kernel)
        tokens = given["q"].shape[0]
        piece = TILE * -(-tokens // (3 * TILE))  # three pieces at the most: 200 tokens make two
        needed = -(-tokens // piece) * heads if splits else 0
        if needed > max(self.scratch, default=0):
            self.scratch.append(needed)

    # --------------------------------------------------------------------------------- what it does

    def _run(self, given: dict[str, Any]) -> None:
        bounds = given["cu_seqlens"].tolist()
        for i, (first, end) in enumerate(zip(bounds, bounds[1:])):
            if first == end:
                continue
            state = self._sequence(given, i, first, end)
            if given["output_state"] is not None:
                given["output_state"][i] = state.transpose(1, 2)
        if bounds[-1] > bounds[-2]:  # the last tile is stored whole
            over = bounds[-2] - (bounds[-2] - bounds[-1]) // TILE * TILE
            given["output"][bounds[-1] : over] = JUNK

    def _sequence(self, given: dict[str, Any], i: int, first: int, end: int) -> torch.Tensor:
        """Outputs and checkpoints of a sequence, written; its last state ``[Hv,K,V]``."""
        heads, size = given["v"].shape[1:]
        state = torch.zeros(heads, size, size, dtype=torch.float32)
        if given["initial_state"] is not None:
            state = given["initial_state"][i].float().transpose(1, 2)
        for number, at in enumerate(range(first, end, TILE)):
            to = min(at + TILE, end)
            q, k, v, g, beta = (
                self._tile(given, name, at, to) for name in ("q", "k", "v", "g", "beta")
            )
            q, k = (x.repeat_interleave(heads // x.shape[0], 0) for x in (q, k))
            rows, state = gdn_chunk(q, k, v, torch.log(g + 1e-10), beta, state, given["scale"])
            rows = rows[:, : to - at].transpose(0, 1)
            given["output"][at:to] = rows * (0.5 if self.wrong else 1.0)
            if given["state_checkpoints"] is not None and to - at == TILE:
                h = given["state_checkpoints"]
                row = int(given["checkpoint_cu_starts"][i]) + number
                if row >= h.shape[0]:
                    raise OutOfBounds(f"checkpoint {row} of {h.shape[0]}")
                h[row] = state.transpose(1, 2)
        return state

    def _tile(self, given: dict[str, Any], name: str, at: int, to: int) -> torch.Tensor:
        """Heads first. Of q, k and v whatever lies in the tile, of the gates what has no effect."""
        x = given[name]
        rows = torch.zeros(TILE, *x.shape[1:], dtype=torch.float32)
        if name in ("g", "beta"):
            rows += name == "g"
            rows[: to - at] = x[at:to]
        else:
            here = x[at : at + TILE]
            rows[: len(here)] = here
        return rows.transpose(0, 1).contiguous()


def install_gdn(monkeypatch: pytest.MonkeyPatch, version: str = "0.7.2") -> types.ModuleType:
    """A fake `flashinfer.gdn_prefill` with a kernel for each device; returns it."""
    package = types.ModuleType("flashinfer")
    module = types.ModuleType("flashinfer.gdn_prefill")
    package.__dict__.update(__version__=version, __path__=[])
    module.__dict__.update(
        chunk_gated_delta_rule=FakeGdn(),
        chunk_gated_delta_rule_sm90=object(),
        chunk_gated_delta_rule_sm100=object(),
        chunk_gated_delta_rule_sm120=object(),
    )
    install(monkeypatch, "flashinfer-python", [package, module], version)
    return module
