"""Interface of a weight format, the plain format, and what quantized formats share. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from decant.engine.checkpoint.weight_shapes import Stored

if TYPE_CHECKING:
    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Weight

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
    @property
    def quantization(self) -> str | None:
        """The quantization of most matrices as ``decant plan`` names it: int8, int4 or fp8."""
        ...

    def allows(self, tensor: str, dtype: str) -> bool:
        """Whether ``tensor`` may be stored as ``dtype``, named as in safetensors."""
        ...

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Tensors of the model, with their shapes in it."""
        ...

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        """Tensors of the model by name; None if transformers reads the files itself.

        Those that are a ``Weight`` stay quantized in linear layers, experts and embeddings, if the backend takes them.
        """
        ...


class Plain:
    quantization: str | None = None

    def allows(self, tensor: str, dtype: str) -> bool:
        if dtype == "U8":
            return tensor.endswith(_MASKS)
        return dtype in FLOATS or (dtype in _INDICES and not tensor.endswith(".weight"))

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return stored

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice] | None:
        return None


PLAIN: WeightFormat = Plain()


class QuantizedFormat(ABC):
    """A format that stores a matrix as several tensors, ``layer.SUFFIX`` for each of the ``parts``."""

    quantization: str | None
    parts: ClassVar[Mapping[str, frozenset[str]]]
    """Dtypes of the tensors of a matrix, by suffix."""
    codes: ClassVar[tuple[str, ...]]
    """Suffixes of tensors that are a matrix, with a dtype that is not ``PLAIN``'s."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that are not used, such as scales of quantized activations."""

    def allows(self, tensor: str, dtype: str) -> bool:
        suffix = self._suffix(tensor)
        return (suffix is not None and dtype in self.parts[suffix]) or PLAIN.allows(tensor, dtype)

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        tensors: dict[str, Stored] = {}
        for name, entry in stored.items():
            suffix = self._suffix(name)
            if suffix in self.codes and len(entry.shape) == 2:
                tensors[f"{self._layer(name)}.weight"] = Stored(entry.file, self.shape(suffix, entry.shape))
            elif suffix is None and not name.endswith(self.unused):
                tensors[name] = entry
        return tensors

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice]:
        from decant.engine.checkpoint.tensor_files import TensorFiles

        tensors, slices, count = TensorFiles(files), dict[str, Slice](), 0
        for name in tensors.names:
            suffix = self._suffix(name)
            if suffix in self.codes and not PLAIN.allows(name, tensors.dtype(name)):
                slices[f"{self._layer(name)}.weight"] = self.weight(self._layer(name), suffix, tensors)
                count += 1
            elif (suffix is None or suffix == "weight") and not name.endswith(self.unused):
                slices[name] = tensors.slice(name)
        if not count:
            raise ValueError("config.json says that its weights are quantized, and none of them is")
        return slices

    @abstractmethod
    def shape(self, suffix: str, stored: tuple[int, ...]) -> tuple[int, int]:
        """Shape [out, in] of a matrix whose codes, the tensor of that suffix, are ``stored``."""

    @abstractmethod
    def weight(self, layer: str, suffix: str, tensors: TensorFiles) -> Weight:
        """Make the weight of a layer without reading it. Raises ValueError, with the name of a tensor."""

    def _suffix(self, tensor: str) -> str | None:
        suffix = tensor.rpartition(".")[2]
        return suffix if suffix in self.parts else None

    @staticmethod
    def _layer(tensor: str) -> str:
        return tensor.rpartition(".")[0]
