import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.checkpoints import chat_model
from tests.e2e.client_checks import open_stub
from tests.e2e.deployment import PATIENCE_S, Deployment, Worker, deployment
from tests.trace_collector import Collector, collecting
from tests.worker.waiting import eventually

pytestmark = pytest.mark.slow

PROMPT = "def total(values):\n    result = 0\n" * 12
OUTPUTS = 2
TOKENS = 400
"""Of each output."""
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
"""No call ends before an output has all its tokens."""
SCHEMA = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"], "additionalProperties": False}
REASONING_TOKENS = 20
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def owner_of_a_run(running: Deployment) -> Worker | None:
    for worker in running.workers[1:]:
        audit = await asyncio.to_thread(worker.audit)
        if audit.owners:
            return worker
    return None


def call_request() -> pb.GenerateRequest:
    """A request for reasoning with a budget, and then a call of a strict tool."""
    messages = pb.Messages(
        messages=[pb.Message(role="user", content=PROMPT)],
        tools=[pb.Tool(name="add", parameters=json.dumps(SCHEMA), strict=True)],
        tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED),
        reasoning=True,
    )
    sampling = pb.SamplingParams(temperature=1.0, seed=1, n=OUTPUTS)
    stopping = pb.StoppingParams(max_tokens=TOKENS, max_reasoning_tokens=REASONING_TOKENS)
    response = pb.ResponseOptions(token_ids=True)
    return pb.GenerateRequest(messages=messages, sampling=sampling, stopping=stopping, response=response)


async def outputs(stub: InferenceServiceStub, running: Deployment | None = None) -> list[tuple[list[int], str, str]]:
    """Tokens, reasoning and arguments of the call of each output."""
    request = call_request()
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
    deltas = [[m.delta for m in messages if m.HasField("delta") and m.delta.index == index] for index in range(OUTPUTS)]
    return [
        (
            [id for delta in output for id in delta.token_ids],
            "".join(delta.reasoning for delta in output),
            "".join(call.arguments for delta in output for call in delta.tool_calls),
        )
        for output in deltas
    ]


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


async def test_reasoning_and_a_call_outlive_the_decode_worker_that_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = chat_model(tmp_path / "chat")
    with collecting() as collector:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds
        with deployment(decode=2, model=str(model)) as running:
            channel, stub = open_stub(running.address)
            async with channel:
                whole = await outputs(stub)
                for ids, reasoning, arguments in whole:
                    assert len(ids) == TOKENS
                    assert reasoning
                    assert re.match(r'\{\s*"numbers"\s*:\s*\[', arguments)
                assert await outputs(stub, running) == whole
            await asyncio.to_thread(running.settled)
            ends = {"GenerateStream", "prefill", "decode"}
            await eventually(lambda: ends <= {span.name for _, span in of_the_trace(collector)})
        check_trace(collector)
