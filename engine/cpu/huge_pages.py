"""Memory of noughts that lies in large pages, where the kernel gives them.

What a step reads is far more than a core keeps the addresses of in pages of 4 KiB. A page is memory only once
something was written there.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from contextlib import suppress

import torch

ARENA = 1 << 26
"""Bytes that are mapped at once for tensors much smaller than a large page is."""

_ALIGNED = 64


def noughts(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own mapping, on the CPU."""
    return torch.frombuffer(_mapped(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class Arena:
    """Tensors side by side in mappings that live as long as any tensor in them does. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def noughts(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, aligned to 64 bytes."""
        needed = math.prod(shape) * dtype.itemsize
        taken = -(-needed // _ALIGNED) * _ALIGNED
        with self._lock:
            if taken > len(self._free):
                self._free = torch.frombuffer(_mapped(max(taken, ARENA)), dtype=torch.uint8)
            found, self._free = self._free[:needed], self._free[taken:]
        return found.view(dtype).view(shape)


def _mapped(count: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    except OSError as error:
        raise MemoryError(f"{count} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def release_freed() -> None:
    """Have the C library's allocator give freed memory back to the system; it keeps most of what tensors free.

    Does nothing where the C library is not glibc.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
