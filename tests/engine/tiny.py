from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decant.engine.engine import Engine
from decant.engine.output import StepOutput
from decant.engine.request import Request, StopParams

VOCAB = 320
CONTEXT_LENGTH = 256

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT_LENGTH // 4,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "tie_word_embeddings": True}

# Served, and equal to generate: name -> (model type, what differs from _BASE). Windows are shorter than the prompts.
SERVED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_dynamic_rope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": CONTEXT_LENGTH // 4,
        },
    ),
    "llama_yarn": ("llama", {"rope_parameters": YARN, "max_position_embeddings": CONTEXT_LENGTH // 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 24,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 24, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "cohere_qk_norm": ("cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_longrope": (
        "phi3",
        {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH, "tie_word_embeddings": True},
    ),
    "opt": ("opt", _OPT),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_MOE,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "decoder_sparse_step": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "jetmoe": ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    "dbrx": (
        "dbrx",
        {
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...),
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": CONTEXT_LENGTH,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "ffn_act_fn": {"name": "silu"},
            },
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **_BASE,
                "sliding_window": 24,
                "layer_types": _ALTERNATING,
                "query_pre_attn_scalar": 16,
                "tie_word_embeddings": True,
            },
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": VOCAB - 3,
            "eoi_token_index": VOCAB - 2,
            "image_token_index": VOCAB - 1,
            "tie_word_embeddings": True,
        },
    ),
    "llava": (
        "llava",
        {
            "text_config": {**_BASE, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_index": VOCAB - 1,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                **_BASE,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [0],
            },
            "image_token_id": VOCAB - 1,
            "video_token_id": VOCAB - 2,
            "vision_start_token_id": VOCAB - 3,
            "vision_end_token_id": VOCAB - 4,
        },
    ),
}


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of an entry of SERVED or of a model type; a change to ``...`` leaves an entry out."""
    kind, own = SERVED.get(name, (name, {}))
    base = {} if "text_config" in own else _BASE
    entries = {**base, **own, **changes}
    return AutoConfig.for_model(kind, **{name: value for name, value in entries.items() if value is not ...})


def _auto_class(made: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM if made.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def kinds() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def save(made: PreTrainedConfig, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(seed)
    model = _auto_class(made).from_config(made, attn_implementation="eager", dtype=torch.float32)
    scale_weights(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=made.get_text_config().eos_token_id)
    model.to(dtype).save_pretrained(folder)
    return folder


def save_large(made: PreTrainedConfig, folder: Path) -> Path:
    """Save a model in bfloat16 whose weights repeat a million numbers, each row from another on.

    They are drawn in a tenth of the time.
    """
    with no_init_weights():
        model = _auto_class(made).from_config(made, dtype=torch.bfloat16)
    model.tie_weights()
    drawn = (torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            repeated = drawn.repeat(-(-weight.numel() // len(drawn)))[: weight.numel()].view_as(weight)
            weight.copy_(1 + repeated if "norm" in name else repeated)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def scale_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw weights that keep each layer's output as large as its input, and logits of spread 1: with a fresh model's
    small weights a wrong attention would go unnoticed.

    A tied table is drawn small and the last norm large; otherwise the likeliest next token is the last one again.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.1 * noise)
    tokens = torch.randint(_vocabulary(model), (1, 48), generator=generator)
    head: Any = model.get_output_embeddings()
    if head is None:
        return
    if head.weight is model.get_input_embeddings().weight:
        _last_norm(model, tokens).weight.add_(40.0)
    for _ in range(6):  # more than once: a tied head is the input's table too, and logits may be capped
        found = spread(model, tokens)
        head.weight.mul_(1.0 / found)
        if abs(found - 1.0) < 1e-4:
            break


def _last_norm(model: PreTrainedModel, tokens: torch.Tensor) -> Any:
    called: list[nn.Module] = []
    norms = [m for m in model.modules() if isinstance(w := getattr(m, "weight", None), torch.Tensor) and w.dim() == 1]
    hooks = [norm.register_forward_hook(lambda module, *_: called.append(module)) for norm in norms]
    spread(model, tokens)
    for hook in hooks:
        hook.remove()
    return called[-1]


def spread(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    evaluated: Any = model.eval()
    with torch.no_grad():
        return float(evaluated(input_ids=tokens, use_cache=False).logits.std().clamp(min=1e-6))


def _vocabulary(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.num_embeddings


def prompt(length: int, seed: int, vocabulary: int = VOCAB - 8) -> tuple[int, ...]:
    """Random tokens; with one ``seed``, shorter prompts are prefixes of longer ones."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, (1024,), generator=generator)[:length].tolist())


@dataclass(frozen=True)
class Written:
    """Tokens, and the margin of the best over the second best at each."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind = _auto_class(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    model.generation_config = GenerationConfig()
    return model


@torch.no_grad()
def generate(model: Any, tokens: Sequence[int], count: int) -> Written:
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    return Written(tuple(out.sequences[0, len(tokens) :].tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))


@torch.no_grad()
def follow(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Written:
    """Choose at each position what ``generate`` would after ``prompt`` and the earlier ``tokens``, in one pass.

    Up to the first other token the choices are those of ``generate``.
    """
    sequence = torch.tensor([[*prompt, *tokens]])[:, :-1]
    best = model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 :].float().topk(2)
    return Written(tuple(best.indices[:, 0].tolist()), tuple((best.values[:, 0] - best.values[:, 1]).tolist()))


@dataclass
class Run:
    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    steps: list[StepOutput]


def greedy(id: str, tokens: Sequence[int], count: int, **options: Any) -> Request:
    return Request(id, tuple(tokens), stop=StopParams(max_tokens=count, ignore_eos=True), **options)


def run(engine: Engine, requests: Sequence[Request], *, cancel: Mapping[int, str] | None = None) -> Run:
    """Run requests to their ends and check the pool; ``cancel`` maps a step to the id to cancel before it."""
    done = Run({request.id: [] for request in requests}, {}, [])
    for request in requests:
        engine.add(request)
    for step in itertools.count():
        if cancel and step in cancel:
            assert engine.cancel(cancel[step])
        if not engine.has_work:
            break
        output = engine.step()
        done.steps.append(output)
        for token in output.tokens:
            done.tokens[token.id].append(token.token)
        for ended in output.ended:
            done.reasons[ended.id] = ended.reason.value
        assert step < 20_000, "the engine does not come to an end"
    engine.check_integrity()
    return done
