from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda.kv_store import CudaKvStore
from decant.engine.kv_layout import KvLayout, LayerSpec

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_is_read_as_it_was_written_and_no_other_changes(dtype: torch.dtype) -> None:
    store = CudaKvStore(KvLayout((LayerSpec(2, 8, 8), LayerSpec(1, 4, 8)), 4, dtype.itemsize), 6, dtype, DEVICE)
    contents = [os.urandom(store.block_bytes) for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(store.write, range(6), contents))
        assert [bytes(read) for read in pool.map(store.read, range(6))] == contents
    before = store.read(2)
    store.write(2, memoryview(bytearray(store.block_bytes)))
    assert bytes(store.read(2)) == bytes(store.block_bytes)
    assert bytes(before) == contents[2], "what was read is a copy"
    assert bytes(store.read(3)) == contents[3]
