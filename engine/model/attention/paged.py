"""Paged attention in plain products, the same bits for a row in any batch.

All decodes are one length group, each piece of a prompt is another. A group walks over tiles of keys with an online
softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022)::

                 keys ->  tile 0     tile 1     tile 2        rows: query heads of a group folded with positions,
    group 0 seq A        [######]   [######]   [####..]       padded to a multiple of ``ROWS``
            seq B        [######]   [##....]                  sorted longest first: a tile takes a leading slice
            seq C        [###...]
    group 1 seq D, 40..  [######]   [//////]                  later tiles skip rows that are too early for them

Every product is in float32, has the same inner length (head dim, TILE) and a multiple of ROWS rows; keys are whole
tiles, masked; a tile that a row does not see changes no bit of its softmax; all else is elementwise or per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints

TILE = 128

ROWS = 16

PIECE = 256
"""Most positions of a prompt in one group: bounds the scores' memory."""

_LOWEST = -1e30
"""Finite, so that a row without keys yet stays finite."""


@dataclass(slots=True)
class LengthGroup:
    """Sequences with the same number P of query positions, contexts longest first.

    start      first query position of the first sequence
    positions  [B, P]
    in_tile    for each tile, how many of the sequences have keys in it
    table      [G, B, tiles * blocks per tile], padded with the store's null block
    first_row  flattened position of the first query
    """

    start: int
    positions: torch.Tensor
    in_tile: list[int]
    table: torch.Tensor
    first_row: int = 0
    _hidden: dict[tuple[AttentionWindow, int, int, int], torch.Tensor | None] = field(default_factory=dict)
    _tiles: dict[AttentionWindow, range] = field(default_factory=dict)

    def tiles(self, view: AttentionWindow) -> range:
        if view not in self._tiles:
            first = int(view.first(self.positions[:, 0]).min())
            self._tiles[view] = range(first // TILE, len(self.in_tile))
        return self._tiles[view]

    def hidden(self, view: AttentionWindow, tile: int, first: int, group: int) -> torch.Tensor | None:
        """Mask [B', 1, rows, TILE] of hidden keys, rows (p * group + g) from ``first`` on; None: none is hidden."""
        key = (view, tile, first, group)
        if key not in self._hidden:
            queries = self.positions[: self.in_tile[tile]].repeat_interleave(group, dim=1)
            queries = _pad_rows(queries[:, :, None])[:, first:, :]
            keys = torch.arange(tile * TILE, (tile + 1) * TILE, device=queries.device)
            mask = (keys > queries) | (keys < view.first(queries))
            self._hidden[key] = mask[:, None] if bool(mask.any()) else None
        return self._hidden[key]


def make_length_groups(flat: FlatBatch, store: KvStore) -> list[LengthGroup]:
    counts = flat.ends - flat.starts
    singles = int((counts == 1).sum())
    groups = []
    if singles:
        groups.append(_make_group(flat.ends[:singles], 1, flat.table[:, :singles], store))
    for index in range(singles, len(counts)):
        for start in range(int(flat.starts[index]), int(flat.ends[index]), PIECE):
            end = min(start + PIECE, int(flat.ends[index]))
            group = _make_group(np.array([end]), end - start, flat.table[:, index : index + 1], store)
            groups.append(group)
    first_row = 0
    for group in groups:
        group.first_row = first_row
        first_row += group.positions.numel()
    return groups


def _make_group(ends: Ints, count: int, table: npt.NDArray[np.int32], store: KvStore) -> LengthGroup:
    block_size, device = store.layout.block_size, store.blocks.device
    per_tile, tiles = TILE // block_size, -(-int(ends[0]) // TILE)
    count_in_tile = (ends[:, None] > np.arange(tiles) * TILE).sum(0).tolist()
    padded = np.full((len(table), len(ends), tiles * per_tile), store.null_block, np.int32)
    needed = -(-int(ends[0]) // block_size)
    padded[:, :, :needed] = table[:, :, :needed]
    positions = torch.from_numpy(ends[:, None] + np.arange(-count, 0)).to(device)
    return LengthGroup(int(ends[0]) - count, positions, count_in_tile, torch.from_numpy(padded).to(device))


class PagedAttention:
    """Attention of a step: writes keys and values to their blocks, then attends.

    ``product_threads`` is entered around products: their bits do not depend on the number of threads.
    """

    def __init__(
        self,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        flat: FlatBatch,
        product_threads: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._store = store
        self._product_threads = product_threads
        self._layer_windows = layer_windows
        self._groups = make_length_groups(flat, store)
        slots = np.divmod(flat.slot_mapping, store.layout.block_size)
        # [G, T] each: block of each cache group, and slot in it, of each token
        self._blocks, self._slots = (torch.from_numpy(part).to(store.blocks.device) for part in slots)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        group = self._store.layout.group_of[call.layer]
        self._store.put(
            call.layer,
            self._blocks[group],
            self._slots[group],
            (call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)),
        )
        _, heads, tokens, _ = call.query.shape
        output = call.query.new_empty(1, tokens, heads, call.value.shape[3])
        query = call.query[0].transpose(0, 1)  # [T, heads, key dim]
        for lengths in self._groups:
            batch, count = lengths.positions.shape
            taken = slice(lengths.first_row, lengths.first_row + batch * count)
            attended = self._attend_group(call, lengths, query[taken].unflatten(0, (batch, count)))
            output[0, taken] = attended.flatten(0, 1)
        return output

    def _attend_group(self, call: AttentionCall, lengths: LengthGroup, query: torch.Tensor) -> torch.Tensor:
        view, kv_heads = self._layer_windows[call.layer], call.key.shape[1]
        batch, count, heads, width = query.shape
        group = heads // kv_heads
        folded = (
            query.reshape(batch, count, kv_heads, group, width)
            .permute(0, 2, 1, 3, 4)
            .reshape(batch, kv_heads, -1, width)
        )
        folded = _pad_rows(folded.float() * call.scaling)
        state = _Softmax(folded, call.value.shape[3], self._product_threads)
        for tile in lengths.tiles(view):
            self._tile(call, lengths, state, tile)
        out: torch.Tensor = state.finish(self._sinks(call, kv_heads, count))
        out = out[:, :, : count * group].unflatten(2, (count, group))
        return out.permute(0, 2, 1, 3, 4).reshape(batch, count, heads, -1).to(query.dtype)

    def _tile(self, call: AttentionCall, lengths: LengthGroup, state: _Softmax, tile: int) -> None:
        view, group = self._layer_windows[call.layer], call.query.shape[1] // call.key.shape[1]
        count_in_tile = lengths.in_tile[tile]
        first = max(0, tile * TILE - lengths.start) * group // ROWS * ROWS  # earlier rows see nothing of this tile
        per_tile = TILE // self._store.layout.block_size
        table = lengths.table[self._store.layout.group_of[call.layer]]
        table = table[:count_in_tile, tile * per_tile : (tile + 1) * per_tile]
        keys, values = self._store.gather(call.layer, table)
        keys = keys.permute(0, 2, 3, 1).float()
        with self._product_threads():
            scores = state.query[:count_in_tile, :, first:] @ keys
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        hidden = lengths.hidden(view, tile, first, group)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        state.add(scores, values.permute(0, 2, 1, 3).float(), count_in_tile, first)

    def _sinks(self, call: AttentionCall, kv_heads: int, count: int) -> torch.Tensor | None:
        if call.sinks is None:
            return None
        rows = call.sinks.float().reshape(1, kv_heads, 1, -1).expand(1, kv_heads, count, -1)
        return _pad_rows(rows.reshape(1, kv_heads, -1, 1))


class _Softmax:
    def __init__(
        self, query: torch.Tensor, value_dim: int, product_threads: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.query = query
        self._product_threads = product_threads
        self.highest = query.new_full((*query.shape[:3], 1), _LOWEST)
        self.total = query.new_zeros(*query.shape[:3], 1)
        self.output = query.new_zeros(*query.shape[:3], value_dim)

    def add(self, scores: torch.Tensor, values: torch.Tensor, count_in_tile: int, first: int) -> None:
        """Add a tile: scores [B', kv heads, rows', TILE], values [B', kv heads, TILE, value dim]."""
        part = (slice(count_in_tile), slice(None), slice(first, None))
        before = self.highest[part]
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights = torch.exp_(scores.sub_(highest))
        decay = torch.exp(before - highest)
        self.total[part] = self.total[part] * decay + weights.sum(-1, keepdim=True)
        with self._product_threads():
            mixed = weights @ values
        self.output[part] = self.output[part] * decay + mixed
        self.highest[part] = highest

    def finish(self, sinks: torch.Tensor | None) -> torch.Tensor:
        if sinks is None:
            return self.output / self.total
        highest = torch.maximum(self.highest, sinks)
        decay = torch.exp(self.highest - highest)
        return self.output * decay / (self.total * decay + torch.exp(sinks - highest))


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[-2] % ROWS
    if not missing:
        return rows
    return torch.cat([rows, rows[..., -1:, :].expand(*rows.shape[:-2], missing, rows.shape[-1])], dim=-2)
