"""Quantize the linear layers of a model, as ``--quantize`` asks for.

int8   a scale per output: the largest number is 127
int4   a scale per group of 64 inputs, of several candidates the one with the least squared error
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import torch
from torch import nn

from decant.engine.checkpoint.coded_linear import CodedLinear, is_plain_linear
from decant.engine.checkpoint.weight import PIECE, CodeKind, Codes, Weight

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

GROUP = 64

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of the scale with which no number is cut off: a smaller one cuts the largest and rounds the others less."""

_SMALLEST_HALF = 2.0**-14
"""Of float16 with all of its bits."""


@torch.inference_mode()
def quantize(model: nn.Module, to: Quantization) -> None:
    """Replace the plain linear layers of a model, one after the other, by ``CodedLinear``. Raises ValueError."""
    layers = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        assert isinstance(module, nn.Linear)
        source = quantized(f"{name}.weight", module.weight, to)
        setattr(model.get_submodule(parent), child, CodedLinear(source, module.bias, module.weight.dtype))


def quantized(name: str, weight: torch.Tensor, to: Quantization) -> Weight:
    """Quantize a matrix [out, in]. Raises ValueError, with its name, if a number is not finite."""
    outputs, inner = weight.shape
    encode = _ENCODERS[to]
    step = max(1, PIECE // inner)
    codes, scales = zip(
        *(encode(weight[first : first + step].float()) for first in range(0, outputs, step)), strict=True
    )
    joined = torch.cat(scales, 1)
    if not bool(joined.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    stored = torch.cat(codes)
    if to == "int8":
        read, kind = partial(_read_int8, stored, joined, inner), CodeKind.INT8
    else:
        stored = _pairs(stored)
        read, kind = partial(_read_int4, stored, joined, inner), CodeKind.INT4
    return Weight(name, (outputs, inner), kind, stored.nbytes + joined.nbytes, read)


def _read_int8(codes: torch.Tensor, scales: torch.Tensor, inner: int) -> Codes:
    return Codes(CodeKind.INT8, codes, scales, inner)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Put two neighbours of four bits into a byte: a model waits for its products in no more memory than they take."""
    padded = nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _read_int4(pairs: torch.Tensor, scales: torch.Tensor, inner: int) -> Codes:
    codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)[:, :inner]
    return Codes(CodeKind.INT4, codes, scales, GROUP)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _not_zero(weight.abs().amax(1) / 127)
    return (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales[None]


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inner = weight.shape[1]
    groups = nn.functional.pad(weight, (0, -inner % GROUP)).unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2)
    extreme = torch.where(most > -least, most, least)  # becomes -8, the code farthest from zero
    best = torch.full_like(extreme, torch.inf)
    scales = torch.ones_like(extreme)
    for share in _SHARES:
        candidate = _as_half(_not_zero(extreme * (share / -8)))[..., None]
        error = ((groups / candidate).round_().clamp_(-8, 7) * candidate - groups).square_().sum(2)
        is_better = error < best
        best, scales = torch.where(is_better, error, best), torch.where(is_better, candidate[..., 0], scales)
    codes = (groups / scales[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return codes.flatten(1)[:, :inner].contiguous(), scales.T.contiguous()


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _as_half(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to float16, where that loses no more than its last bit."""
    halves = scales.half().float()
    return torch.where((halves.abs() >= _SMALLEST_HALF) & halves.isfinite(), halves, scales)


_ENCODERS: Mapping[Quantization, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "int8": _int8,
    "int4": _int4,
}
