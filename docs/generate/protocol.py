"""The page of the protocol's rules: their text from ``tests/protocol_rules.py``, their code and tests from the markers.

Tests are parsed and not imported, as some need a GPU or Redis.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.generate.markdown import code, head, page
from tests.protocol_rules import SECTIONS

ROOT = Path(__file__).parents[2]
MARKER = "pytest.mark.rule"
INTRO = """\
Each rule with its code and the tests that fail without it. [Messages of one
request](architecture.md#messages-of-one-request)."""

Sections = Mapping[str, Mapping[str, str]]
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)
Scopes = (ast.ClassDef, *Functions)


class StaleRule(Exception):
    """A rule, marker or cited name without its counterpart; the message names it."""


@dataclass(frozen=True, slots=True)
class Marker:
    rule: str
    citations: tuple[str, ...]
    """Each is ``path`` or ``path:qualified name``."""
    test: str
    """``path::name``."""


def render(root: Path = ROOT, sections: Sections = SECTIONS) -> str:
    """Render the page.

    Raises StaleRule if a rule has no test, a marker names no rule, or a cited name is not defined in its file.
    """
    markers = _markers_by_rule(root, sections)
    parts = [head("The protocol", "tests/protocol_rules.py and the markers `rule` of tests"), INTRO]
    for title, rules in sections.items():
        parts += [f"## {title}", "\n".join(_rule(text, markers[rule]) for rule, text in rules.items())]
    return page(parts)


def _markers_by_rule(root: Path, sections: Sections) -> dict[str, list[Marker]]:
    ids = [rule for rules in sections.values() for rule in rules]
    if repeated := [rule for rule in dict.fromkeys(ids) if ids.count(rule) > 1]:
        raise StaleRule(f"rules in two sections: {', '.join(repeated)}")
    found: dict[str, list[Marker]] = {rule: [] for rule in ids}
    definitions: dict[str, set[str]] = {}
    for marker in _markers(root):
        if marker.rule not in found:
            raise StaleRule(f"{marker.test}: no rule {marker.rule!r} in tests/protocol_rules.py")
        for citation in marker.citations:
            _check_citation(root, citation, marker, definitions)
        found[marker.rule].append(marker)
    if untested := [rule for rule, markers in found.items() if not markers]:
        raise StaleRule(f"no test has a marker of these rules: {', '.join(untested)}")
    return found


def _rule(text: str, markers: list[Marker]) -> str:
    citations = dict.fromkeys(citation for marker in markers for citation in marker.citations)
    return "\n".join(
        [f"- {text}", f"    - {_listed(citations)}", f"    - {_listed(marker.test for marker in markers)}"]
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(code, names))


def _markers(root: Path) -> Iterator[Marker]:
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text()
        if MARKER in text:
            path = file.relative_to(root).as_posix()
            for function in ast.walk(ast.parse(text)):
                if isinstance(function, Functions) and function.name.startswith("test_"):
                    yield from _markers_of(function, f"{path}::{function.name}")


def _markers_of(function: ast.FunctionDef | ast.AsyncFunctionDef, test: str) -> Iterator[Marker]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARKER:
            arguments = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
            names = [str(value) for value in arguments]
            if len(names) < max(2, len(decorator.args)) or decorator.keywords:
                raise StaleRule(f"{test}: a marker `rule` has an id and at least one citation, all as literals")
            yield Marker(names[0], tuple(names[1:]), test)


def _check_citation(root: Path, citation: str, marker: Marker, definitions: dict[str, set[str]]) -> None:
    path, _, name = citation.partition(":")
    file = root / path
    if not file.is_file():
        raise StaleRule(f"{marker.test}: rule {marker.rule!r} cites {path}, which does not exist")
    if bool(name) != (file.suffix == ".py"):
        raise StaleRule(
            f"{marker.test}: rule {marker.rule!r} cites {citation}: Python files need a name, others have none"
        )
    if name:
        if path not in definitions:
            definitions[path] = set(_definitions(ast.parse(file.read_text())))
        if name not in definitions[path]:
            raise StaleRule(f"{marker.test}: rule {marker.rule!r} cites {name}, which {path} does not define")


def _definitions(scope: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the qualified names of the classes and functions, methods included."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Scopes):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")
