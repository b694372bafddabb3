"""A KV store that reads and writes blocks beside the steps, on streams of its own, through pinned memory.

    compute   [ step k          ][ step k+1        ][ step k+2        ]
    export      [ blocks of step k-1 ]
    import            [ blocks of an arrival ]

The streams need not wait for each other: blocks that are read are of a step whose result is known, and those that are
written are in no launched step (``StepQueue.call_when_unused``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch

from decant.engine.cuda.staging import Download
from decant.engine.kv_layout import KvLayout
from decant.engine.model.kv_store import KvStore


class CudaKvStore(KvStore):
    """KV store of a GPU. ``read`` returns a copy; while ``write`` waits for its copy, other threads run."""

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, num_blocks, dtype, device)
        self._device = device

    # Made when they are needed: a load makes several stores, and torch hands out the same 32 streams in turn.
    @cached_property
    def _export(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @cached_property
    def _import(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def read(self, block: int) -> memoryview:
        with _on(self._export):
            (copied,) = Download([self.blocks[block].view(torch.uint8)]).wait()
        data: memoryview = copied.data
        return data

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        packed = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._import is not None)
        packed.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        with _on(self._import):
            self.blocks[block].view(torch.uint8).copy_(packed, non_blocking=True)
        if self._import is not None:
            self._import.synchronize()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
