"""Interface of a weight format, and the plain format. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decant.engine.checkpoint.weight_shapes import Stored

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element."""
_INDICES = {"I64", "BOOL"}
"""Dtypes of buffers. Narrower integers are quantized or packed weights."""
_MASKS = (".attn.bias", ".attention.bias")
"""Causal masks saved by older releases of transformers, some as U8."""


class Slice(Protocol):
    """Tensor that ``slice[...]`` reads and converts, from any thread."""

    def __getitem__(self, index: Any) -> Any: ...


class WeightFormat(Protocol):
    def allows(self, tensor: str, dtype: str) -> bool:
        """Whether ``tensor`` may be stored as ``dtype``, named as in safetensors."""
        ...

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Tensors of the model, with their shapes in it."""
        ...

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        """Tensors of the model by name; None if transformers reads the files itself."""
        ...


class Plain:
    def allows(self, tensor: str, dtype: str) -> bool:
        if dtype == "U8":
            return tensor.endswith(_MASKS)
        return dtype in FLOATS or (dtype in _INDICES and not tensor.endswith(".weight"))

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return stored

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        return None


PLAIN: WeightFormat = Plain()
