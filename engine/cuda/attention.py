"""Launch lists and launches of ``attention_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda import attention_kernels as kernels
from decant.engine.cuda import layer_kernels
from decant.engine.cuda.graph_sizes import most_items
from decant.engine.cuda.staging import Staging
from decant.engine.kv_layout import LayerSpec, WindowKind
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints

SPLIT = 512
"""Keys of a softmax state if rows are exact. Constant: no row's bits depend on the batch."""

TILE = 64
"""Keys per product."""

NARROW_TILE = 32
"""Keys per product of what needs more registers or shared memory. Divides SPLIT, as TILE does."""

CHUNK_ROWS = 64
"""Query rows of a tile of a sequence with several tokens."""

MIN_ROWS = 16

FEW_ROWS = 32
"""Rows whose programs all run at once."""

WIDE = 128
"""Heads wider than this have half as many keys in a tile."""

HOPPER = (9, 0)
"""Compute capability of GPUs that multiply tiles of 64 rows without holding them in registers."""

HEADS_TILE = 16
"""Query heads that a program rotates: with fewer, threads would read less than 16 bytes."""

NO_STATE = -1


class LaunchShape(NamedTuple):
    """How ``attend`` is compiled, beside the shapes of a model.

    ``is_chunk``: keys that all rows of a tile see need no mask; ``split``: keys of a state, 0 for all of an item.
    """

    tile_rows: int
    tile: int
    is_chunk: bool
    split: int
    num_warps: int = 4
    num_stages: int = 3


class LaunchList(NamedTuple):
    shape: LaunchShape
    items: torch.Tensor
    merges: torch.Tensor
    ended: torch.Tensor
    num_states: int


class StepLists(NamedTuple):
    visible: torch.Tensor
    is_windowed: bool
    lists: tuple[LaunchList, ...]


class Tables(NamedTuple):
    items: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    num_states: int = 0


def power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def token_shape(
    spec: LayerSpec,
    group: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    is_exact: bool = False,
    is_small: bool = False,
) -> LaunchShape:
    """Shape for single tokens, and for all tokens if rows are exact.

    A token then has the same bits alone and in a chunk: one compiled kernel computes both, while a GPU multiplies tiles
    of other sizes with other instructions. ``is_small``: a step of few rows.
    """
    is_wide = max(spec.key_dim, spec.value_dim) > WIDE or dtype == torch.float32 or group > MIN_ROWS
    tile = NARROW_TILE if is_wide or is_exact or block_size < TILE else TILE
    # With 5, loads of a tile overlap products of the one before. Many programs with 3 hide them better (on an H100).
    stages = 5 if (tile == NARROW_TILE or is_small) and dtype != torch.float32 else 3
    split = SPLIT if is_exact else 0
    return LaunchShape(power_of_two(group, MIN_ROWS), tile, is_chunk=False, split=split, num_stages=stages)


def chunk_shape(spec: LayerSpec, group: int, dtype: torch.dtype, capability: tuple[int, int]) -> LaunchShape:
    """Shape for tiles of several positions."""
    if dtype == torch.float32:  # multiplied without tensor cores, in registers
        return LaunchShape(power_of_two(group, MIN_ROWS), NARROW_TILE, is_chunk=True, split=0)
    is_wide = max(spec.key_dim, spec.value_dim) > WIDE
    tile = NARROW_TILE if is_wide or capability < HOPPER else TILE
    rows = power_of_two(group, CHUNK_ROWS)
    if is_wide:
        return LaunchShape(rows, tile, is_chunk=True, split=0, num_warps=8)
    return LaunchShape(rows, tile, is_chunk=True, split=0, num_stages=5 if capability >= HOPPER else 3)


def first_visible(flat: FlatBatch, view: AttentionWindow) -> npt.NDArray[np.int32]:
    visible: npt.NDArray[np.int32] = view.first(torch.from_numpy(flat.positions)).numpy().astype(np.int32)
    return visible


def single_tokens(flat: FlatBatch, rows: Ints, visible: npt.NDArray[np.int32], shape: LaunchShape, most: int) -> Tables:
    """Items of single tokens: as many as ``most`` allows, of equal ranges of keys."""
    tokens, positions = flat.firsts[rows], flat.starts[rows]
    unit = shape.split or shape.tile
    begins, ends = visible[tokens] // unit * unit, positions + 1
    keys = choose_range(ends - begins, unit, most)
    counts = -(-(ends - begins) // keys)
    is_split = counts > 1
    in_row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.repeat(begins, counts) + in_row * keys
    end = np.minimum(begin + keys, np.repeat(ends, counts))
    states_each = np.where(is_split, -(-(ends - begins) // (shape.split or keys)), 0)
    first_states = np.cumsum(states_each) - states_each
    state = np.repeat(first_states, counts) + in_row * (keys // (shape.split or keys))
    state = np.where(np.repeat(is_split, counts), state, NO_STATE)
    merge = np.repeat(np.cumsum(is_split) - 1, counts)
    items = np.stack([np.repeat(rows, counts), np.repeat(positions, counts), begin, end, state, merge], 1)
    merges = np.stack([first_states, states_each, counts], 1)[is_split]
    return Tables(items.astype(np.int32), merges.astype(np.int32), int(states_each.sum()))


def choose_range(lengths: Ints, unit: int, most: int) -> int:
    """Smallest ``unit`` * 2**n that splits the lengths into at most ``most`` ranges, or into one each."""
    keys = unit
    while int((-(-lengths // keys)).sum()) > most and keys < int(lengths.max()):
        keys *= 2
    return keys


def chunks(flat: FlatBatch, rows: Ints, visible: npt.NDArray[np.int32], shape: LaunchShape, group: int) -> Tables:
    """Items of sequences with several tokens, those with most keys first."""
    unit, tile = shape.split or shape.tile, shape.tile_rows // group
    starts, ends = flat.starts[rows], flat.ends[rows]
    counts = -(-(ends - starts) // tile)
    in_row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    position = np.repeat(starts, counts) + in_row * tile
    end = np.minimum(position + tile, np.repeat(ends, counts))
    # Later positions of a tile see nothing before what its first one sees.
    begin = visible[np.repeat(flat.firsts[rows] - starts, counts) + position] // unit * unit
    none = np.full(len(end), NO_STATE)
    items = np.stack([np.repeat(rows, counts), position, begin, end, none, none], 1)
    longest_first = np.argsort(begin - end, kind="stable")
    return Tables(items[longest_first].astype(np.int32), np.empty((0, 3), np.int32))


def row_spans(flat: FlatBatch) -> npt.NDArray[np.int32]:
    return np.stack([flat.firsts, flat.starts, flat.ends], 1).astype(np.int32)


class LayerKind(NamedTuple):
    """Layers that share launch lists."""

    view: AttentionWindow
    group: int
    tokens: LaunchShape
    chunks: LaunchShape


class TritonAttention:
    """Attention of a step: writes keys and values to their blocks, then attends.

    With ``is_exact`` a row has the same bits in any batch and chunk.
    """

    def __init__(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, is_exact: bool = False
    ) -> None:
        self._store = store
        self._layer_windows = layer_windows
        self._flat = flat
        self._is_exact = is_exact
        self._capability = _capability(store.blocks.device)
        self.staging = Staging(store.blocks.device)
        self._table, self._slot_mapping, self._rows = self.staging.upload(
            flat.table, flat.slot_mapping, row_spans(flat)
        )
        # of each cache group
        self._tables, self._slots = self._table.unbind(), self._slot_mapping.unbind()
        self._lists: dict[LayerKind, StepLists] = {}
        self._known_layers: dict[tuple[int, int], LayerKind] = {}

    def _layers(self, layer: int, group: int) -> LayerKind:
        known = self._known_layers.get((layer, group))
        if known is None:
            known = self._known_layers[layer, group] = self._find_layers(layer, group)
        return known

    def _find_layers(self, layer: int, group: int) -> LayerKind:
        spec, dtype, is_exact = self._store.layout.layers[layer], self._store.dtype, self._is_exact
        block_size, is_small = self._store.layout.block_size, len(self._flat.rows) <= FEW_ROWS
        token = token_shape(spec, group, dtype, block_size, is_exact=is_exact, is_small=is_small)
        chunk = token if is_exact else chunk_shape(spec, group, dtype, self._capability)
        return LayerKind(self._layer_windows[layer], group, token, chunk)

    def _make_lists(self, layers: LayerKind) -> StepLists:
        flat = self._flat
        visible = first_visible(flat, layers.view)
        is_single = flat.ends - flat.starts == 1
        tables: list[tuple[LaunchShape, Tables]] = []
        if is_single.any():
            rows = np.flatnonzero(is_single)
            singles = single_tokens(flat, rows, visible, layers.tokens, most_items(len(rows)))
            tables.append((layers.tokens, singles))
        if not is_single.all():
            rows = np.flatnonzero(~is_single)
            tables.append((layers.chunks, chunks(flat, rows, visible, layers.chunks, layers.group)))
        moved = self.staging.upload(visible, *(part for _, table in tables for part in (table.items, table.merges)))
        lists = tuple(
            LaunchList(
                shape, moved[1 + 2 * index], moved[2 + 2 * index], self._zeros(len(table.merges)), table.num_states
            )
            for index, (shape, table) in enumerate(tables)
        )
        return StepLists(moved[0], self._is_windowed(layers.view, visible), lists)

    def _zeros(self, num_merges: int) -> torch.Tensor:
        """Items that have ended, of each merge and KV head: the kernel leaves zeros."""
        shape = max(1, num_merges), max(spec.kv_heads for spec in self._store.layout.layers)
        return torch.zeros(shape, dtype=torch.int32, device=self._store.blocks.device)

    def _is_windowed(self, view: AttentionWindow, visible: npt.NDArray[np.int32]) -> bool:
        """Whether the kernel compares keys with ``visible``. Exact rows have one kernel, with and without a window."""
        return self._is_exact or view.kind is not WindowKind.FULL or bool(visible.any())

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._check(call)
        self._write(call)
        query = call.query if call.query.stride(3) == 1 else call.query.contiguous()
        return self._attend(call._replace(query=query))

    def attend_rotated(self, call: AttentionCall, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate query and key by cos and sin [1, T, key dim], x cos + rotate_half(x) sin, then attend."""
        self._check(call)
        store, spec = self._store, self._store.layout.layers[call.layer]
        query, key, value = (_heads_of_tokens(part) for part in (call.query, call.key, call.value))
        rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        layer_kernels.rotate_and_write[(len(query), -(-query.shape[1] // HEADS_TILE) + 1)](
            *(query, key, value, cos.contiguous(), sin.contiguous(), rotated),
            *(self._slots[self._group(call)], store.blocks, query.stride(0), key.stride(0), value.stride(0)),
            *(store.layout.block_elements, *self._offsets(call.layer)),
            BLOCK=store.layout.block_size,
            HEADS=query.shape[1],
            KV_HEADS=spec.kv_heads,
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            HALF_PAD=power_of_two(spec.key_dim // 2),
            VALUE_PAD=power_of_two(spec.value_dim),
            HEADS_TILE=HEADS_TILE,
            KV_HEADS_PAD=power_of_two(spec.kv_heads),
            CODED=store.layout.format.is_coded,
            num_warps=4,
            num_stages=3,
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
        if not call.scaling > 0.0:  # scores are scaled after their maximum is taken
            raise ValueError(f"attention of layer {call.layer}: scaling above 0, got {call.scaling}")

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend over keys and values that are in their blocks; the query's last dimension is contiguous."""
        spec, heads = self._store.layout.layers[call.layer], call.query.shape[1]
        layers = self._layers(call.layer, heads // spec.kv_heads)
        if layers not in self._lists:
            self._lists[layers] = self._make_lists(layers)
        out = call.query.new_empty(1, call.query.shape[2], heads, spec.value_dim)
        step = self._lists[layers]
        for part in step.lists:
            self._launch(call, out, part, step)
        return out

    def _states(self, part: LaunchList, spec: LayerSpec, group: int) -> torch.Tensor:
        """Softmax states [s, KV heads, group, 2 + value dim] of items that share a row."""
        shape = max(1, part.num_states), spec.kv_heads, group, 2 + spec.value_dim
        return torch.empty(shape, dtype=torch.float32, device=self._store.blocks.device)

    def _offsets(self, layer: int) -> tuple[int, int]:
        spec, keys = self._store.layout.layers[layer], self._store.layout.offsets[layer]
        return keys, keys + self._store.layout.block_size * spec.kv_heads * spec.key_dim

    def _write(self, call: AttentionCall) -> None:
        store, spec = self._store, self._store.layout.layers[call.layer]
        key, value = (part.to(store.dtype) for part in (call.key, call.value))
        key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (key, value))
        strides = (key.stride(2), key.stride(1), value.stride(2), value.stride(1))
        kernels.write_kv[(key.shape[2],)](
            *(key, value, self._slots[self._group(call)], store.blocks, *strides),
            *(store.layout.block_elements, *self._offsets(call.layer)),
            BLOCK=store.layout.block_size,
            KV_HEADS=spec.kv_heads,
            KV_HEADS_PAD=power_of_two(spec.kv_heads),
            KEY_DIM=spec.key_dim,
            VALUE_DIM=spec.value_dim,
            KEY_PAD=power_of_two(spec.key_dim),
            VALUE_PAD=power_of_two(spec.value_dim),
            CODED=store.layout.format.is_coded,
            num_warps=4,
            num_stages=3,
        )

    def _launch(self, call: AttentionCall, out: torch.Tensor, part: LaunchList, step: StepLists) -> None:
        store, spec = self._store, self._store.layout.layers[call.layer]
        group, shape, is_sunk = call.query.shape[1] // spec.kv_heads, part.shape, call.sinks is not None
        heads = {"KV_HEADS": spec.kv_heads, "VALUE_DIM": spec.value_dim, "SINKS": is_sunk}
        heads["VALUE_PAD"] = power_of_two(spec.value_dim, MIN_ROWS)
        sinks = out if call.sinks is None else call.sinks.contiguous()
        table, states = self._tables[self._group(call)], self._states(part, spec, group)
        kernels.attend[(len(part.items) * spec.kv_heads,)](
            *(call.query, out, store.blocks, sinks, step.visible, part.items, part.merges, part.ended),
            *(self._rows, table, states),
            *(call.query.stride(2), call.query.stride(1), store.layout.block_elements, *self._offsets(call.layer)),
            *(table.shape[1], group, float(call.scaling), float(call.softcap or 0.0)),
            **heads,
            BLOCK=store.layout.block_size,
            KEY_DIM=spec.key_dim,
            KEY_PAD=power_of_two(spec.key_dim, MIN_ROWS),
            TILE_ROWS=shape.tile_rows,
            TILE=shape.tile,
            SPLIT=shape.split,
            CHUNK=shape.is_chunk,
            WINDOW=step.is_windowed,
            SOFTCAP=call.softcap is not None,
            CODED=store.layout.format.is_coded,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _heads_of_tokens(part: torch.Tensor) -> torch.Tensor:
    """[T, heads, width] of [1, heads, T, width], without a copy if the heads of a token follow each other."""
    heads = part[0].transpose(0, 1)
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER
