from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from decant import models as trained
from decant.protos import inference_pb2 as pb
from decant.router.text.prompt import prompt_of
from decant.router.text.served_model import MAX_INLINE_LENGTH, Models, load, served
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument, NotFound
from decant.runtime.model_files import ModelUnreadable, find
from tests.router.tokenizer_factories import MADE, SPECIAL, TEXT, byte_fallback, byte_level, folder

TINY = str(trained.path())
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="the a日éx ▁\n<0x41>", max_size=30),
    st.lists(st.sampled_from([*SPECIAL, *TEXT, "<tool call>", " odd ", "<|end|>", "x"]), max_size=5).map(" ".join),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def both(root):
    @cache
    def pair(kind: str, config: str = "{}") -> tuple[Any, Any]:
        place = TINY
        if kind != "tiny-python":
            place = str(folder(root / f"{kind}-{abs(hash(config))}", MADE[kind](), json.loads(config)))
        return served(find(place)), AutoTokenizer.from_pretrained(place)

    return pair


CONFIGS = [
    "{}",
    '{"split_special_tokens": true}',
    '{"add_bos_token": true, "add_eos_token": true}',
    '{"pad_token": "<pad>", "additional_special_tokens": ["<|tool|>", "<one more>"]}',
    '{"added_tokens_decoder": {"9001": {"content": "<late>", "special": false, "lstrip": true, "normalized": false}}}',
    '{"extra_special_tokens": {"image_token": "<image>"},'
    ' "mask_token": {"__type": "AddedToken", "content": "<m>", "lstrip": true, "special": true}}',
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["tiny-python", *MADE])
def test_a_prompt_becomes_the_tokens_that_transformers_makes_of_it(both, kind, config):
    ours, theirs = both(kind, config)

    @given(TEXTS)
    @settings(max_examples=30, deadline=None)
    def same(text: str) -> None:
        text += " <pad><one more> <late><image> <m>"
        assert ours._encode(text, True) == theirs(text).input_ids
        assert ours._encode(text, False) == theirs(text, add_special_tokens=False).input_ids

    same()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["tiny-python", *MADE])
def test_the_same_tokens_are_special_as_in_transformers(both, kind, config):
    ours, theirs = both(kind, config)
    for id in range(len(theirs)):
        mine = ours._decode([id], True)
        if kind == "byte_level" and theirs.convert_ids_to_tokens(id) == "é!":
            continue  # in transformers its accent is a byte
        assert mine == theirs.decode([id], skip_special_tokens=True, clean_up_tokenization_spaces=False)


async def test_a_long_text_gives_the_same_tokens_as_its_short_pieces():
    model = load([TINY]).default
    line = "def f(x):\n"
    count = MAX_INLINE_LENGTH // len(line) + 5
    ids = await model.encode(line * count, special=False)
    assert ids == await model.encode(line, special=False) * count
    assert await model.decode(ids) == line * count


def test_a_truncating_and_padding_file_does_neither_here(root):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    model = served(find(str(folder(root / "cutting", tokenizer))))
    assert len(model._encode("x", True)) == 1
    assert len(model._encode("x " * 20, True)) > 20


def test_the_first_is_the_default_and_names_find_the_others(root):
    models = load([TINY, f"other={folder(root / 'second', byte_level())}"])
    assert list(models.by_id) == ["tiny-python", "other"]
    assert models.find("") is models.default is models.by_id["tiny-python"]
    assert models.find("other").id == "other"
    with pytest.raises(NotFound) as missing:
        models.find("second")
    assert missing.value.reason is Reason.MODEL_NOT_FOUND


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ModelUnreadable, match="tiny-python"):
        load([TINY, TINY])
    with pytest.raises(ValueError, match="each id once"):
        Models([served(find(TINY))] * 2)


def test_a_folder_whose_name_has_an_equals_sign_is_a_folder(root):
    place = folder(root / "a=b", byte_level())
    assert load([str(place)]).default.id == "a=b"
    assert load([f"named={place}"]).default.id == "named"


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_model_without_a_readable_tokenizer_is_refused_by_name(tmp_path, content):
    place = folder(tmp_path / "mute", byte_level())
    file = place / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ModelUnreadable, match=r"mute.*tokenizer\.json"):
        load([str(place)])


def test_a_model_whose_text_can_not_be_followed_is_refused_by_name(tmp_path):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ModelUnreadable, match=r"odd.*CTC"):
        load([str(folder(tmp_path / "odd", tokenizer))])


@pytest.mark.parametrize("bad", [{"top_p": 0}, {"top_k": -1}, {"repetition_penalty": 11}])
def test_a_model_whose_own_sampling_is_out_of_range_is_refused(tmp_path, bad):
    place = folder(tmp_path / "m", byte_level())
    (place / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(ModelUnreadable, match=next(iter(bad))):
        load([str(place)])


def test_special_tokens_of_an_older_model_are_found(tmp_path):
    place = folder(tmp_path / "m", byte_level())
    added = {"content": "<old>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
    (place / "special_tokens_map.json").write_text(json.dumps({"pad_token": added}))
    theirs = AutoTokenizer.from_pretrained(str(place))
    ours = load([str(place)]).default
    text = "x<old> y"
    assert ours._encode(text, True) == theirs(text).input_ids
    assert theirs.pad_token_id in ours._encode(text, True)


def test_a_served_model_has_the_limits_of_its_files(tmp_path):
    place = folder(tmp_path / "m", byte_fallback(), {"chat_template": "{{ messages }}"})
    generation = {"do_sample": True, "temperature": 0.5, "top_k": 20, "eos_token_id": [2, 3]}
    (place / "generation_config.json").write_text(json.dumps(generation))
    model = load([str(place)]).default
    assert (model.max_context_length, model.eos_token_ids, model.has_chat_template) == (64, frozenset({2, 3}), True)
    assert model.vocab_size == byte_fallback().get_vocab_size()
    assert (model.default_sampling.temperature, model.default_sampling.top_k) == (0.5, 20)
    unset = {"seed", "logit_bias", "best_of"}
    names = {field.name for field in model.default_sampling.DESCRIPTOR.fields} - unset
    assert {name for name in names if model.default_sampling.HasField(name)} == names


def test_a_template_in_a_file_of_its_own_counts(tmp_path):
    place: Path = folder(tmp_path / "m", byte_level())
    assert not load([str(place)]).default.has_chat_template
    (place / "chat_template.jinja").write_text("{{ messages }}")
    assert load([str(place)]).default.has_chat_template


EMPTY: dict[str, Any] = dict.fromkeys(
    ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id", "bos_token_id")
)


def test_nulls_in_generation_config_are_what_no_entry_is(tmp_path):
    place = folder(tmp_path / "m", byte_level())
    without = load([str(place)]).default
    (place / "generation_config.json").write_text(json.dumps(EMPTY))
    with_nulls = load([str(place)]).default
    assert with_nulls.default_sampling == without.default_sampling
    assert with_nulls.eos_token_ids == without.eos_token_ids != frozenset()


def resized(place: Path, vocab_size: int) -> Path:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    return place


async def test_a_text_whose_tokens_the_model_lacks_is_refused_by_its_field(tmp_path):
    size = byte_level().get_vocab_size()
    place = resized(folder(tmp_path / "m", byte_level(), {"eos_token": "é!"}), size - 2)
    model = load([str(place)]).default
    assert (model.vocab_size, model.eos_token_ids) == (size - 2, frozenset({2}))
    request = pb.GenerateRequest(prompt="x <tool call>")
    with pytest.raises(InvalidArgument, match=f"prompt: token ids below {size - 2}, got {size - 2}"):
        await prompt_of(request, model, 64, Deadline())
    assert await prompt_of(pb.GenerateRequest(prompt="x"), model, 64, Deadline())


async def test_tokens_that_only_the_model_has_count_and_have_no_text(tmp_path):
    size = byte_level().get_vocab_size()
    model = load([str(resized(folder(tmp_path / "m", byte_level()), size + 30))]).default
    ids = await model.encode("x", special=False)
    assert await model.decode([*ids, size + 7, *ids]) == "xx"
    assert await prompt_of(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[size + 29])), model, 64, Deadline())
    assert model.token_table.bytes_of(size + 7) == b""
