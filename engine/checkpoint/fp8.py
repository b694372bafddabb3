"""The weight format ``fp8``: matrices as e4m3, with one scale, or one per block of 128 x 128. No torch until opened.

    x.weight            F8_E4M3 [out, in]
    x.weight_scale      one number
    x.weight_scale_inv  F32 [out / 128, in / 128], rounded up, each the factor of a block

A weight is the stored number times its scale. ``x.input_scale``, of quantized activations, is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from decant.engine.checkpoint.weight_format import FLOATS, QuantizedFormat
from decant.engine.errors import ModelRefused

if TYPE_CHECKING:
    import torch

    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Codes, Weight

BLOCK = 128

SCALES = ("weight_scale", "weight_scale_inv")
"""Suffixes of the scale of a whole tensor, and of its blocks. Both are factors."""


class Fp8(QuantizedFormat):
    quantization = "fp8"
    parts: ClassVar[Mapping[str, frozenset[str]]] = {
        "weight": frozenset({"F8_E4M3"}),
        **dict.fromkeys(SCALES, frozenset(FLOATS)),
    }
    codes: ClassVar[tuple[str, ...]] = ("weight",)
    unused: ClassVar[tuple[str, ...]] = (".input_scale",)

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        if block not in (None, [BLOCK, BLOCK]):
            raise ModelRefused(name, f"its fp8 weights have scales for blocks of {block}; {[BLOCK, BLOCK]} are served")

    def shape(self, suffix: str, stored: tuple[int, ...]) -> tuple[int, int]:
        return stored[0], stored[1]

    def weight(self, layer: str, suffix: str, tensors: TensorFiles) -> Weight:
        scale = next((f"{layer}.{each}" for each in SCALES if f"{layer}.{each}" in tensors), None)
        if scale is None:
            name = f"{layer}.weight"
            raise ValueError(f"{name} is fp8 and has no scale: {layer}.{SCALES[0]} or {layer}.{SCALES[1]}")
        return fp8_weight(layer, scale, tensors)


def fp8_weight(layer: str, scale: str, tensors: TensorFiles) -> Weight:
    """Make a weight whose ``scale`` is one number, one per output, or one per block. Raises ValueError."""
    from decant.engine.checkpoint.weight import CodeKind, Weight

    name = f"{layer}.weight"
    outputs, inner = tensors.shape(name)
    blocks, of_scale = (-(-outputs // BLOCK), -(-inner // BLOCK)), tensors.shape(scale)
    if of_scale not in ((), (1,), (outputs, 1), blocks):
        limit = f"one number, one per output, or one per block of {BLOCK}, {list(blocks)}"
        raise ValueError(f"the scale of {name} is {list(of_scale)}: {limit}")

    def read() -> Codes:
        return _codes(tensors.read(name), tensors.read(scale).float())

    return Weight(name, (outputs, inner), CodeKind.FP8, tensors.nbytes(name, scale), read)


def _codes(codes: torch.Tensor, scale: torch.Tensor) -> Codes:
    from decant.engine.checkpoint.weight import CodeKind, Codes

    outputs, inner = codes.shape
    if scale.numel() == 1:
        return Codes(CodeKind.FP8, codes, scale.reshape(1, 1).repeat(1, outputs), inner)
    if scale.shape == (outputs, 1):
        return Codes(CodeKind.FP8, codes, scale.T.contiguous(), inner)
    return Codes(CodeKind.FP8, codes, scale.T.repeat_interleave(BLOCK, 1)[:, :outputs].contiguous(), BLOCK)
