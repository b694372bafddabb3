from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.protos.worker_pb2 import TokenLogprobs
from decant.state.logprobs import Logprobs, entry_bytes

NUMBERS = st.floats(width=32, allow_nan=False)
TOKENS = st.integers(0, (1 << 24) - 1)


@st.composite
def entries(draw: st.DrawFn) -> tuple[int, list[TokenLogprobs]]:
    alternatives = draw(st.integers(0, 20))
    found = []
    for _ in range(draw(st.integers(0, 5))):
        top = draw(st.lists(st.tuples(TOKENS, NUMBERS), max_size=alternatives))
        found.append(
            TokenLogprobs(
                logprob=draw(NUMBERS),
                rank=draw(st.integers(0, (1 << 32) - 1)),
                top_ids=[id for id, _ in top],
                top_logprobs=[value for _, value in top],
            )
        )
    return alternatives, found


@pytest.mark.slow
@given(entries())
def test_every_entry_reads_back_and_all_are_equally_long(made: tuple[int, list[TokenLogprobs]]) -> None:
    alternatives, found = made
    kept = Logprobs(alternatives)
    kept.extend(found)
    assert len(kept.packed()) == len(found) * entry_bytes(alternatives)
    assert Logprobs(alternatives, kept.packed()) == kept
    assert kept.entries() == found
    assert kept.entries(1, 3) == found[1:3]
    assert kept.packed(1) == kept.packed()[entry_bytes(alternatives) :]


def test_surplus_alternatives_are_dropped() -> None:
    found = TokenLogprobs(logprob=-1, rank=1, top_ids=[5, 6], top_logprobs=[-1, -2])
    packed = Logprobs(1)
    packed.append(found)
    (kept,) = packed
    assert (list(kept.top_ids), list(kept.top_logprobs)) == ([5], [-1])


def test_bytes_that_end_within_an_entry_are_refused() -> None:
    with pytest.raises(ValueError, match="whole entries"):
        Logprobs(1, struct.pack("<fIf", 0.0, 1, 0.0))


@pytest.mark.parametrize("top_ids", [[5], [5, 6, 7], [5, 1 << 24]])
def test_alternatives_that_cannot_be_read_back_are_refused_and_change_nothing(top_ids: list[int]) -> None:
    kept = Logprobs(2)
    with pytest.raises(ValueError, match="top_ids"):
        kept.append(TokenLogprobs(logprob=-1, rank=1, top_ids=top_ids, top_logprobs=[-1, -2]))
    assert len(kept) == 0
