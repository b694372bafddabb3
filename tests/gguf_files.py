"""GGUF files of small models, written by the package `gguf` as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["CONTROL", "NORMAL", "USER_DEFINED", "GgufFile", "Type", "byte_characters", "of_folder", "small"]

NORMAL, CONTROL, USER_DEFINED = (int(kind) for kind in (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, 4))

Numbers = Any
"""An array of numpy."""

_DRAWN = {
    Type.Q4_K: (144, (0, 2), 1 / 100),
    Type.Q5_K: (176, (0, 2), 1 / 200),
    Type.Q6_K: (210, (208,), 1 / 1500),
}
"""Types that the package can't quantize to: bytes of a block, positions of its float16 scales, their size."""


def quantize(weight: torch.Tensor, kind: Type, seed: int = 0) -> Numbers:
    """Blocks of a weight; of the types that the package only reads, blocks of random numbers of about its size."""
    if kind not in _DRAWN:
        return gguf.quants.quantize(weight.float().numpy(), kind)
    nbytes, scales, factor = _DRAWN[kind]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (weight.numel() // 256, nbytes), dtype=np.uint8)
    size = float(weight.std()) * factor
    for at in scales:
        numbers = draw.uniform(0.5, 1.0, (len(blocks), 1)) * size
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def rotate_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp has those of queries and keys: the halves of a head alternate."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class GgufFile:
    """A file to write: ``values`` and ``tensors`` can be changed before ``write``."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, tuple[Numbers, Type]] = {}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.values.items():
            self._add(writer, key, value)
        for name, (numbers, kind) in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(numbers), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)

    def weight(self, name: str) -> torch.Tensor:
        """A tensor's numbers as the package reads them, in float32."""
        numbers, kind = self.tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(numbers, kind).copy())


def of_folder(
    folder: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    tokenizer: Mapping[str, Any] | None = None,
) -> GgufFile:
    """The model of a folder; its matrices get the type, or that which ``kind`` gives for their names in the file."""
    config = AutoConfig.from_pretrained(folder)
    file = GgufFile(config.model_type)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(_architecture(file.architecture), config.num_hidden_layers)
    for index, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        layer, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(layer)}.{suffix}"
        part = stored.split(".")[-2]
        is_rotated = file.architecture == "llama" and part in heads
        weight = rotate_pairs(tensor, heads[part]) if is_rotated else tensor
        chosen = Type.F32 if tensor.dim() == 1 else kind if isinstance(kind, Type) else kind(stored)
        file.tensors[stored] = quantize(weight, chosen, index), chosen
    file.values = {**_sizes(config, file.architecture), **(byte_tokenizer(config.vocab_size) | dict(tokenizer or {}))}
    return file


def _architecture(name: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _sizes(config: Any, name: str) -> dict[str, Any]:
    rope = config.rope_parameters
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if name != "qwen2":
        sizes |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if name == "llama":
        sizes |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    if rope["rope_type"] in ("yarn", "linear"):
        sizes |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        sizes["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{name}.{key}": value for key, value in sizes.items()}


def byte_characters() -> list[str]:
    """The characters that stand for bytes."""
    return sorted(bytes_to_unicode().values())


def byte_tokenizer(size: int) -> dict[str, Any]:
    """Metadata of a tokenizer of bytes and a few merges, with an end token, up to ``size`` tokens."""
    tokens = byte_characters()
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r")]
    tokens += ["".join(pair) for pair in merges] + ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL] * 3 + [USER_DEFINED]
    spare = size - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{index}]" for index in range(spare)],
        "tokenizer.ggml.token_type": types + [int(gguf.TokenType.UNUSED)] * spare,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


def small(architecture: str = "llama", kind: Type = Type.F32, **values: Any) -> GgufFile:
    """A model of one layer of zeros, 64 wide; ``values`` are added to the metadata, None removes one."""
    file = GgufFile(architecture)
    sizes: dict[str, Any] = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
    }
    shapes |= {"ffn_gate": (32, 64), "ffn_up": (32, 64), "ffn_down": (64, 32), "attn_norm": (64,), "ffn_norm": (64,)}
    tokens = byte_tokenizer(280)
    for name, shape in {
        "token_embd.weight": (len(tokens["tokenizer.ggml.tokens"]), 64),
        "output_norm.weight": (64,),
        **{f"blk.0.{part}.weight": shape for part, shape in shapes.items()},
    }.items():
        chosen = Type.F32 if len(shape) == 1 else kind
        file.tensors[name] = gguf.quants.quantize(np.zeros(shape, np.float32), chosen), chosen
    metadata = {**{f"{architecture}.{key}": value for key, value in sizes.items()}, **tokens, **values}
    file.values = {key: value for key, value in metadata.items() if value is not None}
    return file
