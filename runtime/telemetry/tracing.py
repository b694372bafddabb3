"""Spans of a request, in OpenTelemetry.

    client              router                               workers
    client.NAME ------> NAME -+-- tokenize                   (traceparent in the call's metadata, then in
       traceparent            +-- admission                   EngineRequest.traceparent)
                              '-- attempt -- traceparent --> prefill
                                                             decode ---- handoff

A server exports within `exporting`; a client uses its program's tracer provider; else a span only passes the parent on.
Spans are per request and phase, never per token; attributes hold no text of users.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NAME = "decant"
KEY = "traceparent"
"""Metadata key of W3C Trace Context."""
FLUSH_SECONDS = 3.0
"""Time for the last spans of a process that ends."""

_VALID = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "grpc"

_provider: TracerProvider | None = None
"""Tracer provider of a server, within `exporting` or `recording`."""

Value = str | int | float | bool


class CannotExport(Exception):
    """The environment names a collector, and spans can't reach it."""


class Span:
    """A span that records nothing. ``traceparent`` is that of its children and may be empty."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((KEY, self.traceparent),) if self.traceparent else ()

    def set(self, **attributes: Value) -> None: ...

    def event(self, name: str, seconds_ago: float = 0.0, **attributes: Value) -> None: ...

    def end(self, error: str = "") -> None:
        """End the span; idempotent. ``error`` is a reason without text of users."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif isinstance(error, Exception):
            self.end(str(getattr(error, "label", type(error).__name__)))
        else:
            self.event("cancelled")
            self.end()


class _RecordingSpan(Span):
    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        super().__init__(_traceparent(context))
        self._span = span

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes({f"{NAME}.{key}": value for key, value in attributes.items()})

    def event(self, name: str, seconds_ago: float = 0.0, **attributes: Value) -> None:
        at = time.time_ns() - round(seconds_ago * 1e9)
        self._span.add_event(name, {f"{NAME}.{key}": value for key, value in attributes.items()}, at)

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._span.is_recording():
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()


def span(name: str, parent: str = "", kind: str = "internal", **attributes: Value) -> Span:
    """Start a span, for a ``with`` or until ``end``.

    ``parent`` is a traceparent, empty for the program's current span; ``kind`` is internal, client or server.
    """
    if _provider is None and "opentelemetry.trace" not in sys.modules:
        return Span(parent)
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({KEY: parent}) if parent else None
    tracer = trace.get_tracer(NAME, tracer_provider=_provider)
    started = tracer.start_span(name, context, trace.SpanKind[kind.upper()])
    if not started.is_recording():  # not sampled, or the program has no provider
        return Span(_traceparent(started.get_span_context()) or parent)
    recording = _RecordingSpan(started)
    recording.set(**attributes)
    return recording


def parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    values = [value for key, value in metadata or () if key == KEY]
    return values[0] if len(values) == 1 and isinstance(values[0], str) and _VALID.fullmatch(values[0]) else ""


@contextmanager
def exporting(service: str, flush_s: float = FLUSH_SECONDS) -> Iterator[None]:
    """Export this process's spans over OTLP, if the environment names an endpoint.

    OpenTelemetry's variables configure it. Raises CannotExport.
    """
    environment = os.environ
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if is_off or not any(environment.get(name) for name in _ENDPOINTS):
        yield
        return
    if exporter != "otlp":
        raise CannotExport(f"OTEL_TRACES_EXPORTER: otlp or none, got {exporter}")
    protocol = next(((name, environment[name]) for name in _PROTOCOLS if environment.get(name)), None)
    if protocol is not None and protocol[1] != _PROTOCOL:
        raise CannotExport(f"{protocol[0]}: {_PROTOCOL}, got {protocol[1]}")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise CannotExport(f"{_ENDPOINTS[0]} is set, and decant-llm[tracing] is not installed: {error}") from None
    own_name = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(own_name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        with recording(provider):
            yield
    finally:
        last = threading.Thread(target=provider.shutdown, daemon=True)  # a lost collector must not delay the end
        last.start()
        last.join(flush_s)


@contextmanager
def recording(provider: TracerProvider) -> Iterator[None]:
    global _provider
    before, _provider = _provider, provider
    try:
        yield
    finally:
        _provider = before


def _traceparent(context: Any) -> str:
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
