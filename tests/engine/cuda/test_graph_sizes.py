from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.cuda.graph_sizes import GraphLimits, capture_all, choose_size, graph_sizes, most_items, pad
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request


@given(rows=st.integers(1, 256))
def test_every_decode_batch_has_a_graph_with_little_padding(rows: int) -> None:
    size = choose_size(graph_sizes(256), rows)
    assert size is not None
    assert rows <= size < rows + 16
    assert most_items(size) >= size, "an item for each row, and for each padding row"


def test_a_batch_runs_in_the_smallest_graph_that_was_captured() -> None:
    assert choose_size([16, 8, 4], 3) == 4
    assert choose_size([16, 8, 4], 8) == 8
    assert choose_size([16, 8, 4], 17) is None
    assert choose_size([], 1) is None


@pytest.mark.parametrize(("limits", "most"), [(GraphLimits(seconds=3.5), 4), (GraphLimits(bytes=250), 3)])
def test_capturing_ends_when_seconds_or_bytes_are_spent(limits: GraphLimits, most: int) -> None:
    done: list[int] = []

    def capture(size: int) -> int:
        done.append(size)
        return size

    captured = capture_all(
        sizes := graph_sizes(64),
        capture,
        limits,
        clock=lambda: float(len(done)),
        used_bytes=lambda: 7000 + 100 * len(done),
    )
    assert list(captured) == done == sizes[:most]
    assert done[0] == 64, "the memory of the largest serves the others"


def test_padding_rows_compute_the_null_block_behind_the_others() -> None:
    rows = [
        Row(Request(id, tuple(range(end))), list(range(end)), end - 1, end, (array("i", blocks),), True)
        for id, end, blocks in (("a", 1, [3]), ("b", 6, [0, 1]))
    ]
    flat = flatten(pad(rows, 4, 9), 4, 9)
    assert flat.order.tolist() == [1, 0, 2, 3]
    assert flat.slot_mapping.tolist() == [[5, 12, 36, 36]]
    assert flat.sampled.tolist() == [1, 1, 0, 0]
