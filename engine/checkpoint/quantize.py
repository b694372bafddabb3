"""Quantize the linear layers and experts of a model, as ``--quantize`` asks for.

int8   a scale per output: the largest number is 127
int4   a scale and a zero point per group of 64 inputs, of several candidates those with the least squared error. The
       head is int8: its errors are in the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from decant.engine.checkpoint.coded_linear import CodedLinear, is_plain_linear
from decant.engine.checkpoint.expert_layers import DOWN, CodedExperts, first_of, has_stacked_experts, replace_experts
from decant.engine.checkpoint.weight import CodeKind, Codes, Weight

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

GROUP = 64

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of the scale with which no number is cut off: a smaller one cuts the largest and rounds the others less."""

_Encoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes [out, in], scales and zero points [groups, out]; int8 has no zero points."""

PIECE = 1 << 16
"""Numbers that are quantized at once, which stay in a core's cache."""

_LARGEST_INT4 = 1e18
"""Of the numbers whose squared errors in a group have a sum in float32."""

_SMALLEST_HALF = 2.0**-14
"""Of float16 with all of its bits."""


Map = Callable[[Callable[[torch.Tensor], _Encoded], Iterable[torch.Tensor]], Iterable[_Encoded]]


@torch.inference_mode()
def quantize(model: PreTrainedModel, to: Quantization, piece: int = PIECE) -> None:
    """Replace the plain linear layers of a model, one after the other, by ``CodedLinear``, then transformers' experts
    (``has_stacked_experts``) by ``ExpertLayers`` of these, ``piece`` numbers at a time. Raises ValueError.
    """
    with _pieces_in_threads() as each:
        _quantize_layers(model, to, each, piece)
        stacked = [name for name, module in model.named_modules() if has_stacked_experts(module)]
        made = {name: _quantize_experts(name, model.get_submodule(name), to, each, piece) for name in stacked}
    for name, coded in made.items():
        replace_experts(model, {name: coded}, model.dtype)


@contextmanager
def _pieces_in_threads() -> Iterator[Map]:
    """Each thread of torch's takes pieces: to divide each loop among them takes longer where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, "quantize") as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)


def _quantize_layers(model: PreTrainedModel, to: Quantization, each: Map, piece: int) -> None:
    head = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        assert isinstance(module, nn.Linear)
        source = quantized(f"{name}.weight", module.weight, "int8" if module is head else to, each, piece)
        setattr(model.get_submodule(parent), child, CodedLinear(source, module.bias, module.weight.dtype))


def _quantize_experts(name: str, module: Any, to: Quantization, each: Map, piece: int) -> CodedExperts:
    made = {}
    for tensor in (first_of(module), DOWN):
        weights = getattr(module, tensor).transpose(1, 2) if module.is_transposed else getattr(module, tensor)
        made[tensor] = tuple(
            (quantized(f"{name}.{tensor}.{at}", one, to, each, piece),) for at, one in enumerate(weights)
        )
        setattr(module, tensor, None)  # freed before the next one is made
    return CodedExperts(made[first_of(module)], made[DOWN], {})


def quantized(name: str, weight: torch.Tensor, to: Quantization, each: Map = map, piece: int = PIECE) -> Weight:
    """Quantize a matrix [out, in], ``piece`` numbers at a time.

    Raises ValueError, with its name, if a number is not finite or too large.
    """
    outputs, inner = weight.shape
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    if to == "int4" and float(weight.abs().amax()) > _LARGEST_INT4:
        raise ValueError(f"{name} has numbers above {_LARGEST_INT4:g}, which int4 does not take")
    encode = _int8 if to == "int8" else _int4
    parts = list(each(encode, weight.split(max(1, piece // inner))))
    codes, scales, zeros = (torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), (0, 1, 1), strict=True))
    if to == "int8":
        read, kind = partial(Codes, CodeKind.INT8, codes, scales, inner), CodeKind.INT8
    else:
        codes = _pairs(codes)
        read, kind = partial(_read_int4, codes, scales, zeros, inner), CodeKind.INT4
    return Weight(name, (outputs, inner), kind, codes.nbytes + scales.nbytes + zeros.nbytes, read)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Put two neighbours of four bits into a byte: a model waits for its products in no more memory than they take."""
    padded = nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _read_int4(pairs: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, inner: int) -> Codes:
    codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)[:, :inner]
    return Codes(CodeKind.INT4, codes, scales, GROUP, zeros)


@torch.inference_mode()
def _int8(weight: torch.Tensor) -> _Encoded:
    weight = weight.float()
    scales = _not_zero(weight.abs().amax(1) / 127)
    codes = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales[None], torch.empty(0, len(weight), dtype=torch.uint8)


@torch.inference_mode()
def _int4(weight: torch.Tensor) -> _Encoded:
    weight = weight.float()
    inner = weight.shape[1]
    groups = nn.functional.pad(weight, (0, -inner % GROUP)).unflatten(1, (-1, GROUP))
    least, most = groups.amin(2, keepdim=True).clamp_(max=0), groups.amax(2, keepdim=True).clamp_(min=0)
    best = torch.full_like(least, torch.inf)
    scales, zeros = torch.ones_like(least), torch.zeros_like(least)
    for share in _SHARES:
        scale = _not_zero((most - least) * (share / 15))
        zero = (-share * least / scale).round_().clamp_(0, 15)
        numbers = _numbers(groups, scale, zero)
        fitted = (groups * numbers).sum(2, keepdim=True) / numbers.square().sum(2, keepdim=True).clamp_(min=1)
        scale = _as_half(_not_zero(fitted))  # the best one for these numbers
        error = (_numbers(groups, scale, zero) * scale - groups).square_().sum(2, keepdim=True)
        is_better = error < best
        best, scales, zeros = (
            torch.where(is_better, new, old) for new, old in ((error, best), (scale, scales), (zero, zeros))
        )
    codes = (_numbers(groups, scales, zeros) + zeros).to(torch.uint8).flatten(1)[:, :inner]
    return codes, scales[..., 0].T.contiguous(), zeros[..., 0].T.to(torch.uint8).contiguous()


def _numbers(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers less their zero point."""
    return ((groups / scale).round_() + zero).clamp_(0, 15) - zero


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _as_half(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to float16, where that loses no more than its last bit."""
    halves = scales.half().float()
    return torch.where((halves.abs() >= _SMALLEST_HALF) & halves.isfinite(), halves, scales)
