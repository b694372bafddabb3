from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decant.plan.errors import InvalidPlan
from decant.plan.quantities import parse_count

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes of an element; int4 has a two-byte scale for each group of 128."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REQUIRED = ("layers", "hidden", "heads")
_KEYS = (*_REQUIRED, "kv_heads", "head_dim", "intermediate", "vocab", "params")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a model, in elements.

    linear     parameters of the layers, and of an untied head
    table      parameters of the embedding; `tied`: also the head
    active     parameters that a token is multiplied with
    windows    tokens of sliding or chunked attention, and layers with each
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: int
    table: int
    tied: bool
    active: int
    context: int | None = None
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def params(self) -> int:
        return self.linear + self.table

    @property
    def kv_elements(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        return int(self.linear * BYTES[quantization or dtype] + self.table * BYTES[dtype])

    def step_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Return the bytes of weights that a step reads: without a table that only serves look-ups."""
        return int(self.linear * BYTES[quantization or dtype] + (self.table * BYTES[dtype] if self.tied else 0))

    def kv_bytes(self, kv_dtype: str) -> int:
        """Return the KV bytes of a token in all layers."""
        return int(self.kv_elements * BYTES[kv_dtype])

    def kv_windows(self, kv_dtype: str) -> tuple[tuple[int, int], ...]:
        layer = 2 * self.kv_heads * self.head_dim * BYTES[kv_dtype]
        return tuple((window, int(count * layer)) for window, count in self.windows)


def find_shape(model: str) -> ModelShape:
    """Read the config.json of a folder, a file, or a name on the Hugging Face hub, from which it is downloaded."""
    if Path(model).exists() or not _HUB_NAME.fullmatch(model):
        return read_shape(Path(model))
    try:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        from decant.runtime.model_files import download
    except ImportError as error:
        raise InvalidPlan("--model", f"a folder or a config.json; for names on the hub, {error.name}", model) from None
    try:
        disable_progress_bars()
        # Not hf_hub_download, which repeats a failed request for 24 s.
        folder = download(model, None, ["config.json"])
    except Exception as error:  # noqa: BLE001 - HTTP clients and proxies raise errors of their own
        reason = str(error).strip().partition("\n")[0]
        limit = f"a folder, a config.json, or a model on the Hugging Face hub ({reason})"
        raise InvalidPlan("--model", limit, model) from None
    if not (folder / "config.json").is_file():
        raise InvalidPlan("--model", "a model with a config.json", model)
    return replace(read_shape(folder / "config.json"), name=model)


def read_shape(path: Path) -> ModelShape:
    """Read a config.json, or the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidPlan("--model", f"a folder or a config.json ({error.strerror})", file) from None
    except (ValueError, RecursionError) as error:
        raise InvalidPlan("--model", f"a JSON object in {file.name} ({error})", file) from None
    if not isinstance(config, dict):
        raise InvalidPlan("--model", f"a JSON object in {file.name}", type(config).__name__)
    return from_config(file.parent.resolve().name, config.get("text_config") or config)


def from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    if "kv_lora_rank" in config:
        raise InvalidPlan("--model", "attention with one key and one value per KV head", "kv_lora_rank (latent KV)")
    hidden, layers = _number(config, "hidden_size", "n_embd"), _number(config, "num_hidden_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_head")
    dims = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", default=heads),
        "head_dim": _number(config, "head_dim", default=hidden // heads),
        "intermediate": _number(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        "vocab": _number(config, "vocab_size"),
    }
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    used = _number(config, "num_experts_per_tok", default=experts)
    gated = config.get("model_type") not in ("opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "phi", "starcoder2")
    width = _number(config, "moe_intermediate_size", default=dims["intermediate"]) if experts else dims["intermediate"]
    mlp = (3 if gated else 2) * hidden * width
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") in ("opt", "gpt2", "gemma", "gemma2")))
    context = _number(config, "max_position_embeddings", default=0) or None
    shape = _assemble(name, dims, mlp, (experts, used), tied=tied, context=context)
    return replace(shape, windows=_windows(config, layers))


def _windows(config: Mapping[str, Any], layers: int) -> tuple[tuple[int, int], ...]:
    names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    sizes = {kind: config.get(name) and _number(config, name) for kind, name in names.items()}
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern", 2 if config.get("model_type") == "gemma2" else None)
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        is_full = [layer < first or bool(pattern and (layer + 1) % pattern == 0) for layer in range(layers)]
        used = config.get("use_sliding_window", True)
        kinds = ["sliding_attention" if used and not full else "full_attention" for full in is_full]
    counted = Counter(size for kind in kinds if (size := sizes.get(kind)))
    return tuple(sorted(counted.items()))


def parse_shape(text: str) -> ModelShape:
    dims: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise InvalidPlan("--shape", f"keys {', '.join(_KEYS)}", part.strip() or "nothing")
        dims[key] = parse_count(f"--shape {key}", value)
    if missing := [key for key in _REQUIRED if key not in dims]:
        raise InvalidPlan("--shape", f"at least {', '.join(_REQUIRED)}", f"no {', '.join(missing)}")
    dims.setdefault("kv_heads", dims["heads"])
    dims.setdefault("head_dim", dims["hidden"] // dims["heads"])
    dims.setdefault("vocab", 32000)
    mlp = 3 * dims["hidden"] * dims.get("intermediate", 4 * dims["hidden"])
    shape = _assemble(text, dims, mlp, (0, 0), tied=False, context=None)
    params = dims.get("params")
    if params is None:
        return shape
    if params <= 2 * shape.table:
        raise InvalidPlan("--shape params", f"more than table and head have ({2 * shape.table:,})", params)
    linear = params - shape.table
    return ModelShape(
        text, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, linear, shape.table, tied=False, active=linear
    )


def _assemble(
    name: str, dims: Mapping[str, int], mlp: int, experts: tuple[int, int], *, tied: bool, context: int | None
) -> ModelShape:
    layers, hidden, heads = dims["layers"], dims["hidden"], dims["heads"]
    kv_heads, head_dim = dims["kv_heads"], dims["head_dim"]
    if not head_dim:
        raise InvalidPlan("hidden", f"at least 1 for each of {heads:,} heads", hidden)
    if heads % kv_heads:
        raise InvalidPlan("kv_heads", f"a divisor of {heads} heads", kv_heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    count, used = experts
    router = hidden * count
    table = dims["vocab"] * hidden
    head = 0 if tied else table
    linear = layers * (attention + router + mlp * max(count, 1)) + head
    active = layers * (attention + router + mlp * max(used, 1)) + table
    return ModelShape(name, layers, heads, kv_heads, head_dim, linear, table, tied, active, context)


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidPlan(f"config.json: {name}", "a whole number above 0", value)
            return value
    if default is None:
        raise InvalidPlan("config.json", f"{' or '.join(names)}", "none of them")
    return default
