from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decant.engine.plan import Row

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class FlatBatch:
    """T tokens of n rows, end to end.

    rows                  single tokens first, longest context first (attention's order), then the others
    row_table [6, n]      index in the plan, start and end, first and last + 1 flattened position, whether to draw
    flattened [2 + G, T]  id, position, and the slot in each of G cache groups: block * block_size + slot in the block
    new_blocks [b]        blocks that get their first token but not all: they are cleared first
    table [G, n, W]       block tables up to each row's end, padded with ``null_block``
    """

    rows: Sequence[Row]
    row_table: Ints
    flattened: Ints
    new_blocks: Ints
    table: npt.NDArray[np.int32]

    @property
    def order(self) -> Ints:
        return _part(self.row_table, 0)

    @property
    def starts(self) -> Ints:
        return _part(self.row_table, 1)

    @property
    def ends(self) -> Ints:
        return _part(self.row_table, 2)

    @property
    def firsts(self) -> Ints:
        return _part(self.row_table, 3)

    @property
    def stops(self) -> Ints:
        return _part(self.row_table, 4)

    @property
    def sampled(self) -> Ints:
        return _part(self.row_table, 5)

    @property
    def tokens(self) -> Ints:
        return _part(self.flattened, 0)

    @property
    def positions(self) -> Ints:
        return _part(self.flattened, 1)

    @property
    def slot_mapping(self) -> Ints:
        return _part(self.flattened, slice(2, None))


def _part(table: Ints, index: int | slice) -> Ints:
    part: Ints = table[index]
    return part


def flatten(rows: Sequence[Row], block_size: int, null_block: int) -> FlatBatch:
    count = len(rows)
    starts = np.array([row.start for row in rows], np.int64)
    ends = np.array([row.end for row in rows], np.int64)
    single = ends - starts == 1
    order = np.lexsort((np.where(single, -ends, 0), ~single))
    rows = [rows[index] for index in order.tolist()]
    starts, ends = starts[order], ends[order]
    lengths = ends - starts
    stops = np.cumsum(lengths)
    # A token that the device still draws is not in the list: 0 keeps its place.
    tokens = [token for row in rows for token in row.tokens[row.start : row.end] or (0,)]
    positions = np.repeat(ends - stops, lengths) + np.arange(len(tokens))
    table = block_table(rows, -(-ends // block_size), null_block)
    blocks = table[:, np.repeat(np.arange(count), lengths), positions // block_size]
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    sampled = np.array([row.sample for row in rows], np.int64)
    row_table = np.stack([order, starts, ends, stops - lengths, stops, sampled])
    flattened = np.stack([np.array(tokens, np.int64), positions, *slots])
    is_new = (positions % block_size == 0) & (positions + block_size > np.repeat(ends, lengths))
    return FlatBatch(rows, row_table, flattened, (slots[:, is_new] // block_size).T.flatten(), table)


def cut_before(flat: FlatBatch, keep: Ints) -> tuple[Ints, Ints]:
    """``row_table`` without tokens before each row's first position in ``keep``, and the flattened positions left.

    Flattened positions keep their numbers.
    """
    firsts = flat.stops.copy()
    np.minimum.at(firsts, np.searchsorted(flat.stops, keep, side="right"), keep)
    row_table = flat.row_table.copy()
    row_table[1], row_table[3] = flat.ends - flat.stops + firsts, firsts
    return row_table, spans(flat.stops, flat.stops - firsts)


def block_table(rows: Sequence[Row], needed: Ints, null_block: int) -> npt.NDArray[np.int32]:
    table = np.full((len(rows[0].blocks), len(rows), int(needed.max())), null_block, np.int32)
    for index, (row, count) in enumerate(zip(rows, needed.tolist(), strict=True)):
        for entries, blocks in zip(table, row.blocks, strict=True):
            entries[index, :count] = blocks[:count]
    return table


def spans(stops: Ints, counts: Ints) -> Ints:
    """Last ``counts[i]`` flattened positions of each row, row after row."""
    ends = np.cumsum(counts)
    return np.repeat(stops - ends, counts) + np.arange(int(ends[-1]))
