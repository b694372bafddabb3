"""The public gRPC service: calls in, answers out, and nothing decided here.

    GenerateStream --validate--> ValidRequest --begin--> Course --Answer--> messages, then OK or the course's error
    ResumeStream ---------------- id ---------resume------^  |
                                                             |
          the client leaves before the end ------------------'--> stream_lost

Nothing is sent before the first token, not even metadata: until then a client's gRPC may try again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.router.api.auth import AuthenticatedCall, Authenticator, for_callers
from decant.router.api.get_generation import generation
from decant.router.api.response_writer import ResponseWriter
from decant.router.api.tokenizing import detokenize, tokenize
from decant.router.api.usage import RequestMeter, account_of
from decant.router.api.validation import UNIMPLEMENTED_FIELDS, check_known, validate
from decant.router.execution.reader_lease import ReaderLease, begin_behind
from decant.router.execution.stored import RequestSnapshot
from decant.router.execution.token_stream import Finish, TokenStream
from decant.router.execution.valid_request import ValidRequest
from decant.router.limits import check_id, check_size
from decant.router.text.prompt import ASSUMED_CONTEXT_LENGTH, context_length_of
from decant.router.text.served_model import Models, ServedModel
from decant.runtime.channel import Deadline
from decant.runtime.errors import Cancelled, InvalidArgument, NotFound, ServiceError
from decant.runtime.interceptor import ClientDisconnected
from decant.runtime.metrics import RequestMetrics
from decant.runtime.server import Service
from decant.state.ids import Incarnation, RequestKey

_CANCELLED = pb.CancelGenerationResponse.STATUS_CANCELLED
_ALREADY_FINISHED = pb.CancelGenerationResponse.STATUS_ALREADY_FINISHED
_UNKNOWN = pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST
_LEFT = "left"

_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

_Named = pb.ResumeStreamRequest | pb.GetGenerationRequest | pb.CancelGenerationRequest


class RequestRegistry(Protocol):
    """Who runs requests."""

    async def begin(self, request: ValidRequest) -> TokenStream:
        """The course of this request, or of an equal one of this id.

        Raises QueueFull, AlreadyExists, Unavailable, DeadlineExceeded."""

    async def resume(self, key: RequestKey) -> TokenStream:
        """The course of a request that was accepted, to be read again. Raises NotFound, Unavailable."""

    async def look(self, key: RequestKey) -> RequestSnapshot:
        """How a request stands. Raises NotFound, Unavailable."""

    async def cancel(self, key: RequestKey) -> Finish | ServiceError:
        """How it has ended, by this call or before. Raises NotFound, Unavailable."""

    def stream_lost(self, course: TokenStream) -> None:
        """The client's stream ended without CancelGeneration."""

    def max_context_length(self, model: str) -> int | None:
        """The least window that the model's live workers serve; None while there are none."""

    async def check_wait(self, key: RequestKey, model: str, priority: int, deadline: Deadline) -> None:
        """Raises QueueFull for a new request that would have to wait behind too many, or for longer than it may."""

    def booked(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Counts a call that needs no worker among its tenant's requests at work. Raises QuotaExceeded."""


@dataclass(frozen=True)
class ServerInfoSource:
    """What a router says of itself."""

    incarnation: Incarnation
    version: str
    limits: pb.Limits
    store_available: Callable[[], bool]
    draining: Callable[[], bool]


class InferenceService:
    """``decant.v1.InferenceService``, but for what the interceptor does: errors become statuses there. Whoever calls
    a method is known by then."""

    def __init__(
        self, models: Models, dispatcher: RequestRegistry, about: ServerInfoSource, metrics: RequestMetrics
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._about = about
        self._metrics = {id: metrics.of(id) for id in models.by_id}

    def service(self, callers: Authenticator) -> Service:
        """As a server takes it; a draining one refuses new requests."""
        known = for_callers(self, _SERVICE, callers)
        return Service(
            _SERVICE,
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(known, server),
            entrances=frozenset({"Generate", "GenerateStream"}),
        )

    # ------------------------------------------------------------------------------------------ generating

    async def GenerateStream(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        await self._stream(await self._begin(request, call), 0, call)

    async def Generate(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> pb.GenerateResponse:  # noqa: N802
        course = await self._begin(request, call)
        with self._followed(course) as follower:
            await begin_behind(course, 0)
            response, follower.ended = await ResponseWriter(course, self._model(course)).whole(follower.account)
        return response

    async def ResumeStream(self, request: pb.ResumeStreamRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        key = _key_of(request, call)
        await self._stream(await self._dispatcher.resume(key), request.after_seq, call)

    async def _begin(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> TokenStream:
        tenant, deadline = call.tenant, Deadline.of(call.context)
        model = tenant.models.find(request.model).id
        # Before any work on it: under overload most of a router's time would go into what it then refuses.
        check_id(request.request_id)
        key = RequestKey(tenant.name, request.request_id)
        await self._dispatcher.check_wait(key, model, request.priority, deadline)
        valid = await validate(request, tenant.models, self._dispatcher.max_context_length, deadline, tenant.name)
        return await self._dispatcher.begin(valid)

    async def _stream(self, course: TokenStream, after_seq: int, call: AuthenticatedCall) -> None:
        with self._followed(course) as follower:
            await begin_behind(course, after_seq)
            answer = ResponseWriter(course, self._model(course), after_seq)
            follower.ended = await answer.stream(follower.reading.watched(call.context.write), follower.account)

    def _model(self, course: TokenStream) -> ServedModel:
        return self._models.by_id[course.request.engine_request.model]

    @contextmanager
    def _followed(self, course: TokenStream) -> Iterator[_ReaderResult]:
        """While a client follows a course. One who leaves before its end has lost it, unless its time was over or
        somebody else follows it by now."""
        reading = ReaderLease(course)
        follower = _ReaderResult(reading, account_of(course, self._metrics[course.request.engine_request.model]))
        outcome = _LEFT
        try:
            with reading:
                yield follower
            outcome = pb.FinishReason.Name(follower.ended.reason) if follower.ended else _LEFT
        except ServiceError as error:
            outcome = error.label
            raise
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise ClientDisconnected from error
        finally:
            if course.end is None and reading.is_last and not course.request.deadline.is_over:
                self._dispatcher.stream_lost(course)
            follower.account.close(outcome)

    # ------------------------------------------------------------------------------------------ coming back

    async def GetGeneration(self, request: pb.GetGenerationRequest, call: AuthenticatedCall) -> pb.Generation:  # noqa: N802
        standing = await self._dispatcher.look(_key_of(request, call))
        return await generation(standing, self._model(standing.course))

    async def CancelGeneration(  # noqa: N802
        self, request: pb.CancelGenerationRequest, call: AuthenticatedCall
    ) -> pb.CancelGenerationResponse:
        try:
            end = await self._dispatcher.cancel(_key_of(request, call))
        except NotFound:
            return pb.CancelGenerationResponse(status=_UNKNOWN)
        status = _CANCELLED if isinstance(end, Cancelled) else _ALREADY_FINISHED
        return pb.CancelGenerationResponse(status=status)

    # ------------------------------------------------------------------------------------------ words, models

    async def Tokenize(self, request: pb.TokenizeRequest, call: AuthenticatedCall) -> pb.TokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._dispatcher.booked(call.tenant.name):
            return await tokenize(request, model, self._longest(model), Deadline.of(call.context))

    async def Detokenize(self, request: pb.DetokenizeRequest, call: AuthenticatedCall) -> pb.DetokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._dispatcher.booked(call.tenant.name):
            return await detokenize(request, model, self._longest(model), Deadline.of(call.context))

    def _longest(self, model: ServedModel) -> int:
        return context_length_of(model, self._dispatcher.max_context_length) or ASSUMED_CONTEXT_LENGTH

    async def ListModels(self, request: pb.ListModelsRequest, call: AuthenticatedCall) -> pb.ListModelsResponse:  # noqa: N802
        check_known(request)
        return pb.ListModelsResponse(models=[self._described(model) for model in call.tenant.models.by_id.values()])

    async def GetModel(self, request: pb.GetModelRequest, call: AuthenticatedCall) -> pb.Model:  # noqa: N802
        check_known(request)
        return self._described(call.tenant.models.find(request.model))

    def _described(self, model: ServedModel) -> pb.Model:
        """Lengths are 0 where only workers could tell them, and there are none."""
        longest = context_length_of(model, self._dispatcher.max_context_length) or 0
        return pb.Model(
            id=model.id,
            max_context_length=longest,
            max_output_tokens=max(0, longest - 1),
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling=model.default_sampling,
            revision=model.revision,
            has_chat_template=model.has_chat_template,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: AuthenticatedCall) -> pb.ServerInfo:  # noqa: N802
        check_known(request)
        about = self._about
        return pb.ServerInfo(
            version=about.version,
            router_id=about.incarnation.id,
            default_model=call.tenant.models.default.id,
            limits=about.limits,
            unimplemented_fields=UNIMPLEMENTED_FIELDS,
            state_store_available=about.store_available(),
            draining=about.draining(),
        )


@dataclass(slots=True)
class _ReaderResult:
    """Who reads a course, and how it ended for him."""

    reading: ReaderLease
    account: RequestMeter
    ended: Finish | None = None


def _key_of(request: _Named, call: AuthenticatedCall) -> RequestKey:
    """Of the caller's own request. Raises InvalidArgument for an id that no request has."""
    check_known(request)
    if not request.request_id:
        raise InvalidArgument("request_id", "at least 1 byte", 0)
    check_id(request.request_id)
    return RequestKey(call.tenant.name, request.request_id)
