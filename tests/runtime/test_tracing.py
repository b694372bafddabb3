from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from decant.runtime.telemetry import tracing
from tests.trace_collector import Collector, collecting

VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_traceparent_is_read_from_metadata_or_it_is_ignored() -> None:
    assert tracing.parent_of((("authorization", "x"), ("traceparent", VALID))) == VALID
    assert tracing.parent_of(None) == tracing.parent_of(()) == ""
    for invalid in ("", "00-1-2-01", VALID.upper(), VALID + "-more", VALID.encode()):
        assert tracing.parent_of((("traceparent", invalid),)) == ""
    assert tracing.parent_of((("traceparent", VALID),) * 2) == ""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_opentelemetry_is_not_imported(environment: dict[str, str]) -> None:
    program = (
        "import sys; from decant.runtime.telemetry import tracing\n"
        "with tracing.exporting('s'):\n"
        "    span = tracing.span('a', sys.argv[1])\n"
        "    span.set(a=1); span.event('e'); span.end()\n"
        "print(span.traceparent, any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, VALID], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [VALID, "False"]


def test_an_endpoint_without_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    named = r"OTEL_EXPORTER_OTLP_ENDPOINT.*decant-llm\[tracing\]"
    with pytest.raises(tracing.CannotExport, match=named), tracing.exporting("s"):
        pass


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "console"),
    ],
)
def test_an_export_that_is_not_possible_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv(variable, value)
    with pytest.raises(tracing.CannotExport, match=rf"{variable}: .*, got {value}"), tracing.exporting("s"):
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_the_spans_of_a_server_reach_a_collector_before_it_ends(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    with tracing.exporting("decant-router"), tracing.span("request", VALID, kind="server", tokens=3) as span:
        tracing.span("attempt", span.traceparent).end("peer_lost")
    (resource,) = collector.exports
    assert ("service.name", "decant-router") in [
        (one.key, one.value.string_value) for one in resource.resource.attributes
    ]
    attempt, request = resource.scope_spans[0].spans
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == tuple(VALID.split("-")[1:3])
    assert attempt.parent_span_id == request.span_id
    assert (attempt.status.message, request.status.message) == ("peer_lost", "")
    assert [(one.key, one.value.int_value) for one in request.attributes] == [("decant.tokens", 3)]
    assert tracing.span("after", VALID).traceparent == VALID, "nothing is recorded any more"


def test_a_collector_that_is_lost_does_not_keep_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with tracing.exporting("s", flush_s=0.1):
        tracing.span("request").end()
        began = time.monotonic()
    assert time.monotonic() - began < 8, "OpenTelemetry would try for 10 s"


def test_an_exception_is_a_reason_and_a_cancellation_none(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    with tracing.exporting("s"):
        for error in (ValueError("a prompt"), KeyboardInterrupt()):
            with pytest.raises(type(error)), tracing.span("request"):
                raise error
    failed, cancelled = (span for one in collector.exports for span in one.scope_spans[0].spans)
    assert failed.status.message == "ValueError"
    assert "a prompt" not in str(collector.exports)
    assert (cancelled.status.code, [event.name for event in cancelled.events]) == (0, ["cancelled"])
