"""The weight format ``compressed-tensors``, as llm-compressor writes it. No torch until opened.

    int-quantized     x.weight             I8 [out, in]
                      x.weight_zero_point  I8, as the scales; it may be missing
    float-quantized   x.weight             F8_E4M3 [out, in]
    pack-quantized    x.weight_packed      I32 [out, in / 8], of 8 bits in / 4: signed numbers plus 8, plus 128
                      x.weight_shape       I64 [2]
                      x.weight_zero_point  I32 [out / 8, groups], packed likewise; it may be missing
                      x.weight_g_idx       I32 [in]: the group of each input; it may be missing
    all               x.weight_scale       [1], [out, 1], [out, groups], or a block's of 128 x 128

What a layer has is said by its own tensors. Scales of activations are not used: activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from decant.engine.checkpoint.fp8 import fp8_weight
from decant.engine.checkpoint.weight_format import FLOATS, QuantizedFormat
from decant.engine.errors import ModelRefused

if TYPE_CHECKING:
    import torch

    from decant.engine.checkpoint.tensor_files import TensorFiles
    from decant.engine.checkpoint.weight import Codes, Weight

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class CompressedTensors(QuantizedFormat):
    parts: ClassVar[Mapping[str, frozenset[str]]] = {
        "weight": frozenset({"I8", "F8_E4M3"}),
        "weight_packed": frozenset({"I32"}),
        "weight_shape": frozenset({"I64", "I32"}),
        "weight_scale": frozenset(FLOATS),
        "weight_zero_point": frozenset({"I8", "I32"}),
        "weight_g_idx": frozenset({"I32", "I64"}),
    }
    codes: ClassVar[tuple[str, ...]] = ("weight", "weight_packed")
    unused: ClassVar[tuple[str, ...]] = (
        *(f".{of}_{part}" for of in ("input", "output", "q", "k", "v") for part in ("scale", "zero_point")),
        ".input_global_scale",
    )

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        groups = settings.get("config_groups")
        groups = groups if isinstance(groups, dict) else {}
        layouts = {settings.get("format"), *(each.get("format") for each in groups.values() if isinstance(each, dict))}
        for layout in sorted(str(layout) for layout in layouts - {None, *FORMATS}):
            raise ModelRefused(name, f"compressed-tensors weights of the format {layout} are not served yet")
        sparsity = settings.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise ModelRefused(name, f"sparse weights ({sparsity['format']}) are not served yet")
        transform = settings.get("transform_config")
        if isinstance(transform, dict) and transform.get("config_groups"):
            raise ModelRefused(name, "compressed-tensors weights with transforms (transform_config) are not served yet")
        self.quantization = _quantization(groups)

    def shape(self, suffix: str, stored: tuple[int, ...]) -> tuple[int, int]:
        if suffix == "weight":
            return stored[0], stored[1]
        return stored[0], stored[1] * (4 if self.quantization == "int8" else 8)

    def weight(self, layer: str, suffix: str, tensors: TensorFiles) -> Weight:
        scale = f"{layer}.weight_scale"
        tensors.shape(scale)
        if suffix == "weight_packed":
            return _packed(layer, tensors)
        if tensors.dtype(f"{layer}.weight") == "F8_E4M3":
            return fp8_weight(layer, scale, tensors)
        return _int8(layer, tensors)


def _quantization(groups: Mapping[str, Any]) -> str | None:
    for each in groups.values():
        weights = each.get("weights") if isinstance(each, dict) else None
        if isinstance(weights, dict):
            return "fp8" if weights.get("type") == "float" else f"int{weights.get('num_bits')}"
    return None


def _int8(layer: str, tensors: TensorFiles) -> Weight:
    from decant.engine.checkpoint.weight import CodeKind, Weight, integer_codes

    name, scale, zeros = (f"{layer}.{part}" for part in ("weight", "weight_scale", "weight_zero_point"))
    outputs, inner = tensors.shape(name)
    group = _group(scale, outputs, inner, tensors)

    def read() -> Codes:
        codes = tensors.read(name)
        points = _by_group(tensors.read(zeros), outputs) if zeros in tensors else None
        unsigned = None if points is None else (points.int() + 128).byte()
        return integer_codes(_offset(codes), _by_group(tensors.read(scale), outputs).float(), unsigned, 8, group)

    return Weight(name, (outputs, inner), CodeKind.INT8, tensors.nbytes(name, scale, zeros), read)


def _packed(layer: str, tensors: TensorFiles) -> Weight:
    from decant.engine.checkpoint.packing import columns_by_group, unpack
    from decant.engine.checkpoint.weight import CodeKind, Weight, integer_codes

    names = [f"{layer}.{part}" for part in CompressedTensors.parts if part != "weight"]
    packed, of_shape, scale, zeros, order = names
    tensors.check_shape(of_shape, (2,))
    outputs, inner = (int(count) for count in tensors.read(of_shape).tolist())
    words, bits = tensors.shape(packed), 0
    for bits in (4, 8):
        if words == (outputs, -(-inner * bits // 32)):
            break
    else:
        raise ValueError(f"{packed} is {list(words)}: its weight_shape [{outputs}, {inner}] has 4 or 8 bits")
    group = _group(scale, outputs, inner, tensors)

    def read() -> Codes:
        codes = unpack(tensors.read(packed), bits, 1)[:, :inner]
        points = None
        if zeros in tensors:
            stored = tensors.read(zeros)
            is_packed = tensors.dtype(zeros) == "I32"
            unsigned = unpack(stored, bits, 0)[:outputs] if is_packed else (stored.int() + (1 << bits - 1)).byte()
            points = unsigned.T.contiguous()
        columns = columns_by_group(tensors.read(order), group) if order in tensors else None
        codes = codes.contiguous() if columns is None else codes[:, columns]
        return integer_codes(codes, _by_group(tensors.read(scale), outputs).float(), points, bits, group, columns)

    kind = CodeKind.INT4 if bits == 4 else CodeKind.INT8
    return Weight(f"{layer}.weight", (outputs, inner), kind, tensors.nbytes(*names), read)


def _group(scale: str, outputs: int, inner: int, tensors: TensorFiles) -> int:
    """Return the inputs with a common scale, which the shape of the scales says. Raises ValueError."""
    shape = tensors.shape(scale)
    if shape in ((), (1,), (1, 1), (outputs, 1)):
        return inner
    if len(shape) != 2 or shape[0] != outputs or not 1 <= shape[1] <= inner:
        raise ValueError(f"{scale} is {list(shape)}: one number, [{outputs}, 1] or [{outputs}, groups]")
    return -(-inner // shape[1])


def _by_group(each: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return [groups, out] of one number, or of [out, groups]."""
    return each.reshape(1, 1).repeat(1, outputs) if each.numel() == 1 else each.T.contiguous()


def _offset(codes: torch.Tensor) -> torch.Tensor:
    """Return signed bytes plus 128, as unsigned ones."""
    return (codes.int() + 128).byte()
