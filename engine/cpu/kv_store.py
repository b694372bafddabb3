from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cpu.huge_pages import zeros
from decant.engine.kv_layout import KvLayout
from decant.engine.model.kv_store import KvStore


class HostKvStore(KvStore):
    """KV store in huge pages. ``read`` returns an alias of the store; while ``write`` copies, other threads run."""

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, num_blocks, dtype, device)
        self._host = self.blocks.view(torch.uint8).numpy()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return zeros(shape, dtype)

    def clear(self, blocks: npt.NDArray[np.int64]) -> None:
        self._host[blocks] = 0  # eight times as fast as torch

    def read(self, block: int) -> memoryview:
        data: memoryview = self._host[block].data
        return data

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        np.copyto(self._host[block], np.frombuffer(data, dtype=np.uint8))
