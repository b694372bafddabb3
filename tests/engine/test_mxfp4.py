"""Experts in mxfp4: exactly what transformers dequantizes, and what a model of them generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint import weight_files
from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.model.model import ModelDevice
from decant.engine.scheduler import Limits
from tests.engine import tiny
from tests.engine.served import edit, rewrite, serve

Tensors = dict[str, torch.Tensor]

FIRST = "model.layers.0.mlp.experts.gate_up_proj"
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantize(folder: Path) -> Tensors:
    """Give the experts random blocks. Return the tensors of the model, as transformers dequantizes them."""
    draw, stored, model = torch.Generator().manual_seed(0), Tensors(), Tensors()
    for name, tensor in load_file(folder / "model.safetensors").items():
        model[name] = stored[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inner // 32, 16), generator=draw).to(torch.uint8)
            scales = torch.randint(121, 124, (experts, outputs, inner // 32), generator=draw).to(torch.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            model[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=SETTINGS)
    return model


def checkpoint(folder: Path) -> Path:
    return tiny.save(tiny.config("gpt_oss"), folder)


def generated(device: ModelDevice) -> list[int]:
    engine = Engine(device, Limits(context_length=64))
    return tiny.run(engine, [tiny.greedy("r", [5, 6, 7, 8], 12)]).tokens["r"]


def test_experts_are_exactly_what_transformers_dequantizes(tmp_path: Path) -> None:
    model = quantize(checkpoint(tmp_path))
    weight_files.check(tmp_path)
    opened = checkpoints.open(str(tmp_path)).weight_format.open([tmp_path / "model.safetensors"])
    assert opened is not None
    assert opened.keys() == model.keys()
    for name, tensor in model.items():
        assert torch.equal(opened[name][:], tensor), name
    assert torch.equal(opened[FIRST][1:2], model[FIRST][1:2])


@pytest.mark.parametrize("exponent", [0, 1, 126, 254 - 3])
def test_each_exponent_is_exact(exponent: int, tmp_path: Path) -> None:
    quantize(checkpoint(tmp_path))
    rewrite(tmp_path, lambda had: had | {f"{FIRST}_scales": torch.full_like(had[f"{FIRST}_scales"], exponent)})
    opened = checkpoints.open(str(tmp_path)).weight_format.open([tmp_path / "model.safetensors"])
    assert opened is not None
    numbers = opened[FIRST][:].double() / 2.0 ** (exponent - 127)
    assert set(numbers.unique().tolist()) == {
        sign * number for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0) for sign in (1, -1)
    }


@pytest.mark.slow
def test_a_model_generates_what_its_dequantized_experts_generate(tmp_path: Path) -> None:
    model = quantize(checkpoint(tmp_path))
    device = serve(tmp_path)
    assert device.probe_result.exact
    assert device.equal_bits
    tokens, layout_hash = generated(device), device.layout_hash
    save_file(model, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, quantization_config=None)
    plain = serve(tmp_path)
    assert generated(plain) == tokens
    assert plain.layout_hash != layout_hash


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda had: had | {FIRST + part: change(had[FIRST + part]).contiguous()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("_scales", lambda each: each[:, 1:]), r"gate_up_proj_scales is \[4, 191, 2\]"),
        (changed("_blocks", lambda each: each[..., 1:]), r"gate_up_proj_blocks is \[4, 192, 2, 15\]: \[experts, out"),
        (changed("_blocks", lambda each: each.short()), r"I16 weights are not served yet \(.*gate_up_proj_blocks"),
        (changed("_scales", lambda each: each | 255), r"gate_up_proj_scales has an exponent with which its numbers"),
        (
            changed("_scales", lambda each: each * 0 + 254),
            r"gate_up_proj_scales has an exponent with which its numbers",
        ),
        (lambda had: {name: had[name] for name in had if name != f"{FIRST}_scales"}, r"gate_up_proj_scales is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_format_are_refused_by_name(
    change: Callable[[Tensors], Tensors], reason: str, tmp_path: Path
) -> None:
    quantize(checkpoint(tmp_path))
    rewrite(tmp_path, change)
    with pytest.raises(ModelRefused, match=reason):
        serve(tmp_path)


def test_a_file_without_quantized_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="none of them is"):
        serve(edit(checkpoint(tmp_path), quantization_config=SETTINGS))
