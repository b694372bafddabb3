"""The JSON Schema Test Suite: a schema is refused with a reason, or every answer validates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar
from decant.engine.guides.guide import Guide, GuideKind
from tests.engine.guides.walk import compiler, walk

DRAFTS = ("draft2020-12", "draft-next", "draft2019-09", "draft7", "draft6", "draft4", "draft3")
"""Folders of the suite. Each schema is taken in the meaning of draft 2020-12."""
ANSWERS = 5


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Schemas of the suite by file and description, from the source distribution of jsonschema, which carries it."""
    folder = Path(request.config.cache.mkdir("json-schema-test-suite"))
    if not list(folder.glob("*.tar.gz")):
        command = [sys.executable, "-m", "pip", "download", "jsonschema==4.26.0", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, timeout=120)
        if not list(folder.glob("*.tar.gz")):
            pytest.skip(f"the package index can't be reached: {done.stderr[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return dict(_schemas(files))


def _schemas(files: tarfile.TarFile) -> Iterator[tuple[str, Any]]:
    known = set()
    for member in sorted(
        files.getmembers(), key=lambda member: [draft in member.name for draft in DRAFTS], reverse=True
    ):
        match = re.search(r"/json/tests/([^/]+)/(.+)\.json$", member.name)
        if match is None or match[1] not in DRAFTS:
            continue
        content = files.extractfile(member)
        assert content is not None
        for group in json.load(content):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema.pop("$schema", None)
            text = json.dumps(schema)
            if text not in known:
                known.add(text)
                yield f"{match[1]}/{match[2]}: {group['description']}", schema


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
            if not _is_valid(schema, answer):
                wrong.append(f"{name}: {answer[:100]}")
    assert not wrong
    assert accepted >= 200
    assert ended >= 0.9 * ANSWERS * accepted


def _answers(grammar: Grammar) -> Iterator[str]:
    for seed in range(ANSWERS):
        if (answer := walk(grammar, seed)) is not None:
            yield answer


def _is_valid(schema: Any, answer: str) -> bool:
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    try:
        return bool(validator.is_valid(json.loads(answer)))
    except re.error:  # a pattern that Python's expressions lack
        return True


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


def test_whitespace_is_bounded_wherever_it_may_be() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert _accepts(schema, "[" + " " * 64 + "1" + " " * 64 + "," + " " * 64 + "2]")
    assert not _accepts(schema, "[" + " " * 65 + "1]")
    assert not _accepts(schema, " [1]")
