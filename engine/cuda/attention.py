"""Paged attention of a step in Triton: the launch lists, and the launches of ``attention_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from decant.engine.cuda import attention_kernels as kernels
from decant.engine.cuda import layer_kernels
from decant.engine.model.attention import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints

SPLIT = 512
"""Positions whose keys one program takes for a single token. A constant: a row's bits do not depend on the batch."""

TILE = 32
"""Keys per product; divides SPLIT."""

CHUNK_ROWS = 64
"""Query rows of a tile of a sequence with several tokens."""

LEAST_ROWS = 16
"""Fewest rows of a tensor-core product."""

NO_STATE = -1


class LaunchList(NamedTuple):
    """Work of one launch of ``attend`` with tiles of ``tile_rows``, and of ``merge_splits`` after it.

    The arrays are as in ``attention_kernels``; ``num_states`` states are needed between the two.
    """

    tile_rows: int
    items: torch.Tensor
    merges: torch.Tensor
    num_states: int


class StepLists(NamedTuple):
    """Launch lists of one window, and the first position [T] that each token sees."""

    visible: torch.Tensor
    lists: tuple[LaunchList, ...]


def power_of_two(count: int, least: int = 1) -> int:
    """The lowest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << (count - 1).bit_length())


def make_lists(flat: FlatBatch, view: AttentionWindow, group: int, device: torch.device) -> StepLists:
    """Single tokens get one item per split of their keys, other rows one item per tile of query positions."""
    visible = view.first(torch.from_numpy(flat.positions))
    first_split = (visible // SPLIT).numpy()
    is_single = flat.ends - flat.starts == 1
    lists = []
    if is_single.any():
        lists.append(_single_tokens(flat, np.flatnonzero(is_single), first_split, group))
    if not is_single.all():
        lists.append(_chunks(flat, np.flatnonzero(~is_single), first_split, group))
    moved = tuple(part._replace(items=part.items.to(device), merges=part.merges.to(device)) for part in lists)
    return StepLists(visible.to(device, torch.int32), moved)


def _single_tokens(flat: FlatBatch, rows: Ints, first_split: Ints, group: int) -> LaunchList:
    items, merges = [], []
    num_states = 0
    for row in rows.tolist():
        token, position = int(flat.firsts[row]), int(flat.starts[row])
        first, last = int(first_split[token]), position // SPLIT + 1
        if last - first == 1:
            items.append((row, position, first, last, NO_STATE))
            continue
        merges.append((token, num_states, last - first))
        for split in range(first, last):
            items.append((row, position, split, split + 1, num_states))
            num_states += 1
    return LaunchList(power_of_two(group, LEAST_ROWS), _ints(items, 5), _ints(merges, 3), num_states)


def _chunks(flat: FlatBatch, rows: Ints, first_split: Ints, group: int) -> LaunchList:
    tile_rows = power_of_two(group, CHUNK_ROWS)
    items = []
    for row in rows.tolist():
        start, end, token = int(flat.starts[row]), int(flat.ends[row]), int(flat.firsts[row])
        for position in range(start, end, tile_rows // group):
            last = min(position + tile_rows // group, end)
            first = int(first_split[token + position - start])  # later positions see nothing before it
            items.append((row, position, first, (last - 1) // SPLIT + 1, NO_STATE))
    return LaunchList(tile_rows, _ints(items, 5), _ints([], 3), 0)


def _ints(entries: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, width)


class TritonAttention:
    """The attention of one step: writes its keys and values to their blocks, then attends over the blocks."""

    def __init__(self, store: KvStore, views: Sequence[AttentionWindow], flat: FlatBatch) -> None:
        self._store = store
        self._views = views
        self._flat = flat
        self._device = store.blocks.device
        # of each cache group
        self._tables = torch.from_numpy(flat.table).to(self._device).unbind()
        self._slots = torch.from_numpy(flat.slot_mapping).to(self._device).unbind()
        rows = np.stack([flat.firsts, flat.starts, flat.ends], 1).astype(np.int32)
        self._rows = torch.from_numpy(rows).to(self._device)
        self._lists: dict[tuple[AttentionWindow, int], StepLists] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """-> [1, T, heads, value dim] in the query's dtype. Raises ValueError if the call does not fit the store."""
        self._check(call)
        self._write(call)
        query = call.query if call.query.stride(3) == 1 else call.query.contiguous()
        return self._attend(call._replace(query=query))

    def attend_rotated(self, call: AttentionCall, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``attend`` after the rotation of query and key by cos and sin [1, T, key dim]: x cos + rotate_half(x) sin."""
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
        """The layer's cache group."""
        return self._store.layout.group_of[call.layer]

    def _check(self, call: AttentionCall) -> None:
        spec, heads, tokens = self._store.layout.layers[call.layer], call.query.shape[1], len(self._flat.tokens)
        shapes = call.key.shape[1:], call.value.shape[1:]
        expected = (spec.kv_heads, tokens, spec.key_dim), (spec.kv_heads, tokens, spec.value_dim)
        if shapes != expected or heads % spec.kv_heads or call.query.shape[2:] != call.key.shape[2:]:
            raise ValueError(f"attention of layer {call.layer}: {tuple(call.query.shape)}, {shapes}, for {expected}")

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Over keys and values that are in their blocks; the query's last dimension is contiguous."""
        spec, heads = self._store.layout.layers[call.layer], call.query.shape[1]
        group, view = heads // spec.kv_heads, self._views[call.layer]
        if (view, group) not in self._lists:
            self._lists[view, group] = make_lists(self._flat, view, group, self._device)
        out = call.query.new_empty(1, call.query.shape[2], heads, spec.value_dim)
        visible, lists = self._lists[view, group]
        for part in lists:
            self._launch(call, out, part, visible)
        return out

    def _offsets(self, layer: int) -> tuple[int, int]:
        """Of a layer's keys and values in a block, in elements."""
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
            "VALUE_PAD": power_of_two(spec.value_dim, LEAST_ROWS),
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
            KEY_PAD=power_of_two(spec.key_dim, LEAST_ROWS),
            TILE=TILE,
            SPLIT=SPLIT,
            SOFTCAP=call.softcap is not None,
        )
        if len(part.merges):
            kernels.merge_splits[len(part.merges), spec.kv_heads](states, out, sinks, part.merges, **shape)
