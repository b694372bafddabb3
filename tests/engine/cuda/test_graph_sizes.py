from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.cuda.graph_sizes import GraphLimits, GraphSize, capture_all, choose_size, graph_sizes, pad
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request


@given(rows=st.integers(1, 256), items_per_row=st.integers(1, 32))
def test_every_decode_batch_of_usual_contexts_has_a_graph_that_holds_it_and_its_padding(
    rows: int, items_per_row: int
) -> None:
    items = rows * items_per_row
    size = choose_size(graph_sizes(256), rows, items)
    if size is None:
        assert items_per_row > 16, "only long contexts may be without one"
    else:
        assert size.rows >= rows
        assert size.items >= items + size.rows - rows
        assert size.rows < rows + 16 or items_per_row > 2


def test_a_batch_runs_in_the_smallest_graph_that_was_captured() -> None:
    captured = [GraphSize(4, 8), GraphSize(8, 16), GraphSize(4, 32)]
    assert choose_size(captured, 3, 3) == (4, 8)
    assert choose_size(captured, 3, 8) == (4, 32), "a padding row takes an item"
    assert choose_size(captured, 5, 5) == (8, 16)
    assert choose_size(captured, 9, 9) is None
    assert choose_size([], 1, 1) is None


@pytest.mark.parametrize(("limits", "most"), [(GraphLimits(seconds=3.5), 4), (GraphLimits(bytes=250), 3)])
def test_capturing_ends_when_seconds_or_bytes_are_spent(limits: GraphLimits, most: int) -> None:
    done: list[GraphSize] = []
    captured = capture_all(
        sizes := graph_sizes(64),
        done.append,
        limits,
        clock=lambda: float(len(done)),
        used_bytes=lambda: 7000 + 100 * len(done),
    )
    assert list(captured) == done == sizes[:most]
    assert done[0] == (1, 2), "the smallest batches gain most"


def test_padding_rows_compute_the_null_block_behind_the_others() -> None:
    rows = [
        Row(Request(id, tuple(range(end))), list(range(end)), end - 1, end, (array("i", blocks),), True)
        for id, end, blocks in (("a", 1, [3]), ("b", 6, [0, 1]))
    ]
    flat = flatten(pad(rows, 4, 9), 4, 9)
    assert flat.order.tolist() == [1, 0, 2, 3]
    assert flat.slot_mapping.tolist() == [[5, 12, 36, 36]]
    assert flat.sampled.tolist() == [1, 1, 0, 0]
