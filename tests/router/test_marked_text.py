from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from decant.router.text.template_process.marked_text import (
    CONTENT,
    TEMPLATE,
    UNKNOWN,
    MarkedText,
    joined,
    of_content,
    runs_of,
)

TEMPLATES, CONTENTS = "ABÉ", "xyß"
"""Letters of each origin; white space and separators may have any."""
SHARED = " #\n"

PARTS = st.lists(
    st.tuples(st.just(TEMPLATE), st.text(TEMPLATES + SHARED, max_size=6))
    | st.tuples(st.just(CONTENT), st.text(CONTENTS + SHARED, max_size=6)),
    max_size=6,
).map(lambda parts: joined(MarkedText(text, origin) for origin, text in parts))
POSITIONS = st.integers(-9, 9) | st.none()
SEPARATORS = st.sampled_from([" ", "#", "x", "A", "x#", "\n"])

Operation = Callable[[Any], Any]
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.tuples(POSITIONS, POSITIONS).map(lambda ends: lambda text: text[ends[0] : ends[1]]),
    st.sampled_from(["strip", "lstrip", "rstrip"]).map(lambda name: lambda text: getattr(text, name)()),
    st.tuples(st.sampled_from(["strip", "lstrip", "rstrip", "removeprefix", "removesuffix"]), SEPARATORS).map(
        lambda call: lambda text: getattr(text, call[0])(call[1])
    ),
    st.tuples(st.sampled_from(["split", "rsplit"]), SEPARATORS | st.none(), st.integers(-1, 3)).map(
        lambda call: lambda text: getattr(text, call[0])(call[1], call[2])
    ),
    st.booleans().map(lambda keeps: lambda text: text.splitlines(keeps)),
    st.tuples(st.sampled_from(["partition", "rpartition"]), SEPARATORS).map(
        lambda call: lambda text: list(getattr(text, call[0])(call[1]))
    ),
    st.just(list),
    st.just(lambda text: text * 2),
    st.just(lambda text: text + text[:3]),
)


def origins(text: str) -> list[int]:
    return [origin for length, origin in runs_of(text) for _ in range(length)]


def check(text: str) -> None:
    assert len(origins(text)) == len(text)
    for letter, origin in zip(str.__str__(text), origins(text), strict=True):
        assert letter in SHARED or origin == (TEMPLATE if letter in TEMPLATES else CONTENT)


@pytest.mark.slow
@given(PARTS, st.lists(OPERATIONS, max_size=5))
@settings(max_examples=200, deadline=None)
def test_each_character_keeps_its_origin(marked, operations):
    plain: Any = str.__str__(marked)
    check(marked)
    for operation in operations:
        marked, plain = operation(marked), operation(plain)
        assert marked == plain
        if isinstance(plain, list):
            for piece in marked:
                check(piece)
            marked, plain = MarkedText(" ", TEMPLATE).join(marked), " ".join(plain)
        assert marked == plain
        check(marked)


@given(PARTS, PARTS, PARTS)
@settings(max_examples=50, deadline=None)
def test_replaced_text_has_the_origin_of_what_replaces_it(text, old, new):
    made = text.replace(old, new)
    assert made == str.__str__(text).replace(str.__str__(old), str.__str__(new))
    if old:
        check(made)


@given(PARTS)
def test_a_change_of_case_keeps_origins_of_which_it_is_certain(text):
    for name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase"):
        made = getattr(text, name)()
        assert made == getattr(str.__str__(text), name)()
        assert origins(made) == origins(text) or set(origins(made)) <= {UNKNOWN} | set(origins(text))


def test_sums_with_plain_text_keep_what_is_known():
    content = MarkedText("xy", CONTENT)
    assert origins("a" + content + "b") == [UNKNOWN, CONTENT, CONTENT, UNKNOWN]
    assert origins(content[::-1]) == [CONTENT, CONTENT]
    assert origins(content * 2) == [CONTENT] * 4
    assert origins(f"{content}.") == [UNKNOWN] * 3
    with pytest.raises(TypeError):
        content + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        content.join(["a", 1])  # type: ignore[list-item]
    with pytest.raises(IndexError):
        content[2]


def test_markup_escapes_what_it_is_added_to_as_ever():
    content = MarkedText("<x>", CONTENT)
    assert content + Markup("<b>") == "&lt;x&gt;<b>"
    assert Markup("<b>") + content == "<b>&lt;x&gt;"


def test_all_texts_of_a_value_from_json_are_content():
    made = of_content({"a": ["b", 1, {"c": None}]})
    assert made == {"a": ["b", 1, {"c": None}]}
    assert origins(next(iter(made))) == origins(made["a"][0]) == origins(next(iter(made["a"][2]))) == [CONTENT]
