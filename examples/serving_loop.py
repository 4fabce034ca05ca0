"""Serve a small decoder by continuous batching, with `attn_tiers::decode` as its attention.

    python examples/serving_loop.py                                    # a GPU if there is one
    python examples/serving_loop.py --device cpu --dtype float32
    python examples/serving_loop.py --slots 64 --requests 256 --capacity 4096

Requests with prompts of different lengths arrive, share a batch of slots, and leave. Each layer
has one preallocated KV cache, and a slot's length says how much of it is valid. One decode step
is compiled once, on a GPU it is captured in one CUDA graph, and that graph is replayed while
lengths grow, slots empty and new requests move in: nothing about a request is baked into it.

The model is a Llama in small (RMSNorm, RoPE, grouped-query attention, gated MLP) with random
weights; --dtype is that of its layers and KV caches, while the residual stream, norms, embedding
and head stay in float32. At the end the program checks itself against a plain PyTorch loop that
has no cache.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn_tiers

ops = torch.ops.attn_tiers

PIECE = 32  # prompts are prefilled in pieces of this many tokens, all of one shape

# Relative error allowed between the logits of a token and those of plain PyTorch in that dtype.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}


# ---------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Config:
    vocabulary: int = 512
    layers: int = 3
    width: int = 256
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512


# attend(layer, query, key, value) -> output, all [B, heads, S, head_dim]. The model does not know
# whether there is a cache: the server passes one kind of attention, the plain loop another.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, config: Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.dtype = dtype
        self.heads = (config.query_heads, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_dim
        packed = sum(self.heads) * config.head_dim
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, packed, bias=False, dtype=dtype)
        attended = config.query_heads * config.head_dim
        self.out = nn.Linear(attended, config.width, bias=False, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(config.hidden, config.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        packed = self.qkv(self.attention_norm(x).to(self.dtype)).unflatten(-1, (-1, self.head_dim))
        query, key, value = packed.transpose(1, 2).split(self.heads, dim=1)
        y = attend(self.index, rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x).to(self.dtype)).float().chunk(2, dim=-1)
        return x + self.down((F.silu(gate) * up).to(self.dtype))


class Decoder(nn.Module):
    def __init__(self, config: Config, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, i, dtype) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        half = config.head_dim // 2
        self.frequency = nn.Buffer(10000.0 ** (-torch.arange(half) / half))
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 1.0 if name == "embed.weight" else weight.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):
                    std /= 2 * config.layers  # small branches on a residual of scale 1
                nn.init.normal_(weight, std=std, generator=generator)
        self.requires_grad_(False)  # attn_tiers is for inference only

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [B, S, width] of tokens [B, S] at positions [B, S]."""
        angle = positions[:, None, :, None] * self.frequency  # [B, 1, S, D / 2]
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, S, D]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# --------------------------------------------------------------------------------- the server


@dataclass
class Request:
    arrival: int  # the step at which it turns up
    prompt: list[int]
    budget: int  # how many tokens it wants
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Server:
    """Slots that requests move into and out of, and the one step that serves them all.

    The state lives on the device and never moves, so that a captured step stays right:
      tokens  [slots, 1]  the token that each slot feeds to the model next
      lengths [slots]     tokens in the slot's cache, that one included; 0 is an empty slot
      caches              for each layer K and V, [slots, kv_heads, capacity, head_dim]. Two
                          allocations: Inductor would copy two halves of one at every step.
    """

    def __init__(self, model: Decoder, slots: int, capacity: int, backend: str) -> None:
        config, self.device = model.config, model.head.weight.device
        self.model = model
        self.capacity = capacity

        def cache() -> Tensor:  # not cleared: what lies past a slot's length reaches no result
            shape = (slots, config.kv_heads, capacity, config.head_dim)
            return torch.empty(shape, dtype=model.dtype, device=self.device)

        self.caches = [(cache(), cache()) for _ in range(config.layers)]
        self.tokens = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(slots, config.vocabulary, device=self.device)
        self.compiled = torch.compile(self.decode, backend=backend, fullgraph=True, dynamic=False)
        self.run_step: Callable[[], None] = self.step

    def forward(self, tokens: Tensor, lengths: Tensor, caches: list[tuple[Tensor, Tensor]]):
        """Hidden states of new tokens [B, S], which become the last S of each row's `lengths`.

        An empty slot needs no special case. Its length is 0, so its write index is -1, which
        `kv_scatter_` drops, and its attention is over no keys, which `decode` makes zero.
        """
        start = lengths - tokens.shape[1]
        steps = torch.arange(tokens.shape[1], device=tokens.device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = caches[layer]
            ops.kv_scatter_(key_cache, value_cache, key, value, start)
            return ops.decode(query, key_cache, value_cache, lengths, is_causal=True)

        return self.model(tokens, start[:, None] + steps, attend)

    def decode(self, tokens: Tensor, lengths: Tensor, caches: list[tuple[Tensor, Tensor]]):
        return self.model.head(self.forward(tokens, lengths, caches)[:, -1])

    def step(self) -> None:
        """One token for every slot that is in use."""
        self.logits.copy_(self.compiled(self.tokens, self.lengths, self.caches))
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
        self.lengths.add_(self.lengths > 0)

    def warm_up(self, graph: bool) -> None:
        """Compiles, lets every tier build what it needs, and captures the step if asked to.

        All slots are empty meanwhile, so nothing is written that anyone will read.
        """
        self.admit(0, Request(arrival=0, prompt=[0], budget=1))
        self.lengths.zero_()
        self.step()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self.step()
            self.run_step = captured.replay

    def admit(self, slot: int, request: Request) -> None:
        """Prefills a prompt into a slot's cache, which gives the request its first token.

        The prompt goes in pieces of one shape. The last piece is padded: causality hides the
        padding from the prompt's own rows, and the next tokens overwrite it in the cache.
        """
        caches = [(key[slot : slot + 1], value[slot : slot + 1]) for key, value in self.caches]
        count = len(request.prompt)
        padded = request.prompt + [0] * (-count % PIECE)
        if max(len(padded), count + request.budget) > self.capacity:
            raise ValueError(f"a request of {count} + {request.budget} tokens does not fit")
        tokens = torch.tensor([padded], device=self.device)
        for start in range(0, len(padded), PIECE):
            length = torch.full((1,), start + PIECE, dtype=torch.int32, device=self.device)
            hidden = self.forward(tokens[:, start : start + PIECE], length, caches)
        logits = self.model.head(hidden[:, (count - 1) % PIECE])
        self.tokens[slot] = logits.argmax(-1)
        self.lengths[slot] = count + 1
        request.logits.append(logits[0])

    def serve(self, requests: Sequence[Request]) -> int:
        """Serves all requests, fills in their tokens and logits, and returns the step count.

        The host never waits for the device inside the loop: a request leaves when its budget is
        spent, so that tokens and logits can be read at the end.
        """
        waiting = sorted(requests, key=lambda request: request.arrival)
        slots: list[Request | None] = [None] * len(self.lengths)
        step = 0
        while waiting or any(slots):
            for slot, request in enumerate(slots):
                if request is None and waiting and waiting[0].arrival <= step:
                    slots[slot] = waiting.pop(0)
                    self.admit(slot, slots[slot])
            self.run_step()
            logits = self.logits.clone()
            for slot, request in enumerate(slots):
                if request is not None and len(request.logits) < request.budget:
                    request.logits.append(logits[slot])
                if request is not None and len(request.logits) == request.budget:
                    slots[slot] = None
                    self.lengths[slot] = 0
            step += 1
        for request in requests:
            request.tokens = torch.stack(request.logits).argmax(-1).tolist()
        return step


# ---------------------------------------------------------------------------------- the check


def plain_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits [S, vocabulary] of a whole sequence: no cache, no batch, PyTorch's attention."""

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = query.float(), key.float(), value.float()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.to(query.dtype)

    device = model.head.weight.device
    positions = torch.arange(len(tokens), device=device)[None]
    return model.head(model(torch.tensor([tokens], device=device), positions, attend)[0])


def plain_loop(model: Decoder, prompt: list[int], budget: int) -> list[int]:
    """The greedy continuation, computed afresh from the whole sequence for every token."""
    tokens = list(prompt)
    for _ in range(budget):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def check(model: Decoder, requests: Sequence[Request]) -> str:
    """Compares what was served with plain PyTorch, and says what was found; exits if it differs.

    In float32 the tokens are those of a plain loop. In 16 bit they may part ways at a near tie.
    In both, the logits agree, each request's on the tokens that it was served.
    """
    findings = []
    if model.dtype == torch.float32:
        for number, request in enumerate(requests):
            expected = plain_loop(model, request.prompt, request.budget)
            if request.tokens != expected:
                fail(f"request {number} got {request.tokens}, not {expected}")
        tokens = sum(request.budget for request in requests)
        findings.append(f"{tokens} tokens of {len(requests)} requests equal a plain PyTorch loop's")

    worst, allowed = 0.0, TOLERANCE[model.dtype]
    for request in requests:
        plain = plain_logits(model, request.prompt + request.tokens[:-1])[-request.budget :]
        error = (torch.stack(request.logits) - plain).norm(dim=-1) / plain.norm(dim=-1)
        worst = max(worst, error.max().item())
    findings.append(f"logits within {worst:.1e} of plain PyTorch's, {allowed:.0e} allowed")
    if not worst <= allowed:
        fail(findings[-1])
    return f"ok: {'; '.join(findings)}"


def fail(what: str) -> NoReturn:
    raise SystemExit(f"check      FAILED: {what}")


# ---------------------------------------------------------------------------------- the program


def make_requests(count: int, capacity: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Requests with prompts and budgets of many lengths, in bursts with gaps between them."""
    rng = random.Random(seed)
    requests, arrival = [], 0
    for _ in range(count):
        arrival += rng.choice((0, 0, 0, 2, 12))
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, capacity // 2))]
        requests.append(Request(arrival, prompt, rng.randint(4, capacity // 4)))
    return requests


def default_backend() -> str:
    """`inductor`, or `aot_eager` where Inductor lacks a C++ compiler or Python's headers."""
    compiler = shutil.which(os.environ.get("CXX") or ("g++" if sys.platform == "linux" else "c++"))
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return "inductor" if compiler and headers else "aot_eager"


def run(dtype: torch.dtype, args: argparse.Namespace) -> None:
    model = Decoder(Config(), dtype).to(args.device)
    requests = make_requests(args.requests, args.capacity, model.config.vocabulary)
    server = Server(model, args.slots, args.capacity, args.backend)
    graph = args.device.startswith("cuda")

    # Tiers are chosen here, once for each problem; a replayed graph makes no choice any more.
    started = time.perf_counter()
    with torch_attn_tiers.record_dispatch() as records:
        server.warm_up(graph)
    set_up = time.perf_counter() - started

    started = time.perf_counter()
    steps = server.serve(requests)
    seconds = time.perf_counter() - started

    tokens = sum(request.budget for request in requests)
    tiers = {f"{r.op} Sq={r.problem.Sq}: {r.tier}" for r in records}
    print(f"\n{str(dtype).removeprefix('torch.')} on {args.device}, torch {torch.__version__}")
    print(f"set-up     {set_up:.1f} s: compiled by {args.backend}" + ", captured" * graph)
    print(f"served     {len(requests)} requests in {steps} steps of {args.slots} slots")
    print(f"speed      {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    print(f"tier       {', '.join(sorted(tiers))}")
    print(f"check      {check(model, requests[: args.check])}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES), metavar="DTYPE"
    )
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=128, help="tokens that a slot can hold")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--check", type=int, default=12, help="how many requests to check")
    parser.add_argument("--backend", default=default_backend(), help="of torch.compile")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # this model is too small to be shared out
    for dtype in args.dtype:
        run(DTYPES[dtype], args)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

if __name__ == "__main__":
    main()
