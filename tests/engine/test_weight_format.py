from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decant.engine.checkpoint import weight_files
from decant.engine.checkpoint.formats import FORMATS, find_format
from decant.engine.checkpoint.weight_format import PLAIN, Slice
from decant.engine.checkpoint.weight_shapes import Stored
from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.scheduler import Limits
from tests.engine import tiny

METHOD, SCALE = "int8-rows", ".weight_scale"


class Int8Row:
    def __init__(self, owner: Int8Rows, file: Any, name: str) -> None:
        self._owner, self._file, self._name = owner, file, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._owner.lock:
            self._owner.converted.append(self._name)
        rows = self._file.get_tensor(self._name).float()
        scale = self._file.get_tensor(self._name.removesuffix(".weight") + SCALE)
        whole: torch.Tensor = rows * scale[:, None]
        return whole[index]


class Int8Rows:
    quantization = "int8"

    def __init__(self) -> None:
        self.converted: list[str] = []
        self.lock = threading.Lock()

    def allows(self, tensor: str, dtype: str) -> bool:
        return dtype == "I8" if tensor.endswith("_proj.weight") else PLAIN.allows(tensor, dtype)

    def model_tensors(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        return {name: entry for name, entry in stored.items() if not name.endswith(SCALE)}

    def open(self, files: Sequence[Path]) -> Mapping[str, Slice]:
        slices: dict[str, Slice] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            names = set(file.keys())
            for name in sorted(names):
                if name.removesuffix(".weight") + SCALE in names:
                    slices[name] = Int8Row(self, file, name)
                elif not name.endswith(SCALE):
                    slices[name] = file.get_slice(name)
        return slices


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Int8Rows:
    registered = Int8Rows()
    monkeypatch.setitem(FORMATS, METHOD, lambda name, settings: registered)
    return registered


def quantize(folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1) / 127
            tensors[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
            tensors[name.removesuffix(".weight") + SCALE] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD}
    (folder / "config.json").write_text(json.dumps(config))


def dequantize(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALE)}
    for name in list(tensors):
        if (scale := stored.get(name.removesuffix(".weight") + SCALE)) is not None:
            tensors[name] = tensors[name].float() * scale[:, None]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def serve(folder: Path) -> ModelDevice:
    return load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=1 << 20))


def tokens(device: ModelDevice) -> dict[str, list[int]]:
    engine = Engine(device, Limits(context_length=64))
    return tiny.run(engine, [tiny.greedy("r", [5, 6, 7, 8], 12)]).tokens


def test_a_registered_format_serves_what_its_weights_are(copy: Path, int8: Int8Rows) -> None:
    quantize(copy)
    device = serve(copy)
    assert device.probe_result.exact
    stored = load_file(copy / "model.safetensors")
    matrices = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    assert set(int8.converted) == matrices
    assert len(int8.converted) == len(matrices), "each is converted once"
    generated, layout_hash = tokens(device), device.layout_hash
    dequantize(copy)
    plain = serve(copy)
    assert tokens(plain) == generated
    assert plain.layout_hash != layout_hash, "other files have another layout hash"


def test_nothing_is_converted_before_the_model_takes_it(copy: Path, int8: Int8Rows) -> None:
    quantize(copy)
    weight_files.check(copy)
    slices = int8.open([copy / "model.safetensors"])
    assert not int8.converted
    name = next(name for name in slices if name.endswith("q_proj.weight"))
    assert slices[name][:2].dtype == torch.float32
    assert int8.converted == [name]


def test_a_format_decides_which_dtypes_a_file_may_have(copy: Path, int8: Int8Rows) -> None:
    quantize(copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"]).to(torch.int8)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"I8 weights are not served yet \(model\.norm\.weight"):
        weight_files.check(copy)


def test_an_unknown_format_is_refused_by_its_name(copy: Path) -> None:
    quantize(copy)
    for check in (weight_files.check, serve):
        with pytest.raises(ModelRefused, match="int8-rows weights are not served yet"):
            check(copy)
    assert METHOD not in FORMATS
    assert find_format("m", {}) is PLAIN
