"""What the calls that generate have in common, in each protocol: begin a request, and read it for one client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from decant.protos import inference_pb2 as pb
from decant.router.admission.request_size import RequestSize, least_size
from decant.router.api.adapter_names import AdapterNames
from decant.router.api.auth import AuthenticatedCall
from decant.router.api.keepalive import KeptStream, StreamKeepalive
from decant.router.api.response_writer import ResponseWriter
from decant.router.api.usage import RequestMeter, meter_of
from decant.router.api.validation import validate
from decant.router.execution.registry import RequestRegistry
from decant.router.limits import check_id
from decant.router.request.output import Finish
from decant.router.request.reader_lease import ReaderLease, Write, wait_for_resume_point
from decant.router.request.token_stream import Counts, TokenStream
from decant.router.text.prompt import ASSUMED_CONTEXT_LENGTH, context_length_of, least_prompt_tokens
from decant.router.text.served_model import Models, ServedModel
from decant.router.timings import RouterTimings
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import NotFound, ServiceError
from decant.runtime.serving.interceptor import ClientDisconnected
from decant.runtime.telemetry import tracing
from decant.runtime.telemetry.metrics import RequestMetrics
from decant.runtime.telemetry.tracing import Span
from decant.state.ids import RequestKey

_LEFT = "left"

_Response = TypeVar("_Response")
_Respond = Callable[[ReaderLease, RequestMeter], Awaitable[tuple[_Response, Finish]]]


def call_span(method: str, request_id: str, call: AuthenticatedCall) -> Span:
    parent = tracing.parent_of(call.context.invocation_metadata())
    return tracing.span(method, parent, kind="server", request_id=request_id)


class GenerationCalls:
    """Each protocol's service maps its messages to and from those of ``decant.v1``, and owns nothing else."""

    def __init__(
        self,
        models: Models,
        registry: RequestRegistry,
        metrics: RequestMetrics,
        unread_s: float = RouterTimings().unread_s,
        keepalive_s: float = 0.0,
    ) -> None:
        self.keepalive = StreamKeepalive(keepalive_s, registry.progress)
        self._models = models
        self._registry = registry
        self._adapters = AdapterNames(registry)
        self.unread_s = unread_s
        self._metrics = {id: metrics.of(id) for id in models.by_id}

    async def begin(
        self, request: pb.GenerateRequest, call: AuthenticatedCall, span: Span, kept: KeptStream | None = None
    ) -> TokenStream:
        """Validate and admit a request of the call's tenant; a stream that is ``kept`` learns its key.

        Raises what `validate` and `RequestRegistry.begin` do.
        """
        tenant, deadline = call.tenant, Deadline.of(call.context)
        # Before any other work: an overloaded router must refuse a request cheaply.
        check_id(request.request_id)
        key = RequestKey(tenant.name, request.request_id)
        request = await self._with_adapter_of_model(request, key, tenant.models)
        served = tenant.models.find(request.model)
        model = served.id
        with self._count_refusals(model, tenant.name):
            least_tokens = least_prompt_tokens(request, served)
            await self._registry.wait_for_worker(key, model, least_tokens, deadline, call.send_acceptance)
            size = self._least_size(request, served)
            if size.prompt_tokens < self.context_length(served):  # a longer one is refused by its field below
                await self._registry.check_load(key, model, size, request.priority, deadline)
            adapter = await self._adapter_of(request.lora_name, model, key)
            with tracing.span("tokenize", span.traceparent):
                valid = await validate(request, tenant.models, self._registry.max_context_length, deadline, tenant.name)
            valid.engine_request.traceparent, valid.engine_request.adapter = span.traceparent, adapter
            if kept is not None:
                kept.key = valid.key
            span.set(model=model, tenant=tenant.name, request_id=valid.key.id, prompt_tokens=valid.prompt_tokens)
            return await self._registry.begin(valid, call.send_acceptance)

    async def stream(self, stream: TokenStream, sent: Counts, call: AuthenticatedCall, write: Write) -> None:
        """Write the messages after the tokens of each output that were ``sent``. Raises the request's error."""

        async def respond(lease: ReaderLease, meter: RequestMeter) -> tuple[None, Finish]:
            writer = ResponseWriter(stream, self.model_of(stream), sent)
            return None, await writer.stream(lease.watched(write), meter)

        await self._read(stream, sent, call, respond)

    async def collect(self, stream: TokenStream, call: AuthenticatedCall) -> pb.GenerateResponse:
        """Return the complete response. Raises the request's error."""

        async def respond(_: ReaderLease, meter: RequestMeter) -> tuple[pb.GenerateResponse, Finish]:
            return await ResponseWriter(stream, self.model_of(stream)).collect(meter)

        return await self._read(stream, (), call, respond)

    def model_of(self, stream: TokenStream) -> ServedModel:
        return self._models.by_id[stream.request.engine_request.model]

    def context_length(self, model: ServedModel) -> int:
        return context_length_of(model, self._registry.max_context_length) or ASSUMED_CONTEXT_LENGTH

    async def _with_adapter_of_model(
        self, request: pb.GenerateRequest, key: RequestKey, models: Models
    ) -> pb.GenerateRequest:
        """Name the base and the adapter of a request whose model is an adapter's name."""
        given = request.model, request.lora_name
        names = self._adapters.base_and_adapter(*given, models)
        if names == given and self._adapters.is_unknown(*names, models):
            accepted = await self._registry.find_accepted(key)
            if accepted is not None and accepted.adapter_name == request.model and accepted.model in models.by_id:
                names = accepted.model, accepted.adapter_name
        if names == given:
            return request
        named = pb.GenerateRequest()
        named.CopyFrom(request)
        named.model, named.lora_name = names
        return named

    async def _adapter_of(self, name: str, model: str, key: RequestKey) -> str:
        """Return the digest of the adapter with that name, empty for none. Raises NotFound.

        A name that is gone stands for what it stood for when the request was accepted, if it was.
        """
        try:
            return self._adapters.digest(name, model)
        except NotFound:
            accepted = await self._registry.find_accepted(key)
            if accepted is None or accepted.adapter_name != name:
                raise
            return accepted.adapter

    def _least_size(self, request: pb.GenerateRequest, model: ServedModel) -> RequestSize:
        return least_size(request, least_prompt_tokens(request, model), self.context_length(model))

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

    async def _read(
        self, stream: TokenStream, sent: Counts, call: AuthenticatedCall, respond: _Respond[_Response]
    ) -> _Response:
        """Make the call the stream's reader while ``respond`` answers it, and count how that ended."""
        lease = ReaderLease(stream, self.unread_s)
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
