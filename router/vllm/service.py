"""The service ``vllm.grpc.engine.VllmEngine`` (docs/guides/gateways.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from decant.protos.vllm import common_pb2 as common
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.protos.vllm import vllm_engine_pb2_grpc
from decant.router.api.auth import AuthenticatedCall, Authenticator, authenticated
from decant.router.api.generation_calls import GenerationCalls, call_span
from decant.router.api.keepalive import KeptStream
from decant.router.api.prompt_calls import PromptCalls
from decant.router.api.validation import check_known
from decant.router.execution.registry import RequestRegistry
from decant.router.limits import check_count, check_id
from decant.router.request.token_stream import TokenStream
from decant.router.text.served_model import ServedModel
from decant.router.vllm.engine_info import EngineInfoSource, model_info
from decant.router.vllm.kv_events import event_batch
from decant.router.vllm.metadata import TTL, CallMetadata, call_metadata
from decant.router.vllm.requests import embed_request, generate_request, vllm_field_names
from decant.router.vllm.responses import ChunkWriter, complete_responses, embed_response
from decant.router.vllm.tokenizer_archive import TokenizerArchive
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, DeadlineExceeded, NotFound, Unimplemented
from decant.runtime.serving.server import Service
from decant.runtime.telemetry.tracing import Span
from decant.state.ids import RequestKey

MAX_ABORTED = 1024
"""Requests that one `Abort` names."""

_SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]


def _refused(method: str, why: str) -> Callable[..., Awaitable[NoReturn]]:
    async def refuse(self: VllmEngineService, request: Any, context: Any) -> NoReturn:
        raise Unimplemented(method, "a call", limit=f"not implemented: {why}")

    return refuse


class VllmEngineService:
    """Implementation of the service; an interceptor of the server turns its errors into statuses."""

    def __init__(
        self,
        calls: GenerationCalls,
        registry: RequestRegistry,
        info: EngineInfoSource,
        authenticator: Authenticator,
        objectives: Mapping[str, int],
        prompts: PromptCalls,
    ) -> None:
        self.authenticator = authenticator
        self._calls = calls
        self._prompts = prompts
        self._registry = registry
        self._info = info
        self._objectives = objectives
        self._archives: dict[str, TokenizerArchive] = {}

    def service(self) -> Service:
        return Service(
            _SERVICE,
            lambda server: vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server),
            admission_methods=frozenset({"Generate", "Embed", "SubscribeKvEvents"}),
        )

    # Generation

    @authenticated
    async def Generate(self, request: vllm.GenerateRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        with call_span("VllmEngine.Generate", request.request_id, call) as span, vllm_field_names():
            if request.stream:
                with self._calls.keepalive.keep(call, request.request_id, ChunkWriter(call.write).write) as kept:
                    stream = await self._begin(request, call, span, kept)
                    await self._calls.stream(stream, (), call, kept.write)
                return
            stream = await self._begin(request, call, span)
            for response in complete_responses(await self._calls.collect(stream, call)):
                await call.write(response)

    async def _begin(
        self, request: vllm.GenerateRequest, call: AuthenticatedCall, span: Span, kept: KeptStream | None = None
    ) -> TokenStream:
        metadata = self._metadata(call)
        own = generate_request(request, metadata)
        try:
            async with asyncio.timeout(metadata.queue_s) as limit:
                return await self._calls.begin(own, call, span, kept)
        except TimeoutError:
            if not limit.expired():
                raise
            if request.request_id:  # a request without an id has ended with this call
                await self._cancel(call, request.request_id)
            raise DeadlineExceeded(f"{TTL}: the request waited for {metadata.queue_s:g} s") from None

    @authenticated
    async def Abort(self, request: vllm.AbortRequest, call: AuthenticatedCall) -> vllm.AbortResponse:  # noqa: N802
        check_known(request)
        check_count("request_ids", len(request.request_ids), MAX_ABORTED, "ids")
        for id in request.request_ids:
            check_id(id)
        await asyncio.gather(*(self._cancel(call, id) for id in request.request_ids))
        return vllm.AbortResponse()

    async def _cancel(self, call: AuthenticatedCall, id: str) -> None:
        with suppress(NotFound):
            await self._registry.cancel(RequestKey(call.tenant.name, id))

    @authenticated
    async def Embed(self, request: vllm.EmbedRequest, call: AuthenticatedCall) -> vllm.EmbedResponse:  # noqa: N802
        with call_span("VllmEngine.Embed", request.request_id, call) as span, vllm_field_names():
            response = await self._prompts.embed(embed_request(request, self._metadata(call)), call, span)
            return embed_response(response)

    # Model, server, load

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:  # noqa: N802
        is_ready = self._info.is_ready()
        return vllm.HealthCheckResponse(healthy=is_ready, message="ready" if is_ready else "not ready")

    @authenticated
    async def GetModelInfo(  # noqa: N802
        self, request: vllm.GetModelInfoRequest, call: AuthenticatedCall
    ) -> vllm.GetModelInfoResponse:
        check_known(request)
        model = self._model(call)
        return await asyncio.to_thread(model_info, model, self._calls.context_length(model))

    @authenticated
    async def GetServerInfo(  # noqa: N802
        self, request: vllm.GetServerInfoRequest, call: AuthenticatedCall
    ) -> vllm.GetServerInfoResponse:
        check_known(request)
        return self._info.server_info(self._model(call).id)

    @authenticated
    async def GetLoads(self, request: vllm.GetLoadsRequest, call: AuthenticatedCall) -> vllm.GetLoadsResponse:  # noqa: N802
        check_known(request)
        return self._info.loads(self._model(call).id)

    @authenticated
    async def GetTokenizer(self, request: common.GetTokenizerRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        check_known(request)
        model = self._model(call)
        if (archive := self._archives.get(model.id)) is None:
            archive = self._archives[model.id] = await asyncio.to_thread(TokenizerArchive.of, model.folder)
        *chunks, last = archive.chunks()
        for chunk in chunks:
            await call.context.write(common.GetTokenizerChunk(data=chunk))
        await call.context.write(common.GetTokenizerChunk(data=last, sha256=archive.sha256))

    @authenticated
    async def SubscribeKvEvents(  # noqa: N802
        self, request: common.SubscribeKvEventsRequest, call: AuthenticatedCall
    ) -> None:
        """Write the events of the tenant's blocks of one model until the client leaves.

        No batch has a load record, so `load_records_before_first_batch` changes nothing. Raises what
        `KvEvents.subscribe` and `Subscription.next` do, and Aborted(SLOW_READER) if the client reads no message.
        """
        check_known(request)
        model = self._model(call)
        kv_events, after = self._registry.kv_events, request.start_sequence_number
        with kv_events.subscribe(model.id, call.tenant.name, after) as subscription:
            await call.send_acceptance()
            while True:
                message = event_batch(await subscription.next())
                try:
                    async with asyncio.timeout(self._calls.unread_s):
                        await call.write(message)
                except TimeoutError:
                    detail = f"the client read no message for {self._calls.unread_s:g} s"
                    raise Aborted(Reason.SLOW_READER, detail) from None

    def _metadata(self, call: AuthenticatedCall) -> CallMetadata:
        return call_metadata(call.context.invocation_metadata() or (), self._objectives)

    def _model(self, call: AuthenticatedCall) -> ServedModel:
        return call.tenant.models.find(self._metadata(call).model)

    # What this server does not do

    FlushCache = _refused("FlushCache", "a prefix cache empties itself as its blocks are needed")
    StartProfile = _refused("StartProfile", "workers have no profiler")
    StopProfile = _refused("StopProfile", "workers have no profiler")
