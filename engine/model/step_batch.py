"""The rows of a step laid end to end, as arrays: what the model and its attention are called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from decant.engine.cpu.kernels import KERNELS
from decant.engine.plan import Row

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class FlatBatch:
    """T tokens of n rows.

    rows       single tokens first, longest context first (the order in which attention takes them), then the others
    lines [6, n]  of each row: which of the given rows it is, its start and end, where it begins and stops among the T,
               and 1 where the token after it is to be drawn, else 0
    flattened [3, T]  of each token: its id, its position, and where its key and value go: block * block_size + slot
    begun [b]  blocks that get their first token, and not all of them: in others nothing is left of what lay there
    table [n, W]  block tables, up to each row's end, padded with ``blank``
    """

    rows: Sequence[Row]
    lines: Ints
    flattened: Ints
    begun: Ints
    table: npt.NDArray[np.int32]

    @property
    def order(self) -> Ints:
        return _line(self.lines, 0)

    @property
    def starts(self) -> Ints:
        return _line(self.lines, 1)

    @property
    def ends(self) -> Ints:
        return _line(self.lines, 2)

    @property
    def firsts(self) -> Ints:
        return _line(self.lines, 3)

    @property
    def stops(self) -> Ints:
        return _line(self.lines, 4)

    @property
    def sampled(self) -> Ints:
        return _line(self.lines, 5)

    @property
    def tokens(self) -> Ints:
        return _line(self.flattened, 0)

    @property
    def positions(self) -> Ints:
        return _line(self.flattened, 1)

    @property
    def places(self) -> Ints:
        return _line(self.flattened, 2)


def _line(lines: Ints, index: int) -> Ints:
    line: Ints = lines[index]
    return line


def flatten(rows: Sequence[Row], block_size: int, blank: int) -> FlatBatch:
    """Put rows in order and lay them out."""
    return _flattened(rows, block_size, blank) if KERNELS is None else _compiled(KERNELS, rows, block_size, blank)


def _compiled(kernels: ModuleType, rows: Sequence[Row], block_size: int, blank: int) -> FlatBatch:
    """``engine/cpu/kernels/rows.h``, for hundreds of rows: building the arrays in Python takes too long."""
    ordered, lines, flattened, begun, table, width = kernels.flatten(rows, block_size, blank)
    return FlatBatch(
        ordered,
        np.frombuffer(lines, np.int64).reshape(6, -1),
        np.frombuffer(flattened, np.int64).reshape(3, -1),
        np.frombuffer(begun, np.int64),
        np.frombuffer(table, np.int32).reshape(-1, width),
    )


def _flattened(rows: Sequence[Row], block_size: int, blank: int) -> FlatBatch:
    """The same in numpy."""
    count = len(rows)
    starts = np.array([row.start for row in rows], np.int64)
    ends = np.array([row.end for row in rows], np.int64)
    single = ends - starts == 1
    order = np.lexsort((np.where(single, -ends, 0), ~single))
    rows = [rows[index] for index in order.tolist()]
    starts, ends = starts[order], ends[order]
    lengths = ends - starts
    stops = np.cumsum(lengths)
    tokens = [token for row in rows for token in row.tokens[row.start : row.end]]
    positions = np.repeat(ends - stops, lengths) + np.arange(len(tokens))
    table = block_table(rows, -(-ends // block_size), blank)
    blocks = table[np.repeat(np.arange(count), lengths), positions // block_size]
    places = blocks.astype(np.int64) * block_size + positions % block_size
    sampled = np.array([row.sample for row in rows], np.int64)
    lines = np.stack([order, starts, ends, stops - lengths, stops, sampled])
    flattened = np.stack([np.array(tokens, np.int64), positions, places])
    begun = (positions % block_size == 0) & (positions + block_size > np.repeat(ends, lengths))
    return FlatBatch(rows, lines, flattened, places[begun] // block_size, table)


def ending(flat: FlatBatch, keep: Ints) -> tuple[Ints, Ints]:
    """The lines of a step without all tokens of each row before the first of the flattened positions ``keep``, and the
    positions [k] that are left. All else stays where it stood."""
    firsts = flat.stops.copy()
    np.minimum.at(firsts, np.searchsorted(flat.stops, keep, side="right"), keep)
    lines = flat.lines.copy()
    lines[1], lines[3] = flat.ends - flat.stops + firsts, firsts
    return lines, spans(flat.stops, flat.stops - firsts)


def block_table(rows: Sequence[Row], needed: Ints, blank: int) -> npt.NDArray[np.int32]:
    """[n, W]: the first ``needed`` blocks of each row, then ``blank``. Rows may hold more blocks than they need yet."""
    table = np.full((len(rows), int(needed.max())), blank, np.int32)
    for line, row, count in zip(table, rows, needed.tolist(), strict=True):
        line[:count] = row.blocks[:count]
    return table


def spans(stops: Ints, counts: Ints) -> Ints:
    """The last ``counts[i]`` flattened positions of each row, in order."""
    ends = np.cumsum(counts)
    return np.repeat(stops - ends, counts) + np.arange(int(ends[-1]))
