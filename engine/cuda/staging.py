"""Copies between host and device through pinned memory; asynchronous except on a CPU."""

from __future__ import annotations

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


class Staging:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Copy all arrays at once. They may change afterwards: torch keeps the pinned buffer until the copy ends."""
        offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)])
        packed = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        host = packed.numpy()
        for offset, array in zip(offsets.tolist(), arrays, strict=False):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        moved = packed.to(self.device, non_blocking=True)
        return [
            moved[offset : offset + array.nbytes].view(_dtype(array)).view(array.shape)
            for offset, array in zip(offsets.tolist(), arrays, strict=False)
        ]


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
