"""The rows of a step laid end to end, as arrays: what the model and its attention are called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan import Row

Ints = npt.NDArray[np.int64]

_BEHIND = 1 << 40
"""Sorts a row behind all rows of a single token: more than any position."""


@dataclass(slots=True)
class FlatRows:
    """T tokens of n rows.

    rows       single tokens first, longest context first (the order in which attention takes them)
    starts, ends [n]  positions of each row
    stops [n]  where each row ends among the T
    tokens, positions [T]
    places [T] where each token's key and value go: block * block_size + slot
    table [n, W]  block tables, up to each row's end, padded with ``blank``
    """

    rows: Sequence[Row]
    starts: Ints
    ends: Ints
    stops: Ints
    tokens: list[int]
    positions: Ints
    places: Ints
    table: npt.NDArray[np.int32]


def band_order(rows: Sequence[Row]) -> list[int]:
    """Indexes of ``rows``: single tokens first, longest context first."""
    keys = [-row.end if row.end - row.start == 1 else _BEHIND - row.end for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def flatten(rows: Sequence[Row], block_size: int, blank: int) -> FlatRows:
    """Lay out rows that are in band order."""
    count = len(rows)
    starts = np.fromiter([row.start for row in rows], np.int64, count)
    ends = np.fromiter([row.end for row in rows], np.int64, count)
    lengths = ends - starts
    stops = np.cumsum(lengths)
    tokens: list[int] = []
    for row in rows:
        if row.end - row.start == 1:
            tokens.append(row.tokens[row.start])
        else:
            tokens.extend(row.tokens[row.start : row.end])
    positions = np.repeat(ends - stops, lengths) + np.arange(len(tokens))
    table = block_table(rows, -(-ends // block_size), blank)
    blocks = table[np.repeat(np.arange(count), lengths), positions // block_size]
    places = blocks.astype(np.int64) * block_size + positions % block_size
    return FlatRows(rows, starts, ends, stops, tokens, positions, places, table)


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
