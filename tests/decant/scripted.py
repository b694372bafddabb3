"""A real server of InferenceService whose methods do what a test says, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from runtime.errors import ServiceError
from runtime.fault import trailers

PATIENCE_S = 60.0

Answering = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateStreamResponse]]


@dataclass
class Script(inference_pb2_grpc.InferenceServiceServicer):
    """What is answered, and what was asked."""

    answering: Answering | None = None
    refusal: ServiceError | None = None
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    was_cancelled: threading.Event = field(default_factory=threading.Event)
    call_ended: threading.Event = field(default_factory=threading.Event)
    time_left: float | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        messages = [message async for message in self.GenerateStream(request, context)]
        text = "".join(message.delta.text for message in messages)
        last = messages[-1]
        output = pb.Output(text=text, finished=last.finished)
        return pb.GenerateResponse(
            request_id=last.request_id, model="m", outputs=[output], usage=last.usage, receipt=last.receipt, seed=7
        )

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.asked.append(request)
        self.time_left = context.time_remaining()
        try:
            if self.refusal is not None:
                context.set_trailing_metadata(trailers(self.refusal.fault))
                await context.abort(self.refusal.code, self.refusal.fault.message)
            async for message in (self.answering or plainly)(request, context):
                yield message
        finally:
            self.call_ended.set()

    async def CancelGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cancelled.append(request.request_id)
        self.was_cancelled.set()
        return pb.CancelGenerationResponse(status=pb.CancelGenerationResponse.STATUS_CANCELLED)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = request.text or "".join(message.content for message in request.messages.messages)
        return pb.TokenizeResponse(count=len(text), token_ids=map(ord, text), tokens=list(text))

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ListModelsResponse(models=[pb.Model(id="m", max_context_length=64)])

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.Model(id=request.model or "m")

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerInfo(version="1", router_id="r")


def started(request: pb.GenerateRequest, prompt_tokens: int = 3) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id or "made-up",
        started=pb.Started(model="m", prompt_tokens=prompt_tokens, seed=7),
    )


def delta(request: pb.GenerateRequest, seq: int, text: str) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id or "made-up",
        seq=seq,
        delta=pb.Delta(text=text, num_tokens=1, token_ids=[ord(text)] if request.response.token_ids else []),
    )


def finished(request: pb.GenerateRequest, seq: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id or "made-up",
        seq=seq,
        finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP, eos_token_id=2),
        usage=pb.Usage(prompt_tokens=3, completion_tokens=seq, total_tokens=3 + seq),
        receipt=pb.Receipt(ttft_ms=5.0, decode_ms=2.0, e2e_ms=9.0, prefill_worker="p", decode_worker="d", attempts=1),
    )


async def plainly(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    yield started(request)
    for seq, letter in enumerate("abc", 1):
        yield delta(request, seq, letter)
    yield finished(request, 3)


async def for_ever(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Writes two tokens and then no more."""
    yield started(request)
    yield delta(request, 1, "a")
    yield delta(request, 2, "b")
    await asyncio.Event().wait()


async def never(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Not even a first token."""
    await asyncio.Event().wait()
    yield started(request)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(script, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
