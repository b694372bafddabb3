"""Which batches get a CUDA graph. Imports no torch.

A graph has a fixed number of tokens and rows, and of attention items for contexts of any length: a step chooses how
many keys an item has. A batch is padded to the smallest graph that holds it::

    decodes   tokens  [ a | b | c | pad ]             a padding row computes position 0 of the null block
              items   [ a0 | a1 | b0 | c0 | pad0 | empty | empty | empty ]

    mixed     tokens  [ a | b | c c c c c | pad pad ] one padding row has no items, and writes to the null block
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
"""Sizes of decodes are multiples of this number of rows; below it, powers of two."""

MIXED_STEP = 128
"""Sizes of mixed batches are multiples of this number of tokens."""

MIXED_ROWS = 65
"""Rows of a mixed batch, one of them padding."""

LEAST_MIXED_TOKENS, MOST_MIXED_TOKENS = 640, 2176
"""Tokens of the largest mixed batch, for large and for small models: prompts of 2,048 tokens beside decodes."""

LARGE_WEIGHTS = 16 << 30
"""Bytes of weights of a model whose step of 640 tokens takes the GPU longer than its launches take the host."""

_PADDING = Request("padding", (0,))


class GraphSize(NamedTuple):
    tokens: int
    rows: int

    @property
    def is_mixed(self) -> bool:
        return self.tokens != self.rows


class GraphLimits(NamedTuple):
    """Most rows of decodes, and tokens of a mixed batch; most seconds and bytes of all captures."""

    rows: int = 256
    tokens: int = LEAST_MIXED_TOKENS
    seconds: float = 20.0
    bytes: int = 1 << 30


def mixed_tokens(weight_bytes: int) -> int:
    """Tokens of the largest mixed batch with a graph: beyond it, launches take less time than padding."""
    tokens = LEAST_MIXED_TOKENS * LARGE_WEIGHTS // max(weight_bytes, 1) // MIXED_STEP * MIXED_STEP
    return min(max(tokens, LEAST_MIXED_TOKENS), MOST_MIXED_TOKENS)


def most_items(rows: int) -> int:
    """Most attention items of a step with single tokens of ``rows`` sequences."""
    return rows + min(max(4 * rows, LEAST_EXTRA_ITEMS), MOST_EXTRA_ITEMS)


def graph_sizes(limits: GraphLimits) -> list[GraphSize]:
    """Sizes of the graphs to capture, largest first: the memory of one serves the next."""
    mixed = [GraphSize(tokens, MIXED_ROWS) for tokens in range(MIXED_STEP, limits.tokens + 1, MIXED_STEP)]
    rows = [count for count in (1, 2, 4, 8) if count < limits.rows]
    rows += [*range(_STEP, limits.rows, _STEP), limits.rows]
    return [*mixed[::-1], *(GraphSize(count, count) for count in rows[::-1])]


def choose_size(captured: Iterable[GraphSize], tokens: int, rows: int) -> GraphSize | None:
    """Smallest size that holds the batch and, if it is mixed, a padding row of no or several tokens."""
    if tokens == rows:
        return min((size for size in captured if not size.is_mixed and size.rows >= rows), default=None)
    fitting = (size for size in captured if size.is_mixed and size.tokens >= tokens and size.rows > rows)
    return min((size for size in fitting if size.tokens != tokens + 1), default=None)


def capture_all(
    sizes: Sequence[GraphSize],
    capture: Callable[[GraphSize], T | None],
    limits: GraphLimits,
    *,
    clock: Callable[[], float],
    used_bytes: Callable[[], int],
) -> dict[GraphSize, T]:
    """Capture graphs until the limits; ``capture`` returns None for one that fails."""
    captured: dict[GraphSize, T] = {}
    began, before = clock(), used_bytes()
    for size in sizes:
        if clock() - began >= limits.seconds or used_bytes() - before >= limits.bytes:
            break
        if (graph := capture(size)) is not None:
            captured[size] = graph
    return captured


def pad(rows: Sequence[Row], size: GraphSize, layout: PaddingLayout) -> list[Row]:
    """Add padding up to ``size``; ``step_batch.flatten`` keeps it last."""
    if not size.is_mixed:
        return [*rows, *[padding(1, layout)] * (size.rows - len(rows))]
    tokens = size.tokens - sum(row.end - row.start for row in rows)
    return [*rows, padding(tokens, layout)] if tokens else [*rows]


class PaddingLayout(NamedTuple):
    null_block: int
    block_size: int
    groups: int = 1


def padding(tokens: int, layout: PaddingLayout) -> Row:
    blocks = array("i", [layout.null_block] * -(-tokens // layout.block_size))
    return Row(_PADDING, (0,) * tokens, 0, tokens, (blocks,) * layout.groups, False)


def is_padding(row: Row) -> bool:
    return row.request is _PADDING
