"""Linear layers whose weights stay quantized in a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import coded_kernels as kernels

DEEPEST, LEAST_DEPTH = 64, 16
"""Most inputs of a tile, and fewest: those that tensor cores multiply."""


class TileShape(NamedTuple):
    rows: int
    columns: int
    num_warps: int
    num_stages: int


FEW, MANY = TileShape(16, 16, 2, 4), TileShape(64, 64, 4, 3)
"""Of up to ``FEW.rows`` rows, and of more."""

EXACT = TileShape(64, 32, 4, 3)
"""Of any number of rows: one compiled kernel, so that a row's bits are those of no other."""

TRIAL_ROWS, TRIAL_COLUMNS = 3, 64

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest difference in a trial, relative to the norm of torch's result, whose weights have the rows' dtype."""

_KINDS = {CodeKind.INT8: kernels.INT8, CodeKind.INT4: kernels.INT4, CodeKind.FP8: kernels.FP8}

_FP8_FACTOR = 256
"""The kernel's fp8 numbers are that much smaller."""


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
    depth = DEEPEST if group >= inner else math.gcd(group, DEEPEST)
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
        scales = codes.scales * _FP8_FACTOR if codes.kind is CodeKind.FP8 else codes.scales
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
        count, columns, scales = len(rows), self.out_features, self.scales
        shape = EXACT if self.is_exact else FEW if count <= FEW.rows else MANY
        zeros, mins, bias = (scales if part is None else part for part in (self.zeros, self.mins, self.bias))
        kernels.multiply_codes[(-(-count // shape.rows) * -(-columns // shape.columns),)](
            *(rows, self.codes, scales, zeros, mins, bias, out, count, columns, self.in_features, rows.stride(0)),
            *(self.codes.stride(0), self.layout.group, scales.stride(0)),
            KIND=_KINDS[self.layout.kind].value,
            ZEROS=self.zeros is not None,
            MINS=self.mins is not None,
            BIAS=self.bias is not None,
            WHOLE=len(scales) == 1 and self.mins is None,
            TILE_ROWS=shape.rows,
            TILE_COLUMNS=shape.columns,
            TILE_DEPTH=self.layout.tile_depth,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _packed(codes: torch.Tensor, kind: CodeKind, depth: int) -> torch.Tensor:
    """Return a copy of codes [out, in] as bytes [out, whole tiles], two tiles of int4 in one."""
    outputs, inner = codes.shape
    whole = 2 * depth if kind is CodeKind.INT4 else depth
    padded = codes.new_zeros(outputs, -(-inner // whole) * whole, dtype=torch.uint8)
    padded[:, :inner] = codes.view(torch.uint8)
    if kind is not CodeKind.INT4:
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


TryOne = Callable[[Callable[[], str | None]], str | None]
"""Runs a trial that returns or raises why it failed, and returns that."""


@torch.inference_mode()
def replace_coded(
    model: nn.Module, dtype: torch.dtype, device: torch.device, tried: TryOne, *, is_exact: bool
) -> str | None:
    """Give a model products for its quantized weights; a weight whose groups the kernel does not take is dequantized.

    ``tried`` runs a trial of each kind of weight. If one fails, all are dequantized, and the reason is returned.
    """
    places = [(name, module) for name, module in model.named_modules() if isinstance(module, CodedLinear)]
    seen = set[object]()
    for name, module in places:
        codes = module.source.codes()
        if not tile_depth(codes.shape[1], codes.group):
            _put(model, name, _widened(module, device))
            continue
        product = CodedProduct(codes, module.bias, dtype, device, is_exact=is_exact)
        kernel = product.layout.kernel
        if kernel not in seen and (reason := tried(partial(try_product, product, codes))):
            for each, coded in places:
                _put(model, each, _widened(coded, device))
            return reason
        seen.add(kernel)
        _put(model, name, product)
    return None


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _widened(module: CodedLinear, device: torch.device) -> nn.Linear:
    outputs, inner = module.source.shape
    linear = nn.Linear(inner, outputs, bias=module.bias is not None, device="meta")
    parts = {"weight": module.source[:].to(device, module.dtype), "bias": module.bias}
    for name, part in parts.items():
        setattr(linear, name, None if part is None else nn.Parameter(part, requires_grad=False))
    return linear


def try_product(product: CodedProduct, codes: Codes) -> str | None:
    """Compare the first outputs of some rows with those of torch, for few rows and for many."""
    device, dtype, count = product.codes.device, product.dtype, min(TRIAL_COLUMNS, product.out_features)
    rows = torch.randn(TRIAL_ROWS, product.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    weight = codes.dequantize(dtype, 0, count).to(device)
    expected = nn.functional.linear(rows, weight, None if product.bias is None else product.bias[:count]).float()
    for repeats in (1, -(-(FEW.rows + 1) // TRIAL_ROWS)):
        actual = product(rows.repeat(repeats, 1))[:TRIAL_ROWS, :count].float()
        difference = float((actual - expected).norm() / expected.norm())
        if not difference < TOLERANCE[dtype]:
            return f"{product.layout.kind.name.lower()} weights differ from torch's by {difference:.2g}"
    return None
