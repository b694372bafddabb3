"""The public gRPC service.

refused     only trailers: gRPC's own retries work until here
accepted    initial metadata at once, so that a proxy and the client know that the request waits here
first token messages
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.router.admission.request_size import RequestSize, least_size
from decant.router.api.auth import AuthenticatedCall, Authenticator, authenticated
from decant.router.api.get_generation import generation
from decant.router.api.response_writer import ResponseWriter
from decant.router.api.tokenizing import detokenize, tokenize
from decant.router.api.usage import RequestMeter, meter_of
from decant.router.api.validation import UNIMPLEMENTED_FIELDS, check_known, validate
from decant.router.execution.registry import RequestRegistry
from decant.router.limits import check_id, check_size
from decant.router.request.output import Finish
from decant.router.request.reader_lease import ReaderLease, wait_for_resume_point
from decant.router.request.token_stream import Counts, TokenStream
from decant.router.text.prompt import ASSUMED_CONTEXT_LENGTH, context_length_of, least_prompt_tokens
from decant.router.text.served_model import Models, ServedModel
from decant.router.timings import RouterTimings
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import Cancelled, InvalidArgument, NotFound, ServiceError
from decant.runtime.serving.interceptor import ClientDisconnected
from decant.runtime.serving.server import Service
from decant.runtime.telemetry import tracing
from decant.runtime.telemetry.metrics import RequestMetrics
from decant.runtime.telemetry.tracing import Span
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import returns_best

_CANCELLED = pb.CancelGenerationResponse.STATUS_CANCELLED
_ALREADY_FINISHED = pb.CancelGenerationResponse.STATUS_ALREADY_FINISHED
_UNKNOWN = pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST
_LEFT = "left"

_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

_Response = TypeVar("_Response")
_Respond = Callable[[ReaderLease, RequestMeter], Awaitable[tuple[_Response, Finish]]]
_ById = pb.ResumeStreamRequest | pb.GetGenerationRequest | pb.CancelGenerationRequest


@dataclass(frozen=True)
class ServerInfoSource:
    incarnation: Incarnation
    version: str
    limits: pb.Limits
    store_available: Callable[[], bool]
    draining: Callable[[], bool]


class InferenceService:
    """Implementation of the service; an interceptor of the server turns its errors into statuses."""

    def __init__(
        self,
        models: Models,
        registry: RequestRegistry,
        info: ServerInfoSource,
        metrics: RequestMetrics,
        authenticator: Authenticator,
        unread_s: float = RouterTimings().unread_s,
    ) -> None:
        self.authenticator = authenticator
        self._models = models
        self._registry = registry
        self._info = info
        self._unread_s = unread_s
        self._metrics = {id: metrics.of(id) for id in models.by_id}

    def service(self) -> Service:
        return Service(
            _SERVICE,
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server),
            admission_methods=frozenset({"Generate", "GenerateStream"}),
        )

    # Generation

    @authenticated
    async def GenerateStream(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        if returns_best(request):
            raise InvalidArgument("sampling.best_of", "at most sampling.n in a stream", request.sampling.best_of)
        with _span("GenerateStream", request.request_id, call) as span:
            await self._stream(await self._begin(request, call, span), (), call)

    @authenticated
    async def Generate(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> pb.GenerateResponse:  # noqa: N802
        with _span("Generate", request.request_id, call) as span:
            stream = await self._begin(request, call, span)

            async def respond(_: ReaderLease, meter: RequestMeter) -> tuple[pb.GenerateResponse, Finish]:
                return await ResponseWriter(stream, self._model(stream)).collect(meter)

            return await self._read(stream, (), call, respond)

    @authenticated
    async def ResumeStream(self, request: pb.ResumeStreamRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        key = _key_of(request, call)
        with _span("ResumeStream", key.id, call):
            stream = await self._registry.resume(key, call.send_acceptance)
            if returns_best(stream.request.payload):
                raise InvalidArgument("request_id", "that of a request without sampling.best_of", key.id)
            await self._stream(stream, _sent_counts(request, stream), call)

    async def _begin(self, request: pb.GenerateRequest, call: AuthenticatedCall, span: Span) -> TokenStream:
        tenant, deadline = call.tenant, Deadline.of(call.context)
        served = tenant.models.find(request.model)
        model = served.id
        # Before any other work: an overloaded router must refuse a request cheaply.
        check_id(request.request_id)
        key = RequestKey(tenant.name, request.request_id)
        with self._count_refusals(model, tenant.name):
            size = self._least_size(request, served)
            if size.prompt_tokens < self._context_length(served):  # a longer one is refused by its field below
                await self._registry.check_load(key, model, size, request.priority, deadline)
            with tracing.span("tokenize", span.traceparent):
                valid = await validate(request, tenant.models, self._registry.max_context_length, deadline, tenant.name)
            valid.engine_request.traceparent = span.traceparent
            span.set(model=model, tenant=tenant.name, request_id=valid.key.id, prompt_tokens=valid.prompt_tokens)
            return await self._registry.begin(valid, call.send_acceptance)

    def _least_size(self, request: pb.GenerateRequest, model: ServedModel) -> RequestSize:
        return least_size(request, least_prompt_tokens(request, model), self._context_length(model))

    @contextmanager
    def _count_refusals(self, model: str, tenant: str) -> Iterator[None]:
        metrics = self._metrics[model]
        try:
            yield
        except ServiceError as error:
            if error.reason in metrics.refused:
                metrics.refused[error.reason].inc()
                metrics.tenants.count_refusal(tenant)
            raise

    async def _stream(self, stream: TokenStream, sent: Counts, call: AuthenticatedCall) -> None:
        async def respond(lease: ReaderLease, meter: RequestMeter) -> tuple[None, Finish]:
            writer = ResponseWriter(stream, self._model(stream), sent)
            return None, await writer.stream(lease.watched(call.context.write), meter)

        await self._read(stream, sent, call, respond)

    def _model(self, stream: TokenStream) -> ServedModel:
        return self._models.by_id[stream.request.engine_request.model]

    async def _read(
        self, stream: TokenStream, sent: Counts, call: AuthenticatedCall, respond: _Respond[_Response]
    ) -> _Response:
        """Make the call the stream's reader while ``respond`` answers it, and count how that ended."""
        lease = ReaderLease(stream, self._unread_s)
        meter = meter_of(stream, self._metrics[stream.request.engine_request.model])
        outcome = _LEFT
        try:
            with lease:
                await call.send_acceptance()
                await wait_for_resume_point(stream, sent or [0] * len(stream.outputs))
                response, finish = await respond(lease, meter)
            outcome = pb.FinishReason.Name(finish.reason)
            return response
        except ServiceError as error:
            outcome = error.label
            raise
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise ClientDisconnected from error
        finally:
            if stream.end is None and lease.is_last and not stream.request.deadline.has_passed:
                self._registry.on_disconnect(stream)
            meter.close(outcome)

    # Accepted requests, by id

    @authenticated
    async def GetGeneration(self, request: pb.GetGenerationRequest, call: AuthenticatedCall) -> pb.Generation:  # noqa: N802
        snapshot = await self._registry.get(_key_of(request, call))
        return generation(snapshot, self._model(snapshot.stream))

    @authenticated
    async def CancelGeneration(  # noqa: N802
        self, request: pb.CancelGenerationRequest, call: AuthenticatedCall
    ) -> pb.CancelGenerationResponse:
        try:
            end = await self._registry.cancel(_key_of(request, call))
        except NotFound:
            return pb.CancelGenerationResponse(status=_UNKNOWN)
        status = _CANCELLED if isinstance(end, Cancelled) else _ALREADY_FINISHED
        return pb.CancelGenerationResponse(status=status)

    # Tokenizer, models, server

    @authenticated
    async def Tokenize(self, request: pb.TokenizeRequest, call: AuthenticatedCall) -> pb.TokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._registry.hold_quota(call.tenant.name):
            return await tokenize(request, model, self._context_length(model), Deadline.of(call.context))

    @authenticated
    async def Detokenize(self, request: pb.DetokenizeRequest, call: AuthenticatedCall) -> pb.DetokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._registry.hold_quota(call.tenant.name):
            return await detokenize(request, model, self._context_length(model), Deadline.of(call.context))

    def _context_length(self, model: ServedModel) -> int:
        return context_length_of(model, self._registry.max_context_length) or ASSUMED_CONTEXT_LENGTH

    @authenticated
    async def ListModels(self, request: pb.ListModelsRequest, call: AuthenticatedCall) -> pb.ListModelsResponse:  # noqa: N802
        check_known(request)
        return pb.ListModelsResponse(models=[self._model_proto(model) for model in call.tenant.models.by_id.values()])

    @authenticated
    async def GetModel(self, request: pb.GetModelRequest, call: AuthenticatedCall) -> pb.Model:  # noqa: N802
        check_known(request)
        return self._model_proto(call.tenant.models.find(request.model))

    def _model_proto(self, model: ServedModel) -> pb.Model:
        length = context_length_of(model, self._registry.max_context_length) or 0
        return pb.Model(
            id=model.id,
            max_context_length=length,
            max_output_tokens=max(0, length - 1),
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling=model.default_sampling,
            revision=model.revision,
            has_chat_template=model.has_chat_template,
        )

    @authenticated
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: AuthenticatedCall) -> pb.ServerInfo:  # noqa: N802
        check_known(request)
        info = self._info
        return pb.ServerInfo(
            version=info.version,
            router_id=info.incarnation.id,
            default_model=call.tenant.models.default.id,
            limits=info.limits,
            unimplemented_fields=UNIMPLEMENTED_FIELDS,
            state_store_available=info.store_available(),
            draining=info.draining(),
        )


def _span(method: str, request_id: str, call: AuthenticatedCall) -> Span:
    parent = tracing.parent_of(call.context.invocation_metadata())
    return tracing.span(method, parent, kind="server", request_id=request_id)


def _sent_counts(request: pb.ResumeStreamRequest, stream: TokenStream) -> Counts:
    """Tokens of each output that the client has. Raises InvalidArgument."""
    outputs, sent = len(stream.outputs), list(request.after_output_seqs)
    if not sent and outputs == 1:
        return [request.after_seq]
    if len(sent) > outputs:
        raise InvalidArgument("after_output_seqs", f"at most {outputs} numbers, one for each output", len(sent))
    sent += [0] * (outputs - len(sent))
    if sum(sent) != request.after_seq:
        raise InvalidArgument("after_output_seqs", f"numbers whose sum is after_seq {request.after_seq}", sum(sent))
    return sent


def _key_of(request: _ById, call: AuthenticatedCall) -> RequestKey:
    check_known(request)
    if not request.request_id:
        raise InvalidArgument("request_id", "at least 1 byte", 0)
    check_id(request.request_id)
    return RequestKey(call.tenant.name, request.request_id)
