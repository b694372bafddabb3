"""What a template needs and the process does not have, found before its first conversation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from decant.router.text.template_process.environment import ChatEnvironment

_FILES = {nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "import", nodes.Extends: "extends"}


def find_missing(environment: ChatEnvironment, template: nodes.Template, variables: Collection[str]) -> str | None:
    """Find the first thing that is missing, with its line; no function that the template looks for (``is defined``)."""
    found = sorted(_missing(environment, template, variables))
    return f"line {found[0][0]}: {found[0][1]}" if found else None


def _missing(
    environment: ChatEnvironment, template: nodes.Template, variables: Collection[str]
) -> Iterator[tuple[int, str]]:
    for kind, tag in _FILES.items():
        for node in template.find_all(kind):
            yield node.lineno, f"{tag}: templates have no other files"
    for used, known in ((nodes.Filter, environment.filters), (nodes.Test, environment.tests)):
        for each in template.find_all(used):
            if each.name not in known:
                yield each.lineno, f"No {used.__name__.lower()} named {each.name!r}."
    known_names = {*environment.globals, *variables, *_guarded(template)}
    missing = find_undeclared_variables(template) - known_names
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in missing:
            yield call.lineno, f"there is no function {call.node.name!r}"


def _guarded(template: nodes.Template) -> Iterator[Any]:
    for test in template.find_all(nodes.Test):
        if test.name in ("defined", "undefined", "callable") and isinstance(test.node, nodes.Name):
            yield test.node.name
