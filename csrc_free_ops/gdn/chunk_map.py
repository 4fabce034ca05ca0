"""Kernel 1: where the chunks of each sequence begin, worked out on the device.

One program, N numbers: the host never learns the lengths, so that a captured graph stays right when
they change. N more programs put the sequences in order, the longest first, where the scan has more
programs than run at once: a long one that starts last keeps all others waiting. Where sequences are
split, a second kernel says which chunks are whose segments.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr):
    """What a kernel of the chain begins with: it is launched before the one ahead has ended.

    Nothing touches memory before.
    """
    if PDL:
        tl_cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Programs of the next kernel take the room that this one's leave, once these all run.

    Without it they start when this kernel has ended, and are spread evenly.
    """
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def sequence_bounds(cu_seqlens, i, tokens, mask):
    """First token of sequences i and one past the last, within the tokens whatever is given."""
    first = tl.load(cu_seqlens + i, mask=mask, other=0).to(tl.int64)
    end = tl.load(cu_seqlens + i + 1, mask=mask, other=0).to(tl.int64)
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.minimum(tl.maximum(end, first), tokens)


@triton.jit
def tokens_of_sequence(i, cu_seqlens, tokens, HAS_CU: tl.constexpr):
    """Row of sequence i, its first token there and one past the last."""
    if HAS_CU:
        row = tl.zeros((), tl.int64)
        first, end = sequence_bounds(cu_seqlens, i, tokens, True)
    else:
        row = i
        first = tl.zeros((), tl.int64)
        end = first + tokens
    return row, first, end


@triton.jit
def sequence_of(chunk_starts, chunk, sequences):
    """The sequence that holds a chunk, by bisection; ``sequences`` if there is no such chunk."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(chunk_starts + middle + 1) > chunk:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def tokens_of_chunk(
    chunk, cu_seqlens, chunk_starts, tokens, sequences, C: tl.constexpr, HAS_CU: tl.constexpr
):
    """Row and first token of a chunk, and the end of its sequence.

    If there is no such chunk, the end is not behind the first token.
    """
    if HAS_CU:
        row = tl.zeros((), tl.int64)
        i = sequence_of(chunk_starts, chunk, sequences)
        first, end = sequence_bounds(cu_seqlens, i, tokens, i < sequences)
        first += (chunk - tl.load(chunk_starts + i)) * C
    else:
        chunks_each = tl.cdiv(tokens, C)
        row = chunk // chunks_each
        first = chunk % chunks_each * C
        end = tl.zeros((), tl.int64) + tokens
    return row, first, end


@triton.jit
def _saturated(n):
    """In 32 bits; there are more chunks than those hold only if cu_seqlens breaks its rules."""
    return tl.minimum(n, 2**31 - 1).to(tl.int32)


@triton.jit
def _place_in_order(cu_seqlens, order, i, tokens, sequences, BLOCK: tl.constexpr):
    """Writes sequence i behind all that are longer, and those as long in front of it."""
    first, end = sequence_bounds(cu_seqlens, i, tokens, True)
    length = end - first
    place = tl.zeros((), tl.int32)
    for at in range(0, sequences, BLOCK):
        others = at + tl.arange(0, BLOCK)
        inside = others < sequences
        firsts, ends = sequence_bounds(cu_seqlens, others, tokens, inside)
        lengths = ends - firsts
        is_ahead = (lengths > length) | ((lengths == length) & (others < i))
        place += tl.sum((is_ahead & inside).to(tl.int32), 0)
    tl.store(order + place, i)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def chunk_map_kernel(
    cu_seqlens,
    order,  # out, int32 [sequences]: the sequences, the longest first
    chunk_starts,  # out, int32 [sequences + 1]: chunks before each sequence
    h_cu_starts,  # out, int64 [sequences + 1]: complete chunks before each sequence
    tokens,
    sequences,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CU: tl.constexpr,
    HAS_H_STARTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,  # then there is a program more for each sequence
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    if HAS_ORDER:
        if tl.program_id(0) > 0:
            _place_in_order(cu_seqlens, order, tl.program_id(0) - 1, tokens, sequences, BLOCK)
            return
    chunks = tl.zeros((), tl.int64)
    complete = tl.zeros((), tl.int64)
    for at in range(0, sequences, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < sequences
        if HAS_CU:
            first, end = sequence_bounds(cu_seqlens, i, tokens, inside)
            length = end - first
        else:
            length = tl.where(inside, tokens, 0).to(tl.int64)
        count = (length + C - 1) // C
        if HAS_CU:
            before = chunks + tl.cumsum(count, 0) - count
            tl.store(chunk_starts + i, _saturated(before), mask=inside)
            chunks += tl.sum(count, 0)
        if HAS_H_STARTS:
            count = length // C
            tl.store(h_cu_starts + i, complete + tl.cumsum(count, 0) - count, mask=inside)
            complete += tl.sum(count, 0)
    if HAS_CU:
        tl.store(chunk_starts + sequences, _saturated(chunks))
    if HAS_H_STARTS:
        tl.store(h_cu_starts + sequences, complete)


@triton.jit
def segment_at(segment_map, segment):
    """Sequence of a segment (-1: there is none such), its first chunk within it and among all
    chunks, its number of chunks, and whether it is the sequence's last."""
    at = segment_map + segment * 4
    i = tl.load(at)
    is_last = tl.load(at + 4) != i
    before = tl.load(at + 1).to(tl.int64)
    return i.to(tl.int64), before, tl.load(at + 2).to(tl.int64), tl.load(at + 3), is_last


@triton.jit
def _segments(count, segment_chunks):
    """Of so many chunks; one if there is none."""
    return tl.maximum((count.to(tl.int32) + segment_chunks - 1) // segment_chunks, 1)


@triton.jit(do_not_specialize=["tokens", "sequences", "chunks", "segments", "segment_chunks"])
def segment_map_kernel(
    cu_seqlens,
    segment_map,  # out, int32 [segments + 1, 4], read by segment_at; the last row is of none
    tokens,
    sequences,
    chunks,  # for which there is scratch
    segments,  # as many as the lengths may need
    segment_chunks,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CU: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is one sequence, which has a segment even if it has no token."""
    wait_for_earlier_kernels(PDL)
    let_next_kernel_start(PDL)
    i = tl.program_id(0)
    if HAS_CU:
        first_chunk = tl.zeros((), tl.int64)
        first_segment = tl.zeros((), tl.int64)
        for at in range(0, i, BLOCK):
            others = at + tl.arange(0, BLOCK)
            inside = others < i
            first, end = sequence_bounds(cu_seqlens, others, tokens, inside)
            count = (end - first + C - 1) // C
            first_chunk += tl.sum(count, 0)
            pieces = _segments(count, segment_chunks).to(tl.int64)
            first_segment += tl.sum(tl.where(inside, pieces, 0), 0)
        first, end = sequence_bounds(cu_seqlens, i, tokens, True)
        count = (end - first + C - 1) // C
    else:
        count = tl.zeros((), tl.int64) + (tokens + C - 1) // C
        first_chunk = i * count
        first_segment = i * _segments(count, segment_chunks).to(tl.int64)
    stop = first_segment + _segments(count, segment_chunks)
    # If cu_seqlens breaks its rules, there may be more than there are rows or scratch for.
    real = tl.minimum(stop, segments)
    stop = tl.where(i == sequences - 1, segments + 1, tl.minimum(stop, segments + 1))
    for at in range(first_segment, stop, BLOCK):
        s = at + tl.arange(0, BLOCK)
        before = (s - first_segment) * segment_chunks
        here = tl.minimum(tl.minimum(count - before, segment_chunks), chunks - first_chunk - before)
        row = segment_map + s * 4
        tl.store(row, tl.where(s < real, i, -1), mask=s < stop)
        tl.store(row + 1, before.to(tl.int32), mask=s < real)
        tl.store(row + 2, tl.minimum(first_chunk + before, chunks).to(tl.int32), mask=s < real)
        tl.store(row + 3, tl.maximum(here, 0).to(tl.int32), mask=s < real)
