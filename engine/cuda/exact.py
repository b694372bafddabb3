"""The option ``exact``: every operation of a model gives a row the same bits in any batch.

Replaces linear layers and norms, whose sums torch orders by the shape of the batch. A model with parameters in
other modules, except embeddings, is refused: their sums are unknown. Products of quantized weights are exact already.
"""

from __future__ import annotations

import torch
from torch import nn

from decant.engine.cuda import gemm_kernels as kernels
from decant.engine.cuda.fused_layer import NormForward, fused_layers, try_norm
from decant.engine.errors import InvalidConfig

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 64, 64
"""A row's bits depend on ``TILE_DEPTH``; all are fixed so that no compiled kernel differs."""

SPLIT = 2048
"""Inputs of a range of the sum. A row's bits depend on it."""

WARPS, STAGES = 4, 4

PROGRAMS = 4
"""Programs for each processor, more than its registers hold."""

ADD_TILE = 1024


class ExactLinear:
    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._weight = linear.weight.detach().contiguous()
        self._bias = None if linear.bias is None else linear.bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        columns, depth = self._weight.shape
        rows = x.reshape(-1, depth)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), columns)
        if len(rows):
            self._launch(rows, out)
        return out.view(*x.shape[:-1], columns)

    def _launch(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        count, (columns, depth), processors = len(rows), self._weight.shape, _processors(rows.device)
        tiles = -(-count // TILE_ROWS) * -(-columns // TILE_COLUMNS)
        ranges = -(-depth // SPLIT)
        splits = ranges if tiles <= processors else 1
        parts = out if splits == 1 else rows.new_empty(splits, count, columns, dtype=torch.float32)
        programs = min(tiles * splits, PROGRAMS * processors)
        bias = out if self._bias is None else self._bias
        kernels.linear[(programs,)](
            *(rows, self._weight, bias, out, parts, count, columns, depth, rows.stride(0), programs, splits),
            HAS_BIAS=self._bias is not None,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            TILE_DEPTH=TILE_DEPTH,
            SPLIT=SPLIT,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        if splits > 1:
            kernels.add_splits[(-(-out.numel() // ADD_TILE),)](
                *(parts, bias, out, out.numel(), columns, splits),
                HAS_BIAS=self._bias is not None,
                TILE=ADD_TILE,
                num_warps=4,
                num_stages=3,
            )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@torch.inference_mode()
def make_exact(model: nn.Module, dtype: torch.dtype) -> None:
    replaced: list[tuple[nn.Module, ExactLinear | NormForward]] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or type(module) is nn.Embedding:
            continue
        if type(module) is nn.Linear:
            replaced.append((module, ExactLinear(module)))
            continue
        exact = try_norm(module, dtype)
        if exact is None:
            raise InvalidConfig("exact", "off for a model with other parts than linear layers and RMS norms", name)
        replaced.append((module, exact))
    merged = [linear for _, layer in fused_layers(model) for linear in layer.merged]
    replaced += [(linear, ExactLinear(linear)) for linear in merged if isinstance(linear, nn.Linear)]
    for module, forward in replaced:
        module.forward = forward
