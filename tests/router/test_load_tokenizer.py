from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from decant.protos import inference_pb2 as pb
from decant.router.text.prompt import chat_tokens
from decant.router.text.served_model import load
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import ModelUnreadable
from decant.runtime.settings import SettingError
from tests.router.tokenizer_factories import byte_fallback, byte_level, folder

TEXT = "the a"


def without_processor(tokenizer: Tokenizer) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**described, "post_processor": None}))


def with_offsets(tokenizer: Tokenizer) -> Tokenizer:
    """Give it the post-processor of byte-level tokenizers, which adds no token."""
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def ids_and_warnings(place: Path, *add_bos: str) -> tuple[list[int], list[str]]:
    with capture_logs() as logs:
        model = load([str(place)], add_bos).default
    return model._encode(TEXT, True), [entry["reason"] for entry in logs if entry["log_level"] == "warning"]


# What transformers 4.57.1 makes of each, and 5.23 but for `add_bos_token: false`, in which it ignores that entry.
@pytest.mark.parametrize("kind", ["CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizerFast"])
@pytest.mark.parametrize(("says", "has_bos"), [(None, True), (True, True), (False, False)])
def test_a_class_that_adds_bos_itself_is_built_so_where_the_file_has_no_post_processor(tmp_path, kind, says, has_bos):
    config = {"tokenizer_class": kind, **({} if says is None else {"add_bos_token": says})}
    place = folder(tmp_path / "m", without_processor(byte_fallback()), config)
    ids, warnings = ids_and_warnings(place)
    plain = load([str(place)]).default._encode(TEXT, False)
    assert ids == ([1, *plain] if has_bos else plain)
    assert not warnings
    if kind.startswith("Code") and has_bos:
        assert ids == AutoTokenizer.from_pretrained(str(place))(TEXT).input_ids


@pytest.mark.parametrize("make", [with_offsets, without_processor])
@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_bos_token_that_the_configuration_promises_and_the_file_lacks_is_warned_of_with_its_setting(
    tmp_path, make, kind
):
    place = folder(tmp_path / "m", make(byte_level()), {"tokenizer_class": kind, "add_bos_token": True})
    ids, (warning,) = ids_and_warnings(place)
    assert ids == AutoTokenizer.from_pretrained(str(place))(TEXT).input_ids
    assert "add_bos_token is true" in warning
    assert "--add-bos m" in warning
    added, warnings = ids_and_warnings(place, "m")
    assert added == [0, *ids]
    assert not warnings


def test_the_default_of_a_class_counts_as_its_word(tmp_path):
    _, (warning,) = ids_and_warnings(folder(tmp_path / "m", byte_level(), {"tokenizer_class": "LlamaTokenizerFast"}))
    assert "--add-bos m" in warning


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({}, []),
        ({"add_bos_token": True, "add_eos_token": False}, []),
        ({"add_bos_token": False}, ["add_bos_token is false"]),
        ({"add_eos_token": True}, ["add_eos_token is true"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["add_bos_token is false", "add_eos_token is true"]),
    ],
)
def test_only_what_contradicts_the_post_processor_is_warned_of(tmp_path, config, warned):
    ids, warnings = ids_and_warnings(folder(tmp_path / "m", byte_fallback(), config))
    assert ids[0] == 1
    assert [warning.partition(",")[0] for warning in warnings] == warned


@pytest.mark.parametrize("make", [byte_level, byte_fallback, lambda: with_offsets(byte_level())])
def test_add_bos_adds_one_where_none_is_and_nothing_to_a_conversation(tmp_path, make):
    place = folder(tmp_path / "m", make())
    plain = load([str(place)]).default
    model = load([str(place)], ["m"]).default
    bos = plain.tokenizer.token_to_id("<s>")
    assert model._encode(TEXT, True) == [bos, *plain._encode(TEXT, False)]
    assert model._encode("", True) == [bos]
    assert model._encode(TEXT, False) == plain._encode(TEXT, False)


def test_add_bos_is_refused_for_a_model_that_is_not_served_or_has_no_bos_token(tmp_path):
    place = folder(tmp_path / "m", byte_level(), {"bos_token": None})
    with pytest.raises(SettingError, match=r"add_bos.*\(m\), got other"):
        load([str(place)], ["other"])
    with pytest.raises(ModelUnreadable, match=r"m: --add-bos.*bos_token"):
        load([str(place)], ["m"])


TEMPLATES: dict[str, tuple[dict[str, Any], str | None, tuple[str, ...]]] = {
    "none": ({}, None, ()),
    "chat_template.json alone": ({"chat_template.json": {"chat_template": "J"}}, "J", ()),
    "several in chat_template.json": (
        {"chat_template.json": {"chat_template": {"default": "J", "rag": "R"}}},
        "J",
        ("rag",),
    ),
    "a list in the configuration": (
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "C"}]}},
        "C",
        (),
    ),
    "chat_templates": ({"chat_templates/default.jinja": "D", "chat_templates/tool_use.jinja": "T"}, "D", ("tool_use",)),
    "additional_chat_templates": (
        {"chat_template.jinja": "M", "additional_chat_templates/rag.jinja": "R"},
        "M",
        ("rag",),
    ),
    "only others": ({"additional_chat_templates/rag.jinja": "R", "chat_templates/a.jinja": "A"}, None, ("a", "rag")),
    "the file of its own first": (
        {
            "chat_template.jinja": "M",
            "chat_template.json": {"chat_template": "J"},
            "tokenizer_config.json": {"chat_template": "C"},
        },
        "M",
        (),
    ),
    "the configuration before the processor's": (
        {"chat_template.json": {"chat_template": "J"}, "tokenizer_config.json": {"chat_template": "C"}},
        "C",
        (),
    ),
    "an empty one": ({"tokenizer_config.json": {"chat_template": ""}}, None, ()),
}


def write(place: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        file = place / name
        file.parent.mkdir(exist_ok=True)
        before = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(content if isinstance(content, str) else json.dumps({**before, **content}))
    return place


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_is_found_wherever_checkpoints_have_it(tmp_path, name):
    files, default, others = TEMPLATES[name]
    model = load([str(write(folder(tmp_path / "m", byte_level()), files))]).default
    assert (model.chat.source if model.chat else None) == default
    assert model.has_chat_template == (default is not None)
    assert sorted(model.other_templates) == sorted(others)


async def test_a_model_with_other_templates_than_the_default_says_which(tmp_path):
    files = {"chat_templates/rag.jinja": "R", "chat_templates/tool_use.jinja": "T"}
    model = load([str(write(folder(tmp_path / "m", byte_level()), files))]).default
    messages = pb.Messages(messages=[pb.Message(role="user", content="x")])
    with pytest.raises(InvalidArgument, match="m has no default chat template; it has rag, tool_use: send a text"):
        await chat_tokens(messages, model, 64, Deadline())


@pytest.mark.parametrize("template", [3, [3], [{"name": "x"}], {"default": ["x"]}])
def test_a_chat_template_of_another_form_is_refused_by_name(tmp_path, template):
    place = write(folder(tmp_path / "m", byte_level()), {"chat_template.json": {"chat_template": template}})
    with pytest.raises(ModelUnreadable, match=r"m: chat_template\.json: chat_template is"):
        load([str(place)])
