"""An OpenTelemetry collector on a port of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.exports: list[Any] = []

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        self.exports += request.resource_spans
        return otlp.ExportTraceServiceResponse()

    def spans(self) -> list[tuple[str, Any]]:
        found = []
        for resource in self.exports:
            (service,) = (one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
            found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return sorted(found, key=lambda pair: pair[1].start_time_unix_nano)


@contextmanager
def collecting() -> Iterator[Collector]:
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()
