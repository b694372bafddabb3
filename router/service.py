"""The public gRPC service: calls in, answers out, and nothing decided here.

    GenerateStream --validate--> ValidRequest --begin--> Course --Answer--> messages, then OK or the course's error
                                                 |
          the client leaves before the end ------'--> stream_lost

Nothing is sent before the first token, not even metadata: until then a client's gRPC may try again elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.account import Account
from router.answer import Answer
from router.limits import MAX_REQUEST_BYTES, at_most
from router.models import Models, ServedModel
from router.request import Course, Ended, ValidRequest
from router.validation import (
    TENANT,
    UNIMPLEMENTED_FIELDS,
    check_known,
    check_vocabulary,
    refuse_messages,
    validate,
    window,
)
from runtime.channel import Deadline
from runtime.errors import InvalidArgument, ServiceError, Unavailable, Unimplemented
from runtime.fault import Reason
from runtime.interceptor import Gone
from runtime.metrics import RequestMetrics
from runtime.server import Service
from state.errors import NotYetKnown, StoreUnavailable, UnknownRequest
from state.names import Life, RequestKey
from state.owned import StoredRequest
from state.requests import Requests

RETRY_SECONDS = 1.0
_CANCELLED = pb.CancelGenerationResponse.STATUS_CANCELLED
_ALREADY_FINISHED = pb.CancelGenerationResponse.STATUS_ALREADY_FINISHED
_UNKNOWN = pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST
_LEFT = "left"

_Context = grpc.aio.ServicerContext[Any, Any]


class Dispatcher(Protocol):
    """Who runs requests."""

    async def begin(self, request: ValidRequest) -> Course:
        """Raises QueueFull, AlreadyExists, Unavailable, DeadlineExceeded, Unimplemented."""

    def cancel(self, key: RequestKey) -> bool:
        """Whether it ran here."""

    def stream_lost(self, course: Course) -> None:
        """The client's stream ended without CancelGeneration."""

    def window_of(self, model: str) -> int | None:
        """The least window that the model's live workers serve; None while there are none."""


LookUp = Callable[[RequestKey], Awaitable[StoredRequest | None]]
"""A request as the store has it; None for one that it doesn't know. Raises Unavailable."""


@dataclass(frozen=True)
class About:
    """What a router says of itself."""

    life: Life
    version: str
    limits: pb.Limits
    store_available: Callable[[], bool]
    draining: Callable[[], bool]


def found_in(requests: Requests) -> LookUp:
    """Looks requests up in the store."""

    async def look_up(key: RequestKey) -> StoredRequest | None:
        try:
            return await requests.read(key)
        except UnknownRequest:
            return None
        except NotYetKnown as error:
            raise Unavailable(Reason.STATE_STORE_AWAY, str(error), retry_after=error.retry_after_s) from None
        except StoreUnavailable:
            text = "the state store is away"
            raise Unavailable(Reason.STATE_STORE_AWAY, text, retry_after=RETRY_SECONDS) from None

    return look_up


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """``decant.v1.InferenceService``, but for what the interceptor does: errors become statuses there."""

    def __init__(
        self, models: Models, dispatcher: Dispatcher, look_up: LookUp, about: About, metrics: RequestMetrics
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._look_up = look_up
        self._about = about
        self._metrics = {id: metrics.of(id) for id in models.by_id}

    def service(self) -> Service:
        """As a server takes it; a draining one refuses new requests."""
        return Service(
            pb.DESCRIPTOR.services_by_name["InferenceService"],
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server),
            entrances=frozenset({"Generate", "GenerateStream"}),
        )

    # ------------------------------------------------------------------------------------------ generating

    async def GenerateStream(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        course, answer = await self._begin(request, context)
        with self._followed(course) as follower:
            follower.ended = await answer.stream(context.write, follower.account)

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> pb.GenerateResponse:  # noqa: N802
        course, answer = await self._begin(request, context)
        with self._followed(course) as follower:
            response, follower.ended = await answer.whole(follower.account)
        return response

    async def _begin(self, request: pb.GenerateRequest, context: _Context) -> tuple[Course, Answer]:
        valid = await validate(request, self._models, self._dispatcher.window_of, Deadline.of(context))
        course = await self._dispatcher.begin(valid)
        return course, Answer(course, self._models.by_id[valid.work.model])

    @contextmanager
    def _followed(self, course: Course) -> Iterator[_Follower]:
        """While a client follows a course. One who leaves before its end has lost it, unless its time was over."""
        follower = _Follower(Account(course, self._metrics[course.request.work.model]))
        outcome = _LEFT
        try:
            yield follower
            outcome = pb.FinishReason.Name(follower.ended.reason) if follower.ended else _LEFT
        except ServiceError as error:
            outcome = error.label
            raise
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise Gone from error
        finally:
            if course.end is None and not course.request.deadline.is_over:
                self._dispatcher.stream_lost(course)
            follower.account.close(outcome)

    async def CancelGeneration(  # noqa: N802
        self, request: pb.CancelGenerationRequest, context: _Context
    ) -> pb.CancelGenerationResponse:
        check_known(request)
        if not request.request_id:
            raise InvalidArgument("request_id", "at least 1 byte", 0)
        key = RequestKey(TENANT, request.request_id)
        if self._dispatcher.cancel(key):
            return pb.CancelGenerationResponse(status=_CANCELLED)
        found = await self._look_up(key)
        if found is None:
            return pb.CancelGenerationResponse(status=_UNKNOWN)
        if not found.ended and found.owner != self._about.life:
            raise Unimplemented("InferenceService.CancelGeneration", f"a request of router {found.owner.id}")
        # What was this router's and runs no more has ended, whether or not that is written yet.
        cancelled = found.state == pb.Generation.STATE_CANCELLED
        return pb.CancelGenerationResponse(status=_CANCELLED if cancelled else _ALREADY_FINISHED)

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: _Context) -> None:  # noqa: N802
        raise Unimplemented("InferenceService.ResumeStream")

    async def GetGeneration(self, request: pb.GetGenerationRequest, context: _Context) -> pb.Generation:  # noqa: N802
        raise Unimplemented("InferenceService.GetGeneration")

    # ------------------------------------------------------------------------------------------ words, models

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:  # noqa: N802
        check_known(request)
        at_most("TokenizeRequest", request.ByteSize(), MAX_REQUEST_BYTES, "bytes")
        model = self._models.find(request.model)
        match request.WhichOneof("input"):
            case "messages":
                refuse_messages(model, "TokenizeRequest.messages")
            case None:
                raise InvalidArgument("text", "a text", "none")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await model.encode(request.text, special=special)
        tokens = [model.words.bytes_of(id).decode(errors="replace") for id in ids] if request.return_tokens else ()
        return pb.TokenizeResponse(count=len(ids), token_ids=ids, tokens=tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:  # noqa: N802
        check_known(request)
        at_most("DetokenizeRequest", request.ByteSize(), MAX_REQUEST_BYTES, "bytes")
        model = self._models.find(request.model)
        check_vocabulary("token_ids", request.token_ids, model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await model.decode(list(request.token_ids), skip_special_tokens=skip))

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:  # noqa: N802
        return pb.ListModelsResponse(models=[self._described(model) for model in self._models.by_id.values()])

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.Model:  # noqa: N802
        return self._described(self._models.find(request.model))

    def _described(self, model: ServedModel) -> pb.Model:
        """Lengths are 0 where only workers could tell them, and there are none."""
        longest = window(model, self._dispatcher.window_of) or 0
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

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.ServerInfo:  # noqa: N802
        about = self._about
        return pb.ServerInfo(
            version=about.version,
            router_id=about.life.id,
            default_model=self._models.default.id,
            limits=about.limits,
            unimplemented_fields=UNIMPLEMENTED_FIELDS,
            state_store_available=about.store_available(),
            draining=about.draining(),
        )


@dataclass(slots=True)
class _Follower:
    """Who reads a course, and how it ended for him."""

    account: Account
    ended: Ended | None = None
