from __future__ import annotations

import fnmatch
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from decant import models as trained
from decant.runtime import model_files
from decant.runtime.model_files import PATTERNS, ModelFiles, ModelUnreadable, find


def write_files(folder: Path, **files: Any) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def test_the_tiny_model_has_its_documented_sizes():
    found = find(str(trained.path()))
    assert (found.id, found.context_length, found.vocab_size, found.eos_token_ids) == ("tiny-python", 2048, 4096, (1,))
    assert found.default_sampling["temperature"] == 0
    assert found.folder == trained.path().resolve()


@pytest.mark.parametrize(
    ("scaling", "context_length"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}, 32),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}}, 64),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 32),
        ({"rope_scaling": None}, 32),
    ],
    ids=str,
)
def test_the_context_length_includes_rope_scaling(scaling, context_length, tmp_path):
    assert (
        find(write_files(tmp_path / "m", config={"max_position_embeddings": 32, **scaling})).context_length
        == context_length
    )


def test_a_served_name_changes_nothing_else(tmp_path):
    place = write_files(tmp_path / "m")
    plain, named = find(place), find(place, id="mine")
    assert (plain.id, named.id) == ("m", "mine")
    assert (plain.hashes, plain.revision) == (named.hashes, named.revision)


def test_a_hub_model_is_named_by_its_commit_and_comes_without_weights(tmp_path, monkeypatch):
    place = write_files(tmp_path / "0123abcd", config={"vocab_size": 7})
    asked: dict[str, Any] = {}

    def fetch(model: str, **options: Any) -> str:
        asked.update(model=model, **options)
        return place

    monkeypatch.setattr(model_files, "snapshot_download", fetch)
    found = find("someone/model", "v1")
    assert (found.id, found.revision, found.vocab_size) == ("someone/model", "0123abcd", 7)
    assert (asked["model"], asked["revision"]) == ("someone/model", "v1")
    fetched = [name for name in ("model.safetensors", "pytorch_model.bin", "tokenizer.json", "config.json")
               if any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])]  # fmt: skip
    assert fetched == ["tokenizer.json", "config.json"]
    assert set(asked["allow_patterns"]) == set(PATTERNS)


@pytest.mark.parametrize(
    ("error", "may_be_cached"),
    [(LocalEntryNotFoundError("nothing\nmore"), True), (OSError("unknown"), False), (RuntimeError("407"), False)],
)
def test_a_model_out_of_reach_is_refused_by_name(monkeypatch, error, may_be_cached):
    def fetch(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(model_files, "snapshot_download", fetch)
    with pytest.raises(ModelUnreadable, match="someone/model") as refused:
        find("someone/model")
    assert "more" not in refused.value.reason
    assert ("HF_HOME" in refused.value.reason) == may_be_cached


def test_a_hub_that_never_answers_is_waited_for_with_a_limit(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
        for _ in range(2):
            with pytest.raises(ModelUnreadable, match=r"someone/model.*timed out"):
                find("someone/model")


def test_a_path_without_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ModelUnreadable, match="nowhere"):
        find(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": []}, "config.json"),
        ({"generation_config": 3}, "generation_config.json"),
        ({"config": {"vocab_size": "many"}}, "vocab_size"),
        ({"config": {"max_position_embeddings": 0}}, "max_position_embeddings"),
        ({"config": {"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": "x"}}}, "rotary scaling"),
        ({"config": {"eos_token_id": "</s>"}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": [1, -1]}}, "eos_token_id"),
        ({"generation_config": {"temperature": "hot"}}, "temperature"),
        ({"generation_config": {"top_k": True}}, "top_k"),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path, files, words):
    with pytest.raises(ModelUnreadable, match=words):
        find(write_files(tmp_path / "m", **files))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_a_file_that_can_not_be_read_is_refused(tmp_path, content):
    place = write_files(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_bytes(content)
    with pytest.raises(ModelUnreadable, match=r"config\.json"):
        find(place)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelUnreadable, match=r"config\.json"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({}, None, ()),
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, (4, 5)),
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 4}}, None, (4,)),
        ({"eos_token_id": 3, "text_config": {"vocab_size": 4}}, None, (3,)),
    ],
)
def test_stop_tokens_come_from_the_most_specific_file(tmp_path, config, generation, eos):
    files = {"config": config} | ({} if generation is None else {"generation_config": generation})
    assert find(write_files(tmp_path / "m", **files)).eos_token_ids == eos


def test_limits_of_a_model_of_several_parts_are_those_of_its_text(tmp_path):
    config = {"vocab_size": 1, "text_config": {"vocab_size": 9, "max_position_embeddings": 8}}
    found = find(write_files(tmp_path / "m", config=config))
    assert (found.vocab_size, found.context_length) == (9, 8)
    unnamed = find(write_files(tmp_path / "n"))
    assert (unnamed.vocab_size, unnamed.context_length) == (None, None)


def sampling(tmp_path: Path, **generation: Any) -> dict[str, float]:
    return dict(find(write_files(tmp_path / "m", generation_config=generation)).default_sampling)


def test_a_model_is_greedy_unless_it_asks_for_sampling(tmp_path):
    off = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampling(tmp_path) == off
    assert sampling(tmp_path, temperature=0.5)["temperature"] == 0
    drawn = sampling(tmp_path, do_sample=True, temperature=0.5, top_k=20, top_p=None)
    assert drawn == {**off, "temperature": 0.5, "top_k": 20}
    assert sampling(tmp_path, do_sample=True)["temperature"] == 1


def copied(tmp_path: Path, name: str) -> Path:
    place = tmp_path / name
    place.mkdir()
    for file in trained.path().glob("*.json"):
        shutil.copy(file, place)
    return place


def both(tmp_path: Path, change: Any) -> tuple[ModelFiles, ModelFiles]:
    changed = copied(tmp_path, "changed")
    change(changed)
    return find(str(copied(tmp_path, "kept"))), find(str(changed))


def test_copies_of_a_model_agree(tmp_path):
    one, other = both(tmp_path, lambda place: None)
    assert (one.hashes, one.revision) == (other.hashes, other.revision)
    assert all(0 < hash < 2**64 for hash in one.hashes)


def edit(place: Path, name: str, change: Any, **dump: Any) -> None:
    """Change the JSON object in a file in place, or make it."""
    file = place / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    change(content)
    file.write_text(json.dumps(content, **dump))


def add_token(tokenizer: dict[str, Any]) -> None:
    new = {**tokenizer["added_tokens"][0], "id": 4096, "content": "<new>"}
    tokenizer["added_tokens"].append(new)


CHANGES_TOKEN_IDS: dict[str, tuple[str, Any]] = {
    "a merge": ("tokenizer.json", lambda file: file["model"]["merges"].pop()),
    "an added token": ("tokenizer.json", add_token),
    "the normalizer": ("tokenizer.json", lambda file: file.update(normalizer={"type": "NFC"})),
    "the post-processor": ("tokenizer.json", lambda file: file.update(post_processor=None)),
    "special tokens in texts": ("tokenizer_config.json", lambda file: file.update(split_special_tokens=False)),
    "a token of the configuration": ("tokenizer_config.json", lambda file: file.update(pad_token="<pad>")),
    "a token of the older map": ("special_tokens_map.json", lambda file: file.update(pad_token="<pad>")),
    "the tokenizer's end token": ("tokenizer_config.json", lambda file: file.update(eos_token="<|begin|>")),
    "the generation's end token": ("generation_config.json", lambda file: file.update(eos_token_id=5)),
    "the size of the embedding": ("config.json", lambda file: file.update(vocab_size=5000)),
}
KEEPS_TOKEN_IDS: dict[str, tuple[str, Any]] = {
    "the order of a file": ("tokenizer.json", lambda file: file.update(model=file.pop("model"))),
    "merges as text": (
        "tokenizer.json",
        lambda file: file["model"].update(merges=[" ".join(merge) for merge in file["model"]["merges"]]),
    ),
    "truncation": ("tokenizer.json", lambda file: file.update(truncation={"max_length": 8})),
    "white space": ("tokenizer_config.json", lambda file: None),
    "the chat template": ("tokenizer_config.json", lambda file: file.update(chat_template="{{ messages }}")),
    "a maximum length": ("tokenizer_config.json", lambda file: file.update(model_max_length=7)),
    "a token that is there": ("special_tokens_map.json", lambda file: file.update(pad_token="<|end|>")),
    "the context length": ("config.json", lambda file: file.update(max_position_embeddings=1234)),
    "sampling": ("generation_config.json", lambda file: file.update(top_k=5)),
    "the dtype": ("config.json", lambda file: file.update(torch_dtype="float32")),
}


@pytest.mark.parametrize("name", CHANGES_TOKEN_IDS)
def test_models_with_other_token_ids_or_ends_disagree(tmp_path, name):
    file, change = CHANGES_TOKEN_IDS[name]
    one, other = both(tmp_path, lambda place: edit(place, file, change))
    assert one.hashes.isdisjoint(other.hashes)


@pytest.mark.parametrize("name", KEEPS_TOKEN_IDS)
def test_what_changes_no_token_id_keeps_models_compatible(tmp_path, name):
    file, change = KEEPS_TOKEN_IDS[name]
    one, other = both(tmp_path, lambda place: edit(place, file, change, indent=7))
    assert one.token_ids == other.token_ids


def test_a_template_in_a_file_of_its_own_keeps_models_compatible(tmp_path):
    one, other = both(tmp_path, lambda place: (place / "chat_template.jinja").write_text("{{ messages }}"))
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize(
    ("tokenizer", "file"),
    [({"added_tokens": [3]}, "tokenizer.json"), ({"model": {"merges": 3}}, "tokenizer.json"), ([], "tokenizer.json")],
)
def test_a_malformed_tokenizer_is_refused_by_name(tmp_path, tokenizer, file):
    with pytest.raises(ModelUnreadable, match=file):
        find(write_files(tmp_path / "m", tokenizer=tokenizer, tokenizer_config={"eos_token": "x"}))


VOCABULARY = {"a": 0, "</s>": 2, "<|im_end|>": 5}


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "ends"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 2}, "<|im_end|>", (2, 5)),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 5]}, "<|im_end|>", (2, 5)),
        ({"eos_token_id": 2}, None, {"content": "<|im_end|>"}, (2, 5)),
        ({}, None, "</s>", (2,)),
        ({"eos_token_id": 2}, None, "<unknown>", (2,)),
        ({"eos_token_id": 2, "vocab_size": 5}, None, "<|im_end|>", (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, None, (2,)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": None}}, {"eos_token_id": None}, None, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, None, ()),
        ({"eos_token_id": [7, 9], "vocab_size": 8}, None, None, (7,)),
    ],
)
@pytest.mark.parametrize("kind", ["vocabulary", "added", "unigram"])
def test_the_tokenizers_end_token_is_an_end_beside_the_configurations(
    tmp_path, config, generation, eos_token, ends, kind
):
    added = [{"id": id, "content": text} for text, id in VOCABULARY.items()]
    pieces = [[next((t for t, own in VOCABULARY.items() if own == id), f"piece {id}"), -1.0] for id in range(6)]
    tokenizers: dict[str, dict[str, Any]] = {
        "vocabulary": {"model": {"vocab": VOCABULARY}},
        "added": {"model": {"vocab": {}}, "added_tokens": added},
        "unigram": {"model": {"vocab": pieces}},
    }
    files: dict[str, Any] = {
        "config": config,
        "tokenizer": tokenizers[kind],
        "tokenizer_config": {"eos_token": eos_token},
    }
    files |= {} if generation is None else {"generation_config": generation}
    assert find(write_files(tmp_path / "m", **files)).eos_token_ids == ends
