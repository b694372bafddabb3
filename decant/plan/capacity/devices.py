"""Memory and the rates that bound a step.

Sources, read November 2026. Memory is the capacity of the data sheet, in GiB. Rates of products are dense bfloat16 with
float32 accumulation, without sparsity.

    l4                NVIDIA L4 data sheet: 24 GB, 300 GB/s, 242 TFLOP/s with sparsity
    l40s              NVIDIA L40S data sheet: 48 GB, 864 GB/s, 362 TFLOP/s
    a100-40gb, -80gb  NVIDIA A100 data sheet, SXM: 1,555 and 2,039 GB/s, 312 TFLOP/s
    h100              NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, 1,979 TFLOP/s with sparsity
    h200              NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, 1,979 TFLOP/s with sparsity
    mi300x            AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1,307 TFLOP/s
    rtx-4090          NVIDIA Ada architecture white paper: 24 GB, 1,008 GB/s, 165 TFLOP/s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """Memory in bytes, and peak rates: bytes/s read and bfloat16 operations/s."""

    name: str
    memory: int
    bandwidth: float
    flops: float


PRESETS: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("l4", 24 * _GIB, 300e9, 121e12),
            Device("l40s", 48 * _GIB, 864e9, 362e12),
            Device("a100-40gb", 40 * _GIB, 1555e9, 312e12),
            Device("a100-80gb", 80 * _GIB, 2039e9, 312e12),
            Device("h100", 80 * _GIB, 3350e9, 989e12),
            Device("h200", 141 * _GIB, 4800e9, 989e12),
            Device("mi300x", 192 * _GIB, 5300e9, 1307e12),
            Device("rtx-4090", 24 * _GIB, 1008e9, 165e12),
        )
    }
)
