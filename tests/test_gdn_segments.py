"""When sequences are split for the gated delta rule, into which segments, and at what cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from csrc_free_ops.facts import DeviceFacts, PoolIndices, contiguous_facts

pytest.importorskip("triton")

from csrc_free_ops.gdn import GdnPlan, plan_gdn
from csrc_free_ops.gdn.chunk_map import chunk_map_kernel, segment_map_kernel
from csrc_free_ops.gdn.launch import _q_matrix, default_config, unsupported

H200 = DeviceFacts.of("sm_90")
C = 64


def plan(
    T: int = 32768,
    N: int = 1,
    Hq: int = 2,
    Hv: int = 8,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: DeviceFacts = H200,
    **changes: Any,
) -> GdnPlan:
    q = contiguous_facts((1, T, Hq, K), dtype)
    v = contiguous_facts((1, T, Hv, V), dtype)
    gate = contiguous_facts((1, T, Hv), torch.float32)
    options = {"cu_seqlens_dtype": torch.int32, "sequences": N, "scale": 1.0, **changes}
    return plan_gdn(q, q, v, gate, gate, device, **options)


def names(made: GdnPlan) -> list[str]:
    return [launch.kernel.fn.__name__ for launch in made.launches]


PREPARE = ["decays_kernel", "prepare_kernel"]
SPLIT = ["segment_map_kernel", "segment_kernel", "chain_kernel"]


@pytest.mark.parametrize(
    "T, segments", [(32768, 8), (8192, 8), (4096 + 64, 5), (131072, 8), (131073, 8)]
)
def test_a_long_sequence_of_few_heads_is_split(T: int, segments: int) -> None:
    made = plan(T)
    assert names(made) == ["chunk_map_kernel", *PREPARE, *SPLIT, "scan_kernel"]
    assert made.split is not None and made.split.segments == segments
    assert made.scan.grid[0] == segments * 8 * 2  # about one for each of 132 multiprocessors
    without = plan(T, cu_seqlens_dtype=None)
    assert names(without) == [*PREPARE, *SPLIT, "scan_kernel"]
    assert without.split is not None and without.split.segments == segments


def test_where_tiles_are_narrow_two_programs_run_at_once() -> None:
    made = plan(K=256)
    assert made.split is not None and made.split.segments == 8
    assert made.scan.grid[0] == 8 * 8 * 4
    assert plan(K=256, Hv=16).split is None


@pytest.mark.parametrize(
    "changes",
    [
        {"Hq": 17, "Hv": 34},
        {"Hq": 16, "Hv": 32, "h_layout": "compact", "h_rows": 512},
        {"N": 5},
        {"T": 4000},
        {"N": 4, "Hv": 2, "T": 8192},
        {"batch_invariant": True},
        {"device": H200._replace(multiprocessors=31)},
        {"T": 0},
        {"N": 0},
    ],
    ids=str,
)
def test_other_plans_have_no_more_launches(changes: dict[str, Any]) -> None:
    made = plan(**changes)
    prepare = PREPARE if changes.get("T") != 0 else []
    assert names(made) == ["chunk_map_kernel", *prepare, "scan_kernel"]
    assert made.split is None and made.scan.constants["SPLIT"] is False


@pytest.mark.parametrize(
    ("changes", "is_wide"),
    [
        ({}, True),  # split
        ({"T": 4000}, False),
        ({"N": 2}, True),
        ({"Hv": 64}, True),
        ({"N": 2, "batch_invariant": True}, False),
        ({"N": 2, "dtype": torch.float32}, False),
        ({"N": 2, "dtype": torch.float16}, True),
        ({"N": 16, "V": 32}, False),
        ({"N": 2, "K": 256}, False),
        ({"N": 2, "device": DeviceFacts.of("sm_80")}, False),
        ({"N": 2, "device": DeviceFacts.of("sm_100")}, False),
        ({"N": 2, "device": DeviceFacts.of("sm_120")}, False),
    ],
    ids=str,
)
def test_programs_of_many_take_64_columns_on_hopper(changes: dict[str, Any], is_wide: bool) -> None:
    made = plan(**{"T": 8192, "Hq": 16, "Hv": 32, **changes})
    constants = made.scan.constants
    assert (constants["BV"] == 64, constants["BY_PRODUCT"]) == (
        is_wide, not is_wide and not constants["PRECISION"].startswith("tf32")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "config.heads is 3; it must be a divisor of 4"),
        ({"heads": 0}, "config.heads is 0; it must be a divisor of 4"),
        ({"heads": 8}, "config.heads is 8; it must be a divisor of 4"),
        ({"bk": 16}, "config.bk is 16; it must be at least 32"),
        ({"bk": 48}, "config.bk is 48; it must be a power of two"),
        ({"prepare_bk": 8}, "config.prepare_bk is 8; it must be a power of two from 16 on"),
        ({"bv": 24}, "config.bv is 24"),
        ({"scan_stages": 0}, "config.scan_stages is 0; it must be 1 or more"),
        ({"segment_chunks": -1}, "config.segment_chunks is -1"),
    ],
    ids=str,
)
def test_configuration_that_would_compute_something_else(
    fields: dict[str, int], message: str
) -> None:
    config = default_config(128, 128, 4, torch.bfloat16, H200)._replace(**fields)
    with pytest.raises(ValueError, match=message):
        plan(config=config)


def test_three_heads_are_no_program() -> None:
    """Triton's tiles have sizes that are powers of two."""
    config = default_config(128, 128, 3, torch.bfloat16, H200)
    assert config.heads == 1
    with pytest.raises(ValueError, match="is 3; it must be a divisor of 3 and a power of two"):
        plan(Hv=6, Hq=2, config=config._replace(heads=3))


def test_few_keys_are_one_tile() -> None:
    q = contiguous_facts((1, 150, 1, 32), torch.bfloat16)
    gate = contiguous_facts((1, 150, 1), torch.float32)
    config = default_config(32, 32, 1, torch.bfloat16, H200)._replace(bk=16)
    with pytest.raises(ValueError, match="config.bk is 16; it must be at least 32, one tile"):
        plan_gdn(q, q, q, gate, gate, H200, sequences=1, scale=1.0, config=config)


@pytest.mark.parametrize("T", [4096, 8192, 32768, 131072])
def test_scratch_of_split_sequences_is_small(T: int) -> None:
    """At most 160 bytes for each token and value head."""
    made = plan(T)
    assert made.split is not None
    floats = 1
    for size in made.split.maps:
        floats *= size
    assert floats * 4 <= 160 * T * 8


def test_configuration_says_where_to_split() -> None:
    config = default_config(128, 128, 4, torch.bfloat16, H200)
    forced = plan(1000, config=config._replace(segment_chunks=5))
    assert forced.split is not None and forced.split.segments == 1 + 999 // 320
    assert plan(config=config._replace(segment_chunks=0)).split is None
    assert plan(64, config=config._replace(segment_chunks=1)).split is None  # one segment
    with pytest.raises(ValueError, match=r"segment_chunks is 5.*batch_invariant"):
        plan(config=config._replace(segment_chunks=5), batch_invariant=True)


def segment_map(bounds: list[int] | None, N: int, T: int, L: int) -> list[list[int]]:
    """What the kernel writes, from memory that held other numbers."""
    made = plan(
        T, N, cu_seqlens_dtype=None if bounds is None else torch.int64,
        config=default_config(128, 128, 4, torch.bfloat16, H200)._replace(segment_chunks=L),
    )  # fmt: skip
    assert made.split is not None
    launch = made.split.segment_map
    rows = torch.full((made.split.segments + 1, 4), 77, dtype=torch.int32)
    cu = torch.tensor(bounds or [0])
    constants = {**launch.constants, "BLOCK": 4, "PDL": False}  # several blocks
    segment_map_kernel[launch.grid](cu, rows, **launch.scalars, **constants)
    return rows.tolist()


LENGTHS = [
    [320],
    [0, 320, 0],
    [1, 319],
    [64, 65, 127, 64],
    [192] + [0] * 11,
    [0] * 11 + [192],
    [3] * 9 + [200],
    [100],
]


@pytest.mark.parametrize("L", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_segment_map(lengths: list[int], L: int) -> None:
    T = 320
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    wanted, first_chunk = [], 0
    for i, length in enumerate(lengths):
        count = -(-length // C)
        for before in range(0, max(count, 1), L):
            wanted.append([i, before, first_chunk + before, min(L, count - before)])
        first_chunk += count
    got = segment_map(bounds, len(lengths), T, L)
    assert got[: len(wanted)] == wanted
    assert len(got) > len(wanted) and all(row[0] == -1 for row in got[len(wanted) :])


def test_segment_map_of_a_batch() -> None:
    q = contiguous_facts((2, 150, 1, 16), torch.float32)
    gate = contiguous_facts((2, 150, 1), torch.float32)
    config = default_config(16, 16, 1, torch.float32, H200)._replace(segment_chunks=2)
    made = plan_gdn(q, q, q, gate, gate, H200, sequences=2, scale=1.0, config=config)
    assert made.split is not None
    launch = made.split.segment_map
    rows = torch.full((made.split.segments + 1, 4), 77, dtype=torch.int32)
    constants = {**launch.constants, "PDL": False}
    segment_map_kernel[launch.grid](rows, rows, **launch.scalars, **constants)
    assert rows[:4].tolist() == [[0, 0, 0, 2], [0, 2, 2, 1], [1, 0, 3, 2], [1, 2, 5, 1]]
    assert rows[4, 0] == -1


@pytest.mark.parametrize(
    "bounds", [[0, 9, 5], [0, 500, 900], [-7, 5, 9], [0, 320] * 4, [320, 0], [10**12, -(10**12)]]
)
def test_segments_of_bounds_that_break_the_rules_lie_within_the_scratch(bounds: list[int]) -> None:
    T, N = 320, len(bounds) - 1
    for L in (1, 2):
        *rows, last = segment_map(bounds, N, T, L)
        assert last[0] == -1
        chunks = min(N, T) + (T - min(N, T)) // C
        for i, before, first_chunk, count in rows:
            assert i == -1 or 0 <= i < N
            if i >= 0:
                assert before >= 0 and 0 <= count <= L
                assert 0 <= first_chunk <= first_chunk + count <= chunks


@pytest.mark.parametrize(
    ("changes", "has_order"),
    [
        ({}, False),
        ({"N": 8}, True),
        ({"N": 4096}, True),
        ({"N": 4097}, False),
        ({"N": 8, "cu_seqlens_dtype": None}, False),
        ({"N": 2, "Hq": 1, "Hv": 1}, False),
    ],
    ids=str,
)
def test_sequences_are_put_in_order_where_programs_take_turns(
    changes: dict[str, Any], has_order: bool
) -> None:
    made = plan(**{"T": 8192, "Hq": 16, "Hv": 32, **changes})
    assert made.scan.constants["HAS_ORDER"] is has_order
    assert made.chunk_map is None or made.chunk_map.grid[0] == (1 + made.sequences) ** has_order


def test_longer_sequences_come_first() -> None:
    lengths = [3, 0, 700, 64, 700, 0]
    launch = plan(sum(lengths), len(lengths), Hq=16, Hv=32).chunk_map
    assert launch is not None
    cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    order, starts = torch.full((6,), -1, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    constants = {**launch.constants, "BLOCK": 4, "PDL": False}
    chunk_map_kernel[launch.grid](cu, order, starts, starts, **launch.scalars, **constants)
    assert order.tolist() == [2, 4, 3, 0, 1, 5]
    assert starts.tolist() == [0, 1, 1, 12, 13, 24, 24]


def test_chunk_starts_of_bounds_that_break_the_rules_do_not_wrap_around() -> None:
    T, N = 2**30, 1000  # each second sequence has all tokens
    made = plan(T, N, cu_seqlens_dtype=torch.int64)
    launch = made.chunk_map
    assert launch is not None
    cu = torch.tensor([0, T] * (N // 2) + [0])
    starts = torch.full((N + 1,), -1, dtype=torch.int32)
    constants = {**launch.constants, "BLOCK": 16, "PDL": False}
    order = torch.full((N,), -1, dtype=torch.int32)
    chunk_map_kernel[launch.grid](cu, order, starts, starts, **launch.scalars, **constants)
    assert order.tolist() == [*range(0, N, 2), *range(1, N, 2)]
    assert starts[:3].tolist() == [0, T // C, T // C] and starts[-1] == 2**31 - 1
    assert (starts.diff() >= 0).all()


@pytest.mark.parametrize(
    ("T", "N", "reason"),
    [
        (2**31, 1, "more than 2^31 tokens"),
        (2**30, 2**24, None),
        (2**30, 2**26, "more than 2^31 sequences, heads and tiles of V"),
        (2**30, 2**28, "more than 2^31 chunks and heads"),  # nearly all of one token
    ],
)
def test_what_32_bits_do_not_hold_is_not_supported(T: int, N: int, reason: str | None) -> None:
    q = contiguous_facts((1, T, 8, 128), torch.bfloat16)
    assert unsupported(q, q, q, H200, sequences=N, cu_seqlens_dtype=torch.int32) == reason


def test_layouts_of_gates_do_not_follow_their_strides_where_bits_are_asked_for() -> None:
    q = contiguous_facts((1, 130, 8, 128), torch.bfloat16)
    gate = contiguous_facts((1, 130, 8), torch.float32)
    for batch_invariant in (False, True):
        made = plan_gdn(
            q, q, q, gate, gate, H200, sequences=1, scale=1.0, batch_invariant=batch_invariant
        )
        for name in ("g", "beta"):
            assert made.decays.pointers[name] == (torch.float32, not batch_invariant)


def test_rows_of_a_batch_that_are_apart_are_no_matrix() -> None:
    q = contiguous_facts((2, 64, 4, 128), torch.bfloat16)
    stride_b, *rest = q.stride
    assert _q_matrix(q, 1) == (128, 512, 512)
    assert _q_matrix(q._replace(stride=(stride_b + 512, *rest)), 1) is None
    assert _q_matrix(q._replace(stride=(stride_b, 512, 132, 1)), 1) is None  # heads off 16 bytes
    one = contiguous_facts((1, 64, 4, 128), torch.bfloat16)
    assert _q_matrix(one._replace(stride=(7, 1024, 128, 1)), 1) == (64, 512, 1024)


@pytest.mark.parametrize("N, T", [(1, 1001), (1, 4097), (8, 1001), (64, 1001)])
def test_kernels_are_compiled_once_for_all_lengths(N: int, T: int) -> None:
    # The strides of gates between rows of the batch are 8 T, of which there is one. That numbers
    # of tokens are not compiled for is not known to the interpreter: they are no multiples of 16.
    ours, other = (plan(tokens, N) for tokens in (T, T + 1))
    assert [x.specialization for x in ours.launches] == [x.specialization for x in other.launches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("Hv", [4, 8, 16])
@pytest.mark.parametrize("N", [1, 2])
def test_long_calls_that_track_are_compiled_once_for_all_lengths(
    N: int, Hv: int, dtype: torch.dtype
) -> None:
    state = contiguous_facts((3 * N, Hv, 128, 128), torch.float32)
    options = dict(N=N, Hv=Hv, dtype=dtype, initial_state=state)
    pool = PoolIndices(*[torch.int64] * 4)
    ours, *others = (plan(N * T, pool=pool, **options) for T in (4097, 6001, 131073))
    for other in others:  # of what else kernels are compiled for see above
        assert [x.constants for x in ours.launches] == [x.constants for x in other.launches]


@pytest.mark.parametrize(
    "Hv, N, columns, stages, h_pairs",
    [
        (16, 1, 16, 3, True),  # 128 programs
        (8, 2, 16, 3, True),
        (17, 1, 32, 3, True),
        (32, 1, 32, 3, True),  # 128 of 32 columns
        (48, 1, 64, 3, True),  # 96 of twice the columns: one a multiprocessor
        (64, 1, 64, 3, True),
        (66, 1, 64, 3, True),
        (68, 1, 64, 2, False),  # 136: two a multiprocessor
        (32, 2, 64, 3, True),
        (32, 3, 64, 2, False),
    ],
)
def test_columns_of_a_program_on_hopper(
    Hv: int, N: int, columns: int, stages: int, h_pairs: bool
) -> None:
    config = plan(T=2048, N=N, Hv=Hv, Hq=1).config
    assert (config.bv, config.scan_stages, config.h_pairs) == (columns, stages, h_pairs)
    assert config.segment_chunks is None
    assert plan(T=2048, N=N, Hv=Hv, Hq=1, batch_invariant=True).config.bv == 32


@pytest.mark.parametrize(
    "Hv, N, T, h_layout, chunks",
    [
        (32, 1, 4096, None, 32),  # two segments
        (32, 1, 4032, None, None),
        (32, 1, 4096, "fla", None),
        (33, 1, 8192, None, 64),  # 66 programs on 132 multiprocessors
        (34, 1, 8192, None, None),
        (16, 2, 8192, None, 33),
        (22, 1, 8192, "fla", 43),  # three
        (23, 1, 8192, "fla", None),
    ],
)
def test_segments_on_hopper(
    Hv: int, N: int, T: int, h_layout: str | None, chunks: int | None
) -> None:
    config = plan(T=T, N=N, Hv=Hv, Hq=1, h_layout=h_layout, h_rows=N * T // 64).config
    assert config.segment_chunks == chunks


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize(
    "Hv, N, T, K, expected",
    [
        (48, 1, 2048, 128, (64, 3, True, None)),
        (48, 1, 2048, 96, (32, 2, False, None)),  # no tile is whole
        (32, 32, 8192, 128, (64, 2, True, None)),
        (32, 32, 8192, 96, (64, 2, False, None)),
        (32, 1, 8192, 128, (64, 3, True, 64)),
        (32, 1, 8192, 96, (32, 3, False, None)),
        (8, 1, 8192, 128, (64, 3, True, 16)),
        (8, 1, 8192, 96, (32, 3, False, 16)),
    ],
)
def test_three_chunks_of_64_columns_are_whole_tiles(
    Hv: int, N: int, T: int, K: int, expected: tuple[int | None, ...], qk_l2norm: bool
) -> None:
    made = plan(T=T, N=N, Hv=Hv, Hq=4, K=K, qk_l2norm=qk_l2norm)
    config, constants = made.config, made.scan.constants
    found = (config.bv, config.scan_stages, constants["BOXED"], config.segment_chunks)
    assert found == expected
    # Keys are copied where they are normalised, or come as whole tiles.
    assert constants["HAS_KEYS"] == (made.keys != (0,)) == (qk_l2norm or constants["BOXED"])


@pytest.mark.parametrize(
    "Hv, N, T, track",
    [
        (8, 1, 32768, 1),
        (8, 2, 65536, 1),  # split into at most 144 programs
        (48, 1, 2048, 1),
        (16, 1, 512, 1),
        (32, 32, 8192, 2),
    ],
)
def test_where_a_tracked_state_is_stored(Hv: int, N: int, T: int, track: int) -> None:
    state = contiguous_facts((99, Hv, 128, 128), torch.float32)
    options = dict(T=T, N=N, Hv=Hv, initial_state=state)
    made = plan(**options, pool=PoolIndices(*[torch.int64] * 4))
    assert made.scan.constants["TRACK"] == track
    made = plan(**options, pool=PoolIndices(torch.int64, torch.int64))
    assert made.scan.constants["TRACK"] == 0


def test_threads_write_what_they_have_of_states_where_programs_are_few() -> None:
    def pairs(h_layout: str | None = "fla", **changes: Any) -> bool:
        return plan(h_layout=h_layout, h_rows=520, **changes).scan.constants["H_PAIRS"]

    assert pairs() and pairs("compact") and not pairs(None)
    assert pairs(T=2048) and pairs(batch_invariant=True)  # not split
    assert not pairs(sequences=32, T=2048)
    # Two columns are written at a time: of 4 bytes, and rows begin at 8.
    assert pairs(h_dtype=torch.float32) and not pairs(h_dtype=torch.bfloat16)
    assert pairs(K=66) and not pairs(K=65)
    # Products leave rows there, on sm_100, and elsewhere there is no such instruction.
    devices = {name: DeviceFacts.of(name) for name in ("sm_80", "sm_100", "gfx942")}
    assert {name: pairs(device=device) for name, device in devices.items()} == {
        "sm_80": True,
        "sm_100": False,
        "gfx942": False,
    }
    config = plan().config._replace(h_pairs=False)
    assert not pairs(config=config)


def test_where_sequences_are_split_v_comes_to_registers_in_the_scan_alone() -> None:
    made = plan()
    assert made.split is not None
    constants = made.scan.constants, made.split.make.constants
    assert [one["BY_PRODUCT"] for one in constants] == [False, True]
    assert made.scan.constants["EARLY"]
