"""Kernel 1: where the chunks of each sequence begin, worked out on the device.

One program, N numbers: the host never learns the lengths, so that a captured graph stays right when
they change.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(cu_seqlens, i, tokens, mask):
    """First token of sequences i and one past the last, within the tokens whatever is given."""
    first = tl.load(cu_seqlens + i, mask=mask, other=0).to(tl.int64)
    end = tl.load(cu_seqlens + i + 1, mask=mask, other=0).to(tl.int64)
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.minimum(tl.maximum(end, first), tokens)


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


@triton.jit(do_not_specialize=["tokens", "sequences"])
def chunk_map_kernel(
    cu_seqlens,
    chunk_starts,  # out, int32 [sequences + 1]: chunks before each sequence
    h_cu_starts,  # out, int64 [sequences + 1]: complete chunks before each sequence
    tokens,
    sequences,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CU: tl.constexpr,
    HAS_H_STARTS: tl.constexpr,
):
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
            tl.store(chunk_starts + i, before.to(tl.int32), mask=inside)
            chunks += tl.sum(count, 0)
        if HAS_H_STARTS:
            count = length // C
            tl.store(h_cu_starts + i, complete + tl.cumsum(count, 0) - count, mask=inside)
            complete += tl.sum(count, 0)
    if HAS_CU:
        tl.store(chunk_starts + sequences, chunks.to(tl.int32))
    if HAS_H_STARTS:
        tl.store(h_cu_starts + sequences, complete)
