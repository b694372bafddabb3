"""Compare headers of weight files with config.json, for model types with Llama's layers and names. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decant.engine.errors import ModelRefused

LLAMA_SHAPED = frozenset(
    {
        "arcee",
        "cohere",
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "helium",
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
HEADS_DIVIDE_HIDDEN = frozenset({"llama", "mistral", "mixtral", "qwen2"})
"""Whose default ``head_dim`` is hidden_size / num_attention_heads."""

CONSTANTS = (".rotary_emb.inv_freq", "position_ids", ".attn.masked_bias")
"""Suffixes of tensors that follow from the configuration; saved by older releases."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Stored:
    file: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Size:
    field: str
    count: int | None


def check(name: str, config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    if str(config.get("model_type")) not in LLAMA_SHAPED:
        return
    _check_layers(name, config, tensors)
    shapes = _shapes(config)
    for tensor, stored in tensors.items():
        layer = _LAYER.fullmatch(tensor)
        needed = shapes.get(layer.group(2) if layer else tensor.removeprefix("model."), ())
        counts = [size.count for size in needed]
        if needed and None not in counts and tuple(counts) != stored.shape:
            fields = " x ".join(size.field for size in needed)
            reason = f"{tensor} in {stored.file} is {list(stored.shape)}, and by config.json {fields} is {counts}"
            raise ModelRefused(name, reason)


def predicting(first: int, further: Any) -> range:
    """Indices of the layers after the model's own, which predict further tokens."""
    return range(first, first + further) if isinstance(further, int) else range(0)


def _check_layers(name: str, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    count = _count(config, "num_hidden_layers")
    found = {tensor: layer for tensor in tensors if (layer := _LAYER.fullmatch(tensor))}
    if not count or not found:
        return
    parts = {(int(layer.group(1)), layer.group(2)) for layer in found.values()}
    needed = [(index, f"self_attn.{part}.weight") for index in range(count) for part in _PROJECTIONS]
    if missing := [f"model.layers.{index}.{part}" for index, part in needed if (index, part) not in parts]:
        reason = f"it lacks {len(missing)} of its weights, {missing[0]} among them"
        raise ModelRefused(name, f"{reason}; config.json says num_hidden_layers = {count}")
    further = predicting(count, config.get("num_nextn_predict_layers"))
    surplus = sorted(
        tensor
        for tensor, layer in found.items()
        if int(layer.group(1)) >= count and int(layer.group(1)) not in further and not tensor.endswith(CONSTANTS)
    )
    if surplus:
        reason = f"it has {len(surplus)} weights that the model does not use, {surplus[0]} among them"
        raise ModelRefused(name, f"{reason}; config.json says num_hidden_layers = {count}")


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[_Size, _Size]]:
    hidden = _Size("hidden_size", _count(config, "hidden_size"))
    vocabulary = _Size("vocab_size", _count(config, "vocab_size"))
    inner = _Size("intermediate_size", _count(config, "intermediate_size"))
    queries, keys = _width(config, "num_attention_heads"), _width(config, "num_key_value_heads")
    shapes = {
        "embed_tokens.weight": (vocabulary, hidden),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.get("tie_word_embeddings") is False:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _width(config: Mapping[str, Any], field: str) -> _Size:
    heads, width = _count(config, field), _count(config, "head_dim")
    hidden, of_queries = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if width is None and str(config.get("model_type")) in HEADS_DIVIDE_HIDDEN and hidden and of_queries:
        width = hidden // of_queries
    return _Size(f"({field} x head_dim)", heads * width if heads and width else None)


def _count(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
