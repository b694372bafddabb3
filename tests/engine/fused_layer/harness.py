from __future__ import annotations

import ctypes
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import decant.engine.cpu.fused_layer as fused_layer
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.model_patches import LookaheadLayer
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request
from tests.engine import tiny

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no compiler was here")


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Multiples of the vector width, as in all real models."""


STEPS = [[("a", 0, 33)], [("b", 0, 5)], [("a", 33, 34), ("b", 5, 40)], [("a", 34, 35), ("b", 40, 41)]]


def device_of(folder: Path, name: str, dtype: str = "float32", **changes: Any) -> ModelDevice:
    return load(saved(folder, name, dtype, **changes))


def saved(folder: Path, name: str, dtype: str = "float32", **changes: Any) -> ModelConfig:
    tiny.save(tiny.config(name, **{**WIDE, **changes}), folder)
    return ModelConfig(str(folder), dtype=dtype, device="cpu", kv_bytes=4 << 20)


def fused(device: ModelDevice) -> list[LookaheadLayer]:
    layers = [layer for _, layer in fused_layer.fused_layers(device.model)]
    assert all(isinstance(layer, LookaheadLayer) for layer in layers)
    return layers  # type: ignore[return-value]


def row(tokens: list[int], start: int, end: int, blocks: array[int]) -> Row:
    return Row(Request("r", tuple(tokens)), tokens, start, end, (blocks,), True)


@torch.inference_mode()
def compute_steps(device: ModelDevice) -> list[torch.Tensor]:
    device.store.blocks.zero_()
    tokens = {id: list(tiny.prompt(50, seed)) for seed, id in enumerate("ab")}
    of_group = {"a": [3, 1, 5, 7], "b": [2, 0, 4, 6]}
    groups = range(len(device.windows))
    blocks = {id: tuple(array("i", [8 * g + block for block in ids]) for g in groups) for id, ids in of_group.items()}
    found = []
    for step in STEPS:
        rows = [
            Row(Request(id, tuple(tokens[id])), tokens[id], start, end, blocks[id], True) for id, start, end in step
        ]
        rows.sort(key=lambda row: row.end - row.start > 1)
        found.append(device.runner.logits(rows, np.arange(sum(row.end - row.start for row in rows))).clone())
    return [*found, device.store.blocks.clone()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


def calls_of(calls: int, count: int) -> list[int]:
    """The kernel's LayerCall structs, five addresses each: layer, cache, visible, selected, step."""
    return list((ctypes.c_uint64 * (5 * count)).from_address(calls))
