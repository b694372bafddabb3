"""The rows of a step laid end to end, as arrays: what the model and its attention are called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan import Row

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class FlatRows:
    """T tokens of n rows.

    rows       single tokens first, longest context first (the order in which attention takes them), then the others
    order [n]  which of the given rows each of them is
    starts, ends [n]  positions of each row
    stops [n]  where each row ends among the T
    tokens, positions [T]
    places [T] where each token's key and value go: block * block_size + slot
    table [n, W]  block tables, up to each row's end, padded with ``blank``
    """

    rows: Sequence[Row]
    order: Ints
    starts: Ints
    ends: Ints
    stops: Ints
    tokens: Ints
    positions: Ints
    places: Ints
    table: npt.NDArray[np.int32]


def flatten(rows: Sequence[Row], block_size: int, blank: int) -> FlatRows:
    """Put rows in order and lay them out."""
    count = len(rows)
    starts = np.array([row.start for row in rows], np.int64)
    ends = np.array([row.end for row in rows], np.int64)
    single = ends - starts == 1
    order = np.lexsort((np.where(single, -ends, 0), ~single))
    rows = [rows[index] for index in order.tolist()]
    starts, ends = starts[order], ends[order]
    lengths = ends - starts
    stops = np.cumsum(lengths)
    if single.all():
        tokens = [row.tokens[row.start] for row in rows]
    else:
        tokens = [token for row in rows for token in row.tokens[row.start : row.end]]
    positions = np.repeat(ends - stops, lengths) + np.arange(len(tokens))
    table = block_table(rows, -(-ends // block_size), blank)
    blocks = table[np.repeat(np.arange(count), lengths), positions // block_size]
    places = blocks.astype(np.int64) * block_size + positions % block_size
    return FlatRows(rows, order, starts, ends, stops, np.array(tokens, np.int64), positions, places, table)


def block_table(rows: Sequence[Row], needed: Ints, blank: int) -> npt.NDArray[np.int32]:
    """[n, W]: the first ``needed`` blocks of each row, then ``blank``. Rows may hold more blocks than they need yet."""
    held = np.fromiter([len(row.blocks) for row in rows], np.int64, len(rows))
    joined = np.frombuffer(b"".join([row.blocks for row in rows]), np.int32)
    columns = np.arange(int(held.max()))
    table = np.full((len(rows), len(columns)), blank, np.int32)
    table[columns < held[:, None]] = joined
    if (held > needed).any():
        table[columns >= needed[:, None]] = blank
    return table[:, : int(needed.max())]


def spans(stops: Ints, counts: Ints) -> Ints:
    """The last ``counts[i]`` flattened positions of each row, in order."""
    ends = np.cumsum(counts)
    return np.repeat(stops - ends, counts) + np.arange(int(ends[-1]))
