"""Requests that this router doesn't run, as if it had: out of the store, with all that is written of them.

StoredRequest  payload --validate--> ValidRequest --.
               journal -----------------------------+--> Course, which a reader can't tell from one that ran here
               finished, error, usage, receipt -----'
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.api.validation import validate
from decant.router.execution.token_stream import Finish, TokenStream, ValidRequest
from decant.router.text.prompt import WindowOf
from decant.router.text.served_model import Models
from decant.runtime.channel import Deadline
from decant.runtime.error_details import Reason, from_status
from decant.runtime.errors import Cancelled, DeadlineExceeded, Internal, NotFound, ServiceError, Unavailable, from_fault
from decant.state.errors import StateError, StoreRefilling, UnknownRequest, UnreadableRequest
from decant.state.ids import RequestKey, State
from decant.state.owned import StoredRequest

RETRY_SECONDS = 1.0
_NO_LIMIT = 1 << 30
"""Tokens of a window that nobody has to serve any more."""

RestoreRequest = Callable[[StoredRequest], Awaitable[ValidRequest]]
"""The request as it was valid when it was accepted. Raises what a model that is served no more comes to."""


def reviver(models: Models, window_of: WindowOf) -> RestoreRequest:
    async def revive(found: StoredRequest) -> ValidRequest:
        asked = pb.GenerateRequest()
        asked.CopyFrom(found.payload)
        asked.model = found.record.model  # no name meant the default of its time and tenant
        asked.sampling.seed = found.record.seed
        window = (lambda _: _NO_LIMIT) if found.ended else window_of
        valid = await validate(asked, models, window, _deadline(found.record), found.key.tenant)
        return replace(valid, key=found.key, payload=found.payload, accepted_at=_accepted_at(found.record))

    return revive


def check_stored(found: StoredRequest, request: ValidRequest) -> None:
    """Raises UnreadableRequest for tokens that the request's model can't have written."""
    highest = max((entry.token for entry in found.entries), default=0)
    if highest >= request.vocab_size:
        raise UnreadableRequest(found.key, f"token ids below {request.vocab_size}, got {highest}")
    if any(entry.output for entry in found.entries):
        raise UnreadableRequest(found.key, "output 0 is the only one")


def store_error(error: StateError, key: RequestKey) -> ServiceError:
    """What a client learns who asked for a request that the store doesn't show."""
    match error:
        case UnknownRequest():
            return NotFound("request", key.id)
        case StoreRefilling():
            words = f"request {key.id} is not known yet: the state store is new, and still fills up"
            return Unavailable(Reason.STATE_STORE_AWAY, words, retry_after=error.retry_after_s)
        case UnreadableRequest():
            return Internal()
        case _:
            return Unavailable(Reason.STATE_STORE_AWAY, "the state store is away", retry_after=RETRY_SECONDS)


def course_of(found: StoredRequest, request: ValidRequest) -> TokenStream:
    """All that is written of it."""
    course = TokenStream(request, [entry.token for entry in found.entries])
    course.logprobs, course.prompt_logprobs = found.logprobs, found.prompt_logprobs
    if found.record.HasField("certain_seq"):
        course.certain = found.record.certain_seq
    return course


def replayed(found: StoredRequest, request: ValidRequest) -> TokenStream:
    """A course that nobody writes any more, as it stands in the store."""
    course = course_of(found, request)
    course.cached_tokens = found.record.cached_tokens
    course.recorded = found.record
    course.end = end_of(found)
    return course


def stored_as(end: Finish | ServiceError) -> tuple[State, pb.Finished | None]:
    """How an end is stored; `end_of` reads it again."""
    match end:
        case Finish():
            return Generation.STATE_SUCCEEDED, end.finished()
        case Cancelled():
            return Generation.STATE_CANCELLED, pb.Finished(finish_reason=pb.FINISH_REASON_CANCELLED)
        case DeadlineExceeded():
            return Generation.STATE_FAILED, pb.Finished(finish_reason=pb.FINISH_REASON_TIME_LIMIT)
        case _:
            return Generation.STATE_FAILED, None


def end_of(found: StoredRequest) -> Finish | ServiceError | None:
    """How a request ended, by what is stored; None for one that has not. Raises UnreadableRequest where it lacks."""
    if not found.ended:
        return None
    if found.state == Generation.STATE_CANCELLED:  # perhaps not yet recorded by whoever cancelled it
        return Cancelled()
    if found.state != Generation.STATE_SUCCEEDED:
        return from_fault(from_status(found.record.error))
    if not found.record.finished:
        raise UnreadableRequest(found.key, "how it ended is lacking")
    finished = found.record.finished[0]
    match = finished.WhichOneof("stop_match")
    return Finish(finished.finish_reason, **({match: getattr(finished, match)} if match else {}))


def _deadline(record: RequestRecord) -> Deadline:
    if not record.HasField("deadline"):
        return Deadline()
    return Deadline.after((record.deadline.ToDatetime(UTC) - datetime.now(UTC)).total_seconds())


def _accepted_at(record: RequestRecord) -> float:
    """By the event loop's clock, as far as two routers' wall clocks agree."""
    age = (datetime.now(UTC) - record.create_time.ToDatetime(UTC)).total_seconds()
    return asyncio.get_running_loop().time() - max(0.0, age)
