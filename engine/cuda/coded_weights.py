"""Puts products and experts for quantized weights into a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.expert_layers import ExpertLayers
from decant.engine.checkpoint.weight import Codes
from decant.engine.cuda.coded_product import FEW, CodedProduct, tile_depth
from decant.engine.cuda.grouped_experts import GroupedExperts, group_experts, try_experts

TRIAL_ROWS, TRIAL_COLUMNS = 3, 64

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest difference in a trial, relative to the norm of torch's result, whose weights have the rows' dtype."""

Coded = CodedLinear | ExpertLayers
Product = CodedProduct | GroupedExperts

Trial = Callable[[], str | None]
"""Returns or raises why a product is not right."""

TryOne = Callable[[Trial], str | None]
"""Runs a trial, and returns what it returns or raises."""


@torch.inference_mode()
def replace_coded(
    model: nn.Module, dtype: torch.dtype, device: torch.device, tried: TryOne, *, is_exact: bool
) -> str | None:
    """Give a model products for its quantized weights; a weight whose groups the kernel does not take is dequantized.

    ``tried`` runs a trial of each kind of weight. If one fails, all are dequantized, and the reason is returned.
    """
    places = dict(_places(model))
    seen = set[object]()
    for name, module in places.items():
        product = _product_of(module, dtype, device, is_exact=is_exact)
        if product is None:
            _put(model, name, _dequantized(module, device))
            continue
        kernel = type(product), product.kernel
        if kernel not in seen and (trial := _trial_of(product, module)) is not None:
            if reason := tried(trial):
                for each, coded in places.items():
                    _put(model, each, _dequantized(coded, device))
                return reason
            seen.add(kernel)
        _put(model, name, product)
    return None


def _places(model: nn.Module) -> Iterator[tuple[str, Coded]]:
    """Yield the modules with quantized weights by name, but not those in ``ExpertLayers``."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, ExpertLayers):
            inside = f"{name}."
        if isinstance(module, CodedLinear | ExpertLayers):
            yield name, module


def _product_of(module: Coded, dtype: torch.dtype, device: torch.device, *, is_exact: bool) -> Product | None:
    if isinstance(module, ExpertLayers):
        return group_experts(module, device, is_exact=is_exact)
    codes = module.source.codes()
    if not tile_depth(codes.shape[1], codes.group):
        return None
    return CodedProduct(codes, module.bias, dtype, device, is_exact=is_exact)


def _trial_of(product: Product, module: Coded) -> Trial | None:
    """Return a trial, or None if there is nothing to compare."""
    if isinstance(product, GroupedExperts):
        assert isinstance(module, ExpertLayers)
        return partial(try_experts, product, module)
    assert isinstance(module, CodedLinear)
    codes = module.source.codes()
    first = _first_outputs(codes)
    return None if first is None else partial(try_product, product, codes, first)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _dequantized(module: Coded, device: torch.device) -> nn.Module:
    if isinstance(module, ExpertLayers):
        return module.dequantized(device)
    outputs, inner = module.source.shape
    linear = nn.Linear(inner, outputs, bias=module.bias is not None, device="meta")
    parts = {"weight": module.source[:].to(device, module.dtype), "bias": module.bias}
    for name, part in parts.items():
        setattr(linear, name, None if part is None else nn.Parameter(part, requires_grad=False))
    return linear


def _first_outputs(codes: Codes) -> int | None:
    """First of TRIAL_COLUMNS outputs whose weights are not all zero; None: there are none to compare."""
    for first in range(0, codes.shape[0], TRIAL_COLUMNS):
        if codes.dequantize(torch.float32, first, first + TRIAL_COLUMNS).any():
            return first
    return None


def try_product(product: CodedProduct, codes: Codes, first: int = 0) -> str | None:
    """Compare outputs of one row, of few and of many with those of torch, and weights as dequantized."""
    device, dtype, stop = product.codes.device, product.dtype, min(first + TRIAL_COLUMNS, product.out_features)
    chosen = slice(first, stop)
    rows = torch.randn(TRIAL_ROWS, product.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    weight = codes.dequantize(dtype, first, stop).to(device)
    expected = nn.functional.linear(rows, weight, None if product.bias is None else product.bias[chosen]).float()
    many = rows.repeat(-(-(FEW.rows + 1) // TRIAL_ROWS), 1)
    found = [(product(each)[:TRIAL_ROWS, chosen], expected[: len(each)]) for each in (rows[:1], rows, many)]
    if not product.is_exact:
        found.append((product.dequantized(first, stop), weight))
    for actual, right in found:
        difference = float((actual.float() - right.float()).norm() / right.float().norm())
        if not difference < TOLERANCE[dtype]:
            return f"{product.layout.kind.name.lower()} weights differ from torch's by {difference:.2g}"
    return None
