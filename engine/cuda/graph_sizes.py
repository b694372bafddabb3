"""Which decode batches get a CUDA graph, and which graph a batch runs in. Imports no torch.

A graph is of one size: a number of rows, and a number of attention items (``attention.num_items``), as both are the
shape of its launches. A batch runs in the smallest graph that holds it; the rest of the graph's rows are padding::

    rows    [ a | b | c | pad ]     a padding row computes position 0 of the null block
    items   [ a0 | a1 | b0 | c0 | empty | empty | empty | empty ]

Small graphs come first: launches are a larger share of a small batch's time. A batch without a graph is launched kernel
by kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from decant.engine.plan import Row
from decant.engine.request import Request

T = TypeVar("T")

ITEMS_PER_ROW = (2, 8, 32)
"""A graph's items are one of these times its rows: contexts of 1,024, 4,096 and 16,384 tokens on average."""

_STEP = 16
"""From this number of rows on, sizes are its multiples; below, powers of two."""

_PADDING = Request("padding", (0,))


class GraphSize(NamedTuple):
    rows: int
    items: int


class GraphLimits(NamedTuple):
    """Most rows of a graph, and the seconds and bytes that capturing all graphs may take."""

    rows: int = 256
    seconds: float = 20.0
    bytes: int = 1 << 30


def graph_sizes(most_rows: int) -> list[GraphSize]:
    """Sizes to capture, in order: rows ascending, and all rows with few items before the longer contexts."""
    rows = [count for count in (1, 2, 4, 8) if count < most_rows]
    rows += [*range(_STEP, most_rows, _STEP), most_rows]
    return [GraphSize(count, count * each) for each in ITEMS_PER_ROW for count in rows]


def choose_size(captured: Iterable[GraphSize], rows: int, items: int) -> GraphSize | None:
    """The smallest captured size for this many rows and items, and an item per padding row; None if there is none."""
    fitting = (size for size in captured if size.rows >= rows and size.items >= items + size.rows - rows)
    return min(fitting, default=None)


def capture_all(
    sizes: Sequence[GraphSize],
    capture: Callable[[GraphSize], T],
    limits: GraphLimits,
    *,
    clock: Callable[[], float],
    used_bytes: Callable[[], int],
) -> dict[GraphSize, T]:
    """Capture sizes in order until the seconds or the bytes are spent; a size is begun only if both are left."""
    captured: dict[GraphSize, T] = {}
    began, before = clock(), used_bytes()
    for size in sizes:
        if clock() - began >= limits.seconds or used_bytes() - before >= limits.bytes:
            break
        captured[size] = capture(size)
    return captured


def pad(rows: Sequence[Row], count: int, blank: int, groups: int = 1) -> list[Row]:
    """The rows, and padding rows of so many cache groups up to ``count``.

    They are behind the rows in ``step_batch.flatten``, as none is shorter.
    """
    padding = Row(_PADDING, (0,), 0, 1, (array("i", [blank]),) * groups, False)
    return [*rows, *[padding] * (count - len(rows))]
