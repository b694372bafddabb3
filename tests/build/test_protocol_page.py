import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/protocol.md").read_text()
RULES = re.split(r"^- ", PAGE, flags=re.MULTILINE)[1:]


NAMES = [
    re.findall(r"`([^`]+)`", "".join(re.findall(r"^    - (?:[^\n]|\n      )+", rule, re.MULTILINE))) for rule in RULES
]
CODE = [[name for name in names if "::" not in name] for names in NAMES]
TESTS = [[name for name in names if "::" in name] for names in NAMES]


def test_every_rule_has_code_and_a_test() -> None:
    assert len(RULES) >= 87
    assert all(CODE)
    assert all(TESTS)


@pytest.mark.parametrize("file", sorted({file for files in CODE for file in files}))
def test_the_code_exists(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("test", sorted({test for tests in TESTS for test in tests}))
def test_the_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
