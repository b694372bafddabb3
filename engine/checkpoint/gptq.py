"""The weight format ``gptq``: integers of 4 or 8 bits in words along the inputs. No torch until opened.

x.qweight  I32 [in / 8, out]        of 8 bits in / 4
x.qzeros   I32 [groups, out / 8]    each one less than its zero point, unless checkpoint_format is gptq_v2
x.scales   F16 [groups, out]
x.g_idx    I32 [in]                 the group of each input; it may be missing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from decant.engine.checkpoint.weight_format import FLOATS, QuantizedFormat
from decant.engine.errors import ModelRefused

if TYPE_CHECKING:
    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Codes, Weight

BITS = (4, 8)


class Gptq(QuantizedFormat):
    parts: ClassVar[Mapping[str, frozenset[str]]] = {
        "qweight": frozenset({"I32"}),
        "qzeros": frozenset({"I32"}),
        "scales": frozenset(FLOATS),
        "g_idx": frozenset({"I32"}),
    }
    codes: ClassVar[tuple[str, ...]] = ("qweight",)

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._bits, self._group = integer(name, settings, "bits"), integer(name, settings, "group_size")
        layout = settings.get("checkpoint_format", "gptq")
        if self._bits not in BITS:
            raise ModelRefused(name, f"its GPTQ weights have {self._bits} bits; 4 and 8 are served")
        if layout not in ("gptq", "gptq_v2"):
            raise ModelRefused(
                name, f"GPTQ weights of the checkpoint_format {layout} are not served; gptq and gptq_v2 are"
            )
        if self._group != -1 and self._group < 1:
            raise ModelRefused(name, f"its GPTQ weights have groups of {self._group}")
        self._zero_offset = int(layout == "gptq")

    @property
    def quantization(self) -> str:  # type: ignore[override]
        return f"int{self._bits}"

    def shape(self, suffix: str, stored: tuple[int, ...]) -> tuple[int, int]:
        return stored[1], stored[0] * 32 // self._bits

    def weight(self, layer: str, suffix: str, tensors: TensorFiles) -> Weight:
        from decant.engine.checkpoint.weight import CodeKind, Weight

        names = [f"{layer}.{part}" for part in self.parts]
        packed, zeros, scales, order = names
        outputs, inner = self.shape(suffix, tensors.shape(packed))
        group = inner if self._group == -1 else self._group
        groups = -(-inner // group)
        tensors.check_shape(scales, (groups, outputs))
        tensors.check_shape(zeros, (groups, outputs * self._bits // 32))
        if order in tensors:
            tensors.check_shape(order, (inner,))
        kind = CodeKind.INT4 if self._bits == 4 else CodeKind.INT8

        def read() -> Codes:
            return self._read(names, tensors, group)

        return Weight(f"{layer}.weight", (outputs, inner), kind, tensors.nbytes(*names), read)

    def _read(self, names: list[str], tensors: TensorFiles, group: int) -> Codes:
        from decant.engine.checkpoint.packing import columns_by_group, unpack
        from decant.engine.checkpoint.weight import integer_codes

        packed, zeros, scales, order = names
        codes = unpack(tensors.read(packed), self._bits, 0).T
        points = unpack(tensors.read(zeros), self._bits, 1) + self._zero_offset & (1 << self._bits) - 1
        columns = columns_by_group(tensors.read(order), group) if order in tensors else None
        codes = codes.contiguous() if columns is None else codes[:, columns]
        return integer_codes(codes, tensors.read(scales).float(), points, self._bits, group, columns)


def integer(name: str, settings: Mapping[str, Any], field: str) -> int:
    """Read a whole number of ``quantization_config``. Raises ModelRefused."""
    value = settings.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelRefused(name, f"quantization_config in config.json has no number {field}: {value!r}")
    return value
