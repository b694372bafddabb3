"""Weight formats by ``quantization_config`` in config.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from decant.engine.checkpoint.awq import Awq
from decant.engine.checkpoint.compressed_tensors import CompressedTensors
from decant.engine.checkpoint.fp8 import Fp8
from decant.engine.checkpoint.gguf import Gguf
from decant.engine.checkpoint.gptq import Gptq
from decant.engine.checkpoint.mxfp4 import Mxfp4
from decant.engine.checkpoint.weight_format import PLAIN, WeightFormat
from decant.engine.errors import ModelRefused

FORMATS: dict[str, Callable[[str, Mapping[str, Any]], WeightFormat]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""Weight formats by ``quant_method``, made of a model's name and ``quantization_config``. They raise ModelRefused."""


def find_format(name: str, config: Mapping[str, Any]) -> WeightFormat:
    chosen = PLAIN
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if settings is None:
                continue
            if not settings:  # transformers would fail
                raise ModelRefused(
                    name, f"{key} in config.json is {json.dumps(settings)}: remove it, or name the format"
                )
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            if not isinstance(method, str) or method not in FORMATS:
                raise ModelRefused(name, f"{_title(settings, method)} weights are not served yet")
            chosen = FORMATS[method](name, settings)
    return chosen


def _title(settings: object, method: object) -> str:
    if not isinstance(method, str):
        bits = {"load_in_4bit", "load_in_8bit"} & set(settings) if isinstance(settings, dict) else set()
        return "bitsandbytes" if bits else "quantized"
    return method.upper() if len(method) <= 5 else method
