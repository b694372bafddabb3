"""Confined process that renders the chat template of one model, used through stdin and stdout.

It has little memory, and opens no file and no socket.

    request and reply      | length of head: u32, big-endian | length of text: u32 | head: JSON | text: UTF-8 |
    first request          {"template", "variables", "max_characters": characters,
                            "tokens": control tokens, "other_tokens": added tokens that are none}
                           reply: {}, or {"failed"}: what the template needs and does not have, with its line
    request                {"messages", "tools": their texts are positions among the text's parts,
                            "lengths": bytes of the text's parts, "add_generation_prompt",
                            "continues": the text ends with the last message's content,
                            "variables": more variables of the template,
                            "time": seconds of the Unix clock that templates take for now; null: this process's clock}
    reply                  {"written"} and the text; or {"refused"}: by the template itself; or {"failed"}: the error;
                           or {"field", "limit", "value"}: of the request
                           written: position and index of each control token that the template wrote, in pairs

Texts are not part of the JSON: encoding megabytes would stop the router's event loop.
"""

from __future__ import annotations

import json
import pprint
import resource
import signal
import struct
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import IO, Any, NoReturn

import jinja2.debug
from jinja2 import Template, TemplateError, TemplateSyntaxError

from decant.router.text.template_process.checks import find_missing
from decant.router.text.template_process.content_format import ContentFormat
from decant.router.text.template_process.conversation import ConversationReader, Invalid, up_to_content
from decant.router.text.template_process.environment import ChatEnvironment, Refused, local_time
from decant.router.text.template_process.marked_text import TEMPLATE, MarkedText, joined
from decant.router.text.template_process.written_tokens import TokenSearch, written_tokens

PROBE_SECONDS = 1.0
"""CPU time for a conversation that shows what the template takes."""
MEMORY_BYTES = 512 * 1024 * 1024

_IMPORTED_LATE = (pprint, textwrap, unicodedata, jinja2.debug)
"""Filters import these later, when no file can be opened."""
_WARM_UP_TEMPLATE = r"""{% for m in messages if m.role %}
{% set ns = namespace(x='\n\u00e9') %}{{- ns.x ~ m | tojson(indent=1) }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% macro f(x) %}{{ x[1:] | trim | upper }}{% endmacro %}{{ f('ab') }}
{{ '%s' % 1 ~ strftime_now('%c %B') ~ dict(a=1) }}{{ 'x'.split('x')[-1] }}
{{ [2, 1] | sort | map('string') | join }}"""
"""Has Python load what most templates use before the process is confined."""
_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


class TooLong(Exception):
    pass


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so much CPU time."""

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Renderer:
    """One template, with what it gets from the model's files."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._source: str = setup["template"]
        self._max_characters: int = setup["max_characters"]
        self._search = TokenSearch(setup["tokens"], setup["other_tokens"])
        self._variables = {name: MarkedText(text, TEMPLATE) for name, text in setup["variables"].items()}
        self._environment = ChatEnvironment()

    def check(self) -> Mapping[str, Any]:
        """Reply to the first request."""
        try:
            parsed = self._environment.parse(self._source)
            missing = find_missing(self._environment, parsed, {*self._variables, *_VARIABLES})
            if missing is None:
                self._template, self._format  # noqa: B018 - a property each
        except TemplateSyntaxError as error:
            missing = f"line {error.lineno}: {error.message}"
        except Exception as error:  # noqa: BLE001 - a template may do anything
            missing = f"{type(error).__name__}: {error}"
        return {} if missing is None else {"failed": missing}

    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self._source)

    @cached_property
    def _format(self) -> ContentFormat:
        return ContentFormat(self._probe)

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            with _cpu_limit(PROBE_SECONDS):
                return self._written(messages, tools, add_generation_prompt=True, time=0.0, variables={})
        except Exception:  # noqa: BLE001 - a template may do anything
            return None

    def reply_to(self, request: Mapping[str, Any], texts: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            text, written = self._render(request, texts)
        except Refused as error:
            return {"refused": str(error)}, b""
        except Invalid as error:
            return error.reply, b""
        except TooLong as error:
            return {"failed": str(error)}, b""
        except TemplateError as error:
            return {"failed": f"{type(error).__name__}: {error}"}, b""
        except Exception as error:  # noqa: BLE001 - a template may do anything
            return {"failed": f"{type(error).__name__}: {error}"}, b""
        return {"written": written}, text.encode()

    def _render(self, request: Mapping[str, Any], texts: bytes) -> tuple[str, list[int]]:
        ends = accumulate(request["lengths"], initial=0)
        contents = [texts[begin:end].decode() for begin, end in pairwise(ends)]
        reader = ConversationReader(contents, self._source, self._format)
        text = self._written(
            reader.messages(request["messages"]),
            reader.tools(request["tools"]),
            add_generation_prompt=request["add_generation_prompt"],
            time=request["time"],
            variables=request["variables"],
        )
        if request["continues"]:
            text = up_to_content(text, "".join(reader.last_texts(request["messages"])))
        return text, written_tokens(self._search, text, contents)

    def _written(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
        time: float | None,
        variables: Mapping[str, bool],
    ) -> MarkedText:
        all_variables = {
            **self._variables,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": local_time(time).strftime,
        }
        parts, length = [], 0
        for part in self._template.generate(all_variables):
            length += len(part)
            if length > self._max_characters:
                raise TooLong(f"more than {self._max_characters} characters")
            parts.append(part)
        return joined(parts)


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    renderer: Renderer | None = None
    while len(lengths := requests.read(8)) == 8:
        head, texts = (requests.read(length) for length in struct.unpack(">II", lengths))
        head_out: dict[str, Any] = {}
        request, text = json.loads(head), b""
        if renderer is None:
            renderer = Renderer(request)
            head_out = dict(renderer.check())
        else:
            head_out, text = renderer.reply_to(request, texts)
        reply = json.dumps(head_out).encode()
        replies.write(struct.pack(">II", len(reply), len(text)) + reply + text)
        replies.flush()


def confine() -> None:
    for template in (_WARM_UP_TEMPLATE, "{% if %}", "{{ raise_exception('x') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"):
        setup = {"template": template, "variables": {}, "max_characters": 10_000, "tokens": ["<x>"], "other_tokens": []}
        renderer = Renderer(setup)
        renderer.check()
        conversation = {"messages": [{"role": 0, "content": 1}], "tools": [], "lengths": [4, 0]}
        renderer.reply_to(
            {**conversation, "add_generation_prompt": True, "continues": False, "variables": {}, "time": None}, b"user"
        )
    if sys.platform != "darwin":  # macOS refuses a limit below what is mapped, which is more than this from the start
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)
