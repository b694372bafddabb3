"""Confined process that renders chat templates: ``python -I template_process.py``, used through stdin and stdout.

It has little memory, and opens no file and no socket. Outside the standard library it imports only jinja2.

    request and reply      | length of head: u32, big-endian | length of text: u32 | head: JSON | text: UTF-8 |
    request                {"template", "variables", "max_characters": characters, "lengths": bytes of the text's parts,
                            "time": seconds of the Unix clock that templates take for now; null: this process's clock}
                           text: role and content of each message, concatenated
    reply                  {} and the text; or {"refused"}: by the template itself; or {"failed"}: the error

Texts are not part of the JSON: encoding megabytes would stop the router's event loop. Templates get the
functions that transformers gives them.
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
"""Filters import these later, when no file can be opened."""
_WARM_UP_TEMPLATE = r"""{% for m in messages if m.role %}
{% set ns = namespace(x='\n\u00e9') %}{{- ns.x ~ m | tojson(indent=1) }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% macro f(x) %}{{ x[1:] | trim | upper }}{% endmacro %}{{ f('ab') }}
{{ '%s' % 1 ~ strftime_now('%c %B') ~ dict(a=1) }}{{ 'x'.split('x')[-1] }}
{{ [2, 1] | sort | map('string') | join }}"""
"""Has Python load what most templates use before the process is confined."""


class Refused(Exception):
    """The template called raise_exception."""


class TooLong(Exception):
    pass


class Generation(jinja2.ext.Extension):
    """Tag ``generation``, which marks the assistant's text for training: it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render(template: str, variables: dict[str, Any], max_characters: int) -> str:
    parts, length = [], 0
    for part in _compiled(template).generate(variables):
        length += len(part)
        if length > max_characters:
            raise TooLong(f"more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, dict=_dict)
    return environment.from_string(template)


def _refuse(message: object) -> NoReturn:
    raise Refused(str(message))


def _local_time(seconds: float | None) -> datetime:
    return datetime.now() if seconds is None else datetime.fromtimestamp(seconds)  # noqa: DTZ005, DTZ006 - the local day


def _dict(*args: Any, **more: Any) -> dict[Any, Any]:
    return dict(*args, **more)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Filter ``tojson`` as transformers has it, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def reply_to(request: dict[str, Any], texts: bytes) -> tuple[dict[str, str], bytes]:
    try:
        now = _local_time(request.pop("time"))
        request["variables"] |= {
            "messages": list(_messages(request.pop("lengths"), texts)),
            "strftime_now": now.strftime,
        }
        return {}, render(**request).encode()
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


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    while len(lengths := requests.read(8)) == 8:
        head, texts = (requests.read(length) for length in struct.unpack(">II", lengths))
        head_out, text = reply_to(json.loads(head), texts)
        reply = json.dumps(head_out).encode()
        replies.write(struct.pack(">II", len(reply), len(text)) + reply + text)
        replies.flush()


def confine() -> None:
    for template in (_WARM_UP_TEMPLATE, "{% if %}", "{{ raise_exception('x') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"):
        reply_to(
            {"template": template, "variables": {}, "max_characters": 10_000, "lengths": [4, 0], "time": None}, b"user"
        )
    if sys.platform != "darwin":  # macOS refuses a limit below what is mapped, which is more than this from the start
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)
