from __future__ import annotations

import torch

from decant.engine.cpu import fused_ops, linear, model_patches


def optimize(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Pack linear layers, then fuse: a fused operation takes packed linear layers, a fused layer both."""
    linear.pack(model)
    model_patches.patch_rotation(model, dtype)
    fused_ops.fuse(model, dtype)
    model_patches.fuse_with_lookahead(model, dtype)
