"""Choice of a device and its backend: the only module that imports ``cpu`` and ``cuda``, each when it is chosen."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from decant.engine.errors import InvalidConfig
from decant.engine.library_errors import translate_device_errors
from decant.engine.model.backend import Backend, CudaKernels, TorchBackend
from decant.engine.model.model import ModelConfig

MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that triton supports."""


@translate_device_errors()
def choose_backend(config: ModelConfig) -> Backend:
    """Return the backend of the configured device. Raises InvalidConfig, DeviceFailed."""
    return make_backend(choose_device(config.device), config.cuda_kernels, config.exact)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise InvalidConfig("device", "auto, cpu, cuda or cuda:N", name) from None
    count = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if device.type == "cuda" else None
        limit = "a device of this machine" + (f" within CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "")
        raise InvalidConfig("device", limit, name)
    return device


def make_backend(device: torch.device, cuda_kernels: CudaKernels = "auto", exact: bool = False) -> Backend:
    """Make the backend of a device. With ``exact``, its rows have the same bits in any batch. Raises InvalidConfig."""
    limit = triton_limit(device)
    if cuda_kernels == "triton" and limit is not None:
        raise InvalidConfig("cuda_kernels", limit, cuda_kernels)
    if cuda_kernels != "none" and limit is None:
        from decant.engine.cuda.backend import CudaBackend

        return CudaBackend(device, exact=exact)
    if device.type == "cpu":
        from decant.engine.cpu.backend import make_cpu_backend

        return make_cpu_backend()
    if exact:
        reason = "cuda_kernels none" if limit is None else limit
        raise InvalidConfig("exact", f"off on a CUDA device without triton ({reason})", exact)
    return TorchBackend(device)


def triton_limit(device: torch.device) -> str | None:
    """Return the values of ``cuda_kernels`` that a device leaves, if triton's kernels can't run on it."""
    if device.type != "cuda":
        return f"none on the device {device}"
    if find_spec("triton") is None:
        return "none without the package triton (extra cuda)"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"none on a GPU of compute capability {have}: triton needs {need}"
    return None
