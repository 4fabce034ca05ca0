"""Random calls of `gdn_chunk_prefill` against the oracle: lengths, sizes, strides, all at once.

`pytest --hypothesis-profile=more tests/test_properties_gdn.py` looks at twenty times as many.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.conformance.calls import Maker, same_bits  # noqa: E402
from tests.conformance.gdn_calls import GdnCall, prompts  # noqa: E402

# Triton's interpreter takes a second for a call.
few = settings(max_examples=max(settings().max_examples // 4, 1))

LENGTHS = st.one_of(st.integers(0, 5), st.sampled_from((63, 64, 65, 128)), st.integers(0, 140))
LAYOUTS = ("plain", "heads_first", "cut", "every_other", "tokens_last")


def lay_out(m: Maker, tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with the strides of one of the LAYOUTS."""
    if layout == "heads_first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "tokens_last":
        return tensor.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "every_other":
        wide = m.normal(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    if layout == "cut":
        wide = m.normal(*(size + 3 for size in tensor.shape), dtype=tensor.dtype)
        inner = wide[tuple(slice(1, 1 + size) for size in tensor.shape)]
        return inner.copy_(tensor)
    return tensor


@st.composite
def gdn_calls(draw: st.DrawFn, max_sequences: int = 4, max_group: int = 3) -> GdnCall:
    """Any legal call of the three overloads, small."""
    m = Maker(
        draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
    Hq, group = draw(st.integers(1, 2)), draw(st.integers(1, max_group))
    K, V = draw(st.sampled_from((1, 8, 16, 33))), draw(st.sampled_from((1, 8, 16, 33)))
    sizes: dict[str, Any] = {"Hq": Hq, "Hv": Hq * group, "K": K, "V": V}
    sizes["state"] = draw(st.sampled_from((None, torch.float32, torch.bfloat16)))
    if draw(st.booleans()):
        lengths = draw(st.lists(LENGTHS, max_size=max_sequences))
        sizes["cu_dtype"] = draw(st.sampled_from((torch.int32, torch.int64)))
        call = prompts(m, lengths, T=sum(lengths) + draw(st.integers(0, 9)), **sizes)
    else:
        call = prompts(m, None, B=draw(st.integers(0, 2)), T=draw(LENGTHS), **sizes)
    changes: dict[str, Any] = {}
    for name in ("q", "k", "v", "g", "beta"):
        tensor = call.tensors[name]
        assert tensor is not None
        changes[name] = lay_out(m, tensor, draw(st.sampled_from(LAYOUTS)))
    if draw(st.booleans()):
        changes["scale"] = draw(st.sampled_from((0.0, 1.0, -0.5)))
    for name in ("qk_l2norm", "batch_invariant", "output_final_state"):
        changes[name] = draw(st.booleans())
    if draw(st.booleans()):
        changes["state_v_first"] = True
        state = call.tensors["initial_state"]
        changes["initial_state"] = None if state is None else state.transpose(-1, -2)
    overload = draw(st.sampled_from(("default", "h_fla", "h_compact")))
    if overload != "default":
        changes["total_chunks"] = draw(st.one_of(st.none(), st.integers(0, 5)))
        changes["h_dtype"] = draw(st.sampled_from((None, torch.float32, torch.bfloat16)))
    return call.with_(overload, **changes)


@pytest.mark.parametrize("tier", ["reference"])
@given(data=st.data())
def test_random_call_equals_the_oracle(tier: str, data: st.DataObject) -> None:
    data.draw(gdn_calls()).check(tier)


@pytest.mark.parametrize("tier", ["reference"])
@given(data=st.data())
def test_neighbours_change_no_bit_if_batch_invariant(tier: str, data: st.DataObject) -> None:
    _check_neighbours(tier, data, max_sequences=4)


@pytest.mark.parametrize("tier", ["triton"])
@few
@given(data=st.data())
def test_random_call_equals_the_oracle_in_triton(tier: str, data: st.DataObject) -> None:
    call = data.draw(gdn_calls(max_sequences=2, max_group=2))
    call.require(tier)
    call.check(tier)


@pytest.mark.parametrize("tier", ["triton"])
@few
@given(data=st.data())
def test_neighbours_change_no_bit_in_triton(tier: str, data: st.DataObject) -> None:
    _check_neighbours(tier, data, max_sequences=2)


def _check_neighbours(tier: str, data: st.DataObject, max_sequences: int) -> None:
    lengths = data.draw(st.lists(LENGTHS, min_size=1, max_size=max_sequences))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    m = Maker(dtype, seed=data.draw(st.integers(0, 2**31 - 1)))
    call = prompts(m, lengths, T=sum(lengths) + data.draw(st.integers(0, 9)), batch_invariant=True)
    call.require(tier)
    out, final_state = call.run(tier)
    i = data.draw(st.integers(0, len(lengths) - 1))
    first, end = sum(lengths[:i]), sum(lengths[: i + 1])
    alone = {n: call.tensors[n][:, first:end] for n in ("q", "k", "v", "g", "beta")}  # type: ignore[index]
    alone["initial_state"] = call.tensors["initial_state"][i : i + 1]  # type: ignore[index]
    alone_out, alone_state = call.with_(**alone, cu_seqlens=None).run(tier)
    assert same_bits(out[:, first:end], alone_out)
    assert same_bits(final_state[i : i + 1], alone_state)
