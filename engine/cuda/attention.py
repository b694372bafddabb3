"""Launch lists and launches of ``attention_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda import attention_kernels as kernels
from decant.engine.cuda import layer_kernels
from decant.engine.cuda.graph_sizes import GraphSize
from decant.engine.cuda.staging import Staging
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints

SPLIT = 512
"""Key positions per program of a single token. Constant: no row's bits depend on the batch."""

TILE = 32
"""Keys per product; divides SPLIT."""

CHUNK_ROWS = 64
"""Rows of a chunk of a sequence with several tokens."""

MIN_ROWS = 16

NO_STATE = -1

EMPTY_ITEM = (0, 1 << 30, 0, 0, NO_STATE)
"""Reads no key, writes nothing."""


class LaunchList(NamedTuple):
    tile_rows: int
    items: torch.Tensor
    merges: torch.Tensor
    num_states: int


class StepLists(NamedTuple):
    visible: torch.Tensor
    lists: tuple[LaunchList, ...]


class Tables(NamedTuple):
    items: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    num_states: int = 0


def power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def first_visible(flat: FlatBatch, view: AttentionWindow) -> npt.NDArray[np.int32]:
    visible: npt.NDArray[np.int32] = view.first(torch.from_numpy(flat.positions)).numpy().astype(np.int32)
    return visible


def make_lists(flat: FlatBatch, view: AttentionWindow, group: int, tile_rows: int, staging: Staging) -> StepLists:
    visible = first_visible(flat, view)
    is_single = flat.ends - flat.starts == 1
    tables: list[tuple[int, Tables]] = []
    if is_single.any():
        tables.append((power_of_two(group, tile_rows), single_tokens(flat, np.flatnonzero(is_single), visible)))
    if not is_single.all():
        chunk_rows = power_of_two(group, CHUNK_ROWS)
        rows = np.flatnonzero(~is_single)
        tables.append((chunk_rows, _chunks(flat, rows, visible // SPLIT, chunk_rows // group)))
    moved = staging.upload(visible, *(part for _, table in tables for part in (table.items, table.merges)))
    lists = tuple(
        LaunchList(rows_of, moved[1 + 2 * index], moved[2 + 2 * index], table.num_states)
        for index, (rows_of, table) in enumerate(tables)
    )
    return StepLists(moved[0], lists)


def num_items(flat: FlatBatch) -> int:
    """Number of items of single tokens that see all keys; no window needs more."""
    return int((flat.starts // SPLIT + 1).sum())


def single_tokens(flat: FlatBatch, rows: Ints, visible: npt.NDArray[np.int32]) -> Tables:
    tokens, positions = flat.firsts[rows], flat.starts[rows]
    first = visible[tokens] // SPLIT
    counts = positions // SPLIT + 1 - first
    is_split = counts > 1
    in_row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    split = np.repeat(first, counts) + in_row
    states = np.where(np.repeat(is_split, counts), np.cumsum(np.repeat(is_split, counts)) - 1, NO_STATE)
    items = np.stack([np.repeat(rows, counts), np.repeat(positions, counts), split, split + 1, states], 1)
    begins = np.cumsum(np.where(is_split, counts, 0)) - np.where(is_split, counts, 0)
    merges = np.stack([tokens, begins, counts], 1)[is_split]
    return Tables(items.astype(np.int32), merges.astype(np.int32), int(counts[is_split].sum()))


def _chunks(flat: FlatBatch, rows: Ints, first_split: npt.NDArray[np.int32], tile: int) -> Tables:
    items = []
    for row in rows.tolist():
        start, end, token = int(flat.starts[row]), int(flat.ends[row]), int(flat.firsts[row])
        for position in range(start, end, tile):
            last = min(position + tile, end)
            first = int(first_split[token + position - start])  # later positions see nothing before it
            items.append((row, position, first, (last - 1) // SPLIT + 1, NO_STATE))
    return Tables(np.array(items, np.int32), np.empty((0, 3), np.int32))


def row_spans(flat: FlatBatch) -> npt.NDArray[np.int32]:
    return np.stack([flat.firsts, flat.starts, flat.ends], 1).astype(np.int32)


class TritonAttention:
    """Attention of a step: writes keys and values to their blocks, then attends.

    A token has the same bits alone and in a chunk if ``tile_rows`` is CHUNK_ROWS: one compiled kernel computes both,
    while a GPU multiplies tiles of other sizes with other instructions.
    """

    def __init__(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, tile_rows: int = MIN_ROWS
    ) -> None:
        self._store = store
        self._layer_windows = layer_windows
        self._flat = flat
        self._tile_rows = tile_rows
        self.staging = Staging(store.blocks.device)
        self._table, self._slot_mapping, self._rows = self.staging.upload(
            flat.table, flat.slot_mapping, row_spans(flat)
        )
        # of each cache group
        self._tables, self._slots = self._table.unbind(), self._slot_mapping.unbind()
        self._lists: dict[tuple[AttentionWindow, int], StepLists] = {}

    def _make_lists(self, view: AttentionWindow, group: int) -> StepLists:
        return make_lists(self._flat, view, group, self._tile_rows, self.staging)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._check(call)
        self._write(call)
        query = call.query if call.query.stride(3) == 1 else call.query.contiguous()
        return self._attend(call._replace(query=query))

    def attend_rotated(self, call: AttentionCall, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate query and key by cos and sin [1, T, key dim], x cos + rotate_half(x) sin, then attend."""
        self._check(call)
        store, spec = self._store, self._store.layout.layers[call.layer]
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in (call.query, call.key, call.value))
        rotated = torch.empty_like(query)
        layer_kernels.rotate_and_write[len(query), query.shape[1] + spec.kv_heads](
            *(query, key, value, cos.contiguous(), sin.contiguous(), rotated),
            *(self._slots[self._group(call)], store.blocks),
            *(store.layout.block_elements, *self._offsets(call.layer)),
            BLOCK=store.layout.block_size,
            HEADS=query.shape[1],
            KV_HEADS=spec.kv_heads,
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            HALF_PAD=power_of_two(spec.key_dim // 2),
            VALUE_PAD=power_of_two(spec.value_dim),
        )
        return self._attend(call._replace(query=rotated.transpose(0, 1)[None]))

    def _group(self, call: AttentionCall) -> int:
        return self._store.layout.group_of[call.layer]

    def _check(self, call: AttentionCall) -> None:
        spec, heads, tokens = self._store.layout.layers[call.layer], call.query.shape[1], len(self._flat.tokens)
        shapes = call.key.shape[1:], call.value.shape[1:]
        expected = (spec.kv_heads, tokens, spec.key_dim), (spec.kv_heads, tokens, spec.value_dim)
        if shapes != expected or heads % spec.kv_heads or call.query.shape[2:] != call.key.shape[2:]:
            raise ValueError(f"attention of layer {call.layer}: {tuple(call.query.shape)}, {shapes}, for {expected}")

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend over keys and values that are in their blocks; the query's last dimension is contiguous."""
        spec, heads = self._store.layout.layers[call.layer], call.query.shape[1]
        group, view = heads // spec.kv_heads, self._layer_windows[call.layer]
        if (view, group) not in self._lists:
            self._lists[view, group] = self._make_lists(view, group)
        out = call.query.new_empty(1, call.query.shape[2], heads, spec.value_dim)
        visible, lists = self._lists[view, group]
        for part in lists:
            self._launch(call, out, part, visible)
        return out

    def _offsets(self, layer: int) -> tuple[int, int]:
        spec, keys = self._store.layout.layers[layer], self._store.layout.offsets[layer]
        return keys, keys + self._store.layout.block_size * spec.kv_heads * spec.key_dim

    def _write(self, call: AttentionCall) -> None:
        store, spec = self._store, self._store.layout.layers[call.layer]
        key, value = (part.to(store.dtype) for part in (call.key, call.value))
        key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (key, value))
        strides = (key.stride(2), key.stride(1), value.stride(2), value.stride(1))
        kernels.write_kv[key.shape[2], spec.kv_heads](
            *(key, value, self._slots[self._group(call)], store.blocks, *strides),
            *(store.layout.block_elements, *self._offsets(call.layer)),
            BLOCK=store.layout.block_size,
            KV_HEADS=spec.kv_heads,
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            KEY_PAD=power_of_two(spec.key_dim),
            VALUE_PAD=power_of_two(spec.value_dim),
        )

    def _launch(self, call: AttentionCall, out: torch.Tensor, part: LaunchList, visible: torch.Tensor) -> None:
        store, spec = self._store, self._store.layout.layers[call.layer]
        shape = {
            "KV_HEADS": spec.kv_heads,
            "GROUP": call.query.shape[1] // spec.kv_heads,
            "VALUE_DIM": spec.value_dim,
            "VALUE_PAD": power_of_two(spec.value_dim, MIN_ROWS),
            "TILE_ROWS": part.tile_rows,
            "SINKS": call.sinks is not None,
        }
        sinks = out if call.sinks is None else call.sinks.contiguous()
        width, table = 2 + spec.value_dim, self._tables[self._group(call)]
        states = out.new_empty((max(1, part.num_states), spec.kv_heads, part.tile_rows, width), dtype=torch.float32)
        kernels.attend[len(part.items), spec.kv_heads](
            *(call.query, out, store.blocks, sinks, visible, part.items, self._rows, table, states),
            *(call.query.stride(2), call.query.stride(1), store.layout.block_elements, *self._offsets(call.layer)),
            *(table.shape[1], float(call.scaling), float(call.softcap or 0.0)),
            **shape,
            BLOCK=store.layout.block_size,
            KEY_DIM=spec.key_dim,
            KEY_PAD=power_of_two(spec.key_dim, MIN_ROWS),
            TILE=TILE,
            SPLIT=SPLIT,
            SOFTCAP=call.softcap is not None,
        )
        if len(part.merges):
            kernels.merge_splits[len(part.merges), spec.kv_heads](states, out, sinks, part.merges, **shape)


class StaticAttention(TritonAttention):
    """Attention over buffers at fixed addresses, for a CUDA graph of single tokens."""

    def __init__(
        self,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        flat: FlatBatch,
        size: GraphSize,
        width: int,
        tile_rows: int,
    ) -> None:
        super().__init__(store, layer_windows, flat, tile_rows)
        self._size = size
        shape = len(store.layout.groups), size.rows, width
        table = torch.full(shape, store.null_block, dtype=torch.int32, device=self._table.device)
        table[:, :, : self._table.shape[2]] = self._table
        self._table, self._tables = table, table.unbind()

    def fill(self, flat: FlatBatch) -> None:
        """Copy a batch of at most ``size.items`` items to the buffers."""
        self._flat = flat
        tables = [self._padded_tables(view) for view, _ in self._lists]
        arrays = [part for entry in tables for part in entry]
        table, slots, rows, *moved = self.staging.upload(flat.table, flat.slot_mapping, row_spans(flat), *arrays)
        self._table[:, :, : table.shape[2]].copy_(table)
        self._slot_mapping.copy_(slots)
        self._rows.copy_(rows)
        for index, lists in enumerate(self._lists.values()):
            for target, source in zip((lists.visible, *lists.lists[0][1:3]), moved[3 * index :], strict=False):
                target.copy_(source)

    def _make_lists(self, view: AttentionWindow, group: int) -> StepLists:
        visible, items, merges = (part.clone() for part in self.staging.upload(*self._padded_tables(view)))
        tile_rows = power_of_two(group, self._tile_rows)
        return StepLists(visible, (LaunchList(tile_rows, items, merges, self._size.items),))

    def _padded_tables(self, view: AttentionWindow) -> tuple[npt.NDArray[np.int32], ...]:
        visible = first_visible(self._flat, view)
        rows = np.arange(self._size.rows)
        tables = single_tokens(self._flat, rows, visible)
        items = np.tile(np.array([EMPTY_ITEM], np.int32), (self._size.items, 1))
        merges = np.zeros((self._size.rows, 3), np.int32)
        items[: len(tables.items)], merges[: len(tables.merges)] = tables.items, tables.merges
        return visible, items, merges
