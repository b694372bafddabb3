"""Linear layers whose weights stay quantized in a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import coded_kernels as kernels

DEEPEST, LEAST_DEPTH = 128, 16
"""Most inputs of a tile, and fewest: those that tensor cores multiply."""

WIDEST = 64
"""Most inputs of a tile of a weight whose inputs are not a multiple: all of its tiles are in memory."""


class TileShape(NamedTuple):
    rows: int
    columns: int
    num_warps: int
    num_stages: int


class RowShape(NamedTuple):
    """How ``multiply_row_codes`` is compiled, whose programs take ``depth`` bytes of each column at a time."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


# Those that were fastest on an H100 (bench.gpu.kernels --sections coded).

ROW, ROW_INT4 = RowShape(8, 512, 4, 3), RowShape(4, 512, 4, 1)

FEW, FEW_INT8, MANY = TileShape(16, 64, 4, 4), TileShape(16, 32, 4, 4), TileShape(64, 64, 4, 3)
"""Of up to ``FEW.rows`` rows, for int8 and for others, and of more rows."""

DENSE_ROWS = 256
"""Of at least so many rows, torch's product with dequantized columns is faster."""

DENSE_WEIGHTS = 1 << 25
"""Most that are dequantized at a time."""

DEQUANTIZE = RowShape(8, 256, 4, 1)

EXACT = TileShape(64, 32, 4, 3)
"""Of any number of rows: one compiled kernel, so that a row's bits are those of no other."""

_KINDS = {
    CodeKind.INT8: kernels.INT8,
    CodeKind.INT4: kernels.INT4,
    CodeKind.FP8: kernels.FP8,
    CodeKind.E2M1: kernels.E2M1,
}

_IN_PAIRS = (CodeKind.INT4, CodeKind.E2M1)
"""Two codes are in a byte."""

_SCALE_FACTORS = {CodeKind.FP8: 256.0, CodeKind.E2M1: 0.5}
"""The kernel's numbers of fp8 are that much smaller, and those of e2m1 doubled."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What products that are merged have in common."""

    kind: CodeKind
    inner: int
    group: int
    dtypes: tuple[torch.dtype, torch.dtype]
    has: tuple[bool, ...]

    @property
    def tile_depth(self) -> int:
        return tile_depth(self.inner, self.group)

    @property
    def kernel(self) -> tuple[object, ...]:
        """What the kernel is compiled for."""
        return self.kind, self.tile_depth, self.group == self.inner, self.dtypes, self.has


def tile_depth(inner: int, group: int) -> int:
    """Return the inputs of a tile, each of one group; 0 for groups that the kernel does not take."""
    if group >= inner:
        return max(math.gcd(inner, DEEPEST), WIDEST)
    depth = math.gcd(group, DEEPEST)
    return depth if depth >= LEAST_DEPTH else 0


class CodedProduct(nn.Module):
    """``nn.Linear`` whose weight is codes, with copies of them on ``device``.

    ``tile_depth`` must take its groups. With ``is_exact`` a row has the same bits in any batch.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    mins: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self, codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device, *, is_exact: bool
    ) -> None:
        super().__init__()
        self.dtype, self.is_exact = dtype, is_exact
        self.out_features, self.in_features = codes.shape
        scales = codes.scales * _SCALE_FACTORS.get(codes.kind, 1.0)
        halves = scales.half()
        scales = halves if torch.equal(halves.float(), scales) else scales
        parts = (scales, codes.zeros, codes.mins, bias, codes.order)
        self.layout = _Layout(
            codes.kind,
            self.in_features,
            min(codes.group, self.in_features),
            (dtype, scales.dtype),
            tuple(part is not None for part in parts),
        )
        self.register_buffer("codes", _packed(codes.codes.to(device), codes.kind, self.layout.tile_depth))
        for name, part in zip(("scales", "zeros", "mins", "bias", "order"), parts, strict=True):
            copied = None if part is None else part.detach().to(device, copy=True).contiguous()
            self.register_buffer(name, copied)

    @property
    def kernel(self) -> tuple[object, ...]:
        return self.layout.kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype:
            return self.forward(x.to(self.dtype)).to(x.dtype)
        rows = x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows):
            self._launch(rows, out)
        return out.view(*x.shape[:-1], self.out_features)

    def _launch(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if self.is_exact:
            self._multiply(rows, out, EXACT)
        elif len(rows) == 1:
            self._multiply_row(rows, out)
        elif len(rows) < DENSE_ROWS:
            few = FEW_INT8 if self.layout.kind is CodeKind.INT8 else FEW
            self._multiply(rows, out, few if len(rows) <= few.rows else MANY)
        else:
            self._multiply_dense(rows, out)

    def _parts(self, first: int = 0, stop: int | None = None) -> tuple[torch.Tensor, ...]:
        """Codes, scales, zero points and minima of some columns; what a weight lacks is its scales, and not read."""
        scales = self.scales[:, first:stop]
        others = (scales if part is None else part[:, first:stop] for part in (self.zeros, self.mins))
        return self.codes[first:stop], scales, *others

    @property
    def kernel_options(self) -> dict[str, Any]:
        """Constants of each kernel that reads the codes."""
        return {
            "KIND": _KINDS[self.layout.kind].value,
            "ZEROS": self.zeros is not None,
            "MINS": self.mins is not None,
            "TILE_DEPTH": self.layout.tile_depth,
        }

    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, shape: TileShape) -> None:
        count, columns = len(rows), self.out_features
        kernels.multiply_codes[(-(-count // shape.rows) * -(-columns // shape.columns),)](
            *(rows, *self._parts(), self.scales if self.bias is None else self.bias, out),
            *(count, columns, self.in_features, rows.stride(0)),
            *(self.codes.stride(0), self.layout.group, self.scales.stride(0)),
            **self.kernel_options,
            BIAS=self.bias is not None,
            WHOLE=len(self.scales) == 1 and self.mins is None,
            TILE_ROWS=shape.rows,
            TILE_COLUMNS=shape.columns,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    def _multiply_row(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        kind = self.layout.kind
        shape, has_offset = ROW_INT4 if kind in _IN_PAIRS else ROW, kind is CodeKind.INT4 or self.mins is not None
        kernels.multiply_row_codes[(-(-self.out_features // shape.columns),)](
            *(rows, *self._parts(), self.scales if self.bias is None else self.bias, out),
            *(self.out_features, self.in_features, self.codes.stride(0), self.layout.group, self.scales.stride(0)),
            **self.kernel_options,
            BIAS=self.bias is not None,
            WHOLE=len(self.scales) == 1 and not has_offset,
            TILE_COLUMNS=shape.columns,
            TILES=max(1, shape.depth // self.layout.tile_depth),
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
            num_stages=1,
        )

    def _multiply_dense(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        columns, step = self.out_features, max(1, DENSE_WEIGHTS // self.in_features // 64) * 64
        for first in range(0, columns, step):
            part = slice(first, min(first + step, columns))
            weight = self.dequantized(part.start, part.stop)
            if self.bias is None:
                torch.mm(rows, weight.t(), out=out[:, part])
            else:
                torch.addmm(self.bias[part], rows, weight.t(), out=out[:, part])

    def dequantized(self, first: int, stop: int) -> torch.Tensor:
        """Weights [stop - first, in], as rounded to the dtype of the rows."""
        weight = self.scales.new_empty(stop - first, self.in_features, dtype=self.dtype)
        tiles, row_bytes = max(1, DEQUANTIZE.depth // self.layout.tile_depth), self.codes.stride(0)
        grid = -(-len(weight) // DEQUANTIZE.columns), -(-row_bytes // (tiles * self.layout.tile_depth))
        kernels.dequantize[grid](
            *(*self._parts(first, stop), weight, *weight.shape, row_bytes, self.layout.group, self.scales.stride(0)),
            **self.kernel_options,
            TILE_COLUMNS=DEQUANTIZE.columns,
            TILES=tiles,
            num_warps=DEQUANTIZE.num_warps,
            num_stages=DEQUANTIZE.num_stages,
        )
        return weight


def _packed(codes: torch.Tensor, kind: CodeKind, depth: int) -> torch.Tensor:
    """Return a copy of codes [out, in] as bytes [out, whole tiles], two tiles of int4 or e2m1 in one."""
    outputs, inner = codes.shape
    whole = 2 * depth if kind in _IN_PAIRS else depth
    padded = codes.new_zeros(outputs, -(-inner // whole) * whole, dtype=torch.uint8)
    padded[:, :inner] = codes.view(torch.uint8)
    if kind not in _IN_PAIRS:
        return padded.view(torch.int8) if kind is CodeKind.INT8 else padded
    pairs = padded.view(outputs, -1, 2, depth)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def merge_products(products: Sequence[CodedProduct]) -> CodedProduct:
    """Return one product for all; their codes become parts of its. Raises LookupError."""
    first = products[0]
    orders = [product.order for product in products if product.order is not None]
    if len({product.layout for product in products}) > 1 or any(not torch.equal(each, orders[0]) for each in orders):
        raise LookupError("products of different kinds")
    columns = [product.out_features for product in products]
    merged = copy(first)
    merged._buffers, merged.out_features = first._buffers.copy(), sum(columns)
    for name, dim in (("codes", 0), ("scales", 1), ("zeros", 1), ("mins", 1), ("bias", 0)):
        owned = [getattr(product, name) for product in products]
        if owned[0] is None:
            continue
        together = torch.cat(owned, dim)
        setattr(merged, name, together)
        for product, part in zip(products, together.split(columns, dim), strict=True):
            setattr(product, name, part)
    return merged
