"""A small model of each quantized format, as a worker is started with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import gguf_files
from tests.engine import quantized, test_fp8_weights, test_gguf, test_mxfp4, tiny
from tests.engine.quantized import LAYOUTS, Layout
from tests.engine.tiny_configs import MOE


@dataclass(frozen=True, slots=True)
class Started:
    """A model, and the options of a load."""

    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)


def _layout(layout: Layout, kind: str = "llama") -> Callable[[Path], Started]:
    def make(folder: Path) -> Started:
        tiny.save(tiny.config(kind), folder)
        quantized.quantize(folder, layout, lambda name: "_proj" in name or ".experts." in name)
        return Started(folder)

    return make


def _w8a8() -> Layout:
    """Weights and activations in 8 bits, the latter with a scale for each token."""
    layout = LAYOUTS["compressed-int8-channel"]
    group = dict(layout.settings["config_groups"]["group_0"])
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return replace(layout, settings={**layout.settings, "config_groups": {"group_0": group}})


def _fp8(folder: Path) -> Started:
    test_fp8_weights.quantize(tiny.save(tiny.config("llama"), folder), test_fp8_weights.blocks, "_scale_inv")
    return Started(folder)


def _mxfp4(folder: Path) -> Started:
    test_mxfp4.quantize(test_mxfp4.checkpoint(folder))
    return Started(folder)


def _gguf(folder: Path) -> Started:
    file = gguf_files.of_folder(test_gguf.checkpoint(folder, num_hidden_layers=2), test_gguf.every_kind)
    return Started(test_gguf.folder_of(test_gguf.written(file, folder)))


MODELS: Mapping[str, Callable[[Path], Started]] = {
    "compressed-tensors int8 W8A16": _layout(LAYOUTS["compressed-int8-channel"]),
    "compressed-tensors int8 W8A8": _layout(_w8a8()),
    "compressed-tensors int4": _layout(LAYOUTS["compressed-int4-32-zeros"]),
    "compressed-tensors fp8": _layout(LAYOUTS["compressed-fp8-channel"]),
    "gptq int4 in activation order": _layout(LAYOUTS["gptq-4-64-act-order"]),
    "gptq int8 experts": _layout(LAYOUTS["gptq-8-64"], "mixtral"),
    "awq": _layout(LAYOUTS["awq-32"]),
    "fp8 blocks": _fp8,
    "mxfp4 experts": _mxfp4,
    "gguf, a type for each matrix": _gguf,
    "--quantize int8": lambda folder: Started(tiny.save(tiny.config("llama"), folder), {"quantize": "int8"}),
    "--quantize int4, activations in int8": lambda folder: Started(
        tiny.save(tiny.config("llama"), folder), {"quantize": "int4", "activations": "int8"}
    ),
    "--quantize int4, experts": lambda folder: Started(
        tiny.save(tiny.config("qwen3_moe", **MOE), folder), {"quantize": "int4"}
    ),
}
