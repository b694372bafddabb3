from __future__ import annotations

from types import ModuleType

import torch

from decant.engine.cpu import fused_ops, linear, model_patches


def optimize(model: torch.nn.Module, dtype: torch.dtype, kernels: ModuleType) -> None:
    """Pack linear layers, then fuse: a fused operation takes packed linear layers, a fused layer both."""
    linear.pack(model, kernels)
    model_patches.patch_rotation(model, dtype, kernels)
    fused_ops.fuse(model, dtype, kernels)
    model_patches.fuse_with_lookahead(model, dtype, kernels)
