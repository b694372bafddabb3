"""One line per event on standard output: JSON, or columns on a terminal.

Lines have ``time``, ``level``, ``event``, ``service`` and the values of ``bound``, also those of the standard library's
loggers. Values of keys in ``PRIVATE``, text of users, are replaced by their length.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, TextIO, cast

import structlog
from pydantic import Field
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.types import EventDict, Processor, WrappedLogger

from decant.runtime.settings import Settings

PRIVATE = frozenset({"prompt", "messages", "text", "token_ids", "tokens", "stop", "content"})

Level = Literal["debug", "info", "warning", "error"]


class LogSettings(Settings):
    log_level: Level = Field(default="info", description="least severe level that is logged")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: columns on a terminal, JSON elsewhere"
    )


class LossyStream(io.TextIOBase):
    """Output whose lines are lost while it can't be written: neither a full disk nor a closed pipe fails a caller."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str, /) -> int:
        with suppress(OSError, ValueError):
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()


def start(service: str, settings: LogSettings, *, stream: TextIO | None = None) -> None:
    out = cast(TextIO, LossyStream(stream or sys.stdout))
    console = settings.log_format == "console" or (settings.log_format == "auto" and out.isatty())
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    common = _common(service)
    structlog.configure(
        processors=[*common, *_render(console)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    _route_standard_library(common, console, level, out)


def get(name: str) -> Any:
    return structlog.get_logger(module=name)


def bound(**values: object) -> AbstractContextManager[None]:
    """Add values to every line of the block, and of tasks started inside."""
    return bound_contextvars(**values)


def _common(service: str) -> list[Processor]:
    def name_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return [
        merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        name_service,
        hide_private,
    ]


def hide_private(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key in PRIVATE & event.keys():
        value = event[key]
        event[key] = f"<{len(value)}>" if hasattr(value, "__len__") else "<hidden>"
    return event


def _name_module(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event["module"] = event["_record"].name
    return event


def _render(console: bool) -> list[Processor]:
    # Tracebacks without local variables: those may hold prompts.
    if console:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(timestamp_key="time", exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)]


def _route_standard_library(common: list[Processor], console: bool, level: int, out: TextIO) -> None:
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_name_module, *common],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_render(console)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    logging.getLogger("huggingface_hub").handlers.clear()  # that of its import
