"""Quantized experts: they stay quantized where a backend takes them, and compute what their dequantized weights do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.expert_layers import DOWN, ExpertLayers, first_of, has_stacked_experts, replace_experts
from decant.engine.checkpoint.quantize import Quantization, quantize, quantized
from decant.engine.checkpoint.weight import CodeKind
from decant.engine.cpu.backend import CpuBackend
from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.model.model import ModelDevice
from decant.engine.scheduler import Limits
from tests.engine import quantized as formats
from tests.engine import test_mxfp4, tiny
from tests.engine.quantized import LAYOUTS
from tests.engine.served import rewrite, serve
from tests.engine.tiny_configs import MOE

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def is_expert(name: str) -> bool:
    return ".experts." in name


def checkpoint(kind: str, folder: Path) -> Path:
    changes: dict[str, Any] = {} if kind == "gpt_oss" else {"num_hidden_layers": 1}
    if kind == "qwen3_moe":
        changes |= {**MOE, "moe_intermediate_size": 64}
    return tiny.save(tiny.config(kind, **changes), folder)


def read(folder: Path, *, keep_codes: bool = True) -> Any:
    return checkpoints.open(str(folder)).read(torch.float32, CPU, keep_codes=keep_codes)


def coded_layers(model: nn.Module) -> int:
    """Quantized layers of experts. No other tensor has their weights."""
    assert not any(parameter.dim() == 3 for parameter in model.parameters())
    experts = [module for module in model.modules() if isinstance(module, ExpertLayers)]
    return sum(isinstance(each, CodedLinear) for module in experts for each in module.modules())


def generated(device: ModelDevice) -> list[int]:
    return tiny.run(Engine(device, Limits(context_length=64)), [tiny.greedy("r", [5, 6, 7, 8], 12)]).tokens["r"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixtral", "gptq-4-64-act-order"),
        ("mixtral", "compressed-fp8-block"),
        ("qwen3_moe", "awq-32"),
        ("qwen3_moe", "compressed-int8-channel"),
    ],
)
def test_quantized_experts_generate_what_their_dequantized_weights_generate(
    kind: str, layout: str, tmp_path: Path
) -> None:
    folder = checkpoint(kind, tmp_path)
    model = formats.quantize(folder, LAYOUTS[layout], is_expert)
    assert coded_layers(read(folder)) == 3 * 4
    device = serve(folder)
    assert device.probe_result.exact
    tokens = generated(device)
    formats.dequantize(folder, model)
    assert generated(serve(folder)) == tokens


@pytest.mark.slow
def test_the_layout_hash_tells_coded_experts_from_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    hashes = {serve(folder).layout_hash, serve(folder, quantize="int8").layout_hash}
    formats.quantize(folder, LAYOUTS["awq-32"], lambda name: is_expert(name) or "q_proj" in name)
    hashes.add(serve(folder).layout_hash)
    monkeypatch.setattr(CpuBackend, "keeps_codes", False)
    assert len(hashes | {serve(folder).layout_hash}) == 4


def test_a_load_takes_no_memory_for_the_tensors_of_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = checkpoint("qwen3_moe", tmp_path), list[tuple[int, ...]]()
    formats.quantize(folder, LAYOUTS["awq-32"], is_expert)

    def look(model: nn.Module, found: Any, dtype: torch.dtype) -> None:
        seen.extend(model.get_parameter(name).stride() for each in found.values() for name in each.tensors)
        replace_experts(model, found, dtype)

    monkeypatch.setattr(checkpoints, "replace_experts", look)
    read(folder)
    assert seen == [(0, 0, 0)] * 2


def test_experts_are_dequantized_for_a_device_without_such_products(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    model = formats.quantize(folder, LAYOUTS["awq-32"], is_expert)
    experts = read(folder, keep_codes=False).model.layers[0].mlp.experts
    first = "model.layers.0.mlp.experts.1"
    expected = torch.cat([model[f"{first}.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(experts.gate_up_proj[1], expected)


def test_a_load_puts_no_experts_on_a_device_as_their_placeholders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device would hold whole tensors for them."""
    folder = checkpoint("qwen3_moe", tmp_path)
    formats.quantize(folder, LAYOUTS["awq-32"], is_expert)
    monkeypatch.setattr(checkpoints, "is_accelerate_available", lambda: True)
    from_pretrained = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def without_places(model: Any, *arguments: Any, **options: Any) -> Any:
        assert "device_map" not in options
        return from_pretrained(model, *arguments, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(without_places))
    opened = checkpoints.open(str(folder))
    model = opened.read(torch.float32, CPU, load_to_device=True, keep_codes=True)
    assert coded_layers(model) == 3 * 4


def test_experts_of_which_some_are_plain_are_dequantized(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    model = formats.quantize(folder, LAYOUTS["awq-32"], lambda name: is_expert(name) and ".experts.2." not in name)
    experts = read(folder).model.layers[0].mlp.experts
    assert torch.equal(experts.down_proj[2], model["model.layers.0.mlp.experts.2.down_proj.weight"])
    assert torch.equal(experts.down_proj[1], model["model.layers.0.mlp.experts.1.down_proj.weight"])


def test_a_missing_expert_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    formats.quantize(folder, LAYOUTS["awq-32"], is_expert)
    rewrite(folder, lambda had: {name: each for name, each in had.items() if ".experts.3.up_proj" not in name})
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight is missing"):
        serve(folder)


@pytest.mark.parametrize("experts", [[0, 1, 2], [0, 1, 2, 3, 3]], ids=["fewer", "more"])
def test_quantized_experts_of_another_number_than_the_model_s_are_refused(experts: list[int], tmp_path: Path) -> None:
    test_mxfp4.quantize(test_mxfp4.checkpoint(tmp_path))

    def change(had: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stacked = {name: each[experts] for name, each in had.items() if name.endswith(("_blocks", "_scales"))}
        return had | stacked

    rewrite(tmp_path, change)
    with pytest.raises(ModelRefused, match=f"gate_up_proj has {len(experts)} experts, and the model 4"):
        read(tmp_path)


def test_quantized_experts_of_other_widths_than_the_model_s_are_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    formats.quantize(folder, LAYOUTS["compressed-int8-channel"], is_expert)

    def change(had: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        expert = {name: each for name, each in had.items() if ".experts.3." in name}
        inner = {name: each[:, :32] for name, each in expert.items() if name.endswith("down_proj.weight")}
        outer = {name: each[:32] for name, each in expert.items() if "down_proj" not in name and len(each) == 64}
        return had | {name: each.contiguous() for name, each in (inner | outer).items()}

    rewrite(folder, change)
    with pytest.raises(ModelRefused, match=r"experts\.3\.gate_proj\.weight is \[32, .*, and the model's is \[64, "):
        read(folder)


@pytest.mark.parametrize("expert", [0, 3])
def test_a_scale_of_zero_in_an_expert_is_refused_by_name(expert: int, tmp_path: Path) -> None:
    folder, name = checkpoint("qwen3_moe", tmp_path), f"model.layers.0.mlp.experts.{expert}.up_proj"
    formats.quantize(folder, LAYOUTS["awq-32"], is_expert)
    rewrite(folder, lambda had: had | {f"{name}.scales": torch.zeros_like(had[f"{name}.scales"])})
    with pytest.raises(ModelRefused, match=rf"{re.escape(name)}\.weight: a scale is zero"):
        serve(folder)


def test_mxfp4_experts_stay_quantized_and_are_exact(tmp_path: Path) -> None:
    model = test_mxfp4.quantize(test_mxfp4.checkpoint(tmp_path))
    found = read(tmp_path)
    assert coded_layers(found) == 2 * 2 * 4
    for layer, module in enumerate(found.model.layers):
        for tensor, layers in (("gate_up_proj", module.mlp.experts.up), ("down_proj", module.mlp.experts.down)):
            expected = model[f"model.layers.{layer}.mlp.experts.{tensor}"]
            for expert, each in enumerate(layers):
                assert each.source.kind is CodeKind.E2M1
                assert torch.equal(each.source[:].T, expected[expert].float())


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_of_a_plain_checkpoint_are_quantized_one_by_one(kind: str, to: Quantization, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    model, expected = read(folder), read(folder)
    quantize(model, to)
    assert coded_layers(model) == 2 * 4 * len(model.model.layers)
    stacked = {name: module for name, module in expected.named_modules() if has_stacked_experts(module)}
    for name in stacked:
        expected.set_submodule(name, nn.Identity())
    quantize(expected, to)
    for name, module in stacked.items():
        expected.set_submodule(name, module)
        for tensor in (first_of(module), DOWN):
            rounded = getattr(module, tensor).detach()
            for matrix in rounded.transpose(1, 2) if module.is_transposed else rounded:
                matrix.copy_(quantized("w", matrix, to)[:])
    with torch.inference_mode():
        one, other = (
            each(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits for each in (model, expected)
        )
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
