import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.generate import protocol
from docs.generate.protocol import StaleRule

SECTIONS = {"Tokens": {"sent-once": "A token is sent once.", "in-order": "Tokens come in order."}}
CODE = """
class Sender:
    class Queue:
        def put(self):
            def inner(): ...

    async def send(self): ...
"""
MARKED = """
import a_module_that_does_not_exist

@pytest.mark.rule("sent-once", "sender.py:Sender.send", "state/write.lua")
async def test_a(): ...

@pytest.mark.slow
@pytest.mark.rule("sent-once", "sender.py:Sender.send")
@pytest.mark.rule("in-order", "sender.py:Sender.Queue.put")
def test_b(): ...
"""

Render = Callable[[str], str]


@pytest.fixture
def rendered(tmp_path: Path) -> Render:
    def render(tests: str) -> str:
        files = {"sender.py": CODE, "state/write.lua": "", "tests/sending/test_sender.py": tests}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return protocol.render(tmp_path, SECTIONS)

    return render


def test_a_rule_is_listed_with_its_code_and_its_tests(rendered: Render) -> None:
    _, _, rules = rendered(MARKED).partition("## Tokens\n\n")
    file = "tests/sending/test_sender.py"
    assert rules.splitlines() == [
        "- A token is sent once.",
        "    - `sender.py:Sender.send`, `state/write.lua`",
        f"    - `{file}::test_a`, `{file}::test_b`",
        "- Tokens come in order.",
        "    - `sender.py:Sender.Queue.put`",
        f"    - `{file}::test_b`",
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Sender.send", "Sender.receive", "cites Sender.receive, which sender.py does not define"),
        ("Sender.Queue.put", "put", "cites put, which sender.py does not define"),
        ("Sender.Queue.put", "Sender.Queue.put.inner", "cites Sender.Queue.put.inner, which sender.py does not define"),
        ("sender.py:", "receiver.py:", "cites receiver.py, which does not exist"),
        ("state/write.lua", "state/read.lua", "cites state/read.lua, which does not exist"),
        ("sender.py:Sender.send", "sender.py", "cites sender.py: Python files need a name"),
        ("sent-once", "sent-twice", "test_a: no rule 'sent-twice' in tests/protocol_rules.py"),
        ('@pytest.mark.rule("in-order"', '@other("in-order"', "no test has a marker of these rules: in-order"),
        ("def test_b", "def helper", "no test has a marker of these rules: in-order"),
        ('"in-order", "sender.py:Sender.Queue.put"', '"in-order"', "test_b: a marker `rule` has an id and at least"),
        ('"in-order", "', '"in-order", PREFIX + "', "test_b: a marker `rule` has an id and at least"),
    ],
)
def test_what_is_stale_is_named(rendered: Render, before: str, after: str, message: str) -> None:
    assert before in MARKED
    with pytest.raises(StaleRule, match=re.escape(message)):
        rendered(MARKED.replace(before, after))


def test_two_sections_have_no_rule_in_common(tmp_path: Path) -> None:
    with pytest.raises(StaleRule, match="rules in two sections: sent-once"):
        protocol.render(tmp_path, {**SECTIONS, "Sessions": {"sent-once": "A token is sent once."}})
