from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.cuda.graph_sizes import (
    MIXED_ROWS,
    GraphLimits,
    GraphSize,
    PaddingLayout,
    capture_all,
    choose_size,
    graph_sizes,
    is_padding,
    mixed_tokens,
    most_items,
    pad,
)
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

SIZES = graph_sizes(GraphLimits())


@given(rows=st.integers(1, 256))
def test_every_decode_batch_has_a_graph_with_little_padding(rows: int) -> None:
    size = choose_size(SIZES, rows, rows)
    assert size is not None
    assert rows <= size.rows == size.tokens < rows + 16
    assert most_items(size.rows) >= size.rows, "an item for each row, and for each padding row"


@given(rows=st.integers(1, 64), more=st.integers(1, 639))
def test_a_mixed_batch_has_a_graph_whose_padding_is_one_row_of_no_or_several_tokens(rows: int, more: int) -> None:
    tokens = rows + more
    size = choose_size(SIZES, tokens, rows)
    if size is None:
        assert tokens in (639, *range(641, 704)), "one padding token would be sorted before the chunks"
    else:
        assert size.rows == MIXED_ROWS > rows
        assert 0 <= size.tokens - tokens <= 129
        assert size.tokens - tokens != 1


def test_small_models_have_graphs_of_more_tokens() -> None:
    assert [mixed_tokens(count) for count in (0, 270 << 20, 16 << 30, 140 << 30)] == [2176, 2176, 640, 640]
    assert mixed_tokens(8 << 30) == 1280


def test_a_batch_runs_in_the_smallest_graph_that_was_captured() -> None:
    decodes = [GraphSize(16, 16), GraphSize(8, 8), GraphSize(4, 4)]
    assert choose_size(decodes, 3, 3) == (4, 4)
    assert choose_size(decodes, 8, 8) == (8, 8)
    assert choose_size(decodes, 17, 17) is None
    assert choose_size(decodes, 9, 3) is None
    mixed = [GraphSize(64, 5), GraphSize(32, 5), *decodes]
    assert choose_size(mixed, 9, 3) == (32, 5)
    assert choose_size(mixed, 31, 3) == (64, 5)
    assert choose_size(mixed, 9, 5) is None, "the padding is a row"
    assert choose_size([], 1, 1) is None


@pytest.mark.parametrize(("limits", "most"), [(GraphLimits(seconds=3.5), 4), (GraphLimits(bytes=250), 3)])
def test_capturing_ends_when_seconds_or_bytes_are_spent(limits: GraphLimits, most: int) -> None:
    done: list[GraphSize] = []

    def capture(size: GraphSize) -> GraphSize:
        done.append(size)
        return size

    captured = capture_all(
        sizes := graph_sizes(GraphLimits(64)),
        capture,
        limits,
        clock=lambda: float(len(done)),
        used_bytes=lambda: 7000 + 100 * len(done),
    )
    assert list(captured) == done == sizes[:most]
    assert done[0] == (640, MIXED_ROWS), "the memory of the largest serves the others"


def test_padding_rows_compute_the_null_block_behind_the_others() -> None:
    rows = [
        Row(Request(id, tuple(range(end))), list(range(end)), end - 1, end, (array("i", blocks),), True)
        for id, end, blocks in (("a", 1, [3]), ("b", 6, [0, 1]))
    ]
    flat = flatten(pad(rows, GraphSize(4, 4), PaddingLayout(9, 4)), 4, 9)
    assert flat.order.tolist() == [1, 0, 2, 3]
    assert flat.slot_mapping.tolist() == [[5, 12, 36, 36]]
    assert flat.sampled.tolist() == [1, 1, 0, 0]


def test_the_padding_of_a_mixed_batch_is_its_last_row_in_the_null_block() -> None:
    rows = [
        Row(Request(id, tuple(range(end))), list(range(end)), start, end, (array("i", blocks),), True)
        for id, start, end, blocks in (("a", 0, 5, [3, 4]), ("b", 5, 6, [0, 1]))
    ]
    flat = flatten(pad(rows, GraphSize(12, 4), PaddingLayout(9, 4)), 4, 9)
    assert flat.order.tolist() == [1, 0, 2]
    assert flat.slot_mapping.tolist() == [[5, 12, 13, 14, 15, 16, 36, 37, 38, 39, 36, 37]]
    assert [is_padding(row) for row in flat.rows] == [False, False, True]
    assert len(pad(rows, GraphSize(6, 4), PaddingLayout(9, 4))) == 2
