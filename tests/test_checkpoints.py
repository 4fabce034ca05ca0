"""Which state of a sequence is kept: the index rules, the forms of a result, wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torch_attn_tiers
from torch_attn_tiers.checkpoints import CheckpointMetadata, scatter_checkpoints_

CHUNK = 64


def build(
    seq_lens: list[int], prefix_lens: list[int], page_size: int = 64, slots: list[int] | None = None
) -> CheckpointMetadata:
    slots = list(range(len(seq_lens))) if slots is None else slots
    tensors = (torch.tensor(x, dtype=torch.int32) for x in (seq_lens, prefix_lens, slots))
    lens, prefixes, places = tensors
    return CheckpointMetadata.build(lens, prefixes, page_size, places)


def plain(seq: list[int], prefix: list[int], page: int) -> list[tuple[str, int, int, int]]:
    """(what is kept, row in the compact layout, row in FLA's, tokens) of each sequence."""
    found, compact, fla = [], 0, 0
    for end, begin in zip(seq, prefix, strict=True):
        extend = end - begin
        track = end // page * page - begin
        kind = "nothing"
        if 0 < track == extend:
            kind = "final"
        elif 0 < track < extend and track % CHUNK == 0:
            kind = "h"
        found.append((kind, compact + track // CHUNK - 1, fla + track // CHUNK, track))
        compact += extend // CHUNK
        fla += -(-extend // CHUNK)
    return found


def kinds(metadata: CheckpointMetadata) -> list[str]:
    names = {(True, False): "h", (False, True): "final", (False, False): "nothing"}
    pairs = zip(metadata.track_mask.tolist(), metadata.final_mask.tolist(), strict=True)
    return [names[pair] for pair in pairs]


@pytest.mark.parametrize(
    "seq,prefix,kind,compact,fla",
    [
        (320, 192, "final", None, None),
        (319, 192, "h", 0, 1),
        (350, 192, "h", 1, 2),
        (350, 256, "h", 0, 1),
        (66, 41, "nothing", None, None),
        (64, 41, "final", None, None),  # ends at a page boundary, inside a chunk
        (70, 66, "nothing", None, None),  # the boundary lies before the extension
        (63, 0, "nothing", None, None),
        (64, 0, "final", None, None),
        (65, 0, "h", 0, 1),
        (0, 0, "nothing", None, None),
        (128, 128, "nothing", None, None),
    ],
)
def test_state_of_one_sequence(
    seq: int, prefix: int, kind: str, compact: int | None, fla: int | None
) -> None:
    metadata = build([seq], [prefix], slots=[3])
    assert kinds(metadata) == [kind]
    assert metadata.dst.tolist() == [-1 if kind == "nothing" else 3]
    kept = seq // 64 * 64 - prefix
    assert metadata.track_lens.tolist() == [0 if kind == "nothing" else kept]
    if kind == "h":
        assert metadata.track_ssm_h_src.tolist() == [compact]
        assert metadata.track_ssm_h_src_fla.tolist() == [fla]


def test_empty_sequence_has_no_row() -> None:
    """Floor division: (0 - 1) // 64 + 1 is 0. Truncated it were 1, and all rows after it wrong."""
    metadata = build([0, 350, 64, 350], [0, 192, 64, 192])
    assert kinds(metadata) == ["nothing", "h", "nothing", "h"]
    assert metadata.track_ssm_h_src[1::2].tolist() == [1, 3]
    assert metadata.track_ssm_h_src_fla[1::2].tolist() == [2, 5]


@pytest.mark.parametrize("page", [64, 128, 256])
def test_rows_of_many_sequences(page: int) -> None:
    generator = torch.Generator().manual_seed(page)
    prefix = (torch.randint(0, 9, (200,), generator=generator) * 64).tolist()
    prefix[::7] = torch.randint(0, 500, (29,), generator=generator).tolist()
    extend = torch.randint(0, 400, (200,), generator=generator)
    extend[::3] = extend[::3] // 64 * 64
    seq = [p + e for p, e in zip(prefix, extend.tolist(), strict=True)]
    metadata = build(seq, prefix, page)
    expected = plain(seq, prefix, page)
    assert kinds(metadata) == [kind for kind, *_ in expected]
    assert {"h", "final", "nothing"} == set(kinds(metadata))
    for i, (kind, compact, fla, track) in enumerate(expected):
        if kind == "h":
            assert int(metadata.track_ssm_h_src[i]) == compact
            assert int(metadata.track_ssm_h_src_fla[i]) == fla
        assert int(metadata.dst[i]) == (-1 if kind == "nothing" else i)
        assert int(metadata.track_lens[i]) == (0 if kind == "nothing" else track)


def test_sequence_without_a_place_keeps_nothing() -> None:
    assert build([320, 350], [192, 192], slots=[-1, -1]).dst.tolist() == [-1, -1]


def test_prefix_longer_than_its_sequence_is_no_extension() -> None:
    metadata = build([10, 350], [200, 192])
    assert kinds(metadata) == ["nothing", "h"]
    assert int(metadata.track_ssm_h_src[1]) == 1


def test_shapes_and_dtypes_are_fixed() -> None:
    for count in (0, 1, 5):
        metadata = build([100] * count, [0] * count)
        for name, tensor in metadata._asdict().items():
            assert tensor.shape == (count,)
            assert tensor.dtype is (torch.bool if name.endswith("mask") else torch.int64)


def test_nothing_is_read_by_the_host() -> None:
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    metadata = CheckpointMetadata.build(lengths, lengths, 64, lengths)
    assert all(t.device.type == "meta" for t in metadata)


@pytest.mark.parametrize(
    "page,error,words",
    [
        (63, ValueError, "page_size=63; it must be a multiple of 64"),
        (96, ValueError, "page_size=96"),
        (0, ValueError, "page_size=0"),
        (-64, ValueError, "page_size=-64"),
        (2**63, ValueError, "page_size=9223372036854775808; it must be below"),
        (64.0, TypeError, "page_size is 64.0"),
        (True, TypeError, "page_size is True"),
    ],
)
def test_page_size_is_a_multiple_of_the_chunk(page: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        build([1], [0], page)


def test_page_size_may_be_a_number_of_numpy() -> None:
    got = build([350], [192], np.int64(64))
    for name, tensor in build([350], [192])._asdict().items():
        assert torch.equal(getattr(got, name), tensor)


def test_page_size_may_be_a_symbol_of_a_compiled_graph() -> None:
    compiled = torch.compile(
        CheckpointMetadata.build, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    lengths, prefixes, slots = torch.tensor([350, 128]), torch.tensor([192, 0]), torch.arange(2)
    for page in (64, 128, 192):
        expected = CheckpointMetadata.build(lengths, prefixes, page, slots)
        for got, wanted in zip(compiled(lengths, prefixes, page, slots), expected, strict=True):
            assert torch.equal(got, wanted)
    with pytest.raises(Exception, match="page_size=100; it must be a multiple of 64"):
        compiled(lengths, prefixes, 100, slots)


def test_wrong_lengths_are_errors() -> None:
    good = torch.tensor([5, 9])
    with pytest.raises(TypeError, match="prefix_lens is float32; it must be int32 or int64"):
        CheckpointMetadata.build(good, good.float(), 64, good)
    with pytest.raises(ValueError, match=r"track_slots has shape \(1,\); it must be \(2,\)"):
        CheckpointMetadata.build(good, good, 64, good[:1])
    with pytest.raises(ValueError, match=r"seq_lens has shape \(1, 2\)"):
        CheckpointMetadata.build(good[None], good, 64, good)
    with pytest.raises(ValueError, match=r"seq_lens has shape \(\)"):
        CheckpointMetadata.build(good[0], good, 64, good)
    with pytest.raises(ValueError, match="prefix_lens is on meta and seq_lens on cpu"):
        CheckpointMetadata.build(good, good.to("meta"), 64, good)
    for value, words in (
        (None, "is None"),
        ([5, 9], "is of type list"),
        (good.to_sparse(), "is a tensor of layout sparse_coo"),
    ):
        for i, name in enumerate(("seq_lens", "prefix_lens", "track_slots")):
            args: list[Any] = [good, good, good]
            args[i] = value
            with pytest.raises(TypeError, match=f"build: {name} {words}; it must be a"):
                CheckpointMetadata.build(args[0], args[1], 64, args[2])


# ------------------------------------------------------------------------- forms of a result


def _case() -> tuple[torch.Tensor, CheckpointMetadata, tuple[torch.Tensor, ...]]:
    """A pool, three sequences (a row of h, the last state, nothing), and h of both layouts."""
    metadata = build([350, 320, 66], [192, 192, 41], slots=[4, 0, 2])
    states = torch.arange(20.0).view(20, 1, 1, 1)
    out, final_state = torch.zeros(1, 1), 100 + states[:3]
    return torch.zeros(6, 1, 1, 1), metadata, (out, final_state, states)


def test_result_of_three_values_is_of_the_fla_layout() -> None:
    pool, metadata, (out, final_state, states) = _case()
    result = torch_attn_tiers.GdnPrefillFla(out, final_state, states[None])
    scatter_checkpoints_(pool, metadata.dst, result, metadata)
    assert pool.flatten().tolist() == [101, 0, 0, 0, 2, 0]
    again = torch.zeros_like(pool)
    scatter_checkpoints_(again, metadata.dst, tuple(result), metadata)
    assert again.equal(pool)


def test_result_of_four_values_is_of_the_compact_layout() -> None:
    pool, metadata, (out, final_state, states) = _case()
    starts = torch.tensor([0, 2, 4, 4])
    result = torch_attn_tiers.GdnPrefillCompact(out, final_state, states, starts)
    scatter_checkpoints_(pool, metadata.dst, result, metadata)
    assert pool.flatten().tolist() == [101, 0, 0, 0, 1, 0]


def test_h_alone_leaves_last_states_to_the_caller() -> None:
    pool, metadata, (_, _, states) = _case()
    scatter_checkpoints_(pool, metadata.dst, states[None], metadata)
    assert pool.flatten().tolist() == [0, 0, 0, 0, 2, 0]
    scatter_checkpoints_(pool, metadata.dst, states, metadata)
    assert pool.flatten().tolist() == [0, 0, 0, 0, 1, 0]


def test_other_places_than_those_of_the_metadata() -> None:
    pool, metadata, (out, final_state, states) = _case()
    scatter_checkpoints_(pool, torch.tensor([1, -1, 3]), (out, final_state, states[None]), metadata)
    assert pool.flatten().tolist() == [0, 2, 0, 0, 0, 0]


def test_wrong_results_are_errors() -> None:
    pool, metadata, (out, final_state, states) = _case()

    def scatter(result: Any, metadata: Any = metadata) -> None:
        scatter_checkpoints_(pool, torch.tensor([1, 2, 3]), result, metadata)

    with pytest.raises(ValueError, match="result has 2 values.*output_h=True"):
        scatter((out, final_state))
    with pytest.raises(ValueError, match=r"h has shape \(20, 1, 1, 1\).*FLA layout"):
        scatter((out, final_state, states))
    with pytest.raises(ValueError, match=r"h has shape \(1, 20, 1, 1, 1\)"):
        scatter((out, final_state, states[None], states))
    with pytest.raises(ValueError, match=r"h has shape \(2, 10, 1, 1, 1\)"):
        scatter(states.view(2, 10, 1, 1, 1))
    with pytest.raises(ValueError, match="final_state has shape .0, 1, 1, 1.*asked for"):
        scatter((out, final_state[:0], states[None]))
    with pytest.raises(TypeError, match="final_state of result is None; it must be a tensor"):
        scatter((out, None, states[None]))
    with pytest.raises(TypeError, match="h of result is None; it must be a tensor"):
        scatter((out, final_state, None))
    with pytest.raises(ValueError, match=r"dst has shape \(2,\); it must be \(3,\).*metadata.dst"):
        scatter_checkpoints_(pool, metadata.dst[:2], (out, final_state, states[None]), metadata)
    with pytest.raises(TypeError, match="dst is of type list; it must be a tensor"):
        scatter_checkpoints_(pool, [1, 2, 3], (out, final_state, states[None]), metadata)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="result is of type list"):
        scatter([out, final_state, states])
    with pytest.raises(TypeError, match="metadata is of type tuple"):
        scatter((out, final_state, states[None]), tuple(metadata))
    assert not pool.any()
