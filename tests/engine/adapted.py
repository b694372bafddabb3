"""Devices with adapters, and the logits of steps on them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decant.engine.loading import load
from decant.engine.model.backend import Backend
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request
from tests.engine import tiny

PROMPTS = [tiny.prompt(length, length) for length in (5, 1, 37, 20)]


def add(device: ModelDevice, folder: Path) -> str:
    prepared = device.adapters.load(folder.name, folder)
    device.adapters.add(prepared)
    return prepared.digest


def serve(model: Path, backend: Backend | None = None, **options: Any) -> ModelDevice:
    options = {"dtype": "float32", "device": "cpu", "kv_bytes": 1 << 20, "adapters": True, **options}
    return load(ModelConfig(str(model), **options), backend=backend)


def rows_of(device: ModelDevice, digests: Sequence[str]) -> list[Row]:
    rows, first = [], 0
    for index, digest in enumerate(digests):
        prompt = PROMPTS[index % len(PROMPTS)]
        stop = first + -(-len(prompt) // device.block_size)
        request = Request(f"{index}", tuple(prompt), adapter=digest)
        rows.append(Row(request, prompt, 0, len(prompt), (array("i", range(first, stop)),), True))
        first = stop
    return rows


@torch.inference_mode()
def logits(device: ModelDevice, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Logits of all tokens of each row, computed in one step."""
    flat = device.runner.flatten(rows)
    whole = device.runner.forward(flat, np.arange(int(flat.stops[-1])))
    spans = zip(flat.rows, flat.firsts.tolist(), flat.stops.tolist(), strict=True)
    pieces = {row.request.id: whole[first:stop].clone() for row, first, stop in spans}
    return [pieces[row.request.id] for row in rows]
