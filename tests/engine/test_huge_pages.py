from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.cpu import kv_store as host_store
from decant.engine.cpu.huge_pages import ARENA, Arena, zeros
from decant.engine.cpu.kv_store import HostKvStore
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.model import kv_store

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))


def holds(tensor: torch.Tensor, number: int) -> bool:
    return bool((tensor == number).all())


@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=2, max_size=20))
def test_tensors_of_an_arena_are_zeros_and_do_not_overlap(batch: list[tuple[tuple[int, int], torch.dtype]]) -> None:
    arena = Arena()
    made = [arena.zeros(shape, dtype) for shape, dtype in batch]
    for tensor, (shape, dtype) in zip(made, batch, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % 64 == 0
        assert holds(tensor, 0)
    for number, tensor in enumerate(made, start=1):
        tensor.fill_(number)
    assert all(holds(tensor, number) for number, tensor in enumerate(made, start=1))


def test_a_tensor_outlives_its_arena_and_its_neighbours() -> None:
    arena = Arena()
    kept, gone = arena.zeros((8, 8), torch.float32).fill_(7), arena.zeros((8, 8), torch.float32)
    del arena, gone
    gc.collect()
    assert holds(kept, 7)


def test_a_tensor_larger_than_an_arena_is_mapped_by_itself() -> None:
    arena = Arena()
    large = arena.zeros((ARENA // 4 + 1,), torch.float32)
    assert holds(large[-1], 0)
    assert holds(arena.zeros((4,), torch.float32).fill_(1), 1)


def test_threads_get_memory_of_their_own() -> None:
    arena, made = Arena(), dict[int, list[torch.Tensor]]()

    def take(number: int) -> None:
        made[number] = [arena.zeros((100,), torch.float32).fill_(number) for _ in range(200)]

    threads = [Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(holds(tensor, number) for number, tensors in made.items() for tensor in tensors)
    assert sum(map(len, made.values())) == 800


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("decant.engine.cpu.huge_pages.mmap.mmap", Refusing)
    assert holds(zeros((3, 5), torch.float32), 0)


def resident(tensor: torch.Tensor) -> int:
    page = mmap.PAGESIZE
    begin = tensor.data_ptr() // page * page
    pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // page)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * page), found) == 0
    return page * sum(one & 1 for one in found)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is memory")
def test_the_first_blocks_are_memory_once_a_store_is_prefaulted_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 1 << 20
    monkeypatch.setattr(kv_store, "PREFAULT_BYTES", 32 * mib)
    layout = KvLayout((LayerSpec(4, 64, 64),), 16, KvFormat(4))
    store = HostKvStore(layout, 128 * mib // layout.block_bytes, torch.float32, torch.device("cpu"))
    assert resident(store.blocks) < 4 * mib
    store.prefault()
    assert 32 * mib <= resident(store.blocks) < 40 * mib
    assert holds(store.blocks, 0)


def test_a_cache_that_can_not_be_allocated_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(host_store, "zeros", allocate)
    layout = KvLayout(layers=(LayerSpec(1, 8, 8),), block_size=4, format=KvFormat(2))
    with pytest.raises(InvalidConfig, match="kv_bytes: what cpu can allocate beside the weights, got 384"):
        HostKvStore(layout, 3, torch.bfloat16, torch.device("cpu"))


def test_memory_that_the_kernel_refuses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        zeros((1 << 60,), torch.uint8)
