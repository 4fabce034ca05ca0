"""The chunked gated delta rule, host side: shapes and strides in, a plan of launches out.

Grids and scratch follow from shapes alone. No tensor is read, ``cu_seqlens`` least of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.facts import DeviceFacts, PoolIndices, TensorFacts
from csrc_free_ops.gdn.chunk_map import chunk_map_kernel, segment_map_kernel
from csrc_free_ops.gdn.decays import decays_kernel
from csrc_free_ops.gdn.prepare import prepare_kernel
from csrc_free_ops.gdn.scan import scan_kernel
from csrc_free_ops.gdn.segments import chain_kernel, segment_kernel
from csrc_free_ops.launch import Launch, LaunchesPlan
from csrc_free_ops.sizes import next_power_of_2

C = 64  # tokens of a chunk
_MAP_BLOCK = 1024  # sequences that the chunk map adds up at a time
_MOST_IN_ORDER = 4096  # sequences that are put in order: each is compared with all
_SEGMENT_MAP_BLOCK = 128  # sequences, or segments, of the segment map at a time
_LEAST_SEGMENT = 16  # chunks, below which starting a segment takes longer than going through it
_FEW_BV = 16  # columns of S of a program of the scan, where programs are few
_CHAIN_BV = 16  # columns of S of a program of the chain
_DECAYS_BH = 32  # value heads of a program of the decays kernel
_ZERO_BLOCK = 2048  # elements of padding that it sets to zero at a time
_INDICES = ("read_indices", "write_indices", "track_lens", "track_indices")
_H_LAYOUTS = {None: 0, "fla": 1, "compact": 2}


class GdnConfig(NamedTuple):
    """What the kernels are compiled for beyond the problem itself."""

    prepare_bk: int  # columns of q and k at a time in prepare
    prepare_warps: int
    heads: int  # value heads of a program of prepare: a power of two that divides those of a q head
    bk: int  # columns of a tile of S^T in the scan
    bv: int  # its rows: columns of S that a program of the scan keeps
    scan_warps: int
    scan_stages: int  # chunks whose loads are under way in the scan, its own among them
    #: v is copied to shared memory chunks ahead, as all else that is read (if of 16 bits).
    v_ahead: bool = True
    #: In the scan, instead: v comes to registers a chunk ahead.
    v_early: bool = False
    #: q, weights and keys come as whole tiles, by Hopper's copies of these; keys are copied for it.
    #: Where it is possible: 16 bits, and q in rows of heads, see ``_q_matrix``.
    boxed: bool = False
    #: Each thread writes what it has of states inside sequences, two columns at a time. Else rows
    #: are brought together first. Where it is possible: on NVIDIA, in float32, and K is even.
    h_pairs: bool = False
    prepare_registers: int | None = None  # the most of a thread; None: as the compiler likes
    scan_registers: int | None = None
    #: Chunks of a segment that sequences are split into; 0: they are not; None: by shapes.
    segment_chunks: int | None = None


def default_config(
    K: int, V: int, group: int, dtype: torch.dtype, device: DeviceFacts
) -> GdnConfig:
    """Tile shapes for head sizes K and V and ``group`` heads of v for each of q and k.

    The same for all tokens and sequences: ``plan_gdn`` changes it for many programs, and with
    ``batch_invariant`` only what changes no bit. As many stages as the device has memory for.
    """
    narrow = dtype.itemsize == 2
    # Of sm_100's 512 columns of tensor memory two heads of prepare in a loop take up to 1088 in
    # float32.
    # 64 rows of S^T would be those of one product on Hopper's tensor cores, but the products of a
    # chunk wait for each other: half as many rows and twice the programs were a third faster.
    bk, bv = min(_pow2(K), 64), min(_pow2(V), 32)
    # The same tensor memory is enough for float32 in four pieces of K = 256, but not in eight.
    wide = 128 if narrow else 64 if _has_tensor_memory(device) else 32
    prepare_bk = min(_pow2(K), wide)
    while _prepare_bound(prepare_bk, dtype) > device.shared_memory:
        prepare_bk //= 2
    heads = 1 if group % 2 or (_has_tensor_memory(device) and dtype is torch.float32) else 2
    # By itself a head takes some 200 registers: with a few less three programs fit on Hopper.
    registers = 168 if heads == 1 and narrow and _is_hopper(device) else None
    for stages in (3, 2, 1):
        config = GdnConfig(
            prepare_bk, 4, heads, bk, bv, 4, stages, h_pairs=not _has_tensor_memory(device),
            prepare_registers=registers,
        )  # fmt: skip
        if shared_memory_bound(config, K, dtype) <= device.shared_memory:
            break
    return config


def check_config(
    config: GdnConfig, K: int, group: int, dtype: torch.dtype, device: DeviceFacts
) -> None:
    """Raises ``ValueError`` for a configuration with which kernels would compute something else.

    Or would not compile, with an error that does not name the field. Numbers of warps and registers
    are left to the compiler.
    """

    def check(name: str, is_right: bool, rule: str) -> None:
        if not is_right:
            raise ValueError(f"config.{name} is {getattr(config, name)}; it must be {rule}")

    # A power of two: as a dimension of prepare's tiles.
    is_divisor = 0 < config.heads <= group and group % config.heads == 0
    is_divisor &= config.heads == next_power_of_2(config.heads)
    check("heads", is_divisor, f"a divisor of {group} and a power of two")
    for name in ("prepare_bk", "bk", "bv"):
        size = getattr(config, name)
        check(name, size == _pow2(size), "a power of two from 16 on")
    check("bk", 4 * config.bk >= K, f"at least {-(-K // 4)}, so that there are four tiles at most")
    if _in_two_terms(K, dtype):
        check("bk", config.bk >= K, f"at least {K}, one tile where K is {C // 2} or less")
    check("scan_stages", config.scan_stages > 0, "1 or more")
    check("boxed", not config.boxed or _is_hopper(device), f"false on {device.arch}")
    check("segment_chunks", (config.segment_chunks or 0) >= 0, "None, 0 or more")


def _in_two_terms(K: int, dtype: torch.dtype) -> bool:
    """Whether S is updated by D in two terms.

    More tokens in a chunk than keys are independent: D answers to errors of itself.
    """
    return K <= C // 2 and dtype is not torch.float32


def _has_tensor_memory(device: DeviceFacts) -> bool:
    return device.is_nvidia and (device.capability or (0, 0))[0] == 10


def _is_hopper(device: DeviceFacts) -> bool:
    return device.is_nvidia and (device.capability or (0, 0))[0] == 9


def shared_memory_bound(config: GdnConfig, K: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory that a program may take, from above (tests/compile_only.py checks)."""
    keys = C * config.bk * -(-K // config.bk)
    weights = 2 * C * C
    if config.scan_stages > 1:
        ahead = (config.scan_stages - 1) * (2 * keys + weights)
        made = 2 * keys + 2 * C * config.bv + 2 * config.bv * config.bk
        if config.bv > 32:  # the identity that v is multiplied by, columns of h, and v itself
            made += C * C + 2 * config.bv * min(config.bk, 32)
            made += config.scan_stages * C * config.bv if config.v_ahead else 0
        scan = ahead + made + 1024
    elif dtype.itemsize == 2:  # operands stay until the end of a chunk
        scan = keys + C * config.bk + weights
    else:  # one pair of operands at a time, each in two parts
        scan = 2 * weights
    return max(_prepare_bound(config.prepare_bk, dtype), scan * dtype.itemsize)


def segment_chunks(
    config: GdnConfig,
    sequences: int,
    heads: int,
    V: int,
    chunks: int,
    device: DeviceFacts,
    has_h: bool,
) -> int:
    """Chunks of a segment, where splitting sequences is faster than not; 0 where it is not.

    It is where too few programs go through too many chunks: it makes half of the products again,
    for twice the columns. ``chunks`` is how many there can be. As many programs as run at once: of
    32 columns two fit into a multiprocessor. Two segments are not worth it where ``has_h``: states
    inside sequences are written at the rate of the memory then, and before that nothing is.
    """
    programs = sequences * heads * -(-V // config.bv)
    least = 3 if has_h or config.bv <= 32 else 2
    is_wide = programs == 0 or programs * least > device.multiprocessors
    if is_wide or chunks < 4 * _LEAST_SEGMENT * sequences:
        return 0
    at_once = device.multiprocessors * (1 if config.bv > 32 else 2)
    segments = at_once * sequences // programs
    return max(_LEAST_SEGMENT, -(-chunks // segments))


def fills_device(programs: int, device: DeviceFacts) -> bool:
    """Whether there are more programs than multiprocessors."""
    return programs > device.multiprocessors


def has_tiles_by_programs(K: int, V: int, dtype: torch.dtype, device: DeviceFacts) -> bool:
    """Whether a scan takes 64 or 16 columns of S a program, where it has many or few programs.

    Hopper's products of 64 rows read each operand once, where those of 32 read it twice, and other
    bits come out. A chunk takes less than two of 32 columns do, but longer than one: it pays where
    there are programs enough, or sequences are split until there are. A chunk of 16 columns takes
    four fifths of one of 32: it pays where all programs have a multiprocessor each.
    """
    return _is_hopper(device) and dtype.itemsize == 2 and V > 32 and K <= 128


def _prepare_bound(bk: int, dtype: torch.dtype) -> int:
    """Bytes of three tiles of keys and queries (of float32 in two parts), and of matrices."""
    tiles = 6 if dtype is torch.float32 else 3
    matrices = 6 if dtype is torch.bfloat16 else 8
    return tiles * C * bk * dtype.itemsize + matrices * C * C


def unsupported(
    q: TensorFacts,
    k: TensorFacts,
    v: TensorFacts,
    device: DeviceFacts,
    *,
    sequences: int,
    cu_seqlens_dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Why the kernels cannot take a legal problem, in words; None if they can."""
    config = default_config(q.shape[3], v.shape[3], v.shape[2] // q.shape[2], q.dtype, device)
    needed = shared_memory_bound(config, q.shape[3], q.dtype)
    if needed > device.shared_memory:
        return (
            f"needs {needed} bytes of shared memory for head sizes {q.shape[3]} and {v.shape[3]}, "
            f"{device.arch} has {device.shared_memory}"
        )
    tokens, heads = v.shape[0] * v.shape[1], v.shape[2]
    if tokens >= 2**31:
        return "more than 2^31 tokens"
    chunks = _most_chunks(v.shape[0], v.shape[1], sequences, cu_seqlens_dtype is not None)
    if heads * chunks >= 2**31:
        return "more than 2^31 chunks and heads"
    if sequences * heads * -(-v.shape[3] // config.bv) >= 2**31:
        return "more than 2^31 sequences, heads and tiles of V"
    return None


def plan_gdn(
    q: TensorFacts,
    k: TensorFacts,
    v: TensorFacts,
    g: TensorFacts,
    beta: TensorFacts,
    device: DeviceFacts,
    *,
    initial_state: TensorFacts | None = None,
    cu_seqlens_dtype: torch.dtype | None = None,
    sequences: int,
    scale: float,
    qk_l2norm: bool = False,
    output_final_state: bool = True,
    h_layout: str | None = None,
    h_rows: int = 0,
    h_dtype: torch.dtype | None = None,
    pool: PoolIndices | None = None,
    batch_invariant: bool = False,
    config: GdnConfig | None = None,
) -> GdnPlan:
    """A plan over facts ``[B,T,Hq,K]``, ``[B,T,Hv,V]``, ``[B,T,Hv]`` and a state ``[N,Hv,V,K]``.

    With the dtypes of indices the state is a pool ``[P,Hv,V,K]``, to be run by ``run_pool``.

    Raises:
        ValueError: a configuration that breaks the rules of ``check_config``, or that splits
            sequences with ``batch_invariant``.
    """
    B, T, Hq, K = q.shape
    Hv, V = v.shape[2:]
    by_shapes = config is None
    if config is None:
        config = default_config(K, V, Hv // Hq, q.dtype, device)
    else:
        check_config(config, K, Hv // Hq, q.dtype, device)
    has_cu, has_h = cu_seqlens_dtype is not None, h_layout is not None
    chunks = _most_chunks(B, T, sequences, has_cu)
    # Offsets within a chunk, and from one chunk to the next.
    wide = C * Hv * V >= 2**31 or any(
        C * x.stride[1] + (x.shape[3] - 1) * x.stride[3] >= 2**31 for x in (q, k, v)
    )
    q_matrix = None if wide else _q_matrix(q, chunks * Hv * 2 * C)
    if by_shapes:
        config = _for_programs(
            config, sequences, Hv, K, V, chunks, q.dtype, device,
            has_h=has_h, batch_invariant=batch_invariant,
            can_be_boxed=q_matrix is not None and K == _pow2(K),
        )  # fmt: skip
    v_tiles = -(-V // config.bv)
    L = config.segment_chunks
    if batch_invariant and L:
        raise ValueError(
            f"config.segment_chunks is {L}; with batch_invariant it must be 0 or None: sequences "
            "are not split then"
        )
    if L is None:
        L = (
            0
            if batch_invariant
            else segment_chunks(config, sequences, Hv, V, chunks, device, has_h)
        )
    segments = sequences
    if L:  # a sequence is a segment even if it is empty; one alone may have all tokens
        segments += (1 if has_cu else B) * (max(0, T - 1) // (C * L))
    is_split = segments > sequences
    # Which program is whose changes no bit either.
    fits_at_once = segments * Hv * v_tiles <= device.multiprocessors
    has_order = has_cu and 1 < sequences <= _MOST_IN_ORDER and not (is_split or fits_at_once)
    exact = q.dtype is torch.float32
    tensor_cores = device.is_nvidia
    precision = "tf32x3" if exact and tensor_cores else "ieee"
    # Of T and U, computed in float32. TF32 has the 10 bits of float16 and 3 more than bfloat16.
    solve_precision = "ieee"
    if tensor_cores:
        solve_precision = "tf32" if q.dtype is torch.bfloat16 else "tf32x3"
    if not config.boxed or K % config.bk:
        q_matrix = None

    checkpoints = (h_dtype or torch.float32, True)
    h_pairs = config.h_pairs and device.is_nvidia and K % 2 == 0
    h_pairs &= has_h and checkpoints[0] is torch.float32

    dtype = (q.dtype, True)
    cu = (cu_seqlens_dtype or torch.int32, False)
    starts, h_starts = (torch.int32, True), (torch.int64, True)
    pair = (torch.float32, True)
    shared = dict(C=C, HAS_CU=has_cu, PDL=device.has_pdl)
    has_keys = qk_l2norm or q_matrix is not None
    tiles = dict(K=K, HAS_KEYS=has_keys, PRECISION=precision, WIDE=wide)
    strides = {**_strides("q", q), **_strides("k", k)}
    parts = chunks * Hv // config.heads
    # Two of its programs fit into a multiprocessor.
    ahead = C * -(-2 * device.multiprocessors * config.heads // Hv)
    chunk_map = Launch(
        chunk_map_kernel,
        grid=1 + sequences if has_order else 1,
        pointers=dict(cu_seqlens=cu, order=starts, chunk_starts=starts, h_cu_starts=h_starts),
        scalars=dict(tokens=T, sequences=sequences),
        constants=dict(
            **shared, BLOCK=_MAP_BLOCK, HAS_H_STARTS=h_layout == "compact", HAS_ORDER=has_order
        ),
        options=_options(device, 4),
    )
    decays_bh = min(next_power_of_2(Hv), _DECAYS_BH)
    # How many neighbours a thread loads decides in which order it adds up; what the compiler knows
    # of strides of rows differs with T.
    g_aligned, beta_aligned = (x.aligned and not batch_invariant for x in (g, beta))
    decays = Launch(
        decays_kernel,
        grid=chunks * -(-Hv // decays_bh),
        pointers=dict(
            g=(g.dtype, g_aligned), beta=(beta.dtype, beta_aligned), cu_seqlens=cu,
            chunk_starts=starts, vectors=pair, rests=pair, out=dtype,
        ),
        scalars=dict(
            heads=Hv, row_size=Hv * V, tokens=T, sequences=sequences, **_strides("g", g),
            **_strides("beta", beta),
        ),
        constants=dict(**shared, BH=decays_bh, BLOCK=_ZERO_BLOCK, EXACT=exact),
        options=_options(device, 4),
    )  # fmt: skip
    prepare = Launch(
        prepare_kernel,
        grid=parts,
        pointers=dict(
            q=(q.dtype, q.aligned), k=(k.dtype, k.aligned), cu_seqlens=cu, chunk_starts=starts,
            vectors=pair, rests=pair, weights=dtype, keys=dtype,
        ),
        scalars=dict(
            parts=Hv // config.heads, group_parts=Hv // Hq // config.heads, tokens=T,
            sequences=sequences, ahead=ahead, scale=float(scale), **strides,
        ),
        constants=dict(
            **shared, **tiles, L2NORM=qk_l2norm, HEADS=config.heads, BK=config.prepare_bk,
            NK=-(-K // config.prepare_bk), SOLVE_PRECISION=solve_precision, EXACT=exact,
            NVIDIA=device.is_nvidia,
        ),
        options=_options(device, config.prepare_warps, 1, config.prepare_registers),
    )  # fmt: skip
    state = initial_state
    s_strides = (0, 0, 0, 0) if state is None else state.stride
    given = pair if state is None else (state.dtype, state.aligned)
    indices = dict(zip(_INDICES, pool or ()))
    states = dict(zip(("s_stride_n", "s_stride_h", "s_stride_v", "s_stride_k"), s_strides))
    places = 0 if state is None else state.shape[0]
    in_registers = dict(
        **tiles, V=V, GROUP=Hv // Hq, HV=Hv, BK=config.bk, NK=-(-K // config.bk), BV=config.bv,
        HAS_POOL=pool is not None, TWO_TERMS=_in_two_terms(K, q.dtype), BOXED=q_matrix is not None,
        NVIDIA=device.is_nvidia,
    )  # fmt: skip
    by_product = bool(config.v_ahead) and not exact
    boxes, scan_boxes = {}, {}
    if q_matrix is not None:
        boxes = {"weights": (C, C), "keys": (C, config.bk)}
        scan_boxes = {**boxes, "q": (C, config.bk), "weights": (2 * C, C)}
    track = 0
    if pool is not None and pool.track_lens is not None:
        # Many programs share multiprocessors, which hides what is asked for in each chunk.
        is_inside = not is_split and fills_device(sequences * Hv * v_tiles, device)
        track = 2 if is_inside else 1
    scan = Launch(
        scan_kernel,
        grid=segments * Hv * v_tiles,
        pointers=dict(
            q=(q.dtype, q.aligned), k=(k.dtype, k.aligned), v=(v.dtype, v.aligned),
            initial_state=pair if is_split else given, cu_seqlens=cu, order=starts,
            chunk_starts=starts,
            weights=dtype, vectors=pair, keys=dtype, out=dtype,
            final_state=pair if pool is None else given,
            h=checkpoints, h_cu_starts=h_starts,
            **{name: (indices.get(name) or torch.int32, False) for name in _INDICES},
        ),
        scalars=dict(
            tokens=T, chunks=chunks, rows=h_rows, places=places, **strides,
            **_strides("v", v),
            **states,
        ),
        constants=dict(
            **shared, **in_registers, HAS_STATE=state is not None and not is_split,
            HAS_FINAL=output_final_state, H_LAYOUT=_H_LAYOUTS[h_layout],
            TRACK=track, SPLIT=is_split,
            HAS_ORDER=has_order, BY_PRODUCT=by_product and not config.v_early,
            EARLY=bool(config.v_early), H_PAIRS=bool(h_pairs),
        ),
        options=_options(device, config.scan_warps, config.scan_stages, config.scan_registers),
        boxes=scan_boxes,
    )  # fmt: skip
    split = None
    if is_split:
        split = _plan_split(
            k, v, segments,
            scalars=dict(tokens=T, sequences=sequences, chunks=chunks, segment_chunks=L),
            state=dict(places=places, **states),
            pointers=dict(
                initial_state=given, cu_seqlens=cu, weights=dtype, vectors=pair, keys=dtype,
                read_indices=(indices.get("read_indices") or torch.int32, False),
            ),
            constants=dict(
                **shared, **in_registers, HAS_STATE=state is not None, BY_PRODUCT=by_product
            ),
            boxes=boxes,
            config=config,
            device=device,
        )  # fmt: skip
    return GdnPlan(
        device,
        chunk_map=chunk_map if has_cu or h_layout == "compact" else None,
        decays=decays if chunks else None,
        prepare=prepare if chunks else None,
        split=split,
        scan=scan,
        sequences=sequences,
        weights=(chunks, Hv, 2, C, C),
        vectors=(chunks, Hv, C, 4),
        rests=(chunks, Hv, C) if exact else (0,),
        order=(sequences,) if has_order else (0,),
        keys=(chunks, Hq, C, K) if has_keys else (0,),
        q_matrix=q_matrix,
        config=config,
    )


def _most_chunks(B: int, T: int, sequences: int, has_cu: bool) -> int:
    """How many chunks there are, by whatever lengths."""
    if has_cu:
        m = min(sequences, T)
        return m + (T - m) // C
    return B * -(-T // C)


class Matrix(NamedTuple):
    """A view of a tensor as rows."""

    rows: int
    columns: int
    stride: int  # of a row, in elements

    def of(self, x: Tensor) -> Tensor:
        return x.as_strided((self.rows, self.columns), (self.stride, 1))


def _q_matrix(q: TensorFacts, rows: int) -> Matrix | None:
    """q with a row for each token, all heads side by side; None if it is not so, or too large.

    Hopper copies tiles of such from aligned addresses. ``rows`` is how many the weights have.
    """
    B, T, Hq, K = q.shape
    stride_b, stride, stride_h, stride_d = q.stride
    columns = (Hq - 1) * stride_h + K
    is_dense = stride_d == 1 and (B == 1 or stride_b == T * stride) and columns <= stride
    is_aligned = q.aligned and all(n * q.dtype.itemsize % 16 == 0 for n in (stride, stride_h))
    fits = 0 < B * T < 2**31 and rows < 2**31
    if q.dtype.itemsize == 2 and is_dense and is_aligned and fits:
        return Matrix(B * T, columns, stride)
    return None


def _for_programs(
    config: GdnConfig,
    sequences: int,
    heads: int,
    K: int,
    V: int,
    chunks: int,
    dtype: torch.dtype,
    device: DeviceFacts,
    *,
    has_h: bool,
    batch_invariant: bool,
    can_be_boxed: bool,
) -> GdnConfig:
    """The configuration for as many programs as there are, of the default one.

    When loads are issued changes no bit, but tiles do.
    """
    has_many = fills_device(sequences * heads * -(-V // config.bv), device)
    if not batch_invariant and has_tiles_by_programs(K, V, dtype, device):
        wide = config._replace(
            bk=min(_pow2(K), 128), bv=min(64, _pow2(V)), boxed=True, v_early=True
        )
        # Addresses of three chunks under way take registers that 64 columns do not leave.
        most = wide if can_be_boxed else config
        L = segment_chunks(most, sequences, heads, V, chunks, device, has_h)
        if L:
            return most._replace(segment_chunks=L)
        if fills_device(sequences * heads * -(-V // wide.bv), device):
            # Two programs fit into a multiprocessor.
            return wide._replace(scan_stages=2, h_pairs=False)
        if has_many and can_be_boxed:
            return wide
        if not fills_device(sequences * heads * -(-V // _FEW_BV), device):
            return config._replace(bv=_FEW_BV)
    if has_many:
        # Two programs of a multiprocessor hide more than a third chunk under way.
        return config._replace(scan_stages=min(config.scan_stages, 2), h_pairs=False)
    return config


class Split(NamedTuple):
    """What is launched before the scan where sequences are split, and its scratch."""

    segment_map: Launch
    make: Launch
    chain: Launch
    segments: int
    maps: tuple[int, ...]


def _plan_split(
    k: TensorFacts,
    v: TensorFacts,
    segments: int,
    *,
    scalars: dict[str, int],
    state: dict[str, int],
    pointers: dict[str, tuple[torch.dtype, bool]],
    constants: dict[str, Any],
    boxes: dict[str, tuple[int, int]],
    config: GdnConfig,
    device: DeviceFacts,
) -> Split:
    """From arguments that the scan has as well, by their names there."""
    (Hv, V), K = v.shape[2:], k.shape[3]
    pointers = {
        "k": (k.dtype, k.aligned), "v": (v.dtype, v.aligned), "segment_map": (torch.int32, True),
        "maps": (torch.float32, True), **pointers,
    }  # fmt: skip

    def chosen(*names: str) -> dict[str, tuple[torch.dtype, bool]]:
        return {name: pointers[name] for name in names}

    segment_map = Launch(
        segment_map_kernel,
        grid=scalars["sequences"],
        pointers=chosen("cu_seqlens", "segment_map"),
        scalars=dict(**scalars, segments=segments),
        constants=dict(
            C=C, BLOCK=_SEGMENT_MAP_BLOCK, HAS_CU=constants["HAS_CU"], PDL=device.has_pdl
        ),
        options=_options(device, 4),
    )
    make = Launch(
        segment_kernel,
        grid=segments * Hv * (-(-V // config.bv) + -(-K // config.bv)),
        pointers=chosen(
            "k", "v", "initial_state", "cu_seqlens", "segment_map", "weights", "vectors", "keys",
            "maps", "read_indices",
        ),
        scalars=dict(tokens=scalars["tokens"], **state, **_strides("k", k), **_strides("v", v)),
        constants=constants,
        options=_options(device, config.scan_warps, config.scan_stages, config.scan_registers),
        boxes=boxes,
    )  # fmt: skip
    # M goes to shared memory segments ahead, where there is as much.
    chain_bk = min(_pow2(K), 64)
    size = 4 * (chain_bk * -(-K // chain_bk)) ** 2
    ahead = [n for n in (2, 1) if n * size + 2 * chain_bk**2 * 4 <= device.shared_memory]
    chain = Launch(
        chain_kernel,
        grid=segments * Hv * -(-V // _CHAIN_BV),
        pointers=chosen("segment_map", "maps"),
        scalars=dict(segments=segments),
        constants=dict(
            HV=Hv, K=K, V=V, BV=_CHAIN_BV, BK=chain_bk, NK=-(-K // chain_bk),
            BLOCK=_SEGMENT_MAP_BLOCK, PRECISION="tf32x3" if device.is_nvidia else "ieee",
            NVIDIA=device.is_nvidia, PDL=device.has_pdl,
        ),
        options=_options(device, 8, 1 + max(ahead, default=0)),
    )  # fmt: skip
    return Split(segment_map, make, chain, segments, (segments, Hv, V + K, K))


class GdnPlan(LaunchesPlan):
    """The launches of one problem. Safe to share between threads; holds no tensor.

    Args:
        device: what it runs on.
        chunk_map, decays, prepare, split, scan: its launches, None where there is nothing to do.
        sequences: how many there are.
        weights, vectors, keys: the shapes of scratch, see the prepare kernel; (0,) where none is.
        rests: likewise, see the decays kernel.
        order: likewise, see the chunk map.
        q_matrix: how the scan sees q, if it gets descriptors.
        config: what the kernels are compiled for.
    """

    def __init__(
        self,
        device: DeviceFacts,
        *,
        chunk_map: Launch | None,
        decays: Launch | None,
        prepare: Launch | None,
        split: Split | None,
        scan: Launch,
        sequences: int,
        weights: tuple[int, ...],
        vectors: tuple[int, ...],
        keys: tuple[int, ...],
        rests: tuple[int, ...],
        order: tuple[int, ...],
        q_matrix: Matrix | None,
        config: GdnConfig,
    ) -> None:
        launches = (chunk_map, decays, prepare, *(() if split is None else split[:3]), scan)
        super().__init__(device, [launch for launch in launches if launch is not None])
        self.chunk_map = chunk_map
        self.decays = decays
        self.prepare = prepare
        self.split = split
        self.scan = scan
        self.sequences = sequences
        self.weights = weights
        self.vectors = vectors
        self.keys = keys
        self.rests = rests
        self.order = order
        self.q_matrix = q_matrix
        self.config = config
        self.specialization = (
            device.index,
            *(launch.specialization for launch in self.launches),
        )

    def run(
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
        """Writes out, final_state, h and h_cu_starts, those that are given; states V-first."""
        if self.sequences == 0:
            out.zero_()
            if h_cu_starts is not None:
                h_cu_starts.zero_()
            return
        index = self.device.index
        for launch, tensors in self.calls(
            q, k, v, g, beta, initial_state, cu_seqlens, out, final_state, h, h_cu_starts
        ):
            launch(index, *tensors)

    def run_pool(
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
        """Writes out, and states of the pool, which are V-first; the indices are dense."""
        if self.sequences == 0:
            out.zero_()
            return
        indices = (read_indices, write_indices, track_lens, track_indices)
        index = self.device.index
        for launch, tensors in self.calls(
            q, k, v, g, beta, pool, cu_seqlens, out, pool, None, None, indices
        ):
            launch(index, *tensors)

    def calls(
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
        indices: tuple[Tensor | None, ...] = (None,) * len(_INDICES),
    ) -> list[tuple[Launch, tuple[Tensor, ...]]]:
        """The launches of a run in their order, each with its tensors; there is a sequence."""
        # Scratch of the stream's allocator: another stream or graph has other scratch. An argument
        # that a kernel does not use is stood in for by one that it has.
        starts = out.new_empty(self.sequences + 1, dtype=torch.int32)
        order = out.new_empty(self.order, dtype=torch.int32) if self.order[0] else starts
        weights = out.new_empty(self.weights)
        vectors = out.new_empty(self.vectors, dtype=torch.float32)
        keys = out.new_empty(self.keys) if self.keys[0] else weights
        cu = starts if cu_seqlens is None else cu_seqlens
        h_starts = starts if h_cu_starts is None else h_cu_starts
        calls: list[tuple[Launch, tuple[Tensor, ...]]] = []
        if self.chunk_map is not None:
            calls.append((self.chunk_map, (cu, order, starts, h_starts)))
        if self.decays is not None:
            rests = out.new_empty(self.rests, dtype=torch.float32) if self.rests[0] else vectors
            calls.append((self.decays, (g, beta, cu, starts, vectors, rests, out)))
        if self.prepare is not None:
            calls.append((self.prepare, (q, k, cu, starts, vectors, rests, weights, keys)))
        if self.q_matrix is not None:
            q, weights, keys = (
                self.q_matrix.of(q),
                weights.view(-1, C),
                keys.view(-1, keys.shape[3]),
            )
        state = vectors if initial_state is None else initial_state
        final = vectors if final_state is None else final_state
        checkpoints = vectors if h is None else h
        places = [starts if index is None else index for index in indices]
        if self.split is not None:
            segment_map = out.new_empty(self.split.segments + 1, 4, dtype=torch.int32)
            maps = out.new_empty(self.split.maps, dtype=torch.float32)
            made_from = (k, v, state, cu, segment_map, weights, vectors, keys)
            calls.append((self.split.segment_map, (cu, segment_map)))
            calls.append((self.split.make, (*made_from, maps, places[0])))
            calls.append((self.split.chain, (segment_map, maps)))
            state, starts = maps, segment_map
        read = (q, k, v, state, cu, order, starts, weights, vectors, keys)
        calls.append((self.scan, (*read, out, final, checkpoints, h_starts, *places)))
        return calls


def _pow2(n: int) -> int:
    """The least power of two from n on that a matrix product can have, 16 or more."""
    return max(16, next_power_of_2(n))


def _strides(name: str, facts: TensorFacts) -> dict[str, int]:
    strides = {f"{name}_stride_{dim}": stride for dim, stride in zip("bthd", facts.stride)}
    if facts.shape[0] == 1:
        # What T makes of it would be compiled for: of gates, [1, T, Hv], it may be odd.
        strides[f"{name}_stride_b"] = 0
    return strides


def _options(
    device: DeviceFacts, warps: int, stages: int | None = None, registers: int | None = None
) -> dict[str, Any]:
    """Triton's options of compiling and launching."""
    options: dict[str, Any] = {"num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    if registers is not None:  # not known everywhere
        options["maxnreg"] = registers
    if device.has_pdl:
        options["launch_pdl"] = True
    return options
