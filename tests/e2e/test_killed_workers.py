import asyncio
import os
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import generate_request, open_stub
from tests.e2e.deployment import PATIENCE_S, Deployment, Worker, deployment
from tests.trace_collector import Collector, collecting
from tests.worker.waiting import eventually

pytestmark = pytest.mark.slow

PROMPT = "def total(values):\n    result = 0\n" * 12
OUTPUTS = 2
TOKENS = 400
"""Of each output."""
GUIDE = r"(\w|[ \n().,:=+*]){6000,}"
"""No output ends before it has all its tokens."""
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def owner_of_a_run(running: Deployment) -> Worker | None:
    for worker in running.workers[1:]:
        audit = await asyncio.to_thread(worker.audit)
        if audit.owners:
            return worker
    return None


async def tokens(stub: InferenceServiceStub, running: Deployment | None = None) -> list[list[int]]:
    sampling = pb.SamplingParams(temperature=1.0, seed=1, n=OUTPUTS)
    request = generate_request(PROMPT, sampling=sampling, max_tokens=TOKENS)
    request.guided.regex = GUIDE
    messages = []
    killed = None
    metadata = (("traceparent", f"00-{TRACE}-{CALLER}-01"),) if running is not None else ()
    async for message in stub.GenerateStream(request, timeout=PATIENCE_S, metadata=metadata):
        messages.append(message)
        if running is not None and killed is None and message.seq > 10:
            killed = await owner_of_a_run(running)
            if killed is not None:
                killed.process.kill()
                running.workers.remove(killed)
    assert (killed is not None) == (running is not None)
    assert messages[-1].receipt.attempts == (1 if running is None else 2)
    ids: list[list[int]] = [[] for _ in range(OUTPUTS)]
    for message in messages:
        if message.HasField("delta"):
            ids[message.delta.index] += message.delta.token_ids
    return ids


def of_the_trace(collector: Collector) -> list[tuple[str, Any]]:
    return [(service, span) for service, span in collector.spans() if span.trace_id.hex() == TRACE]


def check_trace(collector: Collector) -> None:
    spans = of_the_trace(collector)
    assert PROMPT[:20] not in str(spans)
    ((_, request),) = ((service, span) for service, span in spans if span.name == "GenerateStream")
    assert request.parent_span_id.hex() == CALLER
    first, second = attempts = [span for _, span in spans if span.name == "attempt"]
    assert {span.parent_span_id for span in attempts} == {request.span_id}
    assert (first.status.message, second.status.message) == ("peer_lost", "")
    made = {(service, span.name, span.parent_span_id) for service, span in spans}
    assert ("decant-prefill-worker", "prefill", first.span_id) in made
    assert ("decant-decode-worker", "decode", second.span_id) in made
    decodes = [span for _, span in spans if span.name == "decode"]
    assert [span.parent_span_id for span in decodes] == [second.span_id], "the killed worker exports no end"


async def test_a_guided_answer_outlives_the_decode_worker_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds
        with deployment(decode=2) as running:
            channel, stub = open_stub(running.address)
            async with channel:
                whole = await tokens(stub)
                assert [len(ids) for ids in whole] == [TOKENS] * OUTPUTS
                assert await tokens(stub, running) == whole
            await asyncio.to_thread(running.settled)
            ends = {"GenerateStream", "prefill", "decode"}
            await eventually(lambda: ends <= {span.name for _, span in of_the_trace(collector)})
        check_trace(collector)
