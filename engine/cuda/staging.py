"""Copies between host and device through pinned memory; asynchronous except on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]

_ALIGN = 16


class Download:
    """Copy of tensors to the host, as kernels launched before leave them; later ones may overwrite the tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        self._host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        if is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Array]:
        """Wait for the copy; no other call of a step waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return [host.numpy() for host in self._host]


class FixedBuffer:
    """Arrays at fixed addresses of a device, which one copy fills."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._memory = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self._places: list[tuple[int, int]] = []  # first byte and number of bytes of each array
        self._end = 0

    def place(self, array: Array) -> torch.Tensor:
        """Reserve memory of the array's shape, with its numbers. Raises RuntimeError if the buffer is full."""
        begin, end = self._end, self._end + _aligned(array.nbytes)
        if end > len(self._memory):
            raise RuntimeError(f"{len(self._memory):,} bytes of fixed arrays, {end:,} needed")
        self._places.append((begin, array.nbytes))
        self._end = end
        part = _view(self._memory, begin, array)
        part.copy_(torch.from_numpy(array))
        return part

    def fill(self, arrays: Sequence[Array], others: Sequence[Array] = ()) -> list[torch.Tensor]:
        """Copy an array for each that was placed, of its size, and behind them ``others``, which it returns."""
        begins, end = [], self._end
        for array in others:
            begins.append(end)
            end += _aligned(array.nbytes)
        packed = torch.empty(end, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        host = packed.numpy()
        for (begin, size), array in zip(self._places, arrays, strict=True):
            host[begin : begin + size] = _bytes(array)
        for begin, array in zip(begins, others, strict=True):
            host[begin : begin + array.nbytes] = _bytes(array)
        self._memory[:end].copy_(packed, non_blocking=True)
        return [_view(self._memory, begin, array) for begin, array in zip(begins, others, strict=True)]


class Staging:
    """Copies the small arrays of a step to the GPU, through pinned memory, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Copy all arrays at once. They may change afterwards: torch keeps the pinned buffer until the copy ends."""
        begins, end = [], 0
        for array in arrays:
            begins.append(end)
            end += _aligned(array.nbytes)
        packed = torch.empty(end, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        host = packed.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            host[begin : begin + array.nbytes] = _bytes(array)
        moved = packed.to(self.device, non_blocking=True)
        return [_view(moved, begin, array) for begin, array in zip(begins, arrays, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _view(memory: torch.Tensor, begin: int, array: Array) -> torch.Tensor:
    return memory[begin : begin + array.nbytes].view(_dtype(array.dtype)).view(array.shape)


@functools.cache
def _dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
