"""config.json of a GGUF file, whose metadata has the same facts under llama.cpp's names.

An entry of the architecture that is not known here is refused: llama.cpp's models are what their entries say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decant.runtime.gguf.reader import GgufHeader, GgufUnreadable

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"

_LIMIT = 1 << 31
_SCALING = "rope.scaling."
_QUANTIZATION = {
    **dict.fromkeys(("Q8_0", "Q6_K", "Q5_0", "Q5_1", "Q5_K"), "int8"),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
}
"""Names of ``decant plan``."""
_DTYPES = {"F16": "float16", "F32": "float32"}
_USED = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
    }
)
"""Entries of an architecture, without its name."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """``has_pairs``: llama.cpp rotates neighbours, so rows of queries and keys are in another order in the file."""

    model_type: str
    class_name: str
    names_head_width: bool
    has_pairs: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", names_head_width=True, has_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", names_head_width=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", names_head_width=True),
}


def architecture_of(header: GgufHeader) -> Architecture:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise GgufUnreadable(f"GGUF files of the architecture {name!r} are not served; {served} are")
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise GgufUnreadable(f"it is one of {parts} files of a model: merge them with llama-gguf-split --merge")
    return ARCHITECTURES[name]


def make_config(header: GgufHeader, read_factors: Callable[[], list[float]]) -> dict[str, Any]:
    """Make config.json; ``read_factors`` reads the tensor of rotary factors. Raises GgufUnreadable."""
    architecture, facts = architecture_of(header), _Facts(header.metadata)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": _rows(header, EMBEDDING),
        "hidden_act": "silu",
        "rope_parameters": _rope(header, facts, read_factors),
        "tie_word_embeddings": has_tied_head(header),
        "dtype": _DTYPES.get(_most(header), "bfloat16"),
        **_biases(header, architecture),
    }
    width = _head_width(facts, hidden, heads)
    if architecture.names_head_width:
        config["head_dim"] = width
    elif width * heads != hidden:
        raise GgufUnreadable(f"its heads have a width of {width}, and by its other sizes {hidden} / {heads}")
    for name in ("bos", "eos"):
        if (id := header.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = id
    return config | {"quantization_config": {"quant_method": "gguf", "weights": _QUANTIZATION.get(_most(header))}}


def has_tied_head(header: GgufHeader) -> bool:
    """Whether head and embedding are one tensor of the model. A quantized one is two, of the same numbers: the head's
    stays quantized."""
    return HEAD not in header.tensors and header.tensors[EMBEDDING].type not in _QUANTIZATION


class _Facts:
    """Entries of the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._prefix = f"{metadata['general.architecture']}."
        own = {key: value for key, value in metadata.items() if key.startswith(self._prefix)}
        self._values = {key.removeprefix(self._prefix): value for key, value in own.items()}
        for key, value in self._values.items():
            if key not in _USED and value:
                raise GgufUnreadable(f"{self._prefix}{key} = {value!r} is not served")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LIMIT:
            raise GgufUnreadable(f"{self._prefix}{key}: a number from 1 to {_LIMIT - 1}, got {_show(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise GgufUnreadable(f"{self._prefix}{key}: a finite number above 0, got {_show(value)}")
        return float(value)


def _show(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, list) else "none" if value is None else repr(value)


def _head_width(facts: _Facts, hidden: int, heads: int) -> int:
    width = facts.count("attention.key_length", facts.get("rope.dimension_count") or max(1, hidden // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if facts.count(key, width) != width:
            raise GgufUnreadable(f"{key} is {facts.get(key)}, and a head has {width} dimensions: this is not served")
    return width


def _rows(header: GgufHeader, name: str) -> int:
    if name not in header.tensors:
        raise GgufUnreadable(f"it has no tensor {name}")
    return header.tensors[name].shape[0]


def _biases(header: GgufHeader, architecture: Architecture) -> dict[str, bool]:
    if architecture.model_type == "qwen2":  # its class always has those of queries, keys and values
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in header.tensors}
    return biases | ({"mlp_bias": "blk.0.ffn_up.bias" in header.tensors} if architecture.model_type == "llama" else {})


def _most(header: GgufHeader) -> str:
    """The type of most bytes, as the head and a few other tensors often have another."""
    sizes: dict[str, int] = {}
    for place in header.tensors.values():
        sizes[place.type] = sizes.get(place.type, 0) + place.end - place.begin
    return max(sizes, key=lambda each: sizes[each])


def _rope(header: GgufHeader, facts: _Facts, read_factors: Callable[[], list[float]]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0)}
    kind = facts.get(f"{_SCALING}type")
    if ROPE_FACTORS in header.tensors:
        if kind not in (None, "none"):
            raise GgufUnreadable(
                f"it has {ROPE_FACTORS} beside a rotary scaling of the type {kind}: this is not served"
            )
        return rope | _llama3(read_factors(), rope["rope_theta"])
    if kind in (None, "none"):
        return rope
    if kind not in ("linear", "yarn"):
        raise GgufUnreadable(f"a rotary scaling of the type {kind!r} is not served; linear and yarn are")
    rope |= {"rope_type": kind, "factor": facts.number(f"{_SCALING}factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = facts.count(f"{_SCALING}original_context_length")
    return rope


def _llama3(factors: list[float], theta: float) -> dict[str, Any]:
    """Find the scaling of Llama 3.1 whose factors these are: the file has them alone, one for each frequency."""
    found = {"factor": round(max(factors), 4), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (8192, 4096, 2048, 16384, 32768):
        expected = _llama3_factors(len(factors), theta, found["factor"], original)
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": original}
    raise GgufUnreadable(f"{ROPE_FACTORS} has factors of another rotary scaling than that of Llama 3.1")


def _llama3_factors(count: int, theta: float, factor: float, original: int) -> list[float]:
    factors = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        smooth = min(1.0, max(0.0, (original / wavelength - 1) / 3))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
