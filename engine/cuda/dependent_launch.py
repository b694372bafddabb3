"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream still runs.

A kernel with a constant DEPENDENT begins with ``wait_for_kernel_before``, and until then only asks for weights to be in
the cache, which returns no value. So at the first read or write of each program all kernels before have completed:
the one before has, and could complete only after it had waited itself, or after the full wait of an ordinary launch.
This holds for buffers that an earlier kernel reads, too. An ordinary launch waits for all of a dependent one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ENABLED = True
"""Off only to measure or test what launches without it do."""

LEAST_CAPABILITY = (9, 0)

LINE = tl.constexpr(64)
"""Weights of 16 bits in a line of the cache."""


def dependent_options(device: torch.device) -> dict[str, Any]:
    """Options of the launch of a kernel with a constant DEPENDENT."""
    is_compiled = device.type == "cuda" and not triton.knobs.runtime.interpret
    if not ENABLED or not is_compiled or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def wait_for_kernel_before():
    """Wait until the kernel before has completed and its writes are visible, then let the next one start."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(weight, row, rows, depth, TILE_DEPTH: tl.constexpr):
    """Ask for the first TILE_DEPTH weights of ``row`` in weight [rows, depth], of 16 bits, to be in the L2 cache."""
    at = tl.minimum(tl.arange(0, max(TILE_DEPTH // LINE, 1)) * LINE, depth - 1)
    pointers = weight + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * depth + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
