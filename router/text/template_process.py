"""A process of its own that renders chat templates: ``python -I template_process.py``, asked through its stdin.

A template comes with a model and is a program: it may loop for ever or ask for all memory there is. Here it has little
memory, opens no file and no socket, and is killed by whoever waits too long.

    question and answer    | length of head: u32, big-endian | length of text: u32 | head: JSON | text: UTF-8 |
    question               {"template", "variables", "most": characters, "lengths": bytes of the text's parts}
                           its text: role and content of each message, one after the other
    answer                 {}, and the text; or {"refused"}: by the template itself; or {"failed"}: why it can't be
                           rendered

Texts are not part of the JSON: for megabytes its encoding would stop the router's event loop.

Stands on jinja2 alone, and is not imported by the router. What templates get beside their variables is what
transformers gives them.
"""

from __future__ import annotations

import json
import pprint
import resource
import struct
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import IO, Any, NoReturn

import jinja2.debug
import jinja2.ext
from jinja2 import Template, TemplateError, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 * 1024 * 1024


_IMPORTED_LATE = (pprint, textwrap, unicodedata, jinja2.debug)
"""By filters, when no file can be opened any more."""
_ALL_WORDS = r"""{% for m in messages if m.role %}
{% set ns = namespace(x='\n\u00e9') %}{{- ns.x ~ m | tojson(indent=1) }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% macro f(x) %}{{ x[1:] | trim | upper }}{% endmacro %}{{ f('ab') }}
{{ '%s' % 1 ~ strftime_now('%c %B') ~ dict(a=1) }}{{ 'x'.split('x')[-1] }}
{{ [2, 1] | sort | map('string') | join }}"""
"""What most templates use: whatever Python loads for it is loaded once it was rendered."""


class Refused(Exception):
    """By the template's own raise_exception."""


class TooLong(Exception):
    """More text than is taken."""


class Generation(jinja2.ext.Extension):
    """``generation`` marks what an assistant wrote, for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render(template: str, variables: dict[str, Any], most: int) -> str:
    """Raises Refused, TooLong, TemplateError, and whatever a template's own mistakes raise."""
    parts, length = [], 0
    for part in _compiled(template).generate(variables):
        length += len(part)
        if length > most:
            raise TooLong(f"more than {most} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, dict=_dict)
    return environment.from_string(template)


def _refuse(message: object) -> NoReturn:
    raise Refused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates tell the local day


def _dict(*args: Any, **more: Any) -> dict[Any, Any]:
    return dict(*args, **more)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes for HTML that jinja2's own makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(question: dict[str, Any], texts: bytes) -> tuple[dict[str, str], bytes]:
    """Head and text. ``lengths`` of the question is taken out of it."""
    try:
        question["variables"]["messages"] = list(_messages(question.pop("lengths"), texts))
        return {}, render(**question).encode()
    except Refused as error:
        return {"refused": str(error)}, b""
    except TooLong as error:
        return {"failed": str(error)}, b""
    except TemplateError as error:
        return {"failed": f"{type(error).__name__}: {error}"}, b""
    except Exception as error:  # noqa: BLE001 - a template may do anything
        return {"failed": f"{type(error).__name__}: {error}"}, b""


def _messages(lengths: list[int], texts: bytes) -> Iterator[dict[str, str]]:
    ends = list(accumulate(lengths, initial=0))
    parts = [texts[begin:end].decode() for begin, end in pairwise(ends)]
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        yield {"role": role, "content": content}


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Until nobody asks any more."""
    while len(lengths := questions.read(8)) == 8:
        head, texts = (questions.read(length) for length in struct.unpack(">II", lengths))
        said, text = answer(json.loads(head), texts)
        shown = json.dumps(said).encode()
        answers.write(struct.pack(">II", len(shown), len(text)) + shown + text)
        answers.flush()


def confine() -> None:
    """From here on this process opens nothing, starts nothing, and has little memory."""
    for template in (_ALL_WORDS, "{% if %}", "{{ raise_exception('x') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"):
        answer({"template": template, "variables": {}, "most": 10_000, "lengths": [4, 0]}, b"user")
    if sys.platform != "darwin":  # macOS refuses a limit below what is mapped, which is more than this from the start
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)
