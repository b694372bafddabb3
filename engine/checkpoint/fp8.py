"""The weight format ``fp8``: matrices as e4m3, with one scale, or one per block of 128 x 128. No torch until opened.

    x.weight            F8_E4M3 [out, in]
    x.weight_scale      one number
    x.weight_scale_inv  F32 [out / 128, in / 128], rounded up, each the factor of a block

A weight is the stored number times its scale. ``x.input_scale``, of quantized activations, is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decant.engine.checkpoint.weight_format import PLAIN, Slice
from decant.engine.checkpoint.weight_shapes import Stored

BLOCK = 128

SCALES = ("_scale", "_scale_inv")
"""Suffixes of the scale of a whole tensor, and of its blocks. Both are factors."""

_INPUT_SCALE = ".input_scale"


class Fp8:
    def allows(self, tensor: str, dtype: str) -> bool:
        return (dtype == "F8_E4M3" and tensor.endswith(".weight")) or PLAIN.allows(tensor, dtype)

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return {name: entry for name, entry in stored.items() if not _is_scale(name)}

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice]:
        from safetensors import safe_open

        sources: dict[str, Any] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            sources |= dict.fromkeys(file.keys(), file)
        slices: dict[str, Slice] = {}
        for name, file in sources.items():
            stored = file.get_slice(name)
            scale = next((name + suffix for suffix in SCALES if name + suffix in sources), None)
            if scale is not None:
                slices[name] = _Matrix(name, stored, sources[scale].get_slice(scale))
            elif stored.get_dtype() == "F8_E4M3":
                raise ValueError(f"{name} is fp8 and has no scale: {name}{SCALES[0]} or {name}{SCALES[1]}")
            elif not _is_scale(name):
                slices[name] = stored
        return slices


class _Matrix:
    def __init__(self, name: str, stored: Any, scale: Any) -> None:
        shape, of_scale = stored.get_shape(), scale.get_shape()
        blocks = [-(-count // BLOCK) for count in shape]
        self._stored = stored
        self._scale = scale
        self._is_whole = of_scale in ([], [1])
        if not self._is_whole and of_scale != blocks:
            raise ValueError(f"the scale of {name} is {of_scale}: one number, or one per block of {BLOCK}, {blocks}")

    def __getitem__(self, index: Any) -> Any:
        scale = (self._scale[:] if self._scale.get_shape() else self._scale[...]).float()
        weight = self._stored[:].float()
        if self._is_whole:
            return (weight * scale.reshape(()))[index]
        for row in range(scale.shape[0]):  # a block row at a time: no second copy of the matrix
            factors = scale[row].repeat_interleave(BLOCK)[: weight.shape[1]]
            weight[row * BLOCK : (row + 1) * BLOCK] *= factors
        return weight[index]


def _is_scale(name: str) -> bool:
    return name.endswith((*(".weight" + suffix for suffix in SCALES), _INPUT_SCALE))
