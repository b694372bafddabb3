from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout
from decant.engine.model.kv_vectors import make_vectors
from decant.engine.plan import BlockMemory

PREFAULT_BYTES = 256 << 20


class KvStore:
    """The KV memory of a model: one tensor of blocks, and the views that attention kernels use.

    ``dtype`` is that of the keys and values that a step computes; ``layout.format`` says how blocks store them.

    A backend makes it once, when the model is loaded. The runner's attention writes and reads tokens by slot; handoffs
    copy whole blocks. Which sequence has a block is known to ``BlockPool`` alone.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        if num_blocks < 1:
            raise InvalidConfig(
                "kv_bytes", f"at least one block of {layout.block_bytes} bytes", num_blocks * layout.block_bytes
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        try:
            stored = torch.int8 if layout.format.is_coded else dtype
            self._memory = self._allocate((num_blocks + 1, layout.block_elements), stored, device)
        except (MemoryError, torch.OutOfMemoryError):
            size = num_blocks * layout.block_bytes
            raise InvalidConfig("kv_bytes", f"what {device} can allocate beside the weights", size) from None
        self.blocks_with_null = self._memory
        self.blocks = self._memory[:num_blocks]
        self.null_block = num_blocks  # a block of zeros: pads block tables, and is the pool's null block
        layers = range(len(layout.layers))
        self._layers = [make_vectors(self._memory, layout, index) for index in layers]
        self._descriptors = np.array([self._descriptor(index) for index in layers], np.int64)
        first, stride = self._descriptors.ctypes.data, self._descriptors.strides[0]
        self.layer_descriptors = [first + index * stride for index in layers]
        """Addresses of ``Cache`` in engine/cpu/kernels/attention.h."""

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def block_memory(self) -> BlockMemory:
        return BlockMemory(self.blocks.data_ptr(), self.blocks.nbytes, self.blocks.device.index)

    def _descriptor(self, layer: int) -> tuple[int, ...]:
        spec, size, keys = self.layout.layers[layer], self.layout.block_size, self.layout.offsets[layer]
        values, scales = keys + size * spec.kv_heads * spec.key_dim, keys + size * spec.slot_elements
        block = self._memory.data_ptr(), self.layout.block_elements, size, keys, values
        heads = spec.kv_heads, spec.key_dim, spec.value_dim
        form = self.layout.format
        further = (1, scales, scales + size * spec.kv_heads * form.scale_bytes) if form.is_coded else (0, 0, 0)
        return *block, *heads, self.num_blocks + 1, *further

    def prefault(self) -> None:
        """Create the pages of the first blocks: a page fault may take milliseconds."""
        self.blocks[: PREFAULT_BYTES // self.block_bytes].zero_()

    def clear(self, blocks: npt.NDArray[np.int64]) -> None:
        """Zero blocks that are filled in part: masked slots must hold finite numbers."""
        self.blocks.index_fill_(0, torch.from_numpy(blocks).to(self.blocks.device), 0)

    def put(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values [T, kv heads, dim] to (blocks[T], slots[T])."""
        self._layers[layer].put((blocks, slots), *kv)

    def gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy blocks of table [B, n] to keys and values [B, n * block_size, kv heads, dim]."""
        batch, count = table.shape
        keys, values = self._layers[layer].gather(table.flatten())
        tokens = (batch, count * self.layout.block_size)
        return keys.reshape(*tokens, *keys.shape[2:]), values.reshape(*tokens, *values.shape[2:])

    def read(self, block: int) -> memoryview:
        data: memoryview = self.blocks[block].view(torch.uint8).cpu().numpy().data
        return data

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self.blocks[block].copy_(torch.frombuffer(bytearray(data), dtype=self.blocks.dtype))
