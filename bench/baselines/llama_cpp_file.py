"""Random checkpoints as GGUF files for llama.cpp, in the kinds of ``--quantize``.

Their numbers are those of the checkpoint, but rows of llama's queries and keys are not put into the order in which
llama.cpp rotates them: a file serves to measure speed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig

from decant.bench.model_shapes import cache_folder

TYPES: Mapping[str, Type] = {"plain": Type.BF16, "int8": Type.Q8_0, "int4": Type.Q4_0}
"""Of layers, by ``Job.weights``. Embedding and head are Q8_0 with int4, as ``--quantize int4`` has the head."""

_BLOCK = 32


def export(model: Path, weights: str) -> Path:
    """Return the GGUF file of a folder, which is written once."""
    newest = max(file.stat().st_mtime_ns for file in model.glob("*.safetensors"))
    path = cache_folder().parent / "llama.cpp" / f"{model.name}-{newest:x}-{weights}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # complete when it gets its name
            unfinished = Path(folder) / path.name
            _write(model, TYPES[weights], unfinished)
            os.rename(unfinished, path)
    return path


def _write(model: Path, kind: Type, path: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_sizes(writer, config)
    for file in model.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer, _, suffix = name.rpartition(".")
            chosen = _type_of(layer, tensor, kind)
            numbers = gguf.quants.quantize(tensor.float().numpy(), chosen)
            writer.add_tensor(f"{names.get_name(layer)}.{suffix}", numbers, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(layer: str, tensor: torch.Tensor, kind: Type) -> Type:
    if tensor.dim() == 1:
        return Type.F32
    if tensor.shape[1] % _BLOCK:
        return Type.BF16
    return Type.Q8_0 if kind is Type.Q4_0 and layer.endswith(("embed_tokens", "lm_head")) else kind


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")  # it gets tokens
