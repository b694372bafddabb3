"""Tensors of a GGUF file under the model's names, as a header of safetensors has them, with the places in the file.

    {"model.layers.0.self_attn.q_proj.weight": {"dtype": "Q4_0", "shape": [64, 64], "data_offsets": [4096, 6400],
                                                "pairs_of_heads": 4}, ...}

With ``pairs_of_heads``, rows of a head alternate between its halves.
"""

from __future__ import annotations

import re
from typing import Any

from decant.runtime.gguf.config import EMBEDDING, HEAD, ROPE_FACTORS, Architecture, has_tied_head
from decant.runtime.gguf.reader import GgufHeader, GgufUnreadable

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in ("q", "k")},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_WHOLE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}


def list_tensors(header: GgufHeader, architecture: Architecture, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Raises GgufUnreadable for a tensor that the model does not have."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    listed: dict[str, dict[str, Any]] = {}
    for name, place in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        entry: dict[str, Any] = {
            "dtype": place.type,
            "shape": list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
        block = _BLOCK.fullmatch(name)
        if block and block[2] in _PARTS:
            if architecture.has_pairs and block[2] in heads:
                entry["pairs_of_heads"] = _halved(name, place.shape[0], heads[block[2]])
            listed[f"model.layers.{block[1]}.{_PARTS[block[2]]}.{block[3]}"] = entry
        elif name in _WHOLE:
            listed[_WHOLE[name]] = entry
        else:
            raise GgufUnreadable(f"the tensor {name} is not one of a {architecture.model_type} model")
    if HEAD not in header.tensors and not has_tied_head(header):
        listed[_WHOLE[HEAD]] = listed[_WHOLE[EMBEDDING]]
    return listed


def _halved(name: str, rows: int, heads: int) -> int:
    if rows % (2 * heads):
        raise GgufUnreadable(f"{name} has {rows} rows: by its metadata {heads} heads of an even width")
    return heads
