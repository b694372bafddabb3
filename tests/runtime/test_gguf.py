"""The folder made of a GGUF file: its configuration, where it is, and which files are refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decant.runtime.gguf import folder as gguf_folders
from decant.runtime.gguf.reader import GgufUnreadable, read_header
from decant.runtime.model_files import ModelUnreadable, find, local_folder
from tests import gguf_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decant" / "gguf"


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((find(str(path)).folder / "config.json").read_text())
    return config


def test_a_file_is_found_as_a_model_with_its_name_sizes_and_ends(tmp_path: Path, cache: Path) -> None:
    path = gguf_files.small("qwen2").write(tmp_path / "a model.gguf")
    found = find(str(path))
    assert (found.id, found.context_length, found.vocab_size) == ("a model", 64, 280)
    tokens = gguf_files.byte_tokenizer(280)["tokenizer.ggml.tokens"]
    assert {tokens[id] for id in found.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert found.folder.parent == cache
    assert found.default_sampling["temperature"] == 0
    assert find(str(path), id="mine").hashes == found.hashes


def test_the_folder_is_made_once_for_each_state_of_a_file(tmp_path: Path, cache: Path) -> None:
    path = gguf_files.small().write(tmp_path / "m.gguf")
    folder = find(str(path)).folder
    made = (folder / "config.json").stat()
    changes: dict[str, Any] = {"llama.context_length": 32}
    assert local_folder(str(path)) == folder
    assert (folder / "config.json").stat() == made
    gguf_files.small(**changes).write(path)
    changed = find(str(path))
    assert changed.folder != folder
    assert changed.context_length == 32
    assert sorted(cache.iterdir()) == sorted([folder, changed.folder])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_sizes_are_those_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    path = gguf_files.small(architecture).write(tmp_path / "m.gguf")
    found = config_of(path)
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    names = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    names |= {"rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings", "model_type"}
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_the_type_of_most_bytes_is_that_of_the_model(tmp_path: Path) -> None:
    file = gguf_files.small()
    assert config_of(file.write(tmp_path / "f32.gguf"))["dtype"] == "float32"
    file.tensors["token_embd.weight"] = np.zeros((280, 64), np.float16), Type.F16
    for part in ("attn_output", "attn_q", "attn_v", "ffn_gate"):
        del file.tensors[f"blk.0.{part}.weight"]
    config = config_of(file.write(tmp_path / "f16.gguf"))
    assert config["dtype"] == "float16"
    assert config["quantization_config"] == {"quant_method": "gguf", "weights": None}


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_the_rotary_scaling_of_llama_3_follows_from_its_factors(factor: float, original: int, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    made = AutoConfig.for_model("llama", hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](made, "cpu")
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    sizes: dict[str, Any] = {"llama.rope.freq_base": 5e5, "llama.embedding_length": 256}
    file = gguf_files.small(**sizes)
    file.tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32), Type.F32
    file.tensors["token_embd.weight"] = np.zeros((280, 256), np.float32), Type.F32
    assert config_of(file.write(tmp_path / "m.gguf"))["rope_parameters"] == scaling
    file.tensors["rope_freqs.weight"][0][5] *= 1.5
    with pytest.raises(ModelUnreadable, match=r"rope_freqs\.weight has factors of another rotary scaling"):
        find(str(file.write(tmp_path / "m.gguf")))


def test_yarn_and_linear_scaling_are_those_of_the_metadata(tmp_path: Path) -> None:
    values: dict[str, Any] = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    values |= {"qwen2.rope.scaling.original_context_length": 16, "qwen2.rope.freq_base": 1e6}
    rope = config_of(gguf_files.small("qwen2", **values).write(tmp_path / "m.gguf"))["rope_parameters"]
    assert rope == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"general.architecture": "mamba"}, "of the architecture 'mamba' are not served; llama, qwen2, qwen3 are"),
        ({"split.count": 3}, "it is one of 3 files of a model: merge them"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8 is not served"),
        ({"llama.attention.sliding_window": 4096}, r"llama\.attention\.sliding_window = 4096 is not served"),
        ({"llama.block_count": None}, r"llama\.block_count: a number from 1 to 2147483647, got none"),
        ({"llama.attention.head_count": [4, 4]}, r"llama\.attention\.head_count: .* got 2 values"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon: a finite number above 0"),
        (
            {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16},
            r"rope\.dimension_count is 8, and a head",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "a rotary scaling of the type 'longrope' is not served"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model: gpt2 and llama are served, got 'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre: .* are served, got 'tekken'"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre: .* are served, got ''"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "has a token twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 280 tokens and 2 types of them"),
        ({"tokenizer.ggml.merges": ["t h e"]}, r"tokenizer\.ggml\.merges has 't h e': two tokens"),
        ({"tokenizer.ggml.merges": ["q q"]}, r"tokenizer\.ggml\.merges has .*no tokens, or together none"),
        ({"tokenizer.ggml.eos_token_id": 280}, r"tokenizer\.ggml\.eos_token_id: below 280, got 280"),
        ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template is no text"),
        ({"general.alignment": 24}, r"general\.alignment: a power of two from 8, got 24"),
    ],
    ids=lambda each: str(next(iter(each.items()))) if isinstance(each, dict) else "",
)
def test_a_file_that_is_not_served_is_refused_by_the_name_of_its_entry(
    values: dict[str, Any], reason: str, tmp_path: Path, cache: Path
) -> None:
    architecture = values.pop("general.architecture", "llama")
    file = gguf_files.small(**values)
    file.architecture = architecture
    with pytest.raises(ModelUnreadable, match=reason):
        find(str(file.write(tmp_path / "m.gguf")))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("blk.0.ffn_gate_exps.weight", Type.F32, r"the tensor blk\.0\.ffn_gate_exps\.weight is not one of a llama"),
        ("blk.0.attn_q.weight", Type.Q3_K, r"Q3_K weights are not served \(blk\.0\.attn_q\.weight\); F32, F16"),
        ("blk.0.attn_q.weight", Type.I8, r"I8 weights are not served \(blk\.0\.attn_q\.weight\)"),
        ("blk.0.attn_k.weight", Type.F32, r"blk\.0\.attn_k\.weight has 2 rows: by its metadata 2 heads"),
    ],
)
def test_a_tensor_that_is_not_served_is_refused_by_its_name(name: str, kind: Type, reason: str, tmp_path: Path) -> None:
    file = gguf_files.small()
    is_bytes = kind in (Type.Q3_K, Type.I8)
    file.tensors[name] = (
        np.zeros((2, 110), np.uint8 if kind is Type.Q3_K else np.int8 if is_bytes else np.float32),
        kind,
    )
    with pytest.raises(ModelUnreadable, match=reason):
        find(str(file.write(tmp_path / "m.gguf")))


def patched(path: Path, at: int, code: str, value: Any) -> Path:
    content = bytearray(path.read_bytes())
    struct.pack_into(code, content, at, value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("at", "code", "value", "reason"),
    [
        (0, "<4s", b"GGML", "it does not begin with GGUF"),
        (4, "<I", 1, "it has the version 1; little-endian files of the versions 2 and 3"),
        (4, ">I", 3, "it is big-endian; little-endian"),
        (8, "<Q", 1 << 60, "it ends within its list of tensors|has .* dimensions|is there twice"),
        (16, "<Q", 1 << 60, "it ends within|unknown type|is there twice|UTF-8"),
        (24, "<Q", 1 << 62, "it ends within its metadata"),
    ],
)
def test_a_header_that_is_malformed_is_refused(at: int, code: str, value: Any, reason: str, tmp_path: Path) -> None:
    path = patched(gguf_files.small().write(tmp_path / "m.gguf"), at, code, value)
    with pytest.raises(GgufUnreadable, match=reason):
        read_header(path)


@pytest.mark.parametrize("items", [0, 8, 12])
def test_an_array_of_more_items_than_the_file_has_is_refused_at_once(items: int, tmp_path: Path) -> None:
    path = gguf_files.small(array=[1, 2, 3]).write(tmp_path / "m.gguf")
    at = path.read_bytes().index(b"array") + 5
    patched(path, at + 4, "<I", items)
    patched(path, at + 8, "<Q", 1 << 61)
    with pytest.raises(GgufUnreadable, match=r"it ends within the value of array"):
        read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf_files.small().write(tmp_path / "whole.gguf").read_bytes()
    path, choose = tmp_path / "cut.gguf", random.Random(0)
    for size in (0, 3, 24, len(whole) - 1, *(choose.randrange(len(whole)) for _ in range(50))):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelUnreadable, match=r"it is empty|it ends within|is incomplete"):
            find(str(path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.small().write(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnreadable, match="XDG_CACHE_HOME chooses their folder"):
        find(str(path))


def test_the_folder_that_another_process_has_made_meanwhile_stays(tmp_path: Path, cache: Path) -> None:
    path = gguf_files.small().write(tmp_path / "m.gguf")
    folder = local_folder(str(path))
    assert folder is not None
    before = folder.stat()
    gguf_folders._make(path, folder)
    assert folder.stat() == before
    assert list(cache.iterdir()) == [folder]
