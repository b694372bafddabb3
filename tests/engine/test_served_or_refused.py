"""What is not served right is not served, and whoever asked is told by name what is the matter."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine import checkpoint, linears, products
from engine.attention import NAME, views
from engine.attention.views import Kind, View
from engine.checkpoint import choose_device
from engine.engine import Engine
from engine.errors import InvalidConfig, ModelRefused
from engine.model import ModelConfig, ModelDevice, load
from engine.request import Request, StopParams
from engine.scheduler import Limits
from tests.engine import tiny

pytestmark = pytest.mark.slow

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
    "deepseek_v32": (tiny._MLA | {"index_n_heads": 2, "index_head_dim": 16}, "a state other than KV .*indexer_keys"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A good checkpoint to break."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def serve(model: Path | str, **options: Any) -> ModelDevice:
    return load(ModelConfig(str(model), **{"device": "cpu", "kv_bytes": 1 << 20, **options}))


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


# -- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_would_answer_wrong_is_refused_by_name(kind, tmp_path):
    changes, reason = REFUSED[kind]
    made = tiny.config(kind, **changes)
    with pytest.raises(ModelRefused, match=reason) as refused:
        serve(tiny.save(made, tmp_path), window=128)
    assert kind.replace("_", "") in refused.value.model.lower()


def test_an_encoder_with_a_decoder_is_refused_by_name(tmp_path):
    made = AutoConfig.for_model("t5", vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    AutoModelForSeq2SeqLM.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"t5.*encoder"):
        serve(tmp_path)


@pytest.mark.parametrize("floor", [16, 200])
def test_a_scale_that_counts_rows_is_found_wherever_in_the_window_it_begins(floor, tmp_path):
    folder = tiny.save(tiny.config("llama4_text", floor_scale=floor, attn_scale=0.5), tmp_path)
    with pytest.raises(ModelRefused, match=r"Llama4ForCausalLM.* differ"):
        serve(folder)
    if floor > 128:
        assert serve(folder, window=128).verdict.exact


def test_a_cache_that_forgets_what_the_prompt_saw_is_found(tmp_path):
    """Moshi's mask shows everything and its cache keeps a window: within it both agree."""
    folder = tiny.save(tiny.config("moshi", sliding_window=64, ffn_dim=96), tmp_path)
    with pytest.raises(ModelRefused, match="layer 0 sees 256 tokens of a prompt, and 64 from its cache"):
        serve(folder)
    assert serve(folder, window=64).verdict.exact


# -- rounding ---------------------------------------------------------------------------------------------------------


_NEAR_TIES = [
    ("deepseek_v3", 2),
    ("deepseek_v3", 9),
    ("gpt_oss", 12),
    ("mixtral", 7),
    ("qwen2_moe", 2),
    ("qwen3_moe", 25),
]
"""Seeds of checkpoints whose routers choose other experts in one rounding to bfloat16 than in another."""


@pytest.mark.parametrize(("kind", "seed"), _NEAR_TIES)
def test_experts_in_bf16_are_served_however_near_to_a_tie_their_router_is(kind, seed, tmp_path):
    more = tiny._MOE if kind == "qwen3_moe" else {}
    device = serve(tiny.save(tiny.config(kind, **more), tmp_path, seed=seed), dtype="bfloat16")
    assert device.verdict.exact
    assert device.verdict.difference < 1e-5


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
def test_a_window_one_token_too_narrow_is_refused_in_any_dtype(dtype, tmp_path, monkeypatch):
    folder = tiny.save(tiny.config("mistral", sliding_window=12), tmp_path)
    assert serve(folder, dtype=dtype).verdict.exact
    monkeypatch.setattr(views, "fit", lambda *_: View(Kind.SLIDING, 11))
    with pytest.raises(ModelRefused, match="its logits differ from transformers' own"):
        serve(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_packed_in_another_order_are_refused(dtype, tmp_path, monkeypatch):
    pack = linears._pack_each

    def swapped(experts: Any, name: str) -> torch.nn.ModuleList:
        first, second, *rest = pack(experts, name)
        return torch.nn.ModuleList([second, first, *rest] if name == "down_proj" else [first, second, *rest])

    monkeypatch.setattr(linears, "_pack_each", swapped)
    with pytest.raises(ModelRefused, match="packed MixtralExperts answer otherwise than its own"):
        serve(tiny.save(tiny.config("mixtral"), tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_that_are_laid_out_wrong_are_refused(kind, dtype, tmp_path, monkeypatch):
    """All products of one width lose their last input."""

    def lossy(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        lost = weight.clone()
        lost[:, -8:] = 0
        return products.prepare(lost if weight.shape[0] == 64 else weight, bias)

    folder = tiny.save(tiny.config(kind), tmp_path)
    monkeypatch.setattr(linears, "prepare", lossy)
    with pytest.raises(ModelRefused, match=r"differ from float32 by|answer otherwise"):
        serve(folder, dtype=dtype)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        serve(tmp_path)


def test_a_folder_with_a_configuration_alone_is_refused(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no weights"):
        serve(copy)


def test_a_file_is_refused(llama):
    with pytest.raises(ModelRefused, match="it is a file"):
        serve(llama / "config.json")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="no folder"):
        serve(tmp_path / "nothing")


def test_pickled_weights_are_refused_unread(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(_bomb(copy / "ran"))
    with pytest.raises(ModelRefused, match=r"only pytorch_model\.bin, and pickles can run code"):
        serve(copy)
    assert not (copy / "ran").exists()


def test_pickled_weights_beside_other_safetensors_are_refused_unread(copy):
    (copy / "model.safetensors").rename(copy / "adapter.safetensors")
    (copy / "pytorch_model.bin").write_bytes(_bomb(copy / "ran"))
    with pytest.raises(ModelRefused, match=r"no file named model\.safetensors"):
        serve(copy)
    assert not (copy / "ran").exists()


def _bomb(mark: Path) -> bytes:
    """A pickle that makes a folder when it is loaded."""
    return b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR."


@pytest.mark.parametrize("kind", ["llama", "a_kind_of_its_own"])
def test_code_in_a_folder_is_never_run(kind, copy):
    """A model type that transformers knows is served by transformers' code; any other is refused."""
    mark = copy / "ran"
    for name in ("configuration_own.py", "modeling_own.py"):
        (copy / name).write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edit(copy, model_type=kind, auto_map=own)
    if kind == "llama":
        assert serve(copy).verdict.exact
    else:
        with pytest.raises(ModelRefused, match=r"a_kind_of_its_own.*it wants code of its own"):
            serve(copy)
    assert not mark.exists()


@pytest.mark.parametrize("kind", [None, 3, ["llama"], ""])
def test_a_kind_that_is_no_name_is_refused(kind, copy):
    with pytest.raises(ModelRefused, match="transformers has no code for it"):
        serve(edit(copy, model_type=kind))


def test_an_unknown_architecture_is_refused_by_name(copy):
    with pytest.raises(ModelRefused, match=r"a_kind_of_its_own.*transformers has no code for it"):
        serve(edit(copy, model_type="a_kind_of_its_own"))


@pytest.mark.parametrize("text", ["{nope", "[1, 2]", "", "\x00\x01"])
def test_a_broken_configuration_is_refused(text, copy):
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelRefused, match="its configuration can't be read"):
        serve(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "big"},
        {"num_attention_heads": 3},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 3},
        {"vocab_size": 999},
        {"hidden_act": "nope"},
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
        {"dtype": "float7"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_its_weights_or_its_type_is_refused(changes, copy):
    with pytest.raises(ModelRefused, match=r"(?i)llama"):
        serve(edit(copy, **changes))


@pytest.mark.parametrize(
    ("kept", "reason"), [(0, "can't be read"), (4, "can't be read"), (40, "can't be read"), (-500, "its header says")]
)
def test_truncated_weights_are_refused(kept, reason, copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelRefused, match=rf"LlamaForCausalLM.*model\.safetensors.*{reason}"):
        serve(copy)


def test_missing_weights_are_refused_and_not_made_up(copy):
    file = copy / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if "layers.1.self_attn.q_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks 1 of its weights, model\.layers\.1\.self_attn\.q_proj\.weight"):
        serve(copy)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Save what ``change`` makes of the tensors of a folder's weight file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def test_a_file_with_more_layers_than_the_configuration_is_refused_by_name(copy):
    edit(copy, num_hidden_layers=1)
    with pytest.raises(ModelRefused, match=r"has 9 weights that the model does not use, model\.layers\.1\.input_lay"):
        serve(copy)


def test_biases_of_another_model_type_are_refused_by_name(tmp_path):
    """A Llama without biases would load Qwen's weights, drop their biases, and answer wrong."""
    folder = tiny.save(tiny.config("qwen2"), tmp_path)
    edit(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.self_attn\.k_proj\.bias among them"):
        serve(folder)


def test_scales_of_quantized_weights_are_refused_by_name(copy):
    _rewrite(copy, lambda had: had | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ModelRefused, match=r"does not use, model\.layers\.0\.mlp\.up_proj\.weight_scale_inv"):
        serve(copy)


@pytest.mark.parametrize(("dtype", "named"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantized_weights_without_their_scales_are_refused_by_name(dtype, named, copy):
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(copy, lambda had: had | {name: had[name].to(dtype)})
    with pytest.raises(ModelRefused, match=rf"{named} weights are not served yet \({name} in model\.safetensors\)"):
        serve(copy)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "one_of_its_own"}, "one_of_its_own"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({}, "quantized"),
    ],
    ids=str,
)
def test_a_quantized_format_is_refused_by_its_name(config, named, copy):
    with pytest.raises(ModelRefused, match=rf"LlamaForCausalLM.*: {named} weights are not served yet$"):
        serve(edit(copy, quantization_config=config))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_in_the_folder_is_refused_by_name(name, copy):
    (copy / name).write_text("{}")
    with pytest.raises(ModelRefused, match=rf"it has an adapter \({name}\), and adapters are not served yet"):
        serve(copy)


def test_constants_that_older_checkpoints_carry_are_left_out(copy):
    older = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(8) for index in range(2)}
    assert serve(_rewrite(copy, lambda had: had | older)).verdict.exact


@pytest.mark.parametrize(("predicting", "refused"), [(1, False), (0, True)])
def test_a_layer_that_predicts_further_tokens_is_left_out_where_the_configuration_counts_it(predicting, refused, copy):
    layer = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.enorm.weight": torch.ones(64)}
    edit(_rewrite(copy, lambda had: had | layer), num_nextn_predict_layers=predicting)
    if refused:
        with pytest.raises(ModelRefused, match=r"model\.layers\.2\.eh_proj\.weight among them"):
            serve(copy)
    else:
        assert serve(copy).verdict.exact


def test_a_missing_shard_is_refused_by_name(llama, copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    files = dict(zip(weights, itertools.cycle(("model-1.safetensors", "model-2.safetensors")), strict=False))
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, copy / file, {"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert serve(copy).verdict.exact
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"1 of 2 weight files are missing, model-2\.safetensors among them"):
        serve(copy)


def test_an_unreachable_hub_name_is_refused_soon(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    began = time.monotonic()
    with pytest.raises(ModelRefused, match=r"decant-tests/not-a-model.*no hub name within reach"):
        serve("decant-tests/not-a-model")
    assert time.monotonic() - began < 10


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the hub in which ``org/tiny`` has two commits, the second one its main branch."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    for seed, commit in enumerate("ab"):
        tiny.save(tiny.config("llama"), repository / "snapshots" / (commit * 40), seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    return repository


def test_a_hub_name_is_served_and_stands_for_the_commit_that_it_was(hub):
    main, first, second = (serve("org/tiny", revision=revision) for revision in (None, "a" * 40, "b" * 40))
    assert main.layout == second.layout != first.layout
    (hub / "refs" / "main").write_text("a" * 40)
    assert serve("org/tiny").layout == first.layout
    with pytest.raises(ModelRefused, match=r"org/tiny.*no hub name within reach"):
        serve("org/tiny", revision="another")


def test_pickled_weights_of_a_hub_name_are_refused_unread(hub, tmp_path):
    snapshot = hub / "snapshots" / ("b" * 40)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").write_bytes(_bomb(tmp_path / "ran"))
    with pytest.raises(ModelRefused, match=r"no file named|model\.safetensors"):
        serve("org/tiny")
    assert not (tmp_path / "ran").exists()


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("dtype", "int8", "bfloat16"),
        ("dtype", "float16", "no fast float16"),
        ("window", tiny.WINDOW + 1, f"at most the checkpoint's {tiny.WINDOW}"),
        ("window", 0, "at least 1"),
        ("window", 12.5, "a whole number"),
        ("kv_bytes", 100, "at least one block of 8192 bytes"),
        ("kv_bytes", 0, "at least 1"),
        ("kv_bytes", -1, "at least 1"),
        ("kv_bytes", 2e9, "a whole number"),
        ("device", "tpu", "cuda:N"),
        ("device", None, "cuda:N"),
        ("device", "meta", "of this machine"),
        ("device", "cuda:99", "of this machine"),
        ("device", "cpu:1", "of this machine"),
        ("block_size", 24, "power of two"),
        ("block_size", 256, "at most 128"),
        ("block_size", 16.0, "a whole number"),
    ],
)
def test_a_setting_that_cannot_be_honoured_names_field_limit_and_value(field, value, limit, llama):
    with pytest.raises(InvalidConfig) as refused:
        serve(llama, **{"dtype": "float32", field: value})
    assert (refused.value.field, refused.value.value) == (field, value)
    assert limit in refused.value.limit


@pytest.mark.parametrize(("name", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False)])
def test_a_device_is_one_of_those_that_the_machine_has(name, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    if there:
        assert choose_device(name) == torch.device(name)
    else:
        with pytest.raises(InvalidConfig, match="of this machine, got 'cuda:2'"):
            choose_device(name)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float16_is_for_cuda(device, copy):
    source = checkpoint.open(str(edit(copy, dtype="float16")))
    chosen = source.choose_dtype("auto", torch.device(device))
    assert chosen == (torch.float16 if device == "cuda" else torch.bfloat16)
    if device == "cuda":
        assert source.choose_dtype("float16", torch.device(device)) == torch.float16


def test_an_end_token_that_the_vocabulary_lacks_is_none(copy):
    """It would have to be forbidden where there is no place for it, and ends nothing."""
    (copy / "generation_config.json").unlink()
    device = serve(edit(copy, eos_token_id=[-1, 7, tiny.VOCAB]), dtype="float32")
    assert device.eos_token_ids == {7}
    stop = StopParams(max_tokens=4, min_tokens=3)
    run = tiny.run(Engine(device, Limits(window=64)), [Request("r", (1, 2), stop=stop)])
    assert len(run.tokens["r"]) in (3, 4)


def test_a_checkpoint_in_another_dtype_is_refused_until_one_is_named(copy):
    edit(copy, dtype="float64")
    with pytest.raises(InvalidConfig) as refused:
        serve(copy)
    assert (refused.value.field, refused.value.value) == ("dtype", "float64")
    assert serve(copy, dtype="float32").verdict.exact


@pytest.mark.parametrize(
    ("stored", "served"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_auto_is_the_checkpoints_dtype_and_bf16_for_float16_on_a_cpu(stored, served, tmp_path):
    device = serve(tiny.save(tiny.config("llama"), tmp_path, dtype=stored))
    assert device.store.blocks.dtype == served
    assert {parameter.dtype for parameter in device.model.parameters()} == {served}


def test_a_window_longer_than_the_kv_memory_is_refused(llama):
    device = serve(llama, dtype="float32", kv_bytes=4 * 8192)
    with pytest.raises(InvalidConfig) as refused:
        Engine(device)
    assert (refused.value.field, refused.value.value) == ("window", tiny.WINDOW)
    with pytest.raises(InvalidConfig, match="64 tokens"):
        Engine(device, Limits(window=device.window))
    Engine(device, Limits(window=64))


# -- the layout -------------------------------------------------------------------------------------------------------


def test_a_layout_is_equal_for_equal_checkpoints_and_settings(llama, copy):
    assert serve(llama).layout == serve(llama).layout == serve(copy).layout
    assert serve(llama, kv_bytes=1 << 19).layout == serve(llama).layout


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"window": 128}, {"block_size": 32}], ids=str)
def test_a_layout_differs_with_what_makes_blocks_or_bits_differ(settings, llama):
    assert serve(llama, **settings).layout != serve(llama).layout


def test_a_layout_differs_with_the_weights(llama, tmp_path):
    other = tiny.save(tiny.config("llama"), tmp_path, seed=1)
    assert serve(other).layout != serve(llama).layout


def test_a_layout_differs_with_any_tensor(tmp_path):
    """Of 8 MB, one number in the middle."""
    folder = tiny.save(tiny.config("llama", vocab_size=16384), tmp_path)
    before = serve(folder).layout

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["model.embed_tokens.weight"][8000, 5] += 1
        return weights

    assert serve(_rewrite(folder, change)).layout != before


# -- everything that transformers has ---------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    **tiny._BASE,
    "d_model": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "n_positions": 256,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "d_ff": 96,
    "d_kv": 16,
    "max_seq_len": 256,
    "max_sequence_length": 256,
    "n_ctx": 256,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 64,
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "embedding_dim": 64,
    "state_size": 16,
    "query_pre_attn_scalar": 16,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "is_decoder": True,
    "intermediate_size_mlp": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "attention_chunk_size": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": tiny.VOCAB,
    "original_max_position_embeddings": 64,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
}
MOST_WEIGHTS = 6_000_000
PROMPTS = [tiny.prompt(length, length, 300) for length in (3, 45, 100)]


def _configurations(kind: str) -> Iterator[Any]:
    """Small configurations of a model type, by what it has of SMALL; some can't be made."""
    default = AutoConfig.for_model(kind)
    known = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    known.pop("tie_word_embeddings", None)
    if "qk_rope_head_dim" in known:
        known |= {"head_dim": 8, "num_key_value_heads": 4}
    special = {name: 1 for name in known if name.endswith("_token_id")}
    without_head = {name: value for name, value in known.items() if name != "head_dim"}
    for changes in (known, known | special, without_head, without_head | special):
        yield lambda changes=changes: AutoConfig.for_model(kind, **changes)


def _small_checkpoint(kind: str, folder: Path) -> Path | None:
    """A tiny checkpoint of a model type, None when none of the attempts could be made."""
    try:
        attempts = list(_configurations(kind))
    except Exception:  # noqa: BLE001 - whatever transformers raises: this type can't be made here
        return None
    for attempt in attempts:
        try:
            made = attempt()
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(made).parameters())
            if size <= MOST_WEIGHTS:
                return tiny.save(made, folder)
        except Exception:  # noqa: BLE001
            continue
    return None


def _verdict(kind: str, folder: Path) -> str:
    """ "served" when load accepts it and generate agrees, else how it ended."""
    made = _small_checkpoint(kind, folder)
    if made is None:
        return "not made"
    try:
        device = serve(made, dtype="float32", window=tiny.WINDOW, kv_bytes=2 << 20)
    except (ModelRefused, InvalidConfig):
        return "refused"
    model = tiny.reference(made)
    engine = Engine(device, Limits(token_budget=7, max_running=7, window=tiny.WINDOW))
    ours = tiny.run(engine, [tiny.greedy(str(index), tokens, 8) for index, tokens in enumerate(PROMPTS)])
    for index, tokens in enumerate(PROMPTS):
        theirs = tiny.generate(model, tokens, 8)
        for one, other, margin in zip(ours.tokens[str(index)], theirs.tokens, theirs.margins, strict=True):
            if one != other and margin > 1e-4:
                return f"WRONG: prompt of {len(tokens)}, {one} for {other} by {margin:.2g}"
            if one != other:
                break
    return "served"


def test_a_model_that_answers_with_all_rows_is_sampled_from_the_right_ones(tmp_path):
    """Whisper's decoder swallows ``logits_to_keep``."""
    assert _verdict("whisper", tmp_path) == "served"


PARTS = 4
"""Of the architectures: more than one process can share them."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_served_writes_what_generate_writes(
    part: int, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Every causal architecture that can be made small by rule: right, or refused."""
    verdicts: dict[str, str] = {}
    for kind in tiny.kinds()[part::PARTS]:
        folder = tmp_path / kind
        folder.mkdir()
        verdicts[kind] = _verdict(kind, folder)
        shutil.rmtree(folder)
    for outcome in ("served", "refused", "not made"):
        kinds = [kind for kind, verdict in verdicts.items() if verdict == outcome]
        record_testsuite_property(f"{outcome.replace(' ', '_')}_{part}", len(kinds))
        print(f"\n{len(kinds)} {outcome}: {' '.join(kinds)}")
    wrong = {kind: verdict for kind, verdict in verdicts.items() if verdict.startswith("WRONG")}
    assert not wrong
    assert sum(verdict == "served" for verdict in verdicts.values()) > 70 // PARTS
    assert sum(verdict == "refused" for verdict in verdicts.values()) > 30 // PARTS
