from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decant.engine.backends import choose_backend
from decant.engine.checkpoint.quantize import Quantization, quantize
from decant.engine.kv_layout import KvDtype
from decant.engine.model.backend import CudaKernels, RunnerLimits
from decant.engine.model.model import ModelConfig, ModelDevice, ReadModel, make_device

_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.1-8b": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        "smollm2-135m": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
        },
        "llama-3.2-1b": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
    }
)

NAMES = tuple(_SHAPES)


@dataclass(frozen=True)
class Decode:
    sequences: int
    context: int
    least: float


@dataclass(frozen=True)
class Sizes:
    model: str = "llama-3.1-8b"
    small_models: tuple[str, str] = ("smollm2-135m", "llama-3.2-1b")
    context_length: int = 10_240
    steps: int = 48
    decodes: tuple[Decode, ...] = (Decode(1, 1024, 0.85), Decode(64, 2048, 0.78), Decode(256, 1024, 0.75))
    prompt: int = 3500
    mixed: tuple[int, int, int] = (64, 1500, 2000)  # requests, shortest and longest prompt
    outputs: int = 500
    compared_outputs: int = 100
    queue: int = 1000
    queue_prompt: int = 512
    queue_mean: int = 128
    queue_most: int = 1536
    queue_kv_tokens: int = 8200
    answers: int = 32
    long_prompts: tuple[int, int] = (8, 8000)  # how many, tokens of each
    chunk: int = 256  # tokens of the prompts in a step beside the answers
    dependent: tuple[int, ...] = (1, 12, 64)  # requests at once
    adapters: tuple[int, ...] = (0, 1, 8)
    copied_bytes: int = 4 << 30
    product: int = 8192


TINY = Sizes(
    model="tiny",
    small_models=("tiny", "tiny"),
    context_length=256,
    steps=3,
    decodes=(Decode(1, 24, 0.85), Decode(3, 24, 0.78)),
    prompt=48,
    mixed=(3, 12, 20),
    outputs=4,
    compared_outputs=2,
    queue=6,
    queue_prompt=16,
    queue_mean=4,
    queue_most=12,
    queue_kv_tokens=112,
    answers=2,
    long_prompts=(1, 64),
    chunk=16,
    adapters=(0, 1, 2),
    copied_bytes=1 << 20,
    product=64,
)


def make_model(name: str, context_length: int, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **_SHAPES[name],
        max_position_embeddings=context_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    return model


@dataclass(frozen=True)
class Served:
    """How models are served: fields of ``ModelConfig``."""

    cuda_kernels: CudaKernels
    block_size: int | None = None
    kv_dtype: KvDtype = "auto"
    quantize: Quantization | None = None
    adapters: bool = False


def make_served(
    model: LlamaForCausalLM, name: str, served: Served, *, exact: bool = False, kv_bytes: int | None = None
) -> ModelDevice:
    """Make a device of the model, changing it in place; without ``kv_bytes``, blocks take the GPU's free memory."""
    config = ModelConfig(name, device=str(model.device), kv_bytes=kv_bytes, exact=exact, **asdict(served))
    context_length = model.config.max_position_embeddings
    if served.quantize is not None:
        quantize(model, served.quantize, choose_backend(config).quantize_piece)
    read = ReadModel(model, name, context_length, lambda layout: f"{name} {layout}")
    return make_device(read, config, choose_backend(config))


def vocabulary(name: str) -> int:
    size: int = _SHAPES[name]["vocab_size"]
    return size


def describe(device: ModelDevice, name: str) -> dict[str, Any]:
    """Which kernels compute a loaded model, as far as its backend and runner know."""
    backend, memory = device.backend, device.memory()
    graphs = getattr(device.runner, "graphs", None)
    return {
        "model": name,
        "backend": backend.kind,
        "fallbacks": getattr(backend, "fallbacks", {}),
        "fused_layers": f"{backend.fused_layers(device.model)} of {len(device.store.layout.layers)}",
        "graphs": "none" if graphs is None else graphs.summary,
        "block_size": device.block_size,
        "free_gb": None if memory is None else round(memory.free / 1e9, 2),
    }


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a decode step of a served model reads: not the embedding, of which it takes few rows."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    taken: int = embedding.weight.nbytes
    coded = (part for module in model.modules() if hasattr(module, "codes") for part in module.buffers(recurse=False))
    return sum(part.nbytes for part in (*model.parameters(), *coded)) - taken


def products(model: torch.nn.Module) -> int:
    return 2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def kv_bytes(model: torch.nn.Module, tokens: int) -> int:
    config: Any = model.config
    head: int = config.hidden_size // config.num_attention_heads
    each: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head * torch.bfloat16.itemsize
    return tokens * each


def beside(device: ModelDevice, num_blocks: int) -> ModelDevice:
    dtype = device.store.dtype
    store = device.backend.make_store(device.store.layout, num_blocks, dtype)
    limits = RunnerLimits(device.eos_token_ids, device.context_length)
    runner = device.backend.make_runner(device.model, store, device.runner.layer_windows, limits)
    return replace(device, store=store, runner=runner)
