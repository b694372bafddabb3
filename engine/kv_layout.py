"""Memory layout of a block: all layers contiguous, so that a handoff moves blocks, not layers.

block   [ layer 0: k | v ][ layer 1: k | v ] ...
k, v    [ slot 0 .. block_size - 1 ][ kv head ][ head dim ]
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


class Kind(enum.Enum):
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True)
class Window:
    """Keys that a query at position q sees: from ``first_visible(q)`` to q.

    FULL from 0; SLIDING the last ``size`` positions; CHUNKED from the start of q's chunk of ``size``.
    """

    kind: Kind = Kind.FULL
    size: int = 0

    def first_visible(self, position: int) -> int:
        """First visible key of a query; never decreases with the position."""
        match self.kind:
            case Kind.FULL:
                return 0
            case Kind.SLIDING:
                return max(0, position - self.size + 1)
            case Kind.CHUNKED:
                return position // self.size * self.size

    def blocks_at_once(self, count: int, block_size: int) -> int:
        """How many of its ``count`` blocks a sequence needs at the same time: those of a window, and the next one."""
        return count if self.kind is Kind.FULL else min(count, -(-self.size // block_size) + 2)


FULL = Window()


def widest(windows: Iterable[Window]) -> Window:
    """A window in which a query sees all that it sees in any of ``windows``."""
    kinds = {Window(window.kind, window.size) for window in windows}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds and all(window.kind is Kind.SLIDING for window in kinds):
        return max(kinds, key=lambda window: window.size)
    return FULL


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's keys and values; dimensions in elements."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def slot_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KvLayout:
    """All layers of a block of ``block_size`` tokens, ``itemsize`` bytes per element.

    The layers are one cache group: their blocks are freed together, once no later query sees them in ``window``.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    itemsize: int
    window: Window = FULL

    @cached_property
    def block_elements(self) -> int:
        return self.block_size * sum(layer.slot_elements for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.itemsize

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each layer's keys in a block, in elements."""
        sizes = (self.block_size * layer.slot_elements for layer in self.layers)
        return tuple(accumulate(sizes, initial=0))[:-1]
