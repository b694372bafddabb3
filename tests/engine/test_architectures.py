from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForSeq2SeqLM

from decant.engine.cpu import gemm as products
from decant.engine.cpu import linear as linears
from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import WindowKind
from decant.engine.model import probe as probes
from decant.engine.model.attention import masks as views
from decant.engine.model.attention.interface import NAME
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.probe import LENGTHS
from tests.engine import tiny, tiny_configs
from tests.engine.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

_DECODER = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}
_HYBRID = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
_NEXT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}

_NOT_CALLED = "its attention can't be replaced: transformers' attention functions were called 0 times for 2 layers"

# model type -> (what its configuration adds, a part of the reason)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_head": 4, "n_layer": 2}, _NOT_CALLED),
    "gptj": ({**_DECODER, "rotary_dim": 8}, _NOT_CALLED),
    "codegen": ({**_DECODER, "rotary_dim": 8}, _NOT_CALLED),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}, _NOT_CALLED),
    "falcon": ({"head_dim": ...}, _NOT_CALLED),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, _NOT_CALLED),
    "mamba": ({"state_size": 8}, r"a state other than KV \(LinearAttentionLayer in layer 0\)"),
    "rwkv": ({}, r"a state other than KV \(state\)"),
    "falcon_h1": (_HYBRID, r"a state other than KV \(LinearAttentionAndFullAttentionLayer in layer 0\)"),
    "qwen3_next": (_NEXT, r"a state other than KV \(LinearAttentionLayer in layer 0\)"),
    "deepseek_v32": (
        tiny_configs.MLA | {"index_n_heads": 2, "index_head_dim": 16},
        "a state other than KV .*indexer_keys",
    ),
}


# -- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_would_answer_wrong_is_refused_by_name(kind, tmp_path):
    changes, reason = REFUSED[kind]
    made = tiny.config(kind, **changes)
    with pytest.raises(ModelRefused, match=reason) as refused:
        serve(tiny.save(made, tmp_path), context_length=128)
    assert kind.replace("_", "") in refused.value.model.lower()


def test_an_encoder_with_a_decoder_is_refused_by_name(tmp_path):
    made = AutoConfig.for_model("t5", vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    AutoModelForSeq2SeqLM.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"t5.*encoder"):
        serve(tmp_path)


@pytest.mark.parametrize("floor", [16, 200])
def test_a_scale_that_counts_rows_is_refused_wherever_it_begins(floor, tmp_path):
    folder = tiny.save(tiny.config("llama4_text", floor_scale=floor, attn_scale=0.5), tmp_path)
    with pytest.raises(ModelRefused, match=r"Llama4ForCausalLM.* differ"):
        serve(folder)
    if floor > 128:
        assert serve(folder, context_length=128).probe_result.exact


def test_a_cache_that_drops_tokens_the_prompt_saw_is_refused(tmp_path):
    """Moshi's mask is full and its cache keeps a sliding window, within which both agree."""
    folder = tiny.save(tiny.config("moshi", sliding_window=64, ffn_dim=96), tmp_path)
    with pytest.raises(ModelRefused, match="layer 0 sees 256 tokens of a prompt, and 64 from its cache"):
        serve(folder)
    assert serve(folder, context_length=64).probe_result.exact


# -- rounding ---------------------------------------------------------------------------------------------------------


_NEAR_TIES = [
    ("deepseek_v3", 2),
    ("deepseek_v3", 9),
    ("gpt_oss", 12),
    ("gpt_oss", 41),
    ("mixtral", 7),
    ("qwen2_moe", 2),
    ("qwen3_moe", 25),
]
"""Seeds of checkpoints whose routers choose other experts after another rounding to bfloat16."""


@pytest.mark.parametrize(("kind", "seed"), _NEAR_TIES)
def test_experts_in_bf16_are_served_however_near_to_a_tie_their_router_is(kind, seed, tmp_path):
    more = tiny_configs.MOE if kind == "qwen3_moe" else {}
    device = serve(tiny.save(tiny.config(kind, **more), tmp_path, seed=seed), dtype="bfloat16")
    assert device.probe_result.exact
    assert device.probe_result.difference < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3", "gpt_oss"])
def test_attention_that_is_a_hundredth_too_sharp_is_refused_in_any_dtype(kind, dtype, tmp_path, monkeypatch):
    forward = AttentionInterface._global_mapping[NAME]

    def sharper(module, query, *rest, **options):
        return forward(module, query * 1.02, *rest, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, sharper)
    folder = tiny.save(tiny.config(kind), tmp_path)
    with pytest.raises(ModelRefused, match="its logits differ from transformers' own"):
        serve(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sliding_window_one_token_too_narrow_is_refused_in_any_dtype(dtype, tmp_path, monkeypatch):
    folder = tiny.save(tiny.config("mistral", sliding_window=12), tmp_path)
    assert serve(folder, dtype=dtype).probe_result.exact
    monkeypatch.setattr(views, "fit", lambda *_: AttentionWindow(WindowKind.SLIDING, 11))
    with pytest.raises(ModelRefused, match="its logits differ from transformers' own"):
        serve(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "score"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_attention_that_lacks_a_score_is_refused_in_any_dtype(kind, score, dtype, tmp_path, monkeypatch):
    forward = AttentionInterface._global_mapping[NAME]

    def without(*call, **options):
        return forward(*call, **options | {score: None})

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, without)
    with pytest.raises(ModelRefused, match="its logits differ from transformers' own"):
        serve(tiny.save(tiny.config(kind), tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_swapped_as_they_are_served_are_refused(dtype, tmp_path, monkeypatch):
    forward = linears.PackedExperts.forward

    def swapped(self, hidden, top_k_index, top_k_weights):
        # The comparison that packing makes gives the first two experts to a row.
        is_packing = torch.equal(top_k_index[0], torch.tensor([0, 1]))
        return forward(self, hidden, top_k_index if is_packing else top_k_index ^ 1, top_k_weights)

    monkeypatch.setattr(linears.PackedExperts, "forward", swapped)
    with pytest.raises(ModelRefused, match=r"differ from float32 by|depend on its neighbours"):
        serve(tiny.save(tiny.config("mixtral"), tmp_path), dtype=dtype)


_NOISE = [torch.full((length,), 0.012) for length in LENGTHS]


def _rounded(*changes: tuple[int, slice, float]) -> list[torch.Tensor]:
    rounded = [noise.clone() for noise in _NOISE]
    for sequence, positions, difference in changes:
        rounded[sequence][positions] = difference
    return rounded


def test_other_experts_from_a_token_on_are_rounding_and_a_difference_at_all_tokens_is_not():
    probes._check_rounding("m", torch.bfloat16, _rounded((2, slice(0, None), 0.4)), _NOISE)
    probes._check_rounding("m", torch.bfloat16, _rounded((1, slice(3, None), 0.2), (2, slice(2, None), 0.1)), _NOISE)
    everywhere = _rounded(*((index, slice(None), 0.03) for index in range(3)))
    with pytest.raises(ModelRefused, match=r"its logits in bfloat16 differ from float32 by 0.03"):
        probes._check_rounding("m", torch.bfloat16, everywhere, _NOISE)
    with pytest.raises(ModelRefused, match=r"its logits in bfloat16 differ from float32 by 0.8"):
        probes._check_rounding("m", torch.bfloat16, _rounded((2, slice(1, None), 0.8)), _NOISE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_packed_in_another_order_are_refused(dtype, tmp_path, monkeypatch):
    pack = linears._pack_each

    def swapped(experts: Any, name: str, kernels: Any) -> torch.nn.ModuleList:
        first, second, *rest = pack(experts, name, kernels)
        return torch.nn.ModuleList([second, first, *rest] if name == "down_proj" else [first, second, *rest])

    monkeypatch.setattr(linears, "_pack_each", swapped)
    with pytest.raises(ModelRefused, match="packed MixtralExperts differ from the original"):
        serve(tiny.save(tiny.config("mixtral"), tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_that_are_laid_out_wrong_are_refused(kind, dtype, tmp_path, monkeypatch):
    def lossy(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Any) -> Any:
        lost = weight.clone()
        lost[:, -8:] = 0
        return products.prepare(lost if weight.shape[0] == 64 else weight, bias, kernels)

    folder = tiny.save(tiny.config(kind), tmp_path)
    monkeypatch.setattr(linears, "prepare", lossy)
    with pytest.raises(ModelRefused, match=r"differ from float32 by|differ from the original"):
        serve(folder, dtype=dtype)
