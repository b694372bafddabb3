"""Random LoRA adapters of a device, and steps that compute with them."""

from __future__ import annotations

import json
import tempfile
from array import array
from pathlib import Path

import torch
from safetensors.torch import save_file

from decant.engine.model.model import ModelDevice
from decant.engine.plan import Row, StepPlan
from decant.engine.request import Request


def add_adapter(device: ModelDevice, rank: int, seed: int) -> str:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in device.model.named_modules():
        if name.endswith("_proj"):
            outputs, inner = layer.weight.shape if hasattr(layer, "weight") else (layer.out_features, layer.in_features)
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inner, generator=generator).to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).to(torch.bfloat16)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.01, "target_modules": r".*_proj"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        prepared = device.adapters.load(f"{seed}", folder)
    device.adapters.add(prepared)
    return prepared.digest


def plan(device: ModelDevice, sequences: int, context: int, digests: list[str]) -> StepPlan:
    """Step of one token of each sequence, behind ``context`` others."""
    rows, count = [], -(-(context + 1) // device.block_size)
    for index in range(sequences):
        tokens = [(index + at) % device.vocab_size for at in range(context + 1)]
        request = Request(f"{index}", tuple(tokens), adapter=digests[index % len(digests)] if digests else "")
        blocks = array("i", range(index * count, (index + 1) * count))
        rows.append(Row(request, tokens, context, context + 1, (blocks,), True))
    return StepPlan(tuple(rows), sequences)
