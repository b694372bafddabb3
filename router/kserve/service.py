"""The service ``inference.GRPCInferenceService`` (docs/guides/gateways.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.protos.kserve import grpc_service_pb2_grpc
from decant.router.api.adapter_names import AdapterNames
from decant.router.api.auth import AuthenticatedCall, Authenticator, authenticated
from decant.router.api.generation_calls import GenerationCalls, call_span
from decant.router.execution.registry import RequestRegistry
from decant.router.kserve.requests import EMPTY_FINAL, check_version, generate_request, kserve_field_names
from decant.router.kserve.tensors import DATATYPES, STREAMING, TEXT_OUTPUT, text_response
from decant.router.text.served_model import ServedModel
from decant.runtime.background import task_group
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, Aborted, InvalidArgument, ServiceError, Unavailable
from decant.runtime.serving.server import Service

DRAIN_CHECK_S = 0.5
AT_ONCE = 64
"""Requests of one stream that run at the same time; the next is read when one has ended."""

_SERVICE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_Tensor = kserve.ModelMetadataResponse.TensorMetadata
_NamedModel = kserve.ModelReadyRequest | kserve.ModelMetadataRequest


class KServeService:
    """Implementation of the service; an interceptor of the server turns its errors into statuses."""

    def __init__(
        self,
        calls: GenerationCalls,
        registry: RequestRegistry,
        authenticator: Authenticator,
        version: str,
        is_ready: Callable[[], bool],
    ) -> None:
        self.authenticator = authenticator
        self._calls = calls
        self._registry = registry
        self._adapters = AdapterNames(registry)
        self._version = version
        self._is_ready = is_ready

    def service(self) -> Service:
        return Service(
            _SERVICE,
            lambda server: grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server),
            admission_methods=frozenset({"ModelInfer", "ModelStreamInfer"}),
        )

    async def ServerLive(self, request: kserve.ServerLiveRequest, context: Any) -> kserve.ServerLiveResponse:  # noqa: N802
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve.ServerReadyRequest, context: Any) -> kserve.ServerReadyResponse:  # noqa: N802
        return kserve.ServerReadyResponse(ready=self._is_ready())

    async def ServerMetadata(self, request: Any, context: Any) -> kserve.ServerMetadataResponse:  # noqa: N802
        return kserve.ServerMetadataResponse(name="decant", version=self._version)

    @authenticated
    async def ModelReady(  # noqa: N802
        self, request: kserve.ModelReadyRequest, call: AuthenticatedCall
    ) -> kserve.ModelReadyResponse:
        """Whether a worker serves the model, or a base with the adapter of that name."""
        model = self._model(request, call)
        is_served = self._registry.max_context_length(model.id) is not None
        return kserve.ModelReadyResponse(ready=is_served and self._is_ready())

    @authenticated
    async def ModelMetadata(  # noqa: N802
        self, request: kserve.ModelMetadataRequest, call: AuthenticatedCall
    ) -> kserve.ModelMetadataResponse:
        model = self._model(request, call)
        inputs = [_Tensor(name=name, datatype=kind, shape=[1]) for name, kind in DATATYPES.items() if name != STREAMING]
        outputs = [_Tensor(name=TEXT_OUTPUT, datatype="BYTES", shape=[-1])]
        return kserve.ModelMetadataResponse(
            name=request.name or model.id, versions=["1"], platform="decant", inputs=inputs, outputs=outputs
        )

    def _model(self, request: _NamedModel, call: AuthenticatedCall) -> ServedModel:
        check_version(request.name, request.version)
        base, _ = self._adapters.base_and_adapter(request.name, "", call.tenant.models)
        return call.tenant.models.find(base)

    @authenticated
    async def ModelInfer(  # noqa: N802
        self, request: kserve.ModelInferRequest, call: AuthenticatedCall
    ) -> kserve.ModelInferResponse:
        with call_span("ModelInfer", request.id, call) as span, kserve_field_names():
            own, streams = generate_request(request)
            if streams:
                raise InvalidArgument("stream", "false or unset: only ModelStreamInfer streams", True)
            answer = await self._calls.collect(await self._calls.begin(own, call, span), call)
            return text_response(request, [output.text for output in answer.outputs])

    @authenticated
    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[kserve.ModelInferRequest], call: AuthenticatedCall
    ) -> None:
        """Answer each request of the stream; an error of one is a message, and the stream goes on.

        Raises Unavailable(DRAINING) once the router drains and what it has begun is answered, Aborted(SLOW_READER) if
        the client reads no answer.
        """
        responses = _Responses(call, self._calls.unread_s)
        slots = asyncio.Semaphore(AT_ONCE)

        async def answer(request: kserve.ModelInferRequest) -> None:
            try:
                await self._answer(request, call, responses)
            finally:
                slots.release()

        async with task_group() as group:
            async for request in self._until_drain(requests):
                await slots.acquire()
                group.create_task(answer(request))
        if not self._is_ready():
            raise Unavailable(Reason.DRAINING, "this router drains", retry_after=RETRY_ELSEWHERE_SECONDS)

    async def _until_drain(
        self, requests: AsyncIterator[kserve.ModelInferRequest]
    ) -> AsyncIterator[kserve.ModelInferRequest]:
        incoming, end = aiter(requests), kserve.ModelInferRequest()
        while True:
            reading = asyncio.ensure_future(anext(incoming, end))
            try:
                while not reading.done() and self._is_ready():
                    await asyncio.wait([reading], timeout=DRAIN_CHECK_S)
            finally:
                reading.cancel()
            if reading.cancelled() or not reading.done() or (request := reading.result()) is end:
                return
            yield request

    async def _answer(self, request: kserve.ModelInferRequest, call: AuthenticatedCall, responses: _Responses) -> None:
        try:
            with call_span("ModelStreamInfer", request.id, call) as span, kserve_field_names():
                own, streams = generate_request(request)
                if streams:
                    with self._calls.keepalive.keep(call, own.request_id, responses.writer(request)) as kept:
                        stream = await self._calls.begin(own, call, span, kept)
                        await self._calls.stream(stream, (), call, kept.write)
                else:
                    answer = await self._calls.collect(await self._calls.begin(own, call, span), call)
                    await responses.send_last(text_response(request, [output.text for output in answer.outputs]))
        except ServiceError as error:
            if error.reason is Reason.SLOW_READER:
                raise
            response = kserve.ModelInferResponse(model_name=request.model_name, id=request.id)
            await responses.send_last(response, f"[{error.code.name}] {error.detail.message}")
            return
        if request.parameters[EMPTY_FINAL].bool_param:
            await responses.send_last(text_response(request, [], is_final=True))


class _Responses:
    """Responses of a stream."""

    def __init__(self, call: AuthenticatedCall, unread_s: float) -> None:
        self._call = call
        self._unread_s = unread_s

    async def send(self, response: kserve.ModelInferResponse, error: str = "") -> None:
        await self._call.write(kserve.ModelStreamInferResponse(error_message=error, infer_response=response))

    async def send_last(self, response: kserve.ModelInferResponse, error: str = "") -> None:
        """Send what ends a request. Raises Aborted(SLOW_READER)."""
        try:
            async with asyncio.timeout(self._unread_s):
                await self.send(response, error)
        except TimeoutError:
            detail = f"the client read no message for {self._unread_s:g} s after a request's end"
            raise Aborted(Reason.SLOW_READER, detail) from None

    def writer(self, request: kserve.ModelInferRequest) -> Any:
        async def write(message: pb.GenerateStreamResponse) -> None:
            if message.delta.text or message.HasField("waiting"):  # an empty piece is one that clients add like others
                await self.send(text_response(request, [message.delta.text], is_final=False))

        return write
