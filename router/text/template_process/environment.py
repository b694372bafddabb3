"""Jinja environment of chat templates, with the functions and filters that transformers gives them.

Its texts are `MarkedText`: constants and expressions keep the origin of each character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decant.router.text.template_process.marked_text import TEMPLATE, MarkedText, filtered, joined

_MAKE_NEW_TEXT = ("center", "striptags", "title", "truncate", "urlencode", "wordwrap")
"""Filters that return a text of their own."""


class Refused(Exception):
    """The template called raise_exception."""


class Generation(jinja2.ext.Extension):
    """Tag ``generation``, which marks the assistant's text for training: it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _MarkingGenerator(CodeGenerator):
    """Generator of code that takes the template's constants from ``environment.constants``."""

    environment: ChatEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802 - as jinja2 names it
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self.environment.add_constant(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.add_constant("".join(map(str, group)))


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Environment of one template."""

    code_generator_class = _MarkingGenerator
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self.constants: list[MarkedText] = []
        self.filters.update({name: _keeping_origin(FILTERS[name]) for name in _MAKE_NEW_TEXT})
        self.filters.update(tojson=_to_json, join=_join)
        self.globals.update(raise_exception=_refuse, dict=_dict)

    def add_constant(self, text: str) -> str:
        """Add a text of the template; return the code that reads it."""
        self.constants.append(MarkedText(text, TEMPLATE))
        return f"environment.constants[{len(self.constants) - 1}]"


def local_time(seconds: float | None) -> datetime:
    return datetime.now() if seconds is None else datetime.fromtimestamp(seconds)  # noqa: DTZ005, DTZ006 - the local day


def _refuse(message: object) -> NoReturn:
    raise Refused(str(message))


def _dict(*args: Any, **more: Any) -> dict[Any, Any]:
    return dict(*args, **more)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Filter ``tojson`` as transformers has it, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    """Filter ``join`` of jinja2, whose plain default would lose the origins."""
    between = d if isinstance(d, MarkedText) else MarkedText(d, TEMPLATE)
    return str(FILTERS["join"](context, value, between, attribute))


def _keeping_origin(function: Callable[..., Any]) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filter_text(*args: Any, **options: Any) -> Any:
        return filtered(args[place], function(*args, **options))

    return filter_text
