"""Memory layout of a block: all layers contiguous, so that a handoff moves blocks, not layers.

block   [ layer 0: k | v ][ layer 1: k | v ] ...
k, v    [ slot 0 .. block_size - 1 ][ kv head ][ head dim ]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


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
    """All layers of a block of ``block_size`` tokens, ``itemsize`` bytes per element."""

    layers: tuple[LayerSpec, ...]
    block_size: int
    itemsize: int

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
