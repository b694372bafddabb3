"""Keys and values of a layer in the memory of the blocks, as their format stores them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from decant.engine.kv_layout import KvLayout

_MOST = 127


class KvVectors(ABC):
    """Keys and values of a layer, written by slot and read by block."""

    @abstractmethod
    def put(self, at: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [T, kv heads, dim] to blocks [T] and their slots [T]."""

    @abstractmethod
    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values [n, block size, kv heads, dim] of blocks [n]."""


class PlainVectors(KvVectors):
    """Numbers as they are."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout, layer: int) -> None:
        self._both = _layer(memory, layout, layer)
        self._key, self._value = _split(self._both, layout, layer)
        self._layout, self._number = layout, layer

    def put(self, at: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        self._key[at] = key
        self._value[at] = value

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _split(torch.index_select(self._both, 0, blocks), self._layout, self._number)


class CodedVectors(KvVectors):
    """Whole numbers, and a scale for each slot and head. Reads are float32, in which the products are exact."""

    def __init__(self, memory: torch.Tensor, layout: KvLayout, layer: int) -> None:
        spec, size = layout.layers[layer], layout.block_size
        both = _layer(memory, layout, layer)
        self._codes = _split(both, layout, layer)
        scales = both[:, size * spec.slot_elements :].view(torch.bfloat16)
        self._scales = scales.unflatten(1, (2, size, spec.kv_heads)).unbind(1)

    def put(self, at: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> None:
        for part, codes, scales in zip((key, value), self._codes, self._scales, strict=True):
            codes[at], scales[at] = encode(part)

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (
            torch.index_select(codes, 0, blocks).float() * torch.index_select(scales, 0, blocks).float()[..., None]
            for codes, scales in zip(self._codes, self._scales, strict=True)
        )
        return key, value


def make_vectors(memory: torch.Tensor, layout: KvLayout, layer: int) -> KvVectors:
    """``memory`` [blocks, ``layout.block_elements``] has the blocks."""
    return (CodedVectors if layout.format.is_coded else PlainVectors)(memory, layout, layer)


def encode(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., dim] in int8 and scales [...] in bfloat16 of vectors [..., dim].

    A vector with a number that is not finite has a scale that is not, and so reads as NaN.
    """
    wide = vectors.float()
    scales = (wide.abs().amax(-1) / _MOST).bfloat16()
    divisors = scales.float()[..., None]
    codes = (wide / divisors).round_().clamp_(-_MOST, _MOST)
    return torch.where(divisors.isfinite() & (divisors != 0), codes, 0).to(torch.int8), scales


def _layer(memory: torch.Tensor, layout: KvLayout, layer: int) -> torch.Tensor:
    start = layout.offsets[layer]
    return memory[:, start : start + layout.block_size * layout.slot_elements[layer]]


def _split(both: torch.Tensor, layout: KvLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [n, block size, kv heads, dim] of a layer's keys and values in blocks [n, elements]."""
    spec, size = layout.layers[layer], layout.block_size
    border, end = size * spec.kv_heads * spec.key_dim, size * spec.slot_elements
    key = both[:, :border].unflatten(1, (size, spec.kv_heads, spec.key_dim))
    value = both[:, border:end].unflatten(1, (size, spec.kv_heads, spec.value_dim))
    return key, value
