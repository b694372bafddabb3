"""A server of InferenceService with scripted methods, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2_grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.runtime.error_details import to_status, trailers
from decant.runtime.errors import DeadlineExceeded, NotFound, ServiceError
from decant.runtime.grpc_options import ACCEPTED
from decant.runtime.serving.health import HealthService, Readiness
from tests.loop_thread import on_a_thread

PATIENCE_S = 300.0

Options = Sequence[tuple[str, Any]]
Answering = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateStreamResponse]]


@dataclass(frozen=True)
class Break:
    after: int
    error: ServiceError | grpc.StatusCode


@dataclass
class Script(inference_pb2_grpc.InferenceServiceServicer):
    answering: Answering | None = None
    is_ready: bool = True
    """Of gRPC's health service when the server starts."""
    refusal: ServiceError | None = None
    accepts: bool = False
    """Sends the headers of an accepted request before its first message."""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    was_cancelled: threading.Event = field(default_factory=threading.Event)
    was_called: threading.Event = field(default_factory=threading.Event)
    call_ended: threading.Event = field(default_factory=threading.Event)
    time_left: float | None = None
    authorized: list[tuple[str, list[str]]] = field(default_factory=list)
    breaks: deque[Break] = field(default_factory=deque)
    """For the next streams, one each; later streams end normally."""
    resumed: list[pb.ResumeStreamRequest] = field(default_factory=list)
    known: dict[str, pb.GenerateRequest] = field(default_factory=dict)
    """By id; shared by the routers of one service."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        messages = [message async for message in self.GenerateStream(request, context)]
        text = "".join(message.delta.text for message in messages)
        last = messages[-1]
        output = pb.Output(text=text, finished=last.finished)
        return pb.GenerateResponse(
            request_id=last.request_id, model="m", outputs=[output], usage=last.usage, receipt=last.receipt, seed=7
        )

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        self.was_called.set()
        self.known.setdefault(request.request_id, request)
        async for message in self._stream(request, 0, context):
            yield message

    async def ResumeStream(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.resumed.append(request)
        if request.request_id not in self.known:
            await refuse(context, NotFound("request", request.request_id))
        async for message in self._stream(self.known[request.request_id], request.after_seq, context):
            yield message

    async def _stream(self, request: pb.GenerateRequest, after_seq: int, context: Any) -> AsyncIterator[Any]:
        self.time_left = context.time_remaining()
        cut = self.breaks.popleft() if self.breaks else None
        sent = 0
        try:
            if self.refusal is not None:
                await refuse(context, self.refusal)
            if self.accepts:
                await context.send_initial_metadata(((ACCEPTED, "true"),))
            async for message in self._rest(request, after_seq, context):
                if cut is not None and sent == cut.after:
                    await refuse(context, cut.error)
                yield message
                sent += 1
            if cut is not None:
                await refuse(context, cut.error)
        finally:
            self.call_ended.set()

    async def _rest(self, request: pb.GenerateRequest, after_seq: int, context: Any) -> AsyncIterator[Any]:
        async for message in (self.answering or short_answer)(request, context):
            if message.HasField("started"):
                message.seq = after_seq
            if message.seq > after_seq or not message.delta.num_tokens:
                yield message

    async def GetGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.request_id not in self.known:
            await refuse(context, NotFound("request", request.request_id))
        generation = pb.Generation(request_id=request.request_id, state=pb.Generation.STATE_FAILED, last_seq=2)
        generation.result.CopyFrom(pb.GenerateResponse(model="m", outputs=[pb.Output(text="ab", token_ids=[97, 98])]))
        generation.create_time.FromSeconds(1_000)
        generation.expire_time.FromSeconds(5_000)
        generation.error.CopyFrom(to_status(DeadlineExceeded().detail))
        generation.transitions.add(state=pb.Generation.STATE_QUEUED, attempt=1).time.FromSeconds(1_000)
        generation.transitions.add(state=pb.Generation.STATE_FAILED, attempt=1).time.FromSeconds(1_400)
        return generation

    async def CancelGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cancelled.append(request.request_id)
        self.was_cancelled.set()
        return pb.CancelGenerationResponse(status=pb.CancelGenerationResponse.STATUS_CANCELLED)

    async def Score(self, request: Any, context: Any) -> Any:  # noqa: N802
        texts = [item.text or "".join(map(chr, item.token_ids.ids)) for item in request.continuations]
        return pb.ScoreResponse(model=request.prompt, scores=[pb.Score(logprob=-len(text)) for text in texts])

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        values = [request.pooling, request.dimensions, request.normalize]
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=[len(item.text), *values]) for item in request.inputs])

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


class TokenRecorder(grpc.aio.ServerInterceptor):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        brought = [str(value) for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        self._script.authorized.append((handler_call_details.method.rpartition("/")[2], brought))
        return await continuation(handler_call_details)


async def refuse(context: Any, error: ServiceError | grpc.StatusCode) -> NoReturn:
    if isinstance(error, grpc.StatusCode):
        await context.abort(error, "as gRPC says it")
        raise AssertionError
    context.set_trailing_metadata(trailers(error.detail))
    await context.abort(error.code, error.detail.message)
    raise AssertionError


def started(request: pb.GenerateRequest, prompt_tokens: int = 3) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id,
        started=pb.Started(model="m", prompt_tokens=prompt_tokens, seed=7),
    )


def delta(request: pb.GenerateRequest, seq: int, text: str) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id,
        seq=seq,
        delta=pb.Delta(text=text, num_tokens=1, token_ids=[ord(text)] if request.response.token_ids else []),
    )


def finished(request: pb.GenerateRequest, seq: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request.request_id,
        seq=seq,
        finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP, eos_token_id=2),
        usage=pb.Usage(prompt_tokens=3, completion_tokens=seq, total_tokens=3 + seq),
        receipt=pb.Receipt(ttft_ms=5.0, decode_ms=2.0, e2e_ms=9.0, prefill_worker="p", decode_worker="d", attempts=1),
    )


async def short_answer(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    yield started(request)
    for seq, letter in enumerate("abc", 1):
        yield delta(request, seq, letter)
    yield finished(request, 3)


async def with_a_tail(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    yield started(request)
    for seq, letter in enumerate("abc", 1):
        yield delta(request, seq, letter)
    yield pb.GenerateStreamResponse(request_id=request.request_id, seq=3, delta=pb.Delta(text="!"))
    yield finished(request, 3)


async def endless_answer(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    yield started(request)
    yield delta(request, 1, "a")
    yield delta(request, 2, "b")
    await asyncio.Event().wait()


async def never(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    await asyncio.Event().wait()
    yield started(request)


@asynccontextmanager
async def _serving(script: Script, port: int, host: str, options: Options) -> AsyncIterator[str]:
    server, readiness = grpc.aio.server(interceptors=[TokenRecorder(script)], options=options), Readiness()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(readiness, []), server)
    if script.is_ready:
        readiness.mark_ready()
    address = f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
    await server.start()
    try:
        yield address
    finally:
        readiness.mark_stopped()  # ends watches
        await server.stop(None)


@contextmanager
def serving(script: Script, port: int = 0, host: str = "127.0.0.1", options: Options = ()) -> Iterator[str]:
    with on_a_thread(_serving(script, port, host, options)) as address:
        yield address
