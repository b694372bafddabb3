"""Adapters of random numbers, as PEFT saves them, and the logits that PEFT computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save(model: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Save an adapter with numbers large enough to change what the model says."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL, **options})
    adapted = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    adapted.save_pretrained(str(folder))
    return folder


@torch.inference_mode()
def logits(model: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Float32 logits of each prompt by PEFT on transformers' own model."""
    import peft

    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        made = peft.PeftModel.from_pretrained(made, str(adapter))
    made.eval()
    return [made(input_ids=torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def edit(folder: Path, **changes: Any) -> Path:
    """Change settings of a saved adapter; a change to ``...`` removes one."""
    file = folder / CONFIG
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Path:
    file = folder / WEIGHTS
    save_file(dict(change(load_file(file))), file, metadata={"format": "pt"})
    return folder


def plain(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, rank: int = 4, seed: int = 0, **settings: Any
) -> Path:
    """Write an adapter without PEFT: the matrices of modules with weights of these ``shapes`` [out, in]."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **settings}
    (folder / CONFIG).write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inner) in shapes.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) * inner**-0.5
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * rank**-0.5
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def for_model(
    folder: Path, model: Path, *, suffixes: tuple[str, ...] = (".q_proj.weight", ".down_proj.weight"), **options: Any
) -> Path:
    """Write an adapter of the weights of a model's folder whose names end so."""
    weights = {name: tuple(each.shape) for name, each in load_file(model / "model.safetensors").items()}
    shapes = {name.removesuffix(".weight"): shape for name, shape in weights.items() if name.endswith(suffixes)}
    return plain(folder, shapes, **options)
