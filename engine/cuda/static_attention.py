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


class StaticAttention(TritonAttention):
    """Attention over buffers at fixed addresses, for a CUDA graph of a batch that is padded to ``memory.size``."""

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
        shape = len(store.layout.groups), rows, memory.width
        table = torch.full(shape, store.null_block, dtype=torch.int32, device=device)
        spans = torch.zeros((rows, 3), dtype=torch.int32, device=device)
        self._fill_rows(table, spans, self._table, self._rows)
        self._table, self._tables, self._rows = table, table.unbind(), spans

    @property
    def rows(self) -> int:
        return self._size.rows

    @staticmethod
    def _fill_rows(table: torch.Tensor, spans: torch.Tensor, table_of: torch.Tensor, spans_of: torch.Tensor) -> None:
        table_of = table_of[:, :, : table.shape[2]]  # of padding, which may be longer than a context, none is used
        table[:, : table_of.shape[1], : table_of.shape[2]].copy_(table_of)
        spans[: len(spans_of)].copy_(spans_of)

    def fill(self, flat: FlatBatch) -> bool:
        """Copy a padded batch to the buffers, or return False if it has too many states."""
        self._flat = flat
        padded = [self._padded_tables(layers) for layers in self._lists]
        if max((count for _, count in padded), default=0) > self._most_states:
            return False
        arrays = [part for entry, _ in padded for part in entry]
        table, slots, spans, *moved = self.staging.upload(flat.table, flat.slot_mapping, row_spans(flat), *arrays)
        self._fill_rows(self._table, self._rows, table, spans)
        self._slot_mapping.copy_(slots)
        targets = [
            target
            for lists in self._lists.values()
            for target in (lists.visible, *(part for of in lists.lists for part in (of.items, of.merges)))
        ]
        for target, source in zip(targets, moved, strict=True):
            target.copy_(source)
        return True

    def _states(self, part: LaunchList, spec: LayerSpec, group: int) -> torch.Tensor:
        return self._memory.states.get((spec.kv_heads, group, 2 + spec.value_dim))

    def _make_lists(self, layers: LayerKind) -> StepLists:
        arrays, _ = self._padded_tables(layers)
        is_windowed = self._is_windowed(layers.view, arrays[0])
        visible, *parts = (part.clone() for part in self.staging.upload(*arrays))
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


def _padded(tables: Tables, num_items: int, num_merges: int) -> list[npt.NDArray[np.int32]]:
    items = np.tile(np.array([EMPTY_ITEM], np.int32), (num_items, 1))
    merges = np.zeros((num_merges, 3), np.int32)
    items[: len(tables.items)], merges[: len(tables.merges)] = tables.items, tables.merges
    return [items, merges]
