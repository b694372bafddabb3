"""Each rule of docs/internals/protocol.md names code and tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/protocol.md").read_text()
RULES = re.split(r"^- ", PAGE, flags=re.MULTILINE)[1:]


def names(label: str, rule: str) -> list[str]:
    """The names in backticks in the labelled entry below the rule."""
    match = re.search(rf"^    - {label}: *((?:[^\n]|\n      )+)", rule, re.MULTILINE)
    return re.findall(r"`([^`]+)`", match[1]) if match else []


CODE = [names("Code", rule) for rule in RULES]
TESTS = [names("Tests?", rule) for rule in RULES]


def test_every_rule_has_code_and_a_test() -> None:
    assert len(RULES) >= 89
    assert all(CODE)
    assert all(TESTS)


@pytest.mark.parametrize("file", sorted({file for files in CODE for file in files}))
def test_the_code_exists(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("test", sorted({test for tests in TESTS for test in tests}))
def test_the_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
