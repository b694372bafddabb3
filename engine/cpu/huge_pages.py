"""Zeroed memory in huge pages, if the system has them. A page takes memory only once it is written."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from contextlib import suppress

import torch

ARENA = 1 << 26

_ALIGNED = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Tensor of zeros with its own mapping. Raises MemoryError."""
    return torch.frombuffer(_mapped(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class Arena:
    """Packs tensors, aligned to 64 bytes, into mappings that live as long as any tensor in them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        needed = math.prod(shape) * dtype.itemsize
        aligned = -(-needed // _ALIGNED) * _ALIGNED
        with self._lock:
            if aligned > len(self._free):
                self._free = torch.frombuffer(_mapped(max(aligned, ARENA)), dtype=torch.uint8)
            tensor, self._free = self._free[:needed], self._free[aligned:]
        return tensor.view(dtype).view(shape)


def _mapped(count: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    except OSError as error:
        raise MemoryError(f"{count} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def release_freed() -> None:
    """Return freed memory to the system: glibc keeps most of what tensors free. Other allocators: no effect."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
