"""Products of at most ``SKINNY_ROWS`` rows with the weights of linear layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from decant.engine.cuda import skinny_kernels as kernels
from decant.engine.cuda.dependent_launch import dependent_options

TILE_ROWS = 16
"""Most rows that ``multiply`` takes: the narrow side of a tile."""

SKINNY_ROWS = TILE_ROWS
"""Rows up to which these kernels are faster than torch's products; 0: never."""

LEAST_SIDE = 16
"""Of a tile that tensor cores multiply."""


class RowShape(NamedTuple):
    """How ``multiply_row`` is compiled. A gated product has half of the columns, each of two rows of weights."""

    columns: int = 8
    depth: int = 512
    num_warps: int = 4
    unroll: int = 2


class RowsShape(NamedTuple):
    """How ``multiply_rows`` is compiled."""

    columns: int = 16
    depth: int = 256
    num_warps: int = 2
    num_stages: int = 4


ROW, ROWS = RowShape(), RowsShape()


def is_skinny(linear: nn.Linear, rows: torch.Tensor) -> bool:
    """Whether ``multiply`` computes the layer: not with a bias, in float32, or if another forward computes it."""
    bias: torch.Tensor | None = linear.bias  # torch declares a tensor
    weight = linear.weight
    is_plain = bias is None and "forward" not in vars(linear) and weight.is_contiguous()
    return is_plain and len(rows) <= SKINNY_ROWS and weight.dtype != torch.float32 and rows.stride(1) == 1


def multiply(
    linear: nn.Linear, rows: torch.Tensor, addend: torch.Tensor | None = None, *, is_gated: bool = False
) -> torch.Tensor:
    """rows [n, depth] -> [n, columns], in place of ``addend`` and added to it if there is one.

    Gated: silu of the first half of the columns times the other half.
    """
    weight, count = linear.weight, len(rows)
    columns, depth = weight.shape[0] >> is_gated, weight.shape[1]
    out = rows.new_empty(count, columns) if addend is None else addend
    options = {"ADD": addend is not None, "GATED": is_gated, **dependent_options(rows.device)}
    if count == 1:
        tile = ROW.columns >> is_gated
        kernels.multiply_row[(-(-columns // tile),)](
            *(rows, weight, out, out, columns, depth),
            **options,
            EVEN=not columns % tile and not depth % ROW.depth,
            TILE_COLUMNS=tile,
            TILE_DEPTH=ROW.depth,
            UNROLL=ROW.unroll,
            num_warps=ROW.num_warps,
            num_stages=1,
        )
        return out
    tile = max(ROWS.columns >> is_gated, LEAST_SIDE)
    kernels.multiply_rows[(-(-columns // tile),)](
        *(rows, weight, out, out, count, columns, depth, rows.stride(0)),
        **options,
        EVEN=not columns % tile and not depth % ROWS.depth,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=tile,
        TILE_DEPTH=ROWS.depth,
        num_warps=ROWS.num_warps,
        num_stages=ROWS.num_stages,
    )
    return out
