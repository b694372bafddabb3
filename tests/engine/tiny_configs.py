"""Small configurations of architectures, for ``tiny.config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 320
CONTEXT_LENGTH = 256

BASE: Mapping[str, Any] = {
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
ALTERNATING = ["sliding_attention", "full_attention"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LONG_ROPE = {
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
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MLA = {
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
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "tie_word_embeddings": True}

# Served, and equal to generate: name -> (model type, what differs from BASE). Windows are shorter than the prompts.
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
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 24, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "cohere_qk_norm": ("cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_longrope": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH, "tie_word_embeddings": True},
    ),
    "opt": ("opt", OPT),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **MOE,
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
            "layer_types": ALTERNATING,
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
    "deepseek_v3": ("deepseek_v3", MLA),
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
                **BASE,
                "sliding_window": 24,
                "layer_types": ALTERNATING,
                "query_pre_attn_scalar": 16,
                "tie_word_embeddings": True,
            },
            "vision_config": VISION,
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
            "text_config": {**BASE, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": VOCAB - 1,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                **BASE,
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
