import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/concepts/request.md").read_text()
SECTIONS = re.split(r"^## (?=\d)", PAGE, flags=re.MULTILINE)[1:]
STOP = re.compile(r"^`([\w/]+\.py)` `([\w.]+)`$", re.MULTILINE)
STOPS = [match for section in SECTIONS for match in STOP.findall(section)]


def definition(body: list[ast.stmt], name: str) -> ast.stmt | None:
    head, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == head:
            return definition(node.body, rest) if rest else node
    return None


def test_a_request_has_at_most_fifteen_stops_in_order() -> None:
    assert 10 <= len(SECTIONS) <= 15
    assert [section.partition(".")[0] for section in SECTIONS] == [str(n + 1) for n in range(len(SECTIONS))]


def test_each_stop_is_one_file_and_function() -> None:
    assert [len(STOP.findall(section)) for section in SECTIONS] == [1] * len(SECTIONS)


@pytest.mark.parametrize(("file", "name"), STOPS, ids=[f"{file}-{name}" for file, name in STOPS])
def test_the_function_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    node = definition(ast.parse((ROOT / file).read_text()).body, name)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{file} defines no function {name}"
