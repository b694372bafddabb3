"""Each rule of docs/protocol.md names files and a test that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/protocol.md").read_text().splitlines() if line.startswith("| ")]
RULES = [row.split(" | ") for row in ROWS if not row.startswith(("| rule", "| ---"))]


def test_every_rule_has_code_and_a_test() -> None:
    assert len(RULES) > 30
    assert all(len(rule) == 3 and all(rule) for rule in RULES)


@pytest.mark.parametrize("held_by", sorted({name for rule in RULES for name in re.findall(r"`([^`]+)`", rule[1])}))
def test_the_code_is_there(held_by: str) -> None:
    assert (ROOT / held_by).is_file()


@pytest.mark.parametrize("test", sorted({re.findall(r"`([^`]+)`", rule[2])[0] for rule in RULES}))
def test_the_test_is_there(test: str) -> None:
    file, _, name = test.partition(": ")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
