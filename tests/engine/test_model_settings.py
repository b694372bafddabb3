from __future__ import annotations

import pytest
import torch

from decant.engine.backends import choose_device
from decant.engine.checkpoint import checkpoint
from decant.engine.cpu.backend import CpuBackend
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.model.backend import TorchBackend
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from tests.engine import tiny, tiny_configs
from tests.engine.served import edit, rewrite, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("dtype", "int8", "bfloat16"),
        ("dtype", "float16", "no fast float16"),
        ("context_length", tiny.CONTEXT_LENGTH + 1, f"at most the checkpoint's {tiny.CONTEXT_LENGTH}"),
        ("context_length", 0, "at least 1"),
        ("context_length", 12.5, "a whole number"),
        ("kv_bytes", 100, "at least one block of 8192 bytes"),
        ("kv_bytes", 0, "at least 1"),
        ("kv_bytes", -1, "at least 1"),
        ("kv_bytes", 2e9, "a whole number"),
        ("device", "tpu", "cuda:N"),
        ("device", None, "cuda:N"),
        ("device", "meta", "of this machine"),
        ("device", "cuda:99", "of this machine"),
        ("device", "cpu:1", "of this machine"),
        ("kv_dtype", "fp8", "one of auto, int8"),
        ("activations", "int4", "one of auto, int8"),
        ("block_size", 24, "power of two"),
        ("block_size", 256, "at most 128"),
        ("block_size", 16.0, "a whole number"),
    ],
)
def test_a_refused_setting_names_field_limit_and_value(field, value, limit, llama):
    name = "context_length" if field == "window" else field  # errors name the setting
    with pytest.raises(InvalidConfig) as refused:
        serve(llama, **{"dtype": "float32", name: value})
    assert (refused.value.field, refused.value.value) == (field, value)
    assert limit in refused.value.limit


def test_codes_need_two_slots_for_their_scales(llama):
    with pytest.raises(InvalidConfig, match="block_size: at least 2 with kv_dtype int8, got 1"):
        serve(llama, kv_dtype="int8", block_size=1)


@pytest.mark.parametrize(("name", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False)])
def test_a_device_must_exist_on_the_machine(name, there, monkeypatch):
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
    dtypes = (CpuBackend if device == "cpu" else TorchBackend).dtypes
    chosen = source.choose_dtype("auto", dtypes)
    assert chosen == (torch.float16 if device == "cuda" else torch.bfloat16)
    if device == "cuda":
        assert source.choose_dtype("float16", dtypes) == torch.float16


def test_an_end_token_outside_the_vocabulary_is_dropped(copy):
    device = serve(copy, dtype="float32", eos_token_ids=frozenset({7, tiny_configs.VOCAB}))
    assert device.eos_token_ids == {7}
    stop = StopParams(max_tokens=4, min_tokens=3)
    run = tiny.run(Engine(device, Limits(context_length=64)), [Request("r", (1, 2), stop=stop)])
    assert len(run.tokens["r"]) in (3, 4)


def test_a_checkpoint_in_another_dtype_is_refused_until_one_is_named(copy):
    edit(copy, dtype="float64")
    with pytest.raises(InvalidConfig) as refused:
        serve(copy)
    assert (refused.value.field, refused.value.value) == ("dtype", "float64")
    assert serve(copy, dtype="float32").probe_result.exact


@pytest.mark.parametrize(
    ("stored", "served"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_auto_is_the_checkpoints_dtype_and_bf16_for_float16_on_a_cpu(stored, served, tmp_path):
    device = serve(tiny.save(tiny.config("llama"), tmp_path, dtype=stored))
    assert device.store.blocks.dtype == served
    assert {parameter.dtype for parameter in device.model.parameters()} == {served}


def test_a_context_length_beyond_the_kv_memory_is_refused(llama):
    device = serve(llama, dtype="float32", kv_bytes=4 * 8192)
    with pytest.raises(InvalidConfig) as refused:
        Engine(device)
    assert (refused.value.field, refused.value.value) == ("context_length", tiny.CONTEXT_LENGTH)
    with pytest.raises(InvalidConfig, match="64 tokens"):
        Engine(device, Limits(context_length=device.context_length))
    Engine(device, Limits(context_length=64))


# -- the layout hash ---------------------------------------------------------------------------------------------------


def test_a_layout_is_equal_for_equal_checkpoints_and_settings(llama, copy):
    assert serve(llama).layout_hash == serve(llama).layout_hash == serve(copy).layout_hash
    assert serve(llama, kv_bytes=1 << 19).layout_hash == serve(llama).layout_hash


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"context_length": 128}, {"block_size": 32}, {"kv_dtype": "int8"}], ids=str
)
def test_a_layout_differs_with_what_makes_blocks_or_bits_differ(settings, llama):
    assert serve(llama, **settings).layout_hash != serve(llama).layout_hash


def test_a_layout_differs_with_the_weights(llama, tmp_path):
    other = tiny.save(tiny.config("llama"), tmp_path, seed=1)
    assert serve(other).layout_hash != serve(llama).layout_hash


def test_a_layout_differs_with_any_tensor(tmp_path):
    folder = tiny.save(tiny.config("llama", vocab_size=16384), tmp_path)
    before = serve(folder).layout_hash

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["model.embed_tokens.weight"][8000, 5] += 1
        return weights

    assert serve(rewrite(folder, change)).layout_hash != before
