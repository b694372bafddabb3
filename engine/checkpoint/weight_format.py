"""Weight formats: how a checkpoint stores the tensors of its model. Imports no torch.

A format gives the model's tensors as slices that are read and converted one at a time, when transformers puts them into
the model. ``formats`` has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decant.engine.checkpoint.weight_shapes import Stored

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
