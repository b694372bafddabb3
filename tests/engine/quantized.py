"""Checkpoints of quantized formats, packed here after the formats' descriptions, or by the packages that write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.engine.served import edit

Parts = dict[str, torch.Tensor]
"""Tensors of a layer by the last part of their names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A format with its settings; ``pack`` returns a matrix's tensors in the file, and what it is in float64."""

    settings: Mapping[str, Any]
    pack: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


def quantize(folder: Path, layout: Layout, is_chosen: Callable[[str], bool] = lambda name: "_proj" in name) -> Parts:
    """Rewrite a checkpoint with its matrices in a layout. Return its tensors as they are then, in float32."""
    stored, model = Parts(), Parts()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = model[name] = tensor
        if name.endswith(".weight") and is_chosen(name):
            layer = name.removesuffix(".weight")
            parts, weight = layout.pack(tensor.float())
            del stored[name]
            stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
            model[name] = weight.float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=dict(layout.settings))
    return model


def dequantize(folder: Path, model: Parts) -> None:
    save_file(model, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=None)


def into_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Put neighbours in the last dimension into words, the first one into the lowest bits."""
    count = 32 // bits
    shifts = torch.arange(count, dtype=torch.int64) * bits
    words = (numbers.long().unflatten(-1, (-1, count)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _drawn(
    weight: torch.Tensor, bits: int, group: int, groups: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [in, out], scales and zero points [groups, out], and the weight they stand for [out, in] in float64."""
    outputs, inner = weight.shape
    count, half = -(-inner // group), 1 << bits - 1
    generator = torch.Generator().manual_seed(inner + outputs)
    scales = (weight.std() * 6 / (2 << bits - 1) * (0.5 + torch.rand(count, outputs, generator=generator))).half()
    zeros = torch.full((count, outputs), half)
    if not symmetric:
        spread = 8 if bits == 4 else 1
        zeros = zeros + torch.randint(1 - spread, spread, (count, outputs), generator=generator)
    codes = (weight.T / scales.float()[groups] + zeros[groups]).round().clamp(max(0, half - 127), half * 2 - 1).long()
    exact = (codes.double() - zeros[groups].double()) * scales.double()[groups]
    return codes, scales, zeros, exact.T


def gptq(
    bits: int = 4, group: int = 32, *, act_order: bool = False, symmetric: bool = False, layout: str = "gptq"
) -> Layout:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        inner = weight.shape[1]
        size = inner if group == -1 else group
        groups = torch.arange(inner) // size
        if act_order:
            groups = groups[torch.randperm(inner, generator=torch.Generator().manual_seed(inner))]
        codes, scales, zeros, exact = _drawn(weight, bits, size, groups, symmetric=symmetric)
        stored = zeros - int(layout == "gptq") & (1 << bits) - 1
        parts = {
            "qweight": into_words(codes.T, bits).T,
            "qzeros": into_words(stored, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return parts, exact

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    return Layout(settings | {"checkpoint_format": layout}, pack)


def awq(group: int = 32) -> Layout:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros, exact = _drawn(weight, 4, size, torch.arange(weight.shape[1]) // size, symmetric=False)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

        def words(numbers: torch.Tensor) -> torch.Tensor:
            return into_words(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, exact

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Layout(settings, pack)


def compressed(compressor: type[BaseCompressor], layout: str, **args: Any) -> Layout:
    made = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=made)

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        scales = _scales(weight, made)
        state = {"weight": weight, "weight_scale": scales}
        if not made.symmetric:
            drawn = torch.randint(-4, 5, scales.shape, generator=torch.Generator().manual_seed(1))
            state["weight_zero_point"] = drawn.to(torch.int8)
        parts = compressor.compress(dict(state), scheme)
        widened = {name: each.double() if name == "weight_scale" else each for name, each in parts.items()}
        return parts, compressor.decompress(widened, scheme)["weight"].double()

    weights = made.model_dump(mode="json")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    settings = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return Layout(settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}, pack)


def _scales(weight: torch.Tensor, args: Any) -> Any:
    most = 448.0 if args.type == "float" else float((1 << args.num_bits - 1) - 1)
    match str(getattr(args.strategy, "value", args.strategy)):
        case "tensor":
            return weight.abs().amax().reshape(1) / most
        case "channel":
            return weight.abs().amax(1, keepdim=True) / most
        case "group":
            return weight.unflatten(1, (-1, args.group_size)).abs().amax(2) / most
        case "block":
            rows, columns = weight.shape
            padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
            return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / most
    raise ValueError(args.strategy)


_PACK, _INT, _FLOAT = PackedQuantizationCompressor, IntQuantizationCompressor, FloatQuantizationCompressor

LAYOUTS: dict[str, Layout] = {
    "gptq-4-32": gptq(),
    "gptq-4-64-act-order": gptq(4, 64, act_order=True),
    "gptq-4-whole-symmetric": gptq(4, -1, symmetric=True),
    "gptq-8-64": gptq(8, 64),
    "gptq-8-whole-symmetric": gptq(8, -1, symmetric=True),
    "gptq-v2-4-32": gptq(layout="gptq_v2"),
    "awq-32": awq(),
    "awq-whole": awq(-1),
    "compressed-int8-channel": compressed(_INT, "int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-int8-tensor": compressed(_INT, "int-quantized", num_bits=8, type="int", strategy="tensor"),
    "compressed-int4-32": compressed(_PACK, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    "compressed-int4-32-zeros": compressed(
        _PACK, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "compressed-int8-packed": compressed(_PACK, "pack-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-fp8-tensor": compressed(_FLOAT, "float-quantized", num_bits=8, type="float", strategy="tensor"),
    "compressed-fp8-channel": compressed(_FLOAT, "float-quantized", num_bits=8, type="float", strategy="channel"),
    "compressed-fp8-block": compressed(
        _FLOAT, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
}


def save_random_gptq(made: PreTrainedConfig, folder: Path, group: int = 128) -> Path:
    """Save a model whose linear layers but the head are of random codes, without making any plain weights of them."""
    generator, stored = torch.Generator().manual_seed(0), Parts()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    for name, each in _split_experts(dict(model.named_parameters())).items():
        outputs, inner = each.shape if each.dim() == 2 else (0, 0)
        if "_proj" in name:
            layer, groups = name.removesuffix(".weight"), inner // group
            stored[f"{layer}.qweight"] = _words(inner // 8, outputs, generator)
            stored[f"{layer}.qzeros"] = _words(groups, outputs // 8, generator)
            stored[f"{layer}.scales"] = torch.full((groups, outputs), 0.2 / inner**0.5).half()
        else:
            drawn = torch.randn(each.shape, generator=generator) / 20
            stored[name] = (drawn if each.dim() == 2 else drawn + 1).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    made.save_pretrained(folder)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
    return edit(folder, quantization_config=settings, architectures=[type(model).__name__])


def _split_experts(model: Parts) -> Parts:
    """Return tensors with those of all experts as the matrices that files have of each."""
    made = Parts()
    for name, each in model.items():
        folder, _, last = name.rpartition(".")
        if each.dim() == 3:
            parts = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
            for expert, matrix in enumerate(each):
                split = zip(parts, matrix.chunk(len(parts)), strict=True)
                made |= {f"{folder}.{expert}.{part}.weight": rows for part, rows in split}
        else:
            made[name] = each
    return made


def _words(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=generator).int()
