from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from decant.client import AsyncClient
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.router.text.served_model import Models
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.telemetry import tracing
from decant.runtime.telemetry.metrics import Registry
from decant.state.store import Store
from tests.router.factories import model
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import PATIENCE, Core, core, until
from tests.router.migration_harness import moving
from tests.router.service_harness import make_service

PROMPT = "Q7K7Z7X7W7V7"
"""Its tokens are in the fake engines' vocabulary."""
USER = "a-user-of-the-tenant"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ALLOWED = {
    "request_id", "model", "tenant", "prompt_tokens", "attempt", "prefill_worker", "decode_worker", "worker", "tokens",
    "cached_tokens", "output_tokens", "sender", "bytes", "to", "count",
}  # fmt: skip


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with tracing.recording(provider):
        yield exporter


@asynccontextmanager
async def serving(running: Core) -> AsyncIterator[str]:
    registry = Registry(process=False)
    service = make_service(running.requests, registry, Models([model(id="m")])).service()
    server = Server([service], ServerSettings(port=0, drain_seconds=1.0), Readiness(), registry)
    await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server.address
    finally:
        server.shutdown.request("the test ends")
        server.shutdown.request("the test ends")
        await asyncio.wait([task])


async def streamed(address: str, tokens: int = 12) -> str:
    async with AsyncClient(address) as client:
        stream = client.stream(PROMPT, max_tokens=tokens, ignore_eos=True, user=USER)
        return "".join([delta.text async for delta in stream])


async def spans_of(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    await until(lambda: len(exporter.get_finished_spans()) >= count)
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def tree(spans: list[ReadableSpan]) -> dict[str, str]:
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: names[span.parent.span_id] if span.parent else "" for span in spans}


def values(spans: list[ReadableSpan]) -> Iterator[tuple[str, object]]:
    for span in spans:
        for attributes in (span.attributes, *(event.attributes for event in span.events)):
            yield from (attributes or {}).items()


def event_names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_streamed_request_is_one_tree_without_its_text(store: Store, exporter: InMemorySpanExporter) -> None:
    async with moving(store, decode="d", prefill="p") as harness, serving(harness.core) as address:
        text = await streamed(address)
        spans = await spans_of(exporter, 8)
    assert tree(spans) == {
        "client.GenerateStream": "",
        "GenerateStream": "client.GenerateStream",
        "tokenize": "GenerateStream",
        "admission": "GenerateStream",
        "attempt": "GenerateStream",
        "prefill": "attempt",
        "decode": "attempt",
        "handoff": "decode",
    }
    assert len({span.context.trace_id for span in spans}) == 1
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    named = {span.name: span for span in spans}
    attempt = named["attempt"].attributes
    assert attempt is not None
    assert (attempt["decant.prefill_worker"], attempt["decant.decode_worker"]) == ("p", "d")
    assert event_names(named["decode"]) == ["scheduled", "first token"]
    assert all(
        (named["decode"].start_time or 0) <= event.timestamp <= (named["decode"].end_time or 0)
        for event in named["decode"].events
    )
    found = list(values(spans))
    assert {key.removeprefix("decant.") for key, _ in found} <= ALLOWED
    assert text
    assert not [value for _, value in found if str(value) in (text, PROMPT, USER) or PROMPT in str(value)]


@pytest.mark.slow
async def test_a_migrated_run_has_a_decode_span_at_each_worker(store: Store, exporter: InMemorySpanExporter) -> None:
    async with moving(store, decode="de", step_s=0.02) as harness, serving(harness.core) as address:
        answering = asyncio.create_task(streamed(address, 120))  # longer than the drain takes on a busy machine
        await until(lambda: any(harness.is_decoding(name) for name in "de"))
        harness.drain(next(name for name in "de" if harness.is_decoding(name)))
        await answering
        spans = await spans_of(exporter, 8)
    decodes = [span for span in spans if span.name == "decode"]
    (attempt,) = (span for span in spans if span.name == "attempt")
    assert event_names(attempt) == ["migrated"]
    assert [span.parent and span.parent.span_id for span in decodes] == [attempt.context.span_id] * 2
    assert "migration offered" in event_names(decodes[0])
    assert len({span.context.trace_id for span in spans}) == 1


async def test_a_second_attempt_is_another_span_of_the_same_trace(store: Store, exporter: InMemorySpanExporter) -> None:
    async with fleet(("d", wire.ROLE_DECODE), ("e", wire.ROLE_DECODE)) as workers:
        fakes = [worker for worker in workers if isinstance(worker, FakeWorker)]
        for worker in fakes:
            worker.script.fails_at = [2]
        async with core(store, fakes) as running, serving(running) as address:
            await streamed(address)
            spans = await spans_of(exporter, 6)
        starts = [start for worker in fakes for start in worker.starts]
    first, second, *_ = attempts = [span for span in spans if span.name == "attempt"]
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "engine"
    assert len({span.context.trace_id for span in spans}) == 1
    assert {span.parent and span.parent.span_id for span in attempts} == {
        span.context.span_id for span in spans if span.name == "GenerateStream"
    }
    assert attempts[-1].status.status_code is StatusCode.UNSET
    assert first.context.span_id != second.context.span_id
    assert {start.engine_request.traceparent.split("-")[2] for start in starts} == {
        f"{span.context.span_id:016x}" for span in attempts
    }


@pytest.mark.parametrize("flag", ["00", "01"])
async def test_the_sampling_of_the_caller_is_honoured(store: Store, exporter: InMemorySpanExporter, flag: str) -> None:
    assert await generate_with(store, f"00-{TRACE}-{PARENT}-{flag}") == (TRACE, flag)
    names = {span.name for span in exporter.get_finished_spans()}
    assert names == ({"Generate", "tokenize", "admission", "attempt"} if flag == "01" else set())


async def test_without_a_tracer_the_context_of_the_caller_is_passed_on(store: Store) -> None:
    assert await generate_with(store, f"00-{TRACE}-{PARENT}-01") == (TRACE, "01")


async def generate_with(store: Store, traceparent: str) -> tuple[str, str]:
    async with fleet(("d", wire.ROLE_DECODE)) as workers:
        (worker,) = (one for one in workers if isinstance(one, FakeWorker))
        async with (
            core(store, [worker]) as running,
            serving(running) as address,
            open_channel(address, PeerTls()) as channel,
        ):
            request = pb.GenerateRequest(prompt=PROMPT, stopping=pb.StoppingParams(max_tokens=3))
            stub = InferenceServiceStub(channel)
            await stub.Generate(request, metadata=(("traceparent", traceparent),), timeout=PATIENCE)
        (start,) = worker.starts
    _, trace, _, flags = start.engine_request.traceparent.split("-")
    return trace, flags
