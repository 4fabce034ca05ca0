"""Serve a hybrid model, of gated delta nets and attention, with a cache of prompts' prefixes.

    python examples/hybrid_serving_loop.py                                 # a GPU if there is one
    python examples/hybrid_serving_loop.py --device cpu --dtype float32
    python examples/hybrid_serving_loop.py --slots 32 --prefixes 16 --requests 64

Three layers of four are gated delta nets (GDN) as in Qwen3-Next: their memory is one state a head,
however long the sequence is. So a prefix that many prompts share is kept as the *state* at a page
boundary, and a prompt that begins with it starts from there. Prefill computes the rest of the
prompt, leaves its last state where decoding goes on, and on the way writes the state at its own
last page boundary for prompts to come: one call of `gdn_chunk_prefill.pool_`. Decoding is one step
for all slots, compiled once and on a GPU captured in one CUDA graph, of `gdn_decode_` and `decode`.

Each conversation has two rounds: the second prompt is the first one, its answer, and a few more
tokens, and resumes from what the first round kept.

The model has random weights; --dtype is that of its layers and KV caches, while the states, the
residual stream, norms, embedding and head stay in float32. At the end the program checks itself
against plain PyTorch, which computes every sequence as a whole, token by token.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn_tiers
from torch_attn_tiers.checkpoints import CheckpointMetadata

ops = torch.ops.attn_tiers

PAGE = 64  # tokens of a page: prefixes are kept at multiples of it

# Relative error allowed between the logits of a token and those of plain PyTorch in that dtype.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}


# ---------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Config:
    vocabulary: int = 512
    layers: int = 4  # three gated delta nets, one attention, and so on
    width: int = 192
    hidden: int = 384
    # attention
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    # gated delta net: heads of q and k, heads of v, and their sizes
    Hq: int = 2
    Hv: int = 4
    K: int = 32
    V: int = 32
    taps: int = 4  # of the short convolution

    def is_attention(self, layer: int) -> bool:
        return layer % 4 == 3

    @property
    def channels(self) -> int:
        """What the convolution runs over: q, k and v."""
        return 2 * self.Hq * self.K + self.Hv * self.V


class Memory(Protocol):
    """What layers know of the tokens before. The model does not know whether there is a cache."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention; all [B, heads, S, head_dim]."""

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        """``x [B, channels, S]`` with the ``count`` columns that came before it in front."""

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: Heads
    ) -> Tensor:
        """The gated delta rule: q, k [B, S, Hq, K], v [B, S, Hv, V], a, b [B, S, Hv] -> like v."""


class Heads(nn.Module):
    """How each head of a gated delta net forgets."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.linspace(-3.0, 0.0, count))
        self.dt_bias = nn.Parameter(torch.linspace(-2.0, 1.0, count))


class DeltaNet(nn.Module):
    def __init__(self, config: Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.config = index, config
        Hv, V = config.Hv, config.V
        self.qkv = nn.Linear(config.width, config.channels, bias=False, dtype=dtype)
        self.ab = nn.Linear(config.width, 2 * Hv, bias=False, dtype=dtype)
        self.gate = nn.Linear(config.width, Hv * V, bias=False, dtype=dtype)
        self.taps = nn.Parameter(torch.empty(config.channels, config.taps))
        self.heads = Heads(Hv)
        self.norm = nn.RMSNorm(V, eps=1e-6)
        self.out = nn.Linear(Hv * V, config.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        c = self.config
        # The short convolution is not part of torch_attn_tiers; packages with kernels for it are
        # named in docs/gdn_decode.md.
        window = memory.before(self.index, self.qkv(x).transpose(1, 2), c.taps - 1)
        mixed = F.conv1d(window.float(), self.taps[:, None], groups=c.channels)
        q, k, v = (
            F.silu(mixed).to(x.dtype).transpose(1, 2)
            .split((c.Hq * c.K, c.Hq * c.K, c.Hv * c.V), dim=-1)
        )  # fmt: skip
        q, k = (t.unflatten(-1, (c.Hq, c.K)) for t in (q, k))
        a, b = self.ab(x).chunk(2, dim=-1)
        y = memory.delta(self.index, q, k, v.unflatten(-1, (c.Hv, c.V)), a, b, self.heads)
        gate = F.silu(self.gate(x).float()).unflatten(-1, (c.Hv, c.V))
        return self.out((self.norm(y.float()) * gate).flatten(2).to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        self.heads = (config.query_heads, config.kv_heads, config.kv_heads)
        packed = sum(self.heads) * config.head_dim
        self.qkv = nn.Linear(config.width, packed, bias=False, dtype=dtype)
        attended = config.query_heads * config.head_dim
        self.out = nn.Linear(attended, config.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = packed.split(self.heads, dim=1)
        y = memory.attend(self.index, rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        kind = Attention if config.is_attention(index) else DeltaNet
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mixer = kind(config, index, dtype)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(config.hidden, config.width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: Memory) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x).to(self.dtype), cos, sin, memory)
        gate, up = self.gate_up(self.mlp_norm(x).to(self.dtype)).float().chunk(2, dim=-1)
        return x + self.down((F.silu(gate) * up).to(self.dtype))


class Decoder(nn.Module):
    def __init__(self, config: Config, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
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

    def forward(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Final hidden states [B, S, width] of tokens [B, S] at positions [B, S]."""
        angle = positions[:, None, :, None] * self.frequency  # [B, 1, S, D / 2]
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, memory)
        return self.norm(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, S, D]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# --------------------------------------------------------------------------------- the memory


class Store:
    """All that is kept of sequences, in places: one for each slot, then one for each prefix.

    It lies on the device and never moves, so that a captured step stays right. By layer:
      pools    states of gated delta nets, [places, Hv, V, K] in float32
      windows  the last inputs of their convolutions, [places, channels, taps - 1]
      caches   K and V of attention, [places, kv_heads, capacity, head_dim]: two allocations
    """

    def __init__(self, model: Decoder, places: int, capacity: int) -> None:
        c, device = model.config, model.head.weight.device
        self.pools: dict[int, Tensor] = {}
        self.windows: dict[int, Tensor] = {}
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}

        def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.empty(places, *shape, dtype=dtype, device=device)  # not cleared

        for layer in range(c.layers):
            if c.is_attention(layer):
                shape = (c.kv_heads, capacity, c.head_dim)
                self.caches[layer] = empty(*shape), empty(*shape)
            else:
                self.pools[layer] = empty(c.Hv, c.V, c.K, dtype=torch.float32)
                self.windows[layer] = empty(c.channels, c.taps - 1)


class Prompt:
    """The memory of one prompt while it is prefilled, from a kept prefix on.

    ``prefix`` is the place to start from, after ``start`` tokens, and ``kept`` the one to fill at
    the last page boundary; -1 is none. The ``count`` tokens are padded at the end. Padding comes
    after all that is read: it is past the last sequence for the delta rule, and causality hides it
    from the prompt's own rows.
    """

    def __init__(
        self, store: Store, slot: int, prefix: int, start: int, count: int, padded: int, kept: int
    ) -> None:
        self.store, self.slot, self.prefix = store, slot, prefix
        self.start, self.count, self.kept = start, count, kept
        end = start + count
        self.track = end // PAGE * PAGE - start  # tokens of the call before the boundary
        device = next(iter(store.pools.values())).device

        def numbers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.read, self.write = numbers(prefix), numbers(slot)
        self.bounds = numbers(0, count)
        self.first, self.length = numbers(start), numbers(start + padded)
        self.metadata = CheckpointMetadata.build(numbers(end), self.first, PAGE, numbers(kept))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        caches = self.store.caches[layer]
        key_cache, value_cache = (cache[self.slot : self.slot + 1] for cache in caches)
        if self.prefix >= 0:
            for cache in caches:
                cache[self.slot, :, : self.start] = cache[self.prefix, :, : self.start]
        ops.kv_scatter_(key_cache, value_cache, key, value, self.first)
        if self.kept >= 0:
            boundary = self.start + self.track
            for cache in caches:
                cache[self.kept, :, :boundary] = cache[self.slot, :, :boundary]
        return ops.decode(query, key_cache, value_cache, self.length, is_causal=True)

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        windows = self.store.windows[layer]
        if self.prefix >= 0:
            past = windows[self.prefix][None]
        else:
            past = x.new_zeros(1, x.shape[1], count)
        window = torch.cat((past, x), dim=-1)  # its column i is the one before token i - count
        windows[self.slot] = window[0, :, self.count : self.count + count]
        if self.kept >= 0:
            windows[self.kept] = window[0, :, self.track : self.track + count]
        return window

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: Heads
    ) -> Tensor:
        g, beta = ops.gdn_gates(a, b, heads.A_log, heads.dt_bias)
        return ops.gdn_chunk_prefill.pool_(
            q,
            k,
            v,
            g,
            beta,
            self.store.pools[layer],
            self.read,
            self.write,
            self.metadata.track_lens,
            self.metadata.dst,
            self.bounds,
            qk_l2norm=True,
            state_v_first=True,
        )


class Slots:
    """The memory of all slots in a decode step. Slot ``i`` has place ``i``.

    An empty slot needs no special case. Its length is 0, so that its write index is -1, which
    `kv_scatter_` drops, its attention is over no keys, which `decode` makes zero, and its state's
    index is -1, which `gdn_decode_` neither reads nor writes.
    """

    def __init__(self, store: Store, lengths: Tensor) -> None:
        self.store, self.lengths = store, lengths
        slots = torch.arange(lengths.shape[0], device=lengths.device)
        self.places = torch.where(lengths > 0, slots, -1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_cache, value_cache = (c[: query.shape[0]] for c in self.store.caches[layer])
        ops.kv_scatter_(key_cache, value_cache, key, value, self.lengths - 1)
        return ops.decode(query, key_cache, value_cache, self.lengths, is_causal=True)

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        windows = self.store.windows[layer][: x.shape[0]]
        window = torch.cat((windows, x), dim=-1)
        windows.copy_(window[..., 1:])
        return window

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: Heads
    ) -> Tensor:
        return ops.gdn_decode_.raw(
            q,
            k,
            v,
            a,
            b,
            heads.A_log,
            heads.dt_bias,
            self.store.pools[layer],
            self.places,
            qk_l2norm=True,
            state_v_first=True,
        )


class Prefixes:
    """Which prefix each place keeps. The one that was used the longest ago makes room."""

    def __init__(self, places: Sequence[int]) -> None:
        self.free = list(places)
        self.kept: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Place and tokens of the longest prefix kept; at least one token is left. (-1, 0): none"""
        for tokens in range((len(prompt) - 1) // PAGE * PAGE, 0, -PAGE):
            key = tuple(prompt[:tokens])
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key], tokens
        return -1, 0

    def place_for(self, prefix: Sequence[int]) -> int:
        """A place for this prefix, which is to be filled; -1 if there are no places at all."""
        key = tuple(prefix)
        if key not in self.kept:
            if not self.free and not self.kept:
                return -1
            self.kept[key] = self.free.pop() if self.free else self.kept.popitem(last=False)[1]
        self.kept.move_to_end(key)
        return self.kept[key]


# --------------------------------------------------------------------------------- the server


@dataclass
class Request:
    arrival: int  # the step at which it turns up
    prompt: list[int]
    budget: int  # how many tokens it wants
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    resumed: int = 0  # tokens of the prompt that came from a kept prefix


class Server:
    """Slots that requests move into and out of, and the one step that serves them all.

    tokens [slots, 1] and lengths [slots] are the token that each slot feeds to the model next, and
    the tokens in its memory, that one included; a length of 0 is an empty slot.
    """

    def __init__(
        self, model: Decoder, slots: int, prefixes: int, capacity: int, backend: str
    ) -> None:
        self.model, self.capacity = model, capacity
        self.device = model.head.weight.device
        self.store = Store(model, slots + prefixes, capacity)
        self.prefixes = Prefixes(range(slots, slots + prefixes))
        self.tokens = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(slots, model.config.vocabulary, device=self.device)
        self.compiled = torch.compile(self.decode, backend=backend, fullgraph=True, dynamic=False)
        self.run_step: Callable[[], None] = self.step

    def decode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.model(tokens, (lengths - 1)[:, None], Slots(self.store, lengths))
        return self.model.head(hidden[:, -1])

    def step(self) -> None:
        """One token for every slot that is in use."""
        self.logits.copy_(self.compiled(self.tokens, self.lengths))
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
        """Prefills what no kept prefix covers of a prompt, which gives its first token."""
        end = len(request.prompt)
        if -(-end // PAGE) * PAGE > self.capacity or end + request.budget > self.capacity:
            raise ValueError(f"a request of {end} + {request.budget} tokens does not fit")
        prefix, start = self.prefixes.longest(request.prompt)
        boundary = end // PAGE * PAGE
        kept = self.prefixes.place_for(request.prompt[:boundary]) if boundary > start else -1

        count = end - start
        padded = request.prompt[start:] + [0] * (-count % PAGE)
        tokens = torch.tensor([padded], device=self.device)
        positions = torch.arange(start, start + len(padded), device=self.device)[None]
        memory = Prompt(self.store, slot, prefix, start, count, len(padded), kept)
        hidden = self.model(tokens, positions, memory)
        logits = self.model.head(hidden[:, count - 1])
        self.tokens[slot] = logits.argmax(-1)
        self.lengths[slot] = end + 1
        request.logits.append(logits[0])
        request.resumed = start

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


class Plain:
    """No memory: whole sequences [1, S], in PyTorch alone, the delta rule as it is written down."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = query.float(), key.float(), value.float()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.to(query.dtype)

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        return F.pad(x, (count, 0))

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: Heads
    ) -> Tensor:
        def unit(x: Tensor) -> Tensor:
            wide = x.float()
            return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype).float()

        group = v.shape[2] // q.shape[2]
        q, k = (unit(x[0]).repeat_interleave(group, dim=1) for x in (q, k))  # [S, Hv, K]
        decay = torch.exp(-heads.A_log.exp() * F.softplus(a[0].float() + heads.dt_bias))
        beta, values = b[0].float().sigmoid(), v[0].float()
        S = values.new_zeros(v.shape[2], q.shape[2], v.shape[3])  # [Hv, K, V]
        outputs = []
        for t in range(q.shape[0]):
            S = decay[t, :, None, None] * S
            d = beta[t, :, None] * (values[t] - (S * k[t, :, :, None]).sum(1))
            S = S + k[t, :, :, None] * d[:, None]
            outputs.append((S * q[t, :, :, None]).sum(1) * q.shape[2] ** -0.5)
        return torch.stack(outputs)[None].to(v.dtype)


def plain_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits [S, vocabulary] of a whole sequence: no cache, no batch, no operator of ours."""
    device = model.head.weight.device
    positions = torch.arange(len(tokens), device=device)[None]
    return model.head(model(torch.tensor([tokens], device=device), positions, Plain())[0])


def check(model: Decoder, requests: Sequence[Request]) -> str:
    """Compares what was served with plain PyTorch, and says what was found; exits if it differs.

    In float32 the tokens are those of a plain greedy run: each is the likeliest one after those
    before it, which by induction are the run's own. In 16 bit they may part ways at a near tie. In
    both, the logits agree.
    """
    findings = []
    worst, allowed = 0.0, TOLERANCE[model.dtype]
    for number, request in enumerate(requests):
        plain = plain_logits(model, request.prompt + request.tokens[:-1])[-request.budget :]
        expected = plain.argmax(-1).tolist()
        if model.dtype == torch.float32 and request.tokens != expected:
            fail(f"request {number} got {request.tokens}, not {expected}")
        error = (torch.stack(request.logits) - plain).norm(dim=-1) / plain.norm(dim=-1)
        worst = max(worst, error.max().item())
    if model.dtype == torch.float32:
        tokens = sum(request.budget for request in requests)
        findings.append(f"{tokens} tokens of {len(requests)} requests equal a plain PyTorch run's")
    findings.append(f"logits within {worst:.1e} of plain PyTorch's, {allowed:.0e} allowed")
    if not worst <= allowed:
        fail(findings[-1])
    return f"ok: {'; '.join(findings)}"


def fail(what: str) -> NoReturn:
    raise SystemExit(f"check      FAILED: {what}")


# ---------------------------------------------------------------------------------- the program


def make_requests(count: int, capacity: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Prompts that begin with one of three instructions, of one page, two, or one and a half."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    instructions = [text(PAGE), text(2 * PAGE), text(PAGE + PAGE // 2)]
    requests, arrival = [], 0
    for _ in range(count):
        arrival += rng.choice((0, 0, 2, 9))
        prompt = rng.choice(instructions) + text(rng.randint(1, PAGE))
        requests.append(Request(arrival, prompt, rng.randint(4, capacity // 12)))
    return requests


def follow_up(requests: Sequence[Request], vocabulary: int, seed: int = 1) -> list[Request]:
    """The second round of each conversation: the prompt, the answer, and a few tokens more."""
    rng = random.Random(seed)
    return [
        Request(
            request.arrival,
            request.prompt + request.tokens + [rng.randrange(vocabulary) for _ in range(9)],
            request.budget,
        )
        for request in requests
    ]


def run(dtype: torch.dtype, args: argparse.Namespace) -> None:
    model = Decoder(Config(), dtype).to(args.device)
    vocabulary = model.config.vocabulary
    server = Server(model, args.slots, args.prefixes, args.capacity, args.backend)
    graph = args.device.startswith("cuda")

    # Tiers are chosen here, once for each problem; a replayed graph makes no choice any more.
    started = time.perf_counter()
    with torch_attn_tiers.record_dispatch() as records:
        server.warm_up(graph)
    set_up = time.perf_counter() - started

    started = time.perf_counter()
    first = make_requests(args.requests, args.capacity, vocabulary)
    steps = server.serve(first)
    second = follow_up(first, vocabulary)
    steps += server.serve(second)
    seconds = time.perf_counter() - started

    requests = [*first, *second]
    tokens = sum(request.budget for request in requests)
    resumed = [request.resumed for request in requests if request.resumed]
    whole = sum(len(request.prompt) for request in requests)
    tiers = {f"{r.problem.call}: {r.tier}" for r in records}
    print(f"\n{str(dtype).removeprefix('torch.')} on {args.device}, torch {torch.__version__}")
    print(f"set-up     {set_up:.1f} s: compiled by {args.backend}" + ", captured" * graph)
    print(f"served     {len(requests)} requests in {steps} steps of {args.slots} slots")
    print(
        f"prefixes   {len(resumed)} prompts resumed from a kept state: {sum(resumed)} of {whole} "
        "prompt tokens were not computed again"
    )
    print(f"speed      {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    print(f"tier       {', '.join(sorted(tiers))}")
    last = requests[max(0, len(requests) - args.check) :]
    print(f"check      {check(model, last)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES), metavar="DTYPE"
    )
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=8, help="how many prefixes are kept")
    parser.add_argument("--capacity", type=int, default=256, help="tokens that a slot can hold")
    parser.add_argument("--requests", type=int, default=8, help="of each of two rounds")
    parser.add_argument("--check", type=int, default=16, help="how many to check, from the last on")
    parser.add_argument("--backend", help="of torch.compile; default: inductor, on a CPU aot_eager")
    args = parser.parse_args(argv)
    if args.capacity < 4 * PAGE:
        parser.error(f"--capacity={args.capacity}: the prompts take {4 * PAGE} tokens")
    if args.backend is None:
        args.backend = "aot_eager" if args.device == "cpu" else "inductor"
    if args.device == "cpu":
        torch.set_num_threads(1)  # this model is too small to be shared out
    for dtype in args.dtype:
        run(DTYPES[dtype], args)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

if __name__ == "__main__":
    main()
