from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from decant.bench.model_shapes import SHAPES
from decant.engine.blocks import BlockPool
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec, Window, WindowKind
from decant.plan.capacity.devices import PRESETS
from decant.plan.capacity.memory import KvCapacity
from decant.plan.capacity.model_shape import ModelShape, find_shape, parse_shape, read_shape
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import parse_bytes, parse_count, parse_slo, parse_tokens
from decant.runtime import model_files

GIB, MIB = 1 << 30, 1 << 20
OPT_13B = "layers=40,hidden=5120,heads=40,params=13B"
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
FOUR_LAYERS = {**LLAMA_3_8B, "num_hidden_layers": 4}
MIXTRAL_8X7B = {
    **LLAMA_3_8B,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    **LLAMA_3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}


def kv_layout(token_bytes: int, block_size: int = 16) -> KvLayout:
    return KvLayout((LayerSpec(1, token_bytes, 0),), block_size, KvFormat(1))


def shape_of(config: Mapping[str, Any], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@cache
def _shape_of_text(config: str) -> ModelShape:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        return read_shape(Path(folder))


def known_shape(config: Mapping[str, Any]) -> ModelShape:
    """Shape of a published configuration, read once in a process: passes through all its layers take seconds."""
    return _shape_of_text(json.dumps(config))


def test_kv_cache_of_opt_13b_has_its_published_size_per_token() -> None:
    assert parse_shape(OPT_13B).kv_bytes("float16") == 800 * 1024  # "nearly 1 MB"


@pytest.mark.slow
def test_kv_cache_of_known_models_has_its_published_size_per_token() -> None:
    assert known_shape(LLAMA_3_8B).kv_bytes("bfloat16") == 128 * 1024
    assert known_shape(SHAPES["qwen2.5-0.5b"]).kv_bytes("bfloat16") == 12 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": 4096}, ((4096, 4),)),
        ({"model_type": "gemma2", "sliding_window": 4096}, ((4096, 2),)),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 3}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, ((64, 1),)),
    ],
)
def test_windows_of_layers_are_those_of_the_model(
    changes: dict[str, object], windows: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    shape = shape_of({**FOUR_LAYERS, **changes}, tmp_path)
    found = Counter(layer.window.size for layer in shape.layers if layer.window.kind is not WindowKind.FULL)
    assert tuple(found.items()) == windows


@pytest.mark.parametrize("length", [1, 100, 128, 129, 5000])
def test_a_sequence_of_full_and_windowed_layers_takes_the_blocks_of_the_engine_s_groups(length: int) -> None:
    sliding = Window(WindowKind.SLIDING, 128)
    layers = (LayerSpec(8, 64, 64, sliding), LayerSpec(8, 64, 64)) * 12
    layout = KvLayout(layers, 16, KvFormat(2))
    kv_capacity = KvCapacity(40 * GIB, 10 * GIB, layout)
    pool = BlockPool(1, layout.block_size, layout.windows)
    assert kv_capacity.sequence_bytes(length) == pool.blocks_at_once(pool.blocks_for(length)) * layout.block_bytes
    assert kv_capacity.sequences(length) == kv_capacity.kv_bytes // kv_capacity.sequence_bytes(length)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (LLAMA_3_8B, 8.03, 7.50),
        (MIXTRAL_8X7B, 46.70, 12.75),
        (QWEN3_30B_A3B, 30.53, 3.04),
        (SHAPES["qwen2.5-0.5b"], 0.494, 0.494),
        (SHAPES["smollm2-135m"], 0.1345, 0.1345),
    ],
)
def test_parameters_of_known_models_are_counted(config: Mapping[str, Any], billions: float, active: float) -> None:
    shape = known_shape(config)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.002)


def test_a100_40gb_holds_14000_tokens_beside_13_billion_weights() -> None:
    """The article's rounding: 26 GB of weights leave 14 GB, at 1 MB a token."""
    kv_capacity = KvCapacity(40 * GIB, 26 * GIB, kv_layout(MIB), share=1.0)
    assert kv_capacity.tokens == 14 * 1024
    assert (kv_capacity.sequences(512), kv_capacity.sequences(2048)) == (28, 7)


def test_exact_sizes_at_nine_tenths_of_the_memory_give_15000_tokens() -> None:
    """The PagedAttention paper's table of OPT-13B on the same device has 12 GB and 15,700 slots."""
    shape = parse_shape(OPT_13B)
    kv_capacity = KvCapacity(PRESETS["a100-40gb"].memory, shape.weight_bytes("float16"), shape.kv_layout("float16"))
    assert kv_capacity.kv_bytes / GIB == pytest.approx(12, rel=0.03)
    assert kv_capacity.tokens == pytest.approx(15_700, rel=0.03)


def test_int8_doubles_the_tokens_that_fit() -> None:
    kv_capacity = KvCapacity(40 * GIB, 26 * GIB, kv_layout(MIB), share=1.0)
    assert KvCapacity(40 * GIB, 26 * GIB, kv_layout(MIB // 2), share=1.0).tokens == 2 * kv_capacity.tokens
    assert KvCapacity(40 * GIB, 13 * GIB, kv_layout(MIB), share=1.0).tokens == pytest.approx(
        2 * kv_capacity.tokens, rel=0.04
    )
    shape = parse_shape(OPT_13B)
    assert shape.kv_bytes("int8") == pytest.approx(shape.kv_bytes("bfloat16") / 2, rel=0.02)  # with its scales
    assert shape.weight_bytes("bfloat16", "int8") == pytest.approx(shape.weight_bytes("bfloat16") / 2, rel=0.02)


def test_a_sequence_takes_whole_blocks() -> None:
    kv_capacity = KvCapacity(memory=64, weights=0, layout=kv_layout(1), share=1.0)
    assert [kv_capacity.sequences(length) for length in (16, 17, 32, 33, 65)] == [4, 2, 2, 1, 0]


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(InvalidPlan, match=r"weights of 26.0 GiB need a device of more than 28.9 GiB.*int8.*24.0 GiB"):
        KvCapacity(24 * GIB, 26 * GIB, kv_layout(MIB)).check(longest=100)


def test_a_sequence_that_does_not_fit_is_refused_with_the_memory_that_holds_it() -> None:
    kv_capacity = KvCapacity(28 * GIB, 26 * GIB, kv_layout(MIB), share=1.0)
    with pytest.raises(InvalidPlan, match=r"4,000 tokens.*at most 2,048 tokens"):
        kv_capacity.check(longest=4000)
    needed = 26 * GIB + (4000 + 16) * MIB
    KvCapacity(needed, 26 * GIB, kv_layout(MIB), share=1.0).check(longest=4000)


@pytest.mark.slow
def test_a_folder_and_its_config_give_the_same_shape(tmp_path: Path) -> None:
    assert shape_of(FOUR_LAYERS, tmp_path) == read_shape(tmp_path / "config.json")
    assert read_shape(tmp_path).context == 8192


@pytest.mark.slow
def test_a_name_on_the_hub_is_read_from_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(model: str, revision: None, patterns: list[str]) -> Path:
        asked.append((model, revision, patterns))
        (tmp_path / "config.json").write_text(json.dumps(FOUR_LAYERS))
        return tmp_path

    monkeypatch.setattr(model_files, "download", fetch)
    shape = find_shape("someone/llama-3.1")
    assert asked == [("someone/llama-3.1", None, ["config.json"])]
    assert shape == replace(read_shape(tmp_path), name="someone/llama-3.1")


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("nothing\nmore"), OSError("no network"), RuntimeError("407")]
)
def test_a_name_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(*_: object) -> Path:
        raise error

    monkeypatch.setattr(model_files, "download", fetch)
    with pytest.raises(InvalidPlan, match=rf"--model: .*hub \({str(error).split()[0]}[^\n]*\), got someone/llama"):
        find_shape("someone/llama")


def test_a_model_of_the_hub_without_a_configuration_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "download", lambda *_: tmp_path)
    with pytest.raises(InvalidPlan, match=r"--model: a model with a config.json, got someone/llama"):
        find_shape("someone/llama")


def test_without_network_a_name_is_refused_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(host: str, *_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    with pytest.raises(InvalidPlan, match=r"--model: .*hub \([^\n]*no network\), got someone/llama"):
        find_shape("someone/llama")
    assert sleeps == []


@pytest.mark.parametrize("text", ["", "layers=4", "layers=4,hidden=8,heads=2,width=3", "layers=4,hidden=8,heads=x"])
def test_a_shape_needs_its_keys_and_numbers(text: str) -> None:
    with pytest.raises(InvalidPlan, match="--shape"):
        parse_shape(text)


def test_quantities_are_parsed_with_their_units() -> None:
    assert parse_bytes("", "40GiB") == parse_bytes("", "40G") == 40 * GIB
    assert parse_bytes("", "40GB") == 40 * 10**9
    assert parse_count("", "13B") == 13 * 10**9
    assert (parse_tokens("", "1500-2000").mean, parse_tokens("", "7").mean_square) == (1750, 49)
    assert parse_slo("ttft=500ms,tpot=0.05s") == parse_slo("tpot=50ms, ttft=.5s".replace("=.5", "=0.5"))


@pytest.mark.parametrize("text", ["0", "20-10", "a", "-5", "1-2-3"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match=r"--prompt-tokens.*got"):
        parse_tokens("--prompt-tokens", text)


@pytest.mark.parametrize("text", ["ttft", "e2e=1s", "ttft=0ms", "ttft=-1s"])
def test_invalid_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="--slo"):
        parse_slo(text)


def test_the_mean_square_of_a_range_is_that_of_its_lengths() -> None:
    lengths = range(3, 12)
    assert parse_tokens("", "3-11").mean_square == pytest.approx(sum(n * n for n in lengths) / len(lengths))
