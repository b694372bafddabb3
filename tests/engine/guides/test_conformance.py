"""The JSON Schema Test Suite: a schema is refused with a reason, or every answer validates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar
from decant.engine.guides.guide import Guide, GuideKind
from tests.engine.guides import json_suite, sampled
from tests.engine.guides.json_suite import is_valid
from tests.engine.guides.walk import allowed, compiler, pieces, walk

ANSWERS = 5


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> dict[str, Any]:
    try:
        return json_suite.schemas(Path(request.config.cache.mkdir("json-schema-test-suite")))
    except json_suite.NoPackageIndex as error:
        pytest.skip(f"{error}")


@pytest.mark.slow
def test_every_answer_of_a_schema_of_the_suite_validates_or_the_schema_is_refused(suite: dict[str, Any]) -> None:
    accepted, ended, wrong = 0, 0, list[str]()
    for name, schema in suite.items():
        grammar = compiler().grammar(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
        try:
            grammar.prepare()
        except InvalidRequest:
            continue
        accepted += 1
        for answer in _answers(grammar):
            ended += 1
            if not is_valid(schema, answer):
                wrong.append(f"{name}: {answer[:100]}")
    assert not wrong
    assert accepted >= 200
    assert ended >= 0.9 * ANSWERS * accepted


def _answers(grammar: Grammar) -> Iterator[str]:
    for seed in range(ANSWERS):
        if (answer := walk(grammar, seed)) is not None:
            yield answer


@pytest.mark.slow
def test_every_sampled_answer_of_the_trained_model_that_is_complete_validates(suite: dict[str, Any]) -> None:
    """All schemas: ``python -m tests.engine.guides.sampled``."""
    some = dict(list(suite.items())[::16])
    found = sampled.conformance(some, answers=2, max_tokens=96)
    assert not found.wrong
    assert found.accepted >= len(some) / 12
    assert found.completed >= found.answers / 4


@pytest.mark.parametrize("key", ["fo\\u006f", "f\\u006Fo", "\\u0066oo"])
def test_a_property_has_one_spelling(key: str) -> None:
    """Else the schema of another spelling would be that of any other property."""
    schema = {"type": "object", "properties": {"foo": {"type": "integer"}}}
    assert json.loads(f'"{key}"') == "foo"
    assert not _accepts(schema, f'{{"{key}":"x"}}')
    assert _accepts(schema, '{"foo":1}')
    assert _accepts(schema, '{"fooo":"x"}')


def _accepts(schema: Any, answer: str) -> bool:
    matcher = compiler().grammar(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))).new_matcher()
    tokens = compiler().tokenize(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_text_may_be_written_in_any_tokens() -> None:
    """Else the library tokenizes all that can follow for each mask, in a time by its length."""
    matcher = compiler().grammar(Guide(GuideKind.CHOICE, choices=("function foo",))).new_matcher()
    assert {pieces()[token] for token in allowed(matcher.compute_bitmask())} > {b"f", b"function"}


def test_whitespace_is_bounded_wherever_it_may_be() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert _accepts(schema, "[" + " " * 64 + "1" + " " * 64 + "," + " " * 64 + "2]")
    assert not _accepts(schema, "[" + " " * 65 + "1]")
    assert not _accepts(schema, " [1]")
