"""Events that the processes log, from the calls of the loggers in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from decant.runtime.telemetry.logs import PRIVATE
from docs.generate.markdown import code, head, page, table

ROOT = Path(__file__).parents[2]
LEVELS = {name: name for name in ("debug", "info", "warning", "error")} | {"exception": "error"}
PARTS: Mapping[str, tuple[str, ...]] = {
    "Every process": ("runtime", "state"),
    "Router": ("router",),
    "Gateway": ("decant/gateway",),
    "Workers": ("worker", "prefill_worker", "decode_worker", "handoff", "engine"),
    "`decant up`": ("decant/command/up",),
}
INTRO = f"""\
Each line of a log is one event: JSON where standard output is no terminal (`--log-format`). Beside the fields below it
has `time` (UTC), `level`, `event` and `service`, and inside a call or a request also `method` and `request_id`. Errors
with a stack have `exception`. Texts of users are never logged: their length replaces the values of
{", ".join(sorted(map(code, PRIVATE)))}. Alert on levels and
metrics, and read events for the cause: their names may change."""


class Event(NamedTuple):
    name: str
    level: str
    fields: tuple[str, ...]


class UnknownEvent(ValueError):
    """A logger is called with an event that is no constant of its module."""


def render() -> str:
    parts = [head("Log events", "the calls of the loggers"), INTRO]
    for title, folders in PARTS.items():
        rows = [(code(one.name), one.level, ", ".join(map(code, one.fields))) for one in events(folders)]
        parts += [f"## {title}", table(("event", "level", "fields"), rows)]
    return page(parts)


def events(folders: Iterable[str]) -> list[Event]:
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return sorted({event for path in sources for event in events_of(path.read_text())})


def events_of(source: str) -> Iterator[Event]:
    module = ast.parse(source)
    for call in ast.walk(module):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "_log"
            and call.func.attr in LEVELS
        ):
            fields = tuple(f"{word.arg}" if word.arg else "..." for word in call.keywords if word.arg != "exc_info")
            for name in _names(call.args[0], module):
                yield Event(name, LEVELS[call.func.attr], fields)


def _names(event: ast.expr, module: ast.Module) -> list[str]:
    names = list(_constants(event))
    if not names and isinstance(event, ast.Name):
        for node in ast.walk(module):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == event.id for t in targets):
                names += _constants(node.value)
    if not names:
        raise UnknownEvent(ast.unparse(event))
    return names


def _constants(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from (*_constants(value.body), *_constants(value.orelse))
