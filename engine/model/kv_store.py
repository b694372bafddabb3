"""The bytes of the blocks, as one tensor; see ``kv_layout`` for how they lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cpu.huge_pages import noughts
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout

SETTLED = 256 << 20
"""Bytes of the blocks that are taken first, which are memory before anybody waits."""


class KvStore:
    """``num_blocks`` blocks of ``layout`` on one device. Knows no owners: that is the pool's half."""

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        if num_blocks < 1:
            raise InvalidConfig("kv_bytes", f"room for at least one block of {layout.block_bytes} bytes", num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        shape = num_blocks + 1, layout.block_elements
        on_cpu = device.type == "cpu"
        try:
            self._memory = noughts(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, torch.OutOfMemoryError):
            size = num_blocks * layout.block_bytes
            raise InvalidConfig("kv_bytes", f"what {device} can allocate beside the weights", size) from None
        self.blocks = self._memory[:num_blocks]
        self.blank = num_blocks  # a block of noughts that nobody owns or writes: what pads a block table
        self._host = self.blocks.view(torch.uint8).numpy() if on_cpu else None
        self._layers = [self._split(index) for index in range(len(layout.layers))]
        self._places = np.array([self._lies(index) for index in range(len(layout.layers))], np.int64)
        begin, apart = self._places.ctypes.data, self._places.strides[0]
        self.places = [begin + index * apart for index in range(len(layout.layers))]
        """Where it is written how each layer lies in memory; ``Cache`` in engine/cpu/kernels/attention.h."""

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.dtype

    def _lies(self, layer: int) -> tuple[int, ...]:
        spec, size, keys = self.layout.layers[layer], self.layout.block_size, self.layout.offsets[layer]
        values = keys + size * spec.kv_heads * spec.key_dim
        lies = self._memory.data_ptr(), self.layout.block_elements, size, keys, values
        return *lies, spec.kv_heads, spec.key_dim, spec.value_dim, self.num_blocks

    def _split(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer's part of all blocks, and its keys and values, as views of the store."""
        spec, size = self.layout.layers[layer], self.layout.block_size
        start = self.layout.offsets[layer]
        both = self._memory[:, start : start + size * spec.slot_elements]
        border = size * spec.kv_heads * spec.key_dim
        keys = both[:, :border].unflatten(1, (size, spec.kv_heads, spec.key_dim))
        values = both[:, border:].unflatten(1, (size, spec.kv_heads, spec.value_dim))
        return both, keys, values

    def settle(self) -> None:
        """Have memory for the first blocks now. It comes with the first write to a page, which takes milliseconds of a
        step where a virtual machine has to ask its host for one. Memory for all of them might never be used."""
        self.blocks[: SETTLED // self.block_bytes].zero_()

    def clear(self, blocks: npt.NDArray[np.int64]) -> None:
        """Zero blocks that are about to be filled in part: whatever lay there, nought times it must be nought."""
        if self._host is None:
            self.blocks.index_fill_(0, torch.from_numpy(blocks).to(self.blocks.device), 0)
        else:
            self._host[blocks] = 0  # eight times as fast as torch

    def put(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values [T, kv heads, dim] of T tokens to (blocks[T], slots[T])."""
        _, keys, values = self._layers[layer]
        keys[blocks, slots] = kv[0]
        values[blocks, slots] = kv[1]

    def gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, table [B, n] -> [B, n * block_size, kv heads, dim] each (a copy)."""
        both, _, _ = self._layers[layer]
        spec, size = self.layout.layers[layer], self.layout.block_size
        copied = torch.index_select(both, 0, table.flatten())
        border = size * spec.kv_heads * spec.key_dim
        batch, count = table.shape
        keys = copied[:, :border].reshape(batch, count * size, spec.kv_heads, spec.key_dim)
        values = copied[:, border:].reshape(batch, count * size, spec.kv_heads, spec.value_dim)
        return keys, values

    def read(self, block: int) -> memoryview:
        """The bytes of a block: an alias of the store on a CPU, a copy from elsewhere."""
        host = self.blocks[block].view(torch.uint8).cpu().numpy() if self._host is None else self._host[block]
        return host.data

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Replace the bytes of a block; while it copies, other threads run."""
        if self._host is None:
            self.blocks[block].copy_(torch.frombuffer(bytearray(data), dtype=self.blocks.dtype))
        else:
            np.copyto(self._host[block], np.frombuffer(data, dtype=np.uint8))
