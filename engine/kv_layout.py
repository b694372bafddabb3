"""Memory layout of a block: its layers contiguous, so that a handoff moves blocks, not layers.

block   [ layer 0: k | v | scales ][ layer 1: k | v | scales ] ...
k, v    [ slot 0 .. block_size - 1 ][ kv head ][ head dim ]
scales  [ slot 0 .. block_size - 1 ][ kv head ] of k, then of v; only in a ``KvFormat`` that has them

A block has the layers of one cache group; blocks of all groups have the same size and share one pool::

    layers    F S S S F S S S          F: full attention, S: a sliding window
    groups    [F F] [S S] [S S] [S S]  a sequence has a row of blocks in each; behind the window S frees its own
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

BLOCK_SIZE = 16
"""Default tokens in a block."""
HOST_KV_BYTES = 1 << 30
"""Default KV memory of a device that computes in the host's memory, if the host has enough."""
HOST_KV_SHARE = 0.75
"""Of the host's memory beside the weights, at most, by default: the rest is for steps, prompts and caches."""

MAX_GROUPS = 8
"""Unless there are more kinds of windows. Each costs time for every sequence of a step."""


class WindowKind(enum.Enum):
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True)
class Window:
    """Keys that a query at position q sees: from ``first_visible(q)``, which never decreases with q, to q."""

    kind: WindowKind = WindowKind.FULL
    size: int = 0

    def first_visible(self, position: int) -> int:
        match self.kind:
            case WindowKind.FULL:
                return 0
            case WindowKind.SLIDING:
                return max(0, position - self.size + 1)
            case WindowKind.CHUNKED:
                return position // self.size * self.size

    def first_block(self, position: int, block_size: int) -> int:
        return self.first_visible(position) // block_size

    def blocks_at_once(self, count: int, block_size: int) -> int:
        return count if self.kind is WindowKind.FULL else min(count, self.max_blocks(block_size))

    def max_blocks(self, block_size: int) -> int:
        """Most blocks that a window spans, and the next one. Not for FULL."""
        return -(-self.size // block_size) + 2


FULL = Window()


def longest_sequence(windows: Sequence[Window], num_blocks: int, block_size: int, max_length: int) -> int:
    """Length in tokens of the longest sequence that ``num_blocks`` can hold, at most ``max_length``."""

    def needed(count: int) -> int:
        return sum(window.blocks_at_once(count, block_size) for window in windows)

    counts = range(-(-max_length // block_size) + 1)
    return min(max_length, (bisect_right(counts, num_blocks, key=needed) - 1) * block_size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV heads and dimensions of one layer, and the window of tokens that its attention sees."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window = FULL

    @property
    def slot_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a key or a value of one token and head is stored: its numbers, and a scale that they are multiplied with.

    itemsize     bytes of a number
    scale_bytes  bytes of the scale; 0: there is none
    """

    itemsize: int
    scale_bytes: int = 0

    @property
    def is_coded(self) -> bool:
        """Whether the numbers are codes, which only their scale makes keys and values."""
        return self.scale_bytes > 0

    def scale_elements(self, spec: LayerSpec) -> int:
        """Elements, each of ``itemsize`` bytes, that the scales of a slot take."""
        return 2 * spec.kv_heads * self.scale_bytes // self.itemsize


INT8_KV = KvFormat(itemsize=1, scale_bytes=2)
"""Whole numbers from -127 to 127. The scale, a bfloat16, makes 127 the largest number of the key or value."""

KvDtype = Literal["auto", "int8"]
"""``auto``: keys and values in the dtype of the model."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    window: Window
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KvLayout:
    """How the KV of all layers is stored in a block, and which layers share a block table.

    Computed once from the model. The store allocates by it, the pool takes its windows and the scheduler its block
    size; two workers exchange blocks only if theirs are equal.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    format: KvFormat

    @cached_property
    def slot_elements(self) -> tuple[int, ...]:
        """Elements of a token in each layer, scales included."""
        return tuple(spec.slot_elements + self.format.scale_elements(spec) for spec in self.layers)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups, widest window first."""
        return _group(self.layers, self.slot_elements)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        return tuple(group.window for group in self.groups)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        pairs = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(pairs[layer] for layer in range(len(self.layers)))

    @cached_property
    def block_elements(self) -> int:
        return self.block_size * max(_total(self.slot_elements, group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.format.itemsize

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each layer's keys in a block of its group, in elements."""
        offsets = dict[int, int]()
        for group in self.groups:
            sizes = (self.block_size * self.slot_elements[layer] for layer in group.layers)
            offsets.update(zip(group.layers, accumulate(sizes, initial=0), strict=False))
        return tuple(offsets[layer] for layer in range(len(self.layers)))


def _total(sizes: Sequence[int], layers: Sequence[int]) -> int:
    return sum(sizes[layer] for layer in layers)


def _group(specs: Sequence[LayerSpec], sizes: Sequence[int]) -> tuple[CacheGroup, ...]:
    """Groups of about equal size, with the least unused memory in blocks of the widest window, then of the next.

    ``sizes`` are the elements of a token in each layer.
    """
    kinds: dict[Window, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.window, []).append(layer)
    ordered = sorted(
        kinds.items(), key=lambda kind: (kind[0].kind is not WindowKind.FULL, -kind[0].size, kind[0].kind.value)
    )
    best: list[list[list[int]]] = []
    fewest: tuple[int, ...] = ()
    for size in sorted(set(_group_sizes(sizes, list(kinds.values()))), reverse=True):
        divided = [_divide(sizes, layers, size) for _, layers in ordered]
        if sum(map(len, divided)) > max(MAX_GROUPS, len(kinds)):
            break  # so do all smaller sizes
        unused = tuple(
            len(parts) * size - _total(sizes, layers) for parts, (_, layers) in zip(divided, ordered, strict=True)
        )
        if not best or unused < fewest:
            best, fewest = divided, unused
    return tuple(
        CacheGroup(window, tuple(part)) for (window, _), parts in zip(ordered, best, strict=True) for part in parts
    )


def _group_sizes(sizes: Sequence[int], kinds: Sequence[Sequence[int]]) -> Iterator[int]:
    least = max(sizes)
    for layers in kinds:
        for count in range(1, len(layers) + 1):
            parts = [layers[at : at + count] for at in range(0, len(layers), count)]
            size = max(_total(sizes, part) for part in parts)
            if size >= least:
                yield size


def _divide(sizes: Sequence[int], layers: Sequence[int], size: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for layer in layers:
        if _total(sizes, [*parts[-1], layer]) > size:
            parts.append([])
        parts[-1].append(layer)
    return parts
