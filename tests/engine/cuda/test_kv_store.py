from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda.kv_store import CudaKvStore
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from tests import gpu

DEVICE = torch.device(gpu.device_type())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_is_read_as_it_was_written_and_no_other_changes(dtype: torch.dtype) -> None:
    store = CudaKvStore(
        KvLayout((LayerSpec(2, 8, 8), LayerSpec(1, 4, 8)), 4, KvFormat(dtype.itemsize)), 6, dtype, DEVICE
    )
    contents = [os.urandom(store.block_bytes) for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(store.write, range(6), contents))
        assert [bytes(read) for read in pool.map(store.read, range(6))] == contents
    before = store.read(2)
    store.write(2, memoryview(bytearray(store.block_bytes)))
    assert bytes(store.read(2)) == bytes(store.block_bytes)
    assert bytes(before) == contents[2], "what was read is a copy"
    assert bytes(store.read(3)) == contents[3]


def test_a_store_that_moves_no_block_has_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load makes several; torch hands out the same 32 streams in turn, and two stores on one wait for each other."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(CudaKvStore, "_allocate", lambda self, shape, dtype, device: torch.zeros(shape, dtype=dtype))
    stores = [
        CudaKvStore(KvLayout((LayerSpec(1, 8, 8),), 4, KvFormat(2)), 2, torch.bfloat16, torch.device("cuda"))
        for _ in range(3)
    ]
    assert not made
    assert stores[0]._export is stores[0]._export
    assert len(made) == 1
