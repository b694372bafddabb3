"""Where the tests of the CUDA kernels compute."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def is_present() -> bool:
    """Whether the machine has an NVIDIA GPU. Sandboxes show its device without the driver's version."""
    places = ("proc/driver/nvidia/version", "dev/nvidia[0-9]*", "dev/dxg")
    return any(next(ROOT.glob(place), None) is not None for place in places)


def device_type() -> str:
    """Type of the torch device: the CPU in triton's interpreter, else CUDA, which must be there."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    import torch

    assert torch.cuda.is_available(), "no GPU that torch can use: set TRITON_INTERPRET=1 for triton's interpreter"
    return "cuda"
