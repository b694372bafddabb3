"""A mixture's experts whose weights stay quantized in a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from decant.engine.checkpoint.expert_layers import TOLERANCE, ExpertLayers, parts_of
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import expert_kernels as kernels
from decant.engine.cuda.coded_product import FEW, FEW_INT8, CodedProduct, TileShape, tile_depth

MANY, EXACT = TileShape(32, 64, 4, 4), TileShape(32, 32, 4, 3)
"""Of more pairs than ``FEW.rows`` for each expert in the mean, and of any number; their sums stay in registers."""

PLACE_TILE, ADD_TILE = 1024, 1024

TRIAL_ROWS = 3


class Pairs(NamedTuple):
    """Pairs of a token and an expert as they were ``chosen`` [pairs], and by expert: see ``expert_kernels``."""

    chosen: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor


def place(chosen: torch.Tensor, experts: int) -> Pairs:
    """Find the pairs of each expert, on the device."""
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    places = torch.empty(len(chosen), dtype=torch.int32, device=chosen.device)
    kernels.place_pairs[(experts,)](chosen, starts, places, len(chosen), TILE=PLACE_TILE, num_warps=4, num_stages=3)
    return Pairs(chosen, starts, places)


class ExpertProducts(nn.Module):
    """Products of rows with the quantized weights of their experts, of which each has the same layout."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    mins: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, products: Sequence[CodedProduct]) -> None:
        super().__init__()
        first = products[0]
        self.layout, self.options, self.dtype = first.layout, first.kernel_options, first.dtype
        self.out_features, self.in_features, self.is_exact = first.out_features, first.in_features, first.is_exact
        for name in ("codes", "scales", "zeros", "mins", "bias", "order"):
            parts = [getattr(product, name) for product in products]
            self.register_buffer(name, None if parts[0] is None else torch.stack(parts))

    def forward(self, rows: torch.Tensor, pairs: Pairs, top_k: int) -> torch.Tensor:
        """Return [pairs, out] of rows [tokens, in], of which each has ``top_k`` pairs."""
        rows, count = rows.to(self.dtype), len(pairs.chosen)
        if self.order is not None:
            rows = rows.repeat_interleave(top_k, 0).gather(1, self.order[pairs.chosen])
            top_k = 1
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = rows.new_empty(count, self.out_features)
        experts, groups, columns = self.scales.shape
        few = FEW_INT8 if self.layout.kind is CodeKind.INT8 else FEW
        shape = EXACT if self.is_exact else few if count <= experts * few.rows else MANY
        zeros, mins, bias = (self.scales if each is None else each for each in (self.zeros, self.mins, self.bias))
        kernels.multiply_expert_codes[(experts * -(-columns // shape.columns),)](
            *(rows, self.codes, self.scales, zeros, mins, bias, out, pairs.starts, pairs.places),
            *(columns, self.in_features, rows.stride(0), self.codes.stride(1), self.layout.group, groups),
            **self.options,
            TOP_K=top_k,
            BIAS=self.bias is not None,
            WHOLE=groups == 1 and self.mins is None,
            TILE_ROWS=shape.rows,
            TILE_COLUMNS=shape.columns,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        return out


class GroupedExperts(nn.Module):
    """``ExpertLayers`` whose products take the rows of all experts in one launch, as CUDA graphs need it."""

    def __init__(self, layers: ExpertLayers, up: ExpertProducts, down: ExpertProducts) -> None:
        super().__init__()
        self._gate, self._post = layers.gate, layers.post
        self._up, self._down = up, down

    @property
    def kernel(self) -> tuple[object, ...]:
        return tuple((each.layout.kernel, each.scales.dtype) for each in (self._up, self._down))

    @property
    def device(self) -> torch.device:
        return self._up.codes.device

    def forward(self, states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        count, top_k = top_k_index.shape
        hidden = states.reshape(count, -1)
        pairs = place(top_k_index.flatten().contiguous(), len(self._up.codes))
        inner = self._gate(self._up(hidden, pairs, top_k))
        outputs = self._post(self._down(inner, pairs, 1))
        out = hidden.new_empty(hidden.shape)
        width = hidden.shape[1]
        kernels.add_experts[(count, -(-width // ADD_TILE))](
            *(outputs, top_k_weights.contiguous(), out, width), TOP_K=top_k, TILE=ADD_TILE, num_warps=4, num_stages=3
        )
        return out.view(states.shape)


def group_experts(layers: ExpertLayers, device: torch.device, *, is_exact: bool) -> GroupedExperts | None:
    """Return products for the experts, or None if they are not all of one layout that the kernel takes."""
    products = []
    for matrices in (layers.up, layers.down):
        codes = _alike([_joined([part.source.codes() for part in parts_of(each)]) for each in matrices])
        if codes is None or not tile_depth(codes[0].shape[1], codes[0].group):
            return None
        of_first = parts_of(matrices[0])[0]
        biases = [parts_of(each)[0].bias for each in matrices]
        made = [
            CodedProduct(each, bias, of_first.dtype, device, is_exact=is_exact)
            for each, bias in zip(codes, biases, strict=True)
        ]
        if len({product.scales.dtype for product in made}) > 1:
            for product in made:
                product.scales = product.scales.float()
        products.append(ExpertProducts(made))
    return GroupedExperts(layers, *products)


def _joined(parts: Sequence[Codes]) -> Codes | None:
    """Return codes whose outputs are those of all parts; None for parts of different layouts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    alike = _alike(parts)
    if alike is None or any(not _equal(each.order, first.order) for each in parts):
        return None

    def join(name: str, dim: int) -> torch.Tensor | None:
        owned = [getattr(each, name) for each in alike]
        return None if owned[0] is None else torch.cat(owned, dim)

    codes, scales = torch.cat([each.codes for each in alike]), torch.cat([each.scales for each in alike], 1)
    return replace(first, codes=codes, scales=scales, zeros=join("zeros", 1), mins=join("mins", 1))


def _alike(all_codes: Sequence[Codes | None]) -> Sequence[Codes] | None:
    """Return the codes, zero points of 8 given to those that lack them; None for codes of different layouts."""
    found = [each for each in all_codes if each is not None]
    if any(each.zeros is not None for each in found):
        found = [
            each if each.zeros is not None else replace(each, zeros=torch.full_like(each.scales, 8, dtype=torch.uint8))
            for each in found
            if each.kind is CodeKind.INT4 and each.mins is None
        ]
    layouts = {(each.kind, each.shape, each.group, each.mins is None, each.order is None) for each in found}
    return found if len(layouts) == 1 and len(found) == len(all_codes) else None


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@torch.inference_mode()
def try_experts(grouped: GroupedExperts, layers: ExpertLayers) -> str | None:
    """Compare what a few rows have from the first experts with the layers' own products."""
    source = parts_of(layers.up[0])[0]
    count, inner = min(2, len(layers.up)), source.source.shape[1]
    device = grouped.device
    rows = torch.randn(TRIAL_ROWS, inner, generator=torch.Generator().manual_seed(0)).to(device, source.dtype)
    chosen = (torch.arange(TRIAL_ROWS, device=device)[:, None] + torch.arange(count, device=device)) % len(layers.up)
    shares = torch.tensor([0.7, 0.3][:count], device=device).to(source.dtype).expand(TRIAL_ROWS, count)
    expected = layers(rows, chosen, shares).float()
    norm = float(expected.norm())
    for repeats in (1, FEW.rows * len(layers.up) // TRIAL_ROWS + 1):  # with tiles of few rows, and of many
        many = (each.repeat(repeats, 1) for each in (rows, chosen, shares))
        difference = float((grouped(*many)[-TRIAL_ROWS:].float() - expected).norm())
        if not difference <= TOLERANCE[source.dtype] * norm:
            break
    else:
        return None
    kind = source.source.kind.name.lower()
    return f"experts of {kind} weights differ from torch's by {difference / (norm or 1.0):.2g}"
