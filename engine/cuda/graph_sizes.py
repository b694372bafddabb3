"""Which decode batches get a CUDA graph. Imports no torch.

A graph has fixed numbers of rows and attention items (``attention.num_items``); a batch is padded to the smallest that
holds it::

    rows    [ a | b | c | pad ]     a padding row computes position 0 of the null block
    items   [ a0 | a1 | b0 | c0 | empty | empty | empty | empty ]
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from decant.engine.plan import Row
from decant.engine.request import Request

T = TypeVar("T")

ITEMS_PER_ROW = (2, 8, 32)
"""Work items per row, for contexts of 1,024, 4,096 and 16,384 tokens on average."""

_STEP = 16
"""Sizes are multiples of this number of rows; below it, powers of two."""

_PADDING = Request("padding", (0,))


class GraphSize(NamedTuple):
    rows: int
    items: int


class GraphLimits(NamedTuple):
    """Most rows of a graph; most seconds and bytes of all captures."""

    rows: int = 256
    seconds: float = 20.0
    bytes: int = 1 << 30


def graph_sizes(max_rows: int) -> list[GraphSize]:
    """Sizes to capture, small ones first, as launches are a larger share of their time."""
    rows = [count for count in (1, 2, 4, 8) if count < max_rows]
    rows += [*range(_STEP, max_rows, _STEP), max_rows]
    return [GraphSize(count, count * each) for each in ITEMS_PER_ROW for count in rows]


def choose_size(captured: Iterable[GraphSize], rows: int, items: int) -> GraphSize | None:
    """Smallest size that holds the rows, the items, and an item per padding row."""
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
    captured: dict[GraphSize, T] = {}
    began, before = clock(), used_bytes()
    for size in sizes:
        if clock() - began >= limits.seconds or used_bytes() - before >= limits.bytes:
            break
        captured[size] = capture(size)
    return captured


def pad(rows: Sequence[Row], count: int, null_block: int, groups: int = 1) -> list[Row]:
    """Add padding rows of ``groups`` cache groups up to ``count``; ``step_batch.flatten`` keeps them last."""
    padding = Row(_PADDING, (0,), 0, 1, (array("i", [null_block]),) * groups, False)
    return [*rows, *[padding] * (count - len(rows))]
