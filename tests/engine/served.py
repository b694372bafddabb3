from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice


def serve(model: Path | str, **options: Any) -> ModelDevice:
    return load(ModelConfig(str(model), **{"device": "cpu", "kv_bytes": 1 << 20, **options}))


def edit(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder
