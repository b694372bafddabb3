"""The weight format ``gguf``: a folder made of a GGUF file, whose tensors are of several types. No torch until opened.

    model.gguf             the file, or a link to it
    model.gguf.index.json  dtype, shape and place in the file of each of the model's tensors, as in a safetensors header

    F32, F16, BF16  plain numbers
    Q8_0            int8, a scale for 32 inputs
    Q5_0, Q5_1      5 bits as int8, a scale for 32 inputs, of Q5_1 with a minimum
    Q4_0, Q4_1      int4, a scale for 32 inputs, of Q4_1 with a minimum
    Q4_K, Q5_K      int4, or 5 bits as int8, a scale and a minimum for 32 inputs, each 6 bits times a number for 256
    Q6_K            6 bits as int8, a scale for 16 inputs, 8 bits times a number for 256

Rows of a tensor with ``pairs_of_heads`` alternate between the halves of a head, and are put in order here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decant.engine.checkpoint.weight_format import FLOATS, Slice
from decant.engine.checkpoint.weight_shapes import Stored
from decant.engine.errors import ModelRefused

if TYPE_CHECKING:
    import torch

WEIGHTS, INDEX = "model.gguf", "model.gguf.index.json"

BLOCKS = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


class Gguf:
    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        weights = settings.get("weights")
        if weights not in (None, "int8", "int4"):
            raise ModelRefused(
                name, f"quantization_config in config.json has the weights {weights!r}: int8, int4 or null"
            )
        self.quantization: str | None = weights

    def allows(self, tensor: str, dtype: str) -> bool:
        return dtype in FLOATS or dtype in BLOCKS

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return stored

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice]:
        (file,) = files
        return {name: _slice(name, _Tensor(file, entry)) for name, entry in read_index(file).items()}


def read_index(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read the index beside a GGUF file. Raises OSError, and ValueError unless the file has all of its tensors."""
    index: Mapping[str, Mapping[str, Any]] = json.loads(file.with_name(INDEX).read_bytes())
    needed, size = max(int(entry["data_offsets"][1]) for entry in index.values()), file.stat().st_size
    if size < needed:
        raise ValueError(f"it has {size} bytes, and {INDEX} says {needed}")
    return index


class _Tensor:
    """A tensor in a file."""

    def __init__(self, file: Path, entry: Mapping[str, Any]) -> None:
        self._file, self._pairs = file, int(entry.get("pairs_of_heads", 0))
        self.type, self.shape = str(entry["dtype"]), tuple(int(count) for count in entry["shape"])
        self._begin, end = entry["data_offsets"]
        self.nbytes = int(end) - int(self._begin)

    def read(self) -> torch.Tensor:
        """Read the bytes of each row, uint8 [shape[0], bytes]. Raises ValueError."""
        import torch

        content = bytearray(self.nbytes)
        with self._file.open("rb") as stream:
            stream.seek(self._begin)
            if stream.readinto(content) != self.nbytes:
                raise ValueError(f"{self._file} ends at {stream.tell()}")
        rows = torch.frombuffer(content, dtype=torch.uint8).view(self.shape[0], -1)
        if not self._pairs:
            return rows
        return rows[torch.arange(len(rows)).view(self._pairs, -1, 2).transpose(1, 2).flatten()]


class _Plain:
    def __init__(self, tensor: _Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Any:
        import torch

        dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return self._tensor.read().view(dtypes[self._tensor.type]).view(self._tensor.shape)[index]


def _slice(name: str, tensor: _Tensor) -> Slice:
    if tensor.type in FLOATS:
        return _Plain(tensor)
    from decant.engine.checkpoint.ggml_blocks import KINDS, decode
    from decant.engine.checkpoint.weight import Codes, Weight

    if len(tensor.shape) != 2:
        raise ValueError(f"{name} is {tensor.type} {list(tensor.shape)}: only matrices are served")

    def read() -> Codes:
        return decode(tensor.type, tensor.read())

    return Weight(name, (tensor.shape[0], tensor.shape[1]), KINDS[tensor.type], tensor.nbytes, read)
