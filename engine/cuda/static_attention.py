"""Attention of CUDA graphs: launches of ``attention`` over buffers at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda.attention import (
    NO_STATE,
    LaunchList,
    LayerKind,
    StepLists,
    Tables,
    TritonAttention,
    chunks,
    first_visible,
    row_spans,
    single_tokens,
)
from decant.engine.cuda.graph_sizes import GraphSize, is_padding, most_items
from decant.engine.cuda.staging import Array, FixedBuffer
from decant.engine.kv_layout import LayerSpec
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch

MOST_STATES = 4096
"""Softmax states of a step in a CUDA graph if rows are exact: 68 MB with the heads of Llama-3.1-8B."""

EMPTY_ITEM = (-1, 0, 0, 0, NO_STATE, 0)

NO_ITEMS = Tables(np.empty((0, 6), np.int32), np.empty((0, 3), np.int32))


class StateBuffers:
    """Softmax states that the CUDA graphs of a store share, by shape: replays follow each other."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.most = most
        self._device = device
        self._buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def get(self, shape: tuple[int, ...]) -> torch.Tensor:
        if shape not in self._buffers:
            self._buffers[shape] = torch.empty((self.most, *shape), dtype=torch.float32, device=self._device)
        return self._buffers[shape]


class GraphMemory(NamedTuple):
    """What a graph's attention has: blocks of a row in its tables, and states."""

    size: GraphSize
    width: int
    states: StateBuffers


ITEM_BYTES, MERGE_BYTES, INT_BYTES = 24, 12, 4


class StaticAttention(TritonAttention):
    """Attention over buffers at fixed addresses, for a CUDA graph of a batch that is padded to ``memory.size``.

    ``buffer`` has them all but the block tables, of which a step copies what it uses.
    """

    def __init__(
        self,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        flat: FlatBatch,
        memory: GraphMemory,
        is_exact: bool,
    ) -> None:
        super().__init__(store, layer_windows, flat, is_exact)
        self._size, self._most_states = memory.size, memory.states.most
        self._memory = memory
        device, rows = self._table.device, memory.size.rows
        self.buffer = FixedBuffer(_capacity(memory.size, len(store.layout.groups), len(layer_windows)), device)
        shape = len(store.layout.groups), rows, memory.width
        self._table = torch.full(shape, store.null_block, dtype=torch.int32, device=device)
        self._tables = self._table.unbind()
        self._copy_table(flat)
        self._slots = self.buffer.place(flat.slot_mapping).unbind()
        self._rows = self.buffer.place(_all_spans(flat, rows))
        self._arrays: list[Array] = []

    @property
    def rows(self) -> int:
        return self._size.rows

    def _copy_table(self, flat: FlatBatch) -> None:
        table = flat.table[:, :, : self._memory.width]  # padding may be longer than a context: none of it is used
        (moved,) = self.staging.upload(table)
        self._table[:, : table.shape[1], : table.shape[2]].copy_(moved)

    def prepare(self, flat: FlatBatch) -> bool:
        """Make the lists of a padded batch, or return False if it has too many states."""
        self._flat = flat
        padded = [self._padded_tables(layers) for layers in self._lists]
        if max((count for _, count in padded), default=0) > self._most_states:
            return False
        self._arrays = [part for entry, _ in padded for part in entry]
        return True

    def fill(self, before: Sequence[Array], others: Sequence[Array]) -> list[torch.Tensor]:
        """Copy the batch that was prepared. ``before`` and ``others``: see ``FixedBuffer.fill``."""
        flat = self._flat
        self._copy_table(flat)
        arrays: list[Array] = [flat.slot_mapping, _all_spans(flat, self._size.rows), *before, *self._arrays]
        return self.buffer.fill(arrays, others)

    def _states(self, part: LaunchList, spec: LayerSpec, group: int) -> torch.Tensor:
        return self._memory.states.get((spec.kv_heads, group, 2 + spec.value_dim))

    def _make_lists(self, layers: LayerKind) -> StepLists:
        arrays, _ = self._padded_tables(layers)
        is_windowed = self._is_windowed(layers.view, arrays[0])
        visible, *parts = map(self.buffer.place, arrays)
        shapes = (layers.tokens, layers.chunks)
        lists = [
            LaunchList(shape, items, merges, self._zeros(len(merges)), 0)
            for shape, items, merges in zip(shapes, parts[::2], parts[1::2], strict=False)
        ]
        return StepLists(visible, is_windowed, tuple(lists))

    def _padded_tables(self, layers: LayerKind) -> tuple[list[npt.NDArray[np.int32]], int]:
        """Arrays of ``StepLists`` with fixed shapes, and the number of states."""
        flat, size = self._flat, self._size
        visible = first_visible(flat, layers.view)
        is_single = flat.ends - flat.starts == 1
        rows, most = np.flatnonzero(is_single), most_items(size.rows)
        singles = single_tokens(flat, rows, visible, layers.tokens, most) if len(rows) else NO_ITEMS
        arrays = [visible, *_padded(singles, most, size.rows)]
        if size.is_mixed:
            rows = np.flatnonzero(~is_single)
            rows = rows[:-1] if is_padding(flat.rows[-1]) else rows
            tiles = chunks(flat, rows, visible, layers.chunks, layers.group)
            most = size.tokens // (layers.chunks.tile_rows // layers.group) + size.rows
            arrays += _padded(tiles, most, 0)
        return arrays, singles.num_states


def _capacity(size: GraphSize, groups: int, layers: int) -> int:
    """Bytes of a graph's arrays, with lists for each layer, of which most share one."""
    lists = INT_BYTES * size.tokens + MERGE_BYTES * size.rows
    lists += ITEM_BYTES * (most_items(size.rows) + size.is_mixed * (size.tokens + size.rows))
    return (5 + groups) * 8 * (size.tokens + size.rows) + (layers + 1) * (lists + 256)


def _all_spans(flat: FlatBatch, rows: int) -> npt.NDArray[np.int32]:
    spans = np.zeros((rows, 3), np.int32)
    spans[: len(flat.rows)] = row_spans(flat)
    return spans


def _padded(tables: Tables, num_items: int, num_merges: int) -> list[npt.NDArray[np.int32]]:
    items = np.tile(np.array([EMPTY_ITEM], np.int32), (num_items, 1))
    merges = np.zeros((num_merges, 3), np.int32)
    items[: len(tables.items)], merges[: len(tables.merges)] = tables.items, tables.merges
    return [items, merges]
