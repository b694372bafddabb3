"""The weight format ``awq``: integers of 4 bits in words along the outputs. No torch until opened.

x.qweight  I32 [in, out / 8]      the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the lowest bits first
x.qzeros   I32 [groups, out / 8]  in the same order
x.scales   F16 [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from decant.engine.checkpoint.gptq import integer
from decant.engine.checkpoint.weight_format import FLOATS, QuantizedFormat
from decant.engine.errors import ModelRefused

if TYPE_CHECKING:
    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Codes, Weight

BITS, IN_A_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(QuantizedFormat):
    quantization = "int4"
    parts: ClassVar[Mapping[str, frozenset[str]]] = {
        "qweight": frozenset({"I32"}),
        "qzeros": frozenset({"I32"}),
        "scales": frozenset(FLOATS),
    }
    codes: ClassVar[tuple[str, ...]] = ("qweight",)

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        bits, self._group = integer(name, settings, "bits"), integer(name, settings, "group_size")
        version = str(settings.get("version", "gemm")).lower()
        if bits != BITS:
            raise ModelRefused(name, f"its AWQ weights have {bits} bits; {BITS} are served")
        if version != "gemm":
            raise ModelRefused(name, f"AWQ weights of the version {version} are not served; gemm is")
        if self._group != -1 and self._group < 1:
            raise ModelRefused(name, f"its AWQ weights have groups of {self._group}")

    def shape(self, suffix: str, stored: tuple[int, ...]) -> tuple[int, int]:
        return stored[1] * IN_A_WORD, stored[0]

    def weight(self, layer: str, suffix: str, tensors: TensorFiles) -> Weight:
        from decant.engine.checkpoint.weight import CodeKind, Weight

        names = [f"{layer}.{part}" for part in self.parts]
        packed, zeros, scales = names
        outputs, inner = self.shape(suffix, tensors.shape(packed))
        group = inner if self._group == -1 else self._group
        groups = -(-inner // group)
        tensors.check_shape(scales, (groups, outputs))
        tensors.check_shape(zeros, (groups, outputs // IN_A_WORD))

        def read() -> Codes:
            from decant.engine.checkpoint.packing import unpack
            from decant.engine.checkpoint.weight import integer_codes

            codes = unpack(tensors.read(packed), BITS, 1, ORDER).T.contiguous()
            points = unpack(tensors.read(zeros), BITS, 1, ORDER)
            return integer_codes(codes, tensors.read(scales).float(), points, BITS, group)

        return Weight(f"{layer}.weight", (outputs, inner), CodeKind.INT4, tensors.nbytes(*names), read)
