"""The weight format ``mxfp4``: experts as GPT-OSS ships them, numbers of 4 bits with an exponent for 32. No torch until
opened.

    x_blocks  U8 [experts, out, in / 32, 16]  e2m1, the first of two numbers in the lower bits
    x_scales  U8 [experts, out, in / 32]      e8m0: 127 more than the exponent; 255 is not a number

The model's tensor x is [experts, in, out]. Where a backend does not keep its codes, x is dequantized in bfloat16, which
has all of its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decant.engine.checkpoint.weight_format import PLAIN, Slice
from decant.engine.checkpoint.weight_shapes import Stored

if TYPE_CHECKING:
    import torch

    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Codes, Weight

BLOCKS, SCALES = "_blocks", "_scales"
IN_A_BLOCK = 32

_LARGEST_SCALE = 252
"""Of those with which all numbers are finite in float32 and bfloat16."""


class Mxfp4:
    quantization: str | None = None
    """As a GPU has them in memory, dequantized."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Settings say which layers are plain, as the names of the tensors do."""

    def allows(self, tensor: str, dtype: str) -> bool:
        return dtype == "U8" if tensor.endswith((BLOCKS, SCALES)) else PLAIN.allows(tensor, dtype)

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        tensors: dict[str, Stored] = {}
        for name, entry in stored.items():
            if name.endswith(BLOCKS) and len(entry.shape) == 4:
                experts, outputs, count, _ = entry.shape
                tensors[name.removesuffix(BLOCKS)] = Stored(entry.file, (experts, count * IN_A_BLOCK, outputs))
            elif not name.endswith(SCALES):
                tensors[name] = entry
        return tensors

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice]:
        from decant.engine.checkpoint.tensor_files import TensorFiles

        tensors, slices, count = TensorFiles(files), dict[str, Slice](), 0
        for name in tensors.names:
            if name.endswith(BLOCKS):
                slices[name.removesuffix(BLOCKS)] = _Experts(name.removesuffix(BLOCKS), tensors)
                count += 1
            elif not name.endswith(SCALES):
                slices[name] = tensors.slice(name)
        if not count:
            raise ValueError("config.json says that its weights are quantized, and none of them is")
        return slices


class _Experts:
    """Matrices [experts, in, out], dequantized as they are read. Raises ValueError with the name of a tensor."""

    def __init__(self, name: str, tensors: TensorFiles) -> None:
        self._name, self._tensors = name, tensors
        shape = tensors.shape(name + BLOCKS)
        if len(shape) != 4 or shape[3] * 2 != IN_A_BLOCK:
            raise ValueError(f"{name}{BLOCKS} is {list(shape)}: [experts, out, in / {IN_A_BLOCK}, {IN_A_BLOCK // 2}]")
        tensors.check_shape(name + SCALES, shape[:3])
        self._count, self._outputs, self._inner = shape[0], shape[1], shape[2] * IN_A_BLOCK

    @property
    def experts(self) -> Sequence[Weight]:
        """The matrix [out, in] of each expert."""
        from decant.engine.checkpoint.weight import CodeKind, Weight

        nbytes = self._tensors.nbytes(self._name + BLOCKS, self._name + SCALES) // self._count
        shape = self._outputs, self._inner
        return [
            Weight(f"{self._name}.{at}", shape, CodeKind.E2M1, nbytes, partial(self._codes, at))
            for at in range(self._count)
        ]

    def _codes(self, expert: int) -> Codes:
        import torch

        from decant.engine.checkpoint.weight import CodeKind, Codes

        blocks, scales = (self._tensors.slice(self._name + part)[expert] for part in (BLOCKS, SCALES))
        if int(scales.max()) > _LARGEST_SCALE:
            raise ValueError(f"{self._name}{SCALES} has an exponent with which its numbers are not finite")
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        return Codes(CodeKind.E2M1, codes, _powers(scales).T.contiguous(), IN_A_BLOCK)

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch

        whole = torch.empty(self._count, self._inner, self._outputs, dtype=torch.bfloat16)
        for expert, weight in enumerate(whole):
            weight.copy_(self._codes(expert).dequantize(torch.bfloat16).T)
        return whole[index]


def _powers(scales: torch.Tensor) -> torch.Tensor:
    import torch

    exponents = scales.int()
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)  # 2 ** -127 has another form
