from __future__ import annotations

from functools import cache
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from decant import models as trained
from decant.router.text.detokenizing.make import make_token_table
from decant.router.text.detokenizing.token_table import Detokenizer, TokenTable, UnsupportedDecoder
from tests.router.tokenizer_factories import MADE

KINDS = ["tiny-python", *MADE]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_file(str(trained.path() / "tokenizer.json")) if kind == "tiny-python" else MADE[kind]()


@cache
def words(kind: str) -> TokenTable:
    return make_token_table(tokenizer(kind))


def decoded(kind: str, ids: list[int], *, skip: bool = True) -> str:
    """Text by the library, of which a ByteLevel decoder takes the accents of an added token for bytes."""
    added = {id: token.content for id, token in tokenizer(kind).get_added_tokens_decoder().items()}
    if not isinstance(tokenizer(kind).decoder, decoders.ByteLevel):
        added = {}
    accented = {id: text for id, text in added.items() if not text.isascii()}
    runs = groupby(ids, accented.__contains__)
    return "".join(
        "".join(accented[id] for id in run)
        if is_accented
        else tokenizer(kind).decode(list(run), skip_special_tokens=skip)
        for is_accented, run in runs
    )


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer(kind).get_vocab_size()
    texts = st.text(max_size=20) | st.text(alphabet="👨👩👧\u200d🇩🇪\ufe0f🏽é日a \U000e0067", max_size=12)
    anything = st.integers(0, size + 3)  # some beyond the vocabulary, as a model's table may have
    few = st.integers(0, min(size, 40))
    written = texts.map(lambda text: list(tokenizer(kind).encode(text).ids))
    return st.lists(st.one_of(written, st.lists(anything, max_size=6), st.lists(few, max_size=6)), max_size=6).map(
        lambda parts: [id for part in parts for id in part]
    )


def whole(stream: Detokenizer, ids: list[int]) -> str:
    return "".join([*(stream.add([id]) for id in ids), stream.flush()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_joined_it_is_what_the_tokenizer_makes_of_all_tokens(kind):
    @given(ids_of(kind))
    @settings(max_examples=120, deadline=None)
    def same(ids: list[int]) -> None:
        for skip in (True, False):
            expected = decoded(kind, ids, skip=skip)
            assert whole(words(kind).detokenizer(skip_special_tokens=skip), ids) == expected

    same()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_after_some_tokens_does_not_depend_on_how_they_were_cut(kind):
    @given(ids_of(kind), st.data())
    @settings(max_examples=50, deadline=None)
    def same(ids: list[int], data: st.DataObject) -> None:
        stops = [0]
        while stops[-1] < len(ids):
            stops.append(data.draw(st.integers(stops[-1] + 1, len(ids))))
        for skip in (True, False):
            one_by_one, cut = (words(kind).detokenizer(skip_special_tokens=skip) for _ in range(2))
            texts = [""]
            for id in ids:
                texts.append(texts[-1] + one_by_one.add([id]))
            text = ""
            for start, stop in pairwise(stops):
                text += cut.add(ids[start:stop])
                assert text == texts[stop]

    same()


@pytest.mark.parametrize("kind", ["tiny-python", "byte_level", "byte_fallback", "byte_fallback_unstripped"])
@pytest.mark.parametrize("text", ["é", "日本", "😀", "👨‍👩‍👧", "👍🏽", "🇩🇪", "❤️‍🔥", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"])
def test_a_character_comes_out_whole(kind, text):
    stream = words(kind).detokenizer(skip_special_tokens=True)
    ids = tokenizer(kind).encode(text + "x" + text + "x", add_special_tokens=False).ids
    parts = [part for part in [*(stream.add([id]) for id in ids), stream.flush()] if part]
    assert "".join(parts).lstrip(" ") == text + "x" + text + "x"
    apart = [part for part in parts if part not in ("x", " ")]
    for part in apart:
        assert part.strip(" ").replace("x", "") in (text, text * 2, "日", "本")


def test_only_the_incomplete_flag_of_several_is_held_back():
    for count in range(1, 7):
        ids = tokenizer("byte_level").encode("🇩" * count, add_special_tokens=False).ids
        stream = words("byte_level").detokenizer(skip_special_tokens=True)
        assert len(stream.add(ids)) == count - count % 2
        assert len(stream.flush()) == count % 2


def test_letters_are_not_held_back():
    stream = words("tiny-python").detokenizer(skip_special_tokens=True)
    for id in tokenizer("tiny-python").encode("def f(x): # ü 日", add_special_tokens=False).ids[:-6]:
        assert stream.add([id])


@pytest.mark.parametrize("kind", ["tiny-python", "byte_fallback"])
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(kind):
    ids = tokenizer(kind).encode("x😀", add_special_tokens=False).ids[:-1]
    stream = words(kind).detokenizer(skip_special_tokens=True)
    assert stream.add(ids) == "x"
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_make_up_the_text(kind):
    text = "the quick brown dog"
    ids = tokenizer(kind).encode(text, add_special_tokens=False).ids
    assert b"".join(map(words(kind).bytes_of, ids)).decode().strip() == text


def test_a_piece_of_a_character_has_its_bytes_and_a_special_token_its_name():
    ids = tokenizer("byte_fallback").encode("😀", add_special_tokens=False).ids
    assert b"".join(map(words("byte_fallback").bytes_of, ids[1:])) == "😀".encode()
    assert words("tiny-python").bytes_of(1) == b"<|end|>"
    assert words("tiny-python").bytes_of(10**6) == b""
    assert words("metaspace").bytes_of(10**6) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_text(kind):
    stream = words(kind).detokenizer(skip_special_tokens=True)
    size = tokenizer(kind).get_vocab_size()
    ids = [id for id in range(size) if len(words(kind).bytes_of(id)) > 1]
    for id in ids * 5:
        stream.add([id])
    kept = [getattr(stream, name) for slots in type(stream).__mro__ for name in getattr(slots, "__slots__", ())]
    assert sum(len(part) for part in kept if isinstance(part, str | bytes | bytearray)) < 40


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), "ByteFallback"),
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Sequence([decoders.BPEDecoder(), decoders.ByteFallback()]), "BPEDecoder"),
    ],
)
def test_a_decoder_that_can_not_be_followed_is_refused_by_name(decoder, name):
    made = MADE["words"]()
    made.decoder = decoder
    with pytest.raises(UnsupportedDecoder, match=name):
        make_token_table(made)


def following(kind: str, prompt: list[int], output: list[int], *, skip: bool) -> str:
    """Text of the output alone, after a prompt."""
    end = words(kind).prompt_end(prompt, skip_special_tokens=skip)
    return whole(words(kind).detokenizer(skip_special_tokens=skip, after=end), output)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_a_text_is_cut_in_prompt_and_output_their_texts_are_that_of_all_tokens(kind):
    texts = st.text(max_size=20) | st.text(alphabet="the a dog👨👩👧\u200d🇩🇪é日本 ", max_size=20)

    @given(texts, st.data())
    @settings(max_examples=150, deadline=None)
    def same(text: str, data: st.DataObject) -> None:
        ids = tokenizer(kind).encode(text).ids
        count = data.draw(st.integers(0, len(ids)))
        prompt, output, table = ids[:count], ids[count:], words(kind)
        for skip in (True, False):
            end = table.prompt_end(prompt, skip_special_tokens=skip)
            before = decoded(kind, list(table.without_rest(prompt, end)), skip=skip)
            before = before.removesuffix("\ufffd") if end.rest else before
            all_text = decoded(kind, ids, skip=skip)
            assert before + following(kind, prompt, output, skip=skip) == all_text

    same()


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "text"),
    [
        ("byte_fallback", ["▁a"], ["▁the"], " the"),
        ("byte_fallback", ["<s>"], ["▁the", "▁a"], "the a"),
        ("byte_fallback", [], ["▁the"], "the"),
        ("byte_fallback", ["▁"], ["▁the"], " the"),
        ("byte_fallback", ["a", "<0xC3>"], ["<0xA9>", "a"], "éa"),
        ("byte_fallback", ["<0xE6>", "<0x97>", "<0xA5>"], ["<0xE6>", "<0x9C>", "<0xAC>"], "本"),
        ("byte_fallback", ["a", "<0xC3>", "<s>"], ["<0xA9>"], "é"),
        ("byte_fallback_unstripped", ["▁a"], ["▁the"], " the"),
        ("byte_level", ["Ã"], ["©"], "é"),
        ("tiny-python", ["a"], ["Ġ"], " "),
    ],
)
def test_the_text_after_a_prompt_keeps_its_space_and_completes_its_character(kind, prompt, output, text):
    prompt, output = ([tokenizer(kind).token_to_id(token) for token in tokens] for tokens in (prompt, output))
    assert following(kind, prompt, output, skip=True) == text


@pytest.mark.parametrize("kind", ["metaspace", "word_piece", "end_of_word", "words"])
def test_a_word_after_a_prompt_keeps_its_space(kind):
    ids = tokenizer(kind).encode("the dog", add_special_tokens=False).ids
    count = len(tokenizer(kind).encode("the", add_special_tokens=False).ids)
    assert following(kind, ids[:count], ids[count:], skip=True) == " dog"
    assert following(kind, [], ids[count:], skip=True) == "dog"


def test_an_added_token_with_accents_is_its_text():
    (id,) = tokenizer("byte_level").encode("é!").ids
    table = words("byte_level")
    assert whole(table.detokenizer(skip_special_tokens=True), [id, id]) == "é!é!"
    assert table.bytes_of(id).decode() == table.decode([id], skip_special_tokens=True) == "é!"
