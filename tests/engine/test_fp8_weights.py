from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint import weight_files
from decant.engine.checkpoint.fp8 import BLOCK
from decant.engine.checkpoint.weight import Weight
from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.scheduler import Limits
from tests.engine import tiny

LARGEST = 448.0
"""Of e4m3."""

Scale = Callable[[torch.Tensor], torch.Tensor]


def tensor_scale(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax() / LARGEST


def blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    scales: torch.Tensor = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / LARGEST
    return scales


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if scale.dim() == 0:
        return scale
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def checkpoint(tmp_path: Path) -> Path:
    config = tiny.config("llama")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 1, 144, 200
    return tiny.save(config, tmp_path)


def quantize(folder: Path, scale_of: Scale, suffix: str) -> dict[str, torch.Tensor]:
    stored, model = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = model[name] = tensor
        if name.endswith("_proj.weight"):
            scale = scale_of(tensor.float()).float()
            factors = spread(scale, tensor.shape)
            stored[name] = (tensor.float() / factors).to(torch.float8_e4m3fn)
            stored[name + suffix] = scale
            model[name] = stored[name].float() * factors
            if suffix == "_scale":
                stored[name.replace(".weight", ".input_scale")] = torch.tensor(3.0)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def serve(folder: Path) -> ModelDevice:
    return load(ModelConfig(str(folder), dtype="float32", device="cpu", context_length=64, kv_bytes=1 << 20))


def tokens(device: ModelDevice) -> list[int]:
    return tiny.run(Engine(device, Limits(context_length=64)), [tiny.greedy("r", [5, 6, 7, 8], 8)]).tokens["r"]


@pytest.mark.slow
@pytest.mark.parametrize(("scale_of", "suffix"), [(tensor_scale, "_scale"), (blocks, "_scale_inv")])
def test_fp8_weights_generate_what_their_products_with_the_scales_generate(
    scale_of: Scale, suffix: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path)
    model = quantize(folder, scale_of, suffix)
    weight_files.check(folder)
    generated = tokens(serve(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model, folder / "model.safetensors", {"format": "pt"})
    assert tokens(serve(folder)) == generated


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda scale: scale[:1], r"the scale of model\S+_proj.weight is \[1, .*one per block of 128"),
        (None, r"_proj.weight is fp8 and has no scale"),
    ],
)
def test_a_missing_scale_or_one_of_another_shape_is_refused_by_name(
    changed: Scale | None, reason: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path)
    quantize(folder, blocks, "_scale_inv")
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("gate_proj.weight_scale_inv"))
    scale = stored.pop(name)
    if changed is not None:
        stored[name] = changed(scale).contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=reason):
        serve(folder)


def test_another_device_gets_each_weight_as_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    alive, most = set[int](), []
    convert = Weight.__getitem__

    def watched(self: Weight, index: object) -> torch.Tensor:
        made: torch.Tensor = convert(self, index)
        alive.add(id(made))
        weakref.finalize(made, alive.discard, id(made))
        most.append(len(alive))
        return made

    monkeypatch.setattr(Weight, "__getitem__", watched)
    config = tiny.config("llama")
    config.num_hidden_layers = 4
    folder = tiny.save(config, tmp_path)
    quantize(folder, blocks, "_scale_inv")
    model = checkpoints.open(str(folder)).read(torch.float32, torch.device("meta"), load_to_device=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(most) == 28
    assert max(most) <= 8, "transformers reads with 4 threads"
