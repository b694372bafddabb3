from __future__ import annotations

import itertools
import json
import socket
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.errors import ModelRefused
from tests.engine import tiny
from tests.engine.served import edit, rewrite, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        serve(tmp_path)


def test_a_folder_with_only_a_configuration_is_refused(copy):
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
    return b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR."


@pytest.mark.parametrize("kind", ["llama", "a_kind_of_its_own"])
def test_code_in_a_folder_is_never_run(kind, copy):
    mark = copy / "ran"
    for name in ("configuration_own.py", "modeling_own.py"):
        (copy / name).write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edit(copy, model_type=kind, auto_map=own)
    if kind == "llama":
        assert serve(copy).probe_result.exact
    else:
        with pytest.raises(ModelRefused, match=r"a_kind_of_its_own.*requires remote code \(auto_map\)"):
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


def test_missing_weights_are_refused_and_not_initialized(copy):
    file = copy / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if "layers.1.self_attn.q_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks 1 of its weights, model\.layers\.1\.self_attn\.q_proj\.weight"):
        serve(copy)


def test_a_file_with_more_layers_than_the_configuration_is_refused_by_name(copy):
    edit(copy, num_hidden_layers=1)
    with pytest.raises(ModelRefused, match=r"has 9 weights that the model does not use, model\.layers\.1\.input_lay"):
        serve(copy)


def test_biases_of_another_model_type_are_refused_by_name(tmp_path):
    folder = tiny.save(tiny.config("qwen2"), tmp_path)
    edit(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.self_attn\.k_proj\.bias among them"):
        serve(folder)


def test_scales_of_quantized_weights_are_refused_by_name(copy):
    rewrite(copy, lambda had: had | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ModelRefused, match=r"does not use, model\.layers\.0\.mlp\.up_proj\.weight_scale_inv"):
        serve(copy)


@pytest.mark.parametrize(("dtype", "named"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantized_weights_without_their_scales_are_refused_by_name(dtype, named, copy):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(copy, lambda had: had | {name: had[name].to(dtype)})
    with pytest.raises(ModelRefused, match=rf"{named} weights are not served yet \({name} in model\.safetensors\)"):
        serve(copy)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq", "nbits": 4}, "HQQ"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "one_of_its_own"}, "one_of_its_own"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "quantized"),
    ],
    ids=str,
)
def test_a_quantized_format_is_refused_by_its_name(config, named, copy):
    with pytest.raises(ModelRefused, match=rf"LlamaForCausalLM.*: {named} weights are not served yet$"):
        serve(edit(copy, quantization_config=config))


@pytest.mark.parametrize(("value", "shown"), [({}, r"\{\}"), (False, "false"), ([], r"\[\]"), (0, "0")])
def test_a_quantization_without_a_format_is_refused_as_transformers_does(value, shown, copy):
    edit(copy, quantization_config=value)
    with pytest.raises(ModelRefused, match=rf"quantization_config in config\.json is {shown}: remove it, or name the"):
        serve(copy)
    with pytest.raises((ValueError, AttributeError)):
        AutoModelForCausalLM.from_pretrained(copy)


def test_a_quantization_of_null_is_none(copy):
    assert serve(edit(copy, quantization_config=None)).probe_result.exact


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_in_the_folder_is_refused_by_name(name, copy):
    (copy / name).write_text("{}")
    with pytest.raises(ModelRefused, match=rf"it has an adapter \({name}\): serve it beside its base model"):
        serve(copy)


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_of_a_hub_name_is_refused_by_name(hub, has_config):
    snapshot = hub / "snapshots" / ("b" * 40)
    (snapshot / "adapter_config.json").write_text("{}")
    if not has_config:
        (snapshot / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"it has an adapter \(adapter_config\.json\): serve it beside its base"):
        serve("org/tiny")


def test_a_folder_with_only_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"it has an adapter \(adapter_config\.json\)"):
        serve(tmp_path)


def test_constants_that_older_checkpoints_carry_are_left_out(copy):
    older = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(8) for index in range(2)}
    assert serve(rewrite(copy, lambda had: had | older)).probe_result.exact


@pytest.mark.parametrize(("predicting", "refused"), [(1, False), (0, True)])
def test_a_layer_that_predicts_further_tokens_is_left_out_where_the_configuration_counts_it(predicting, refused, copy):
    layer = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.enorm.weight": torch.ones(64)}
    edit(rewrite(copy, lambda had: had | layer), num_nextn_predict_layers=predicting)
    if refused:
        with pytest.raises(ModelRefused, match=r"model\.layers\.2\.eh_proj\.weight among them"):
            serve(copy)
    else:
        assert serve(copy).probe_result.exact


def test_a_missing_shard_is_refused_by_name(llama, copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    files = dict(zip(weights, itertools.cycle(("model-1.safetensors", "model-2.safetensors")), strict=False))
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, copy / file, {"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert serve(copy).probe_result.exact
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"1 of 2 weight files are missing, model-2\.safetensors among them"):
        serve(copy)


def test_offline_a_hub_name_is_refused_without_a_connection_or_a_wait(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    calls: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: calls.append(f"resolve {host}"))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: calls.append(f"connect {address}"))
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(f"sleep {seconds}"))
    with pytest.raises(ModelRefused, match=r"decant-tests/not-a-model.*no hub name within reach"):
        serve("decant-tests/not-a-model")
    assert calls == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    for seed, commit in enumerate("ab"):
        tiny.save(tiny.config("llama"), repository / "snapshots" / (commit * 40), seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    return repository


def test_a_hub_name_is_served_at_its_resolved_commit(hub):
    main, first, second = (serve("org/tiny", revision=revision) for revision in (None, "a" * 40, "b" * 40))
    assert main.layout_hash == second.layout_hash != first.layout_hash
    (hub / "refs" / "main").write_text("a" * 40)
    assert serve("org/tiny").layout_hash == first.layout_hash
    with pytest.raises(ModelRefused, match=r"org/tiny.*no hub name within reach"):
        serve("org/tiny", revision="another")


def test_a_cached_hub_name_is_served_without_a_connection_or_a_wait(hub, monkeypatch):
    def no_network(host: str, *_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, host)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for module in (
        "models.auto.auto_factory",
        "integrations.peft",
    ):  # peft, for which it asks the hub, is of tests alone
        monkeypatch.setattr(f"transformers.{module}.is_peft_available", lambda: False)
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    assert serve("org/tiny").probe_result.exact
    assert sleeps == []


def test_pickled_weights_of_a_hub_name_are_refused_unread(hub, tmp_path):
    snapshot = hub / "snapshots" / ("b" * 40)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").write_bytes(_bomb(tmp_path / "ran"))
    with pytest.raises(ModelRefused, match=r"no file named|model\.safetensors"):
        serve("org/tiny")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "first"), [("llava", "cpu"), ("llama", "meta")])
def test_a_device_gets_weights_as_they_are_read_unless_some_are_dropped(
    name: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    devices: list[set[str]] = []
    drop = checkpoints._drop_other_media

    def watched(model: PreTrainedModel) -> None:
        devices.append({parameter.device.type for parameter in model.parameters()})
        drop(model)

    monkeypatch.setattr(checkpoints, "_drop_other_media", watched)
    folder = tiny.save(tiny.config(name), tmp_path)
    model = checkpoints.open(str(folder)).read(torch.float32, torch.device("meta"), load_to_device=True)
    assert devices == [{first}]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
