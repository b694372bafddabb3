from __future__ import annotations

import io
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TextIO, cast

from decant.command.deployment.processes import Process

_WIDTH = 10
_COLOURS = (36, 33, 35, 32, 34, 31)
_LEVEL_COLOURS = {"warning": 33, "error": 31, "critical": 31}
_SHOWN_APART = {"time", "level", "event", "message", "service", "module", "process", "exception"}


class Output:
    """Output as JSON lines with ``process`` added; nothing is written after a broken pipe, and lines are lost while a
    disk is full.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._broken = False

    def line(self, process: str, raw: str) -> Mapping[str, Any]:
        """Write a line and return its fields. A line that is not a JSON object becomes an event."""
        fields = _fields(raw)
        self._show(process, fields)
        return fields

    def update(self, current: Mapping[str, Process]) -> None:
        """Called with all processes after each change of one."""

    def close(self) -> None:
        """Called once, whatever ended the deployment."""

    def stream(self, process: str) -> TextIO:
        return cast(TextIO, _Lines(self, process))

    def _show(self, process: str, fields: Mapping[str, Any]) -> None:
        self._write(json.dumps({"process": process, **fields}) + "\n")

    def _write(self, text: str) -> None:
        if not self._broken:
            try:
                self._out.write(text)
                self._out.flush()
            except (BrokenPipeError, ValueError):
                self._broken = True
            except OSError:
                pass  # the processes' output is read on: a full pipe would stop them


class Columns(Output):
    """Output as columns: time, process, event and the other fields."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._colours: dict[str, int] = {}

    def _show(self, process: str, fields: Mapping[str, Any]) -> None:
        self._write(self.columns(process, fields) + "\n")

    def columns(self, process: str, fields: Mapping[str, Any]) -> str:
        colour = self._colours.setdefault(process, _COLOURS[len(self._colours) % len(_COLOURS)])
        level = str(fields.get("level", ""))
        event = str(fields.get("event", fields.get("message", "")))  # the gateway's own lines have a message
        rest = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _SHOWN_APART)
        level_text = f"\x1b[{_LEVEL_COLOURS[level]}m{level}\x1b[0m " if level in _LEVEL_COLOURS else ""
        line = f"{_clock(fields.get('time'))} \x1b[{colour}m{process:<{_WIDTH}}\x1b[0m {level_text}{event}"
        line += f"  \x1b[2m{rest}\x1b[0m" if rest else ""
        return "\n    ".join([line, *str(fields.get("exception", "")).splitlines()])


class _Lines(io.TextIOBase):
    def __init__(self, output: Output, process: str) -> None:
        self._output = output
        self._process = process
        self._partial = ""

    def write(self, text: str, /) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._output.line(self._process, line)
        return len(text)


def _fields(raw: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError:
        return {"event": raw}
    return fields if isinstance(fields, dict) else {"event": raw}


def _clock(time: object) -> str:
    try:
        then = datetime.fromisoformat(str(time)).astimezone()
    except ValueError:
        then = datetime.now().astimezone()
    return then.strftime("%H:%M:%S")
