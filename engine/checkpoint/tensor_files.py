"""Tensors of a checkpoint's safetensors files by name, read when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_BITS = {"I32": 32, "I64": 64, "F32": 32, "F64": 64, "F16": 16, "BF16": 16}


class TensorFiles:
    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> Sequence[str]:
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def dtype(self, name: str) -> str:
        return str(self.slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ValueError if there is none of that name."""
        if name not in self:
            raise ValueError(f"{name} is missing")
        return tuple(self.slice(name).get_shape())

    def nbytes(self, *names: str) -> int:
        """Bytes in the files of those ``names`` that are there."""
        found = [name for name in names if name in self]
        return sum(math.prod(self.shape(name)) * _BITS.get(self.dtype(name), 8) // 8 for name in found)

    def check_shape(self, name: str, *allowed: tuple[int, ...]) -> None:
        """Raises ValueError with the name, the shape and what it may be."""
        shape = self.shape(name)
        if shape not in allowed:
            raise ValueError(
                f"{name} is {list(shape)}: by the weight's shape {' or '.join(map(str, map(list, allowed)))}"
            )
