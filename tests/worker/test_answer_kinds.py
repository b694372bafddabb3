"""What an output of each kind is: otherwise it would show little that it is the same wherever it is written."""

from __future__ import annotations

import json

import pytest

from decant.engine.guides.guide import GuideKind
from decant.router.text.tools.call_parser import CallParser, whole_calls
from decant.router.text.tools.formats import FORMATS
from tests.worker.answer_kinds import DRAWS, END, TOOLS, AnswerKind, answer_kinds, text
from tests.worker.harness import make_work, run_alone

LETTERS = 9
PARAMETERS = '{"properties": {"k": {"type": "string"}}}'


@pytest.mark.parametrize("kind", answer_kinds(LETTERS), ids=lambda kind: kind.name)
def test_an_output_is_of_its_kind(kind: AnswerKind) -> None:
    output = run_alone(kind.of(make_work(wanted=2 * LETTERS)), eos=END)
    assert len(output) >= LETTERS
    if kind.form is None:
        return
    assert output[-1] == END
    parser = CallParser(kind.form, dict.fromkeys(TOOLS, PARAMETERS), "r/0")
    (call,) = whole_calls([*parser.add(text(output)).calls, *parser.finish().calls])
    assert [len(value) for value in json.loads(call.arguments).values()] == [LETTERS - DRAWS]


def test_each_guide_and_each_format_has_a_kind() -> None:
    kinds = answer_kinds(LETTERS)
    guides = {kind.request.guide.WhichOneof("kind") for kind in kinds if kind.request.HasField("guide")}
    assert guides == set(GuideKind)
    assert [kind.form for kind in kinds if kind.form is not None] == list(FORMATS)
    assert any(kind.request.HasField("reasoning") and not kind.request.HasField("guide") for kind in kinds)
