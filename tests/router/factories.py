from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from decant import models as trained
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import RequestRecord
from decant.router.admission.request_size import RequestSize
from decant.router.api.auth import DEFAULT_TENANT
from decant.router.api.validation import validate
from decant.router.execution.registry import AcceptedAdapter
from decant.router.kv_events.publisher import KvEvents, NoKvEvents
from decant.router.prompt_runs.prompt_run import ComputedPrompt
from decant.router.prompt_runs.runner import PromptBatch
from decant.router.request.output import Finish, Output
from decant.router.request.stored import RequestSnapshot
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.text.served_model import Models, ServedModel, served
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import Cancelled, NotFound, ServiceError
from decant.runtime.model_files import find
from decant.runtime.packed import unpack
from decant.state.ids import RequestKey


@cache
def tiny() -> ServedModel:
    return served(find(str(trained.path())))


def model(**changes: Any) -> ServedModel:
    return replace(tiny(), **changes)


def context_length(tokens: int | None) -> Any:
    return lambda _: tokens


async def valid(
    *,
    served: ServedModel | None = None,
    workers_context_length: int | None = None,
    deadline: Deadline = Deadline(),  # noqa: B008 - it has no state
    **fields: Any,
) -> ValidRequest:
    if not {"token_ids", "messages", "prompt"} & fields.keys():
        fields["prompt"] = "def f(x):"
    request = pb.GenerateRequest(**fields)
    return await validate(
        request, Models([served or tiny()]), context_length(workers_context_length), deadline, DEFAULT_TENANT
    )


def write(stream: TokenStream, *tokens: int, end: Finish | ServiceError | None = None) -> None:
    """Append tokens and an end to a stream, as an output and the execution do."""
    stream.outputs[0].tokens += tokens
    if stream.request.output_options.logprobs is not None:
        stream.outputs[0].logprobs.extend(logprobs(stream.request.output_options.logprobs, token) for token in tokens)
    stream.outputs[0].last_token_at = asyncio.get_running_loop().time()
    if stream.end is None and isinstance(end, Finish):
        for output in stream.outputs:
            output.finish = output.finish or end
    stream.end = stream.end or end
    stream.notify()


def begin_writing(stream: TokenStream) -> Output:
    stream.begin_writing()
    return stream.outputs[0]


def logprobs(alternatives: int, token: int) -> wire.TokenLogprobs:
    ids = range(token, token + alternatives)
    return wire.TokenLogprobs(
        logprob=-0.5, rank=1, top_ids=ids, top_logprobs=[-0.5 - place for place in range(alternatives)]
    )


STOPPED = Finish(pb.FINISH_REASON_STOP, eos_token_id=1)
AT_LENGTH = Finish(pb.FINISH_REASON_LENGTH)


class ScriptedPrompts:
    """Computes the prompts of `Score` and `Embed` calls: the log-probability of position n is -n."""

    def __init__(self) -> None:
        self.batches: list[PromptBatch] = []

    async def run(self, batch: PromptBatch, on_accepted: Callable[[], Awaitable[None]]) -> list[ComputedPrompt]:
        self.batches.append(batch)
        await on_accepted()
        return [self._compute(request) for request in batch.requests]

    def _compute(self, request: wire.EngineRequest) -> ComputedPrompt:
        computed = ComputedPrompt()
        computed.cached_tokens = 2
        if request.HasField("embedding"):
            computed.embedding = struct.pack("<2f", len(unpack(request.prompt)), 0.5)
        else:
            positions = range(request.prompt_logprobs_from, len(unpack(request.prompt)))
            computed.logprobs = [wire.TokenLogprobs(logprob=-position, rank=1) for position in positions]
        return computed


class ScriptedRegistry:
    def __init__(self) -> None:
        self.streams: asyncio.Queue[TokenStream] = asyncio.Queue()
        self.lost: asyncio.Queue[TokenStream] = asyncio.Queue()
        self.known: dict[RequestKey, TokenStream] = {}
        self.context_length: int | None = None
        self.refusal: ServiceError | None = None
        self.quota_tenants: list[str] = []
        """Tenants of calls that need no worker."""
        self.prompts = ScriptedPrompts()
        self.known_adapters: list[wire.Adapter] = []
        self.kv_events: KvEvents = NoKvEvents()
        self.plan: Callable[[TokenStream], Any] = lambda stream: None

    async def begin(self, request: ValidRequest, on_waiting: Any = None) -> TokenStream:
        if self.refusal is not None:
            raise self.refusal
        stream = TokenStream(request)
        self.known[request.key] = stream
        self.plan(stream)
        self.streams.put_nowait(stream)
        return stream

    async def resume(self, key: RequestKey, on_waiting: Any = None) -> TokenStream:
        try:
            return self.known[key]
        except KeyError:
            raise NotFound("request", key.id) from None

    async def get(self, key: RequestKey) -> RequestSnapshot:
        stream = await self.resume(key)
        return RequestSnapshot(
            stream, pb.Generation.STATE_DECODING, RequestRecord(), None if stream.end is None else 60.0
        )

    async def cancel(self, key: RequestKey) -> Finish | ServiceError:
        stream = await self.resume(key)
        write(stream, end=Cancelled())
        assert stream.end is not None
        return stream.end

    def progress(self, key: RequestKey) -> pb.Waiting:
        return pb.Waiting(state=pb.Generation.STATE_QUEUED, attempt=1)

    def on_disconnect(self, stream: TokenStream) -> None:
        self.lost.put_nowait(stream)

    def check_open(self, model: str) -> None:
        pass

    def max_context_length(self, model: str) -> int | None:
        return self.context_length

    def quantization(self, model: str) -> str:
        return "int4"

    def adapters(self, model: str) -> Mapping[str, wire.Adapter]:
        return {adapter.name: adapter for adapter in self.known_adapters}

    async def find_accepted(self, key: RequestKey) -> AcceptedAdapter | None:
        if (stream := self.known.get(key)) is None:
            return None
        accepted = stream.request.engine_request
        return AcceptedAdapter(accepted.model, stream.request.payload.lora_name, accepted.adapter)

    async def wait_for_worker(
        self, key: RequestKey, model: str, prompt_tokens: int, deadline: Deadline, on_waiting: Any = None
    ) -> None:
        pass

    async def check_load(
        self, key: RequestKey, model: str, size: RequestSize, priority: int, deadline: Deadline
    ) -> None:
        pass

    @asynccontextmanager
    async def hold_quota(self, tenant: str) -> AsyncIterator[None]:
        self.quota_tenants.append(tenant)
        yield


def unpacked(packed: bytes) -> list[int]:
    return list(unpack(packed))
