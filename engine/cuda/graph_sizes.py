"""Which decode batches get a CUDA graph. Imports no torch.

A graph has a fixed number of rows, and of attention items for contexts of any length: a step chooses how many keys an
item has. A batch is padded to the smallest graph that holds it::

    rows    [ a | b | c | pad ]     a padding row computes position 0 of the null block
    items   [ a0 | a1 | b0 | c0 | pad0 | empty | empty | empty ]
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from decant.engine.plan import Row
from decant.engine.request import Request

T = TypeVar("T")

LEAST_EXTRA_ITEMS, MOST_EXTRA_ITEMS = 64, 192
"""Attention items beyond one per row: enough programs for a GPU when rows are few, and few empty ones."""

_STEP = 16
"""Sizes are multiples of this number of rows; below it, powers of two."""

_PADDING = Request("padding", (0,))


class GraphLimits(NamedTuple):
    """Most rows of a graph; most seconds and bytes of all captures."""

    rows: int = 256
    seconds: float = 20.0
    bytes: int = 1 << 30


def most_items(rows: int) -> int:
    """Most attention items of a step with single tokens of ``rows`` sequences."""
    return rows + min(max(4 * rows, LEAST_EXTRA_ITEMS), MOST_EXTRA_ITEMS)


def graph_sizes(max_rows: int) -> list[int]:
    """Rows of the graphs to capture, largest first: the memory of one serves the next."""
    rows = [count for count in (1, 2, 4, 8) if count < max_rows]
    rows += [*range(_STEP, max_rows, _STEP), max_rows]
    return rows[::-1]


def choose_size(captured: Iterable[int], rows: int) -> int | None:
    """Smallest size that holds the rows."""
    return min((size for size in captured if size >= rows), default=None)


def capture_all(
    sizes: Sequence[int],
    capture: Callable[[int], T | None],
    limits: GraphLimits,
    *,
    clock: Callable[[], float],
    used_bytes: Callable[[], int],
) -> dict[int, T]:
    """Capture graphs until the limits; ``capture`` returns None for one that fails."""
    captured: dict[int, T] = {}
    began, before = clock(), used_bytes()
    for size in sizes:
        if clock() - began >= limits.seconds or used_bytes() - before >= limits.bytes:
            break
        if (graph := capture(size)) is not None:
            captured[size] = graph
    return captured


def pad(rows: Sequence[Row], count: int, null_block: int, groups: int = 1) -> list[Row]:
    """Add padding rows of ``groups`` cache groups up to ``count``; ``step_batch.flatten`` keeps them last."""
    padding = Row(_PADDING, (0,), 0, 1, (array("i", [null_block]),) * groups, False)
    return [*rows, *[padding] * (count - len(rows))]
