"""Weight formats: how a checkpoint stores the tensors of its model. Imports no torch.

A format is chosen by ``quantization_config`` in config.json. It gives the model's tensors as slices that are read and
converted one at a time, when transformers puts them into the model. ``PLAIN`` is the only format today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decant.engine.checkpoint.weight_shapes import Stored
from decant.engine.errors import ModelRefused

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of plain weights, and their bytes per element."""
_INDICES = {"I64", "BOOL"}
"""Dtypes of buffers such as positions and masks. Narrower integers are quantized or packed weights."""
_MASKS = (".attn.bias", ".attention.bias")
"""Name suffixes of causal masks saved by older releases of transformers, some of them as U8."""


class Slice(Protocol):
    """A tensor that is not in memory yet: ``slice[...]`` reads and converts it. May be called from any thread."""

    def __getitem__(self, index: Any) -> Any: ...


class WeightFormat(Protocol):
    """One way of storing weights."""

    def allows(self, tensor: str, dtype: str) -> bool:
        """Whether a file may have a tensor of that name and safetensors dtype."""
        ...

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """The tensors that the model gets from these stored ones, with their shapes in the model."""
        ...

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        """The model's tensors. None: transformers reads the files itself."""
        ...


class Plain:
    """Each tensor is stored as the model has it, in a floating-point dtype."""

    def allows(self, tensor: str, dtype: str) -> bool:
        if dtype == "U8":
            return tensor.endswith(_MASKS)
        return dtype in FLOATS or (dtype in _INDICES and not tensor.endswith(".weight"))

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return stored

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        return None


PLAIN: WeightFormat = Plain()

FORMATS: dict[str, WeightFormat] = {}
"""Other formats, by ``quant_method``."""


def find_format(name: str, config: Mapping[str, Any]) -> WeightFormat:
    """The format that a config.json names, in itself or in a part. Raises ModelRefused for an unknown one."""
    chosen = PLAIN
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if settings is None:
                continue
            if not settings:  # transformers would fail
                raise ModelRefused(
                    name, f"{key} in config.json is {json.dumps(settings)}: remove it, or name the format"
                )
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            if not isinstance(method, str) or method not in FORMATS:
                raise ModelRefused(name, f"{_title(settings, method)} weights are not served yet")
            chosen = FORMATS[method]
    return chosen


def _title(settings: object, method: object) -> str:
    if not isinstance(method, str):
        bits = {"load_in_4bit", "load_in_8bit"} & set(settings) if isinstance(settings, dict) else set()
        return "bitsandbytes" if bits else "quantized"
    return method.upper() if len(method) <= 5 else method
