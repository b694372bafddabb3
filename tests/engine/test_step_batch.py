from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.backends import make_backend
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.model import step_batch
from decant.engine.model.step_batch import spans
from decant.engine.plan import Row
from decant.engine.request import Request

SIZE, BLANK = 4, 999
ARRAYS = (
    "order",
    "starts",
    "ends",
    "firsts",
    "stops",
    "sampled",
    "tokens",
    "positions",
    "slot_mapping",
    "new_blocks",
    "table",
)

flatten = make_backend(torch.device("cpu")).flatten

compiled = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels here")


@st.composite
def any_row(draw: st.DrawFn, groups: int) -> Row:
    tokens = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
    end = draw(st.integers(1, len(tokens)))
    start = draw(st.one_of(st.just(end - 1), st.integers(0, end - 1)))
    blocks = []
    for _ in range(groups):
        held = -(-end // SIZE) + draw(st.integers(0, 2))
        blocks.append(array("i", draw(st.lists(st.integers(0, 50), min_size=held, max_size=held))))
    return Row(Request("r", (1,)), tokens, start, end, tuple(blocks), draw(st.booleans()))


any_rows = st.integers(1, 3).flatmap(lambda groups: st.lists(any_row(groups), min_size=1, max_size=12))


@pytest.mark.slow
@given(any_rows)
def test_compiled_and_in_numpy_rows_are_the_same_arrays(rows: list[Row]) -> None:
    one, other = flatten(rows, SIZE, BLANK), step_batch.flatten(rows, SIZE, BLANK)
    for name in ARRAYS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    assert all(mine is theirs for mine, theirs in zip(one.rows, other.rows, strict=True))


@pytest.mark.slow
@given(any_rows)
def test_every_token_is_at_the_position_of_its_row(rows: list[Row]) -> None:
    flat = flatten(rows, SIZE, BLANK)
    assert sorted(flat.order.tolist()) == list(range(len(rows)))
    singles = [end for start, end in zip(flat.starts, flat.ends, strict=True) if end - start == 1]
    assert singles == sorted(singles, reverse=True)  # attention takes the longest first
    assert all(flat.ends[: len(singles)] - flat.starts[: len(singles)] == 1)
    for index, at in enumerate(flat.order.tolist()):
        row, span = rows[at], slice(flat.firsts[index], flat.stops[index])
        assert flat.rows[index] is row
        assert flat.sampled[index] == row.sample
        assert flat.tokens[span].tolist() == list(row.tokens[row.start : row.end])
        assert flat.positions[span].tolist() == list(range(row.start, row.end))
        needed = -(-row.end // SIZE)
        for group, blocks in enumerate(row.blocks):
            places = [blocks[position // SIZE] * SIZE + position % SIZE for position in range(row.start, row.end)]
            assert flat.slot_mapping[group, span].tolist() == places
            assert flat.table[group, index, :needed].tolist() == blocks[:needed].tolist()
            assert (flat.table[group, index, needed:] == BLANK).all()
    new_blocks = [
        blocks[at // SIZE]
        for row in flat.rows
        for at in range(row.start, row.end)
        if at % SIZE == 0 and at + SIZE > row.end
        for blocks in row.blocks
    ]
    assert flat.new_blocks.tolist() == new_blocks


def test_spans_are_the_last_positions_of_each_row() -> None:
    assert spans(np.array([3, 4, 9]), np.array([2, 0, 3])).tolist() == [1, 2, 6, 7, 8]


@compiled
@pytest.mark.parametrize(
    ("start", "end", "blocks"),
    [(0, 6, 2), (2, 2, 2), (-1, 1, 2), (4, 5, 1)],
    ids=["beyond its tokens", "no position", "before its tokens", "beyond its blocks"],
)
def test_a_row_that_reaches_beyond_what_it_has_is_refused(start: int, end: int, blocks: int) -> None:
    fine = Row(Request("fine", (1,)), [1], 0, 1, (array("i", [0]),), True)
    bad = Row(Request("bad", (1,)), [1, 2, 3, 4, 5], start, end, (array("i", range(blocks)),), True)
    with pytest.raises(ValueError, match=f"row 1: positions {start} to {end} of 5 tokens in {blocks} blocks"):
        flatten([fine, bad], SIZE, BLANK)


@compiled
def test_an_invalid_row_is_refused() -> None:
    row = Row(Request("r", (1,)), [1], 0, 1, (array("i", [0]),), True)
    wrong: list[dict[str, Any]] = [{"tokens": 7}, {"tokens": ["a"]}, {"start": "0"}, {"end": None}]
    wrong += [{"blocks": array("i", [0])}, {"blocks": ()}, {"blocks": ([0],)}, {"blocks": (array("q", [0]),)}]
    for fields in wrong:
        with pytest.raises(TypeError):
            flatten([row._replace(**fields)], SIZE, BLANK)
    with pytest.raises(TypeError, match="tuples of seven"):
        flatten([row[:5]], SIZE, BLANK)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one array for each cache group"):
        flatten([row, row._replace(blocks=row.blocks * 2)], SIZE, BLANK)
