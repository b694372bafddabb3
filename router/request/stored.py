"""Stored form of a request. ``record_end`` and ``finish_from_record`` are inverse."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.request.output import Finish
from decant.router.request.token_stream import RecordedStream, TokenStream
from decant.router.request.usage import receipt_of, usage_of
from decant.router.request.valid_request import ValidRequest
from decant.router.workers.pool import WorkerPool
from decant.runtime.error_details import Reason, from_status, to_status
from decant.runtime.errors import (
    RETRY_AFTER_SECONDS,
    Cancelled,
    DeadlineExceeded,
    Internal,
    NotFound,
    ServiceError,
    Unavailable,
    from_detail,
)
from decant.state.errors import StateError, StoreRefilling, UnknownRequest, UnreadableRequest
from decant.state.ids import Incarnation, RequestKey, State
from decant.state.owned import OwnedRequest, StoredRequest

RestoreRequest = Callable[[StoredRequest], Awaitable[ValidRequest]]
"""Raises ServiceError if the model is not served any more."""


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request as it is now; ``expires_in_s`` is None before its end."""

    stream: TokenStream
    state: State
    record: RequestRecord
    expires_in_s: float | None


def check_stored(stored: StoredRequest, request: ValidRequest) -> None:
    """Raise UnreadableRequest for tokens or outputs that the request can't have."""
    highest = max((entry.token for entry in stored.entries), default=0)
    if highest >= request.vocab_size:
        raise UnreadableRequest(stored.key, f"token ids below {request.vocab_size}, got {highest}")
    if max((entry.output for entry in stored.entries), default=0) >= request.num_outputs:
        raise UnreadableRequest(stored.key, f"outputs below {request.num_outputs}")


def check_same_prompt(stored: StoredRequest, request: ValidRequest) -> None:
    """Raise Unavailable if this router makes another prompt of a request: its output would not continue the recorded
    one.
    """
    recorded, own = stored.record.prompt_hash, _prompt_hash(request)
    if recorded and recorded != own:
        message = (
            f"this router makes prompt {own:016x} of request {stored.key.id}, and the one that accepted it made "
            f"{recorded:016x}: their tokenizers, chat templates or --add-bos differ"
        )
        raise Unavailable(Reason.TOKENIZER_MISMATCH, message, retry_after=RETRY_AFTER_SECONDS)


def _prompt_hash(request: ValidRequest) -> int:
    digest = hashlib.blake2b(request.engine_request.prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def store_error(error: StateError, key: RequestKey) -> ServiceError:
    match error:
        case UnknownRequest():
            return NotFound("request", key.id)
        case StoreRefilling():
            detail = f"request {key.id} is unknown so far: the state store was emptied, and is being filled"
            return Unavailable(Reason.STATE_STORE_UNAVAILABLE, detail, retry_after=error.retry_after_s)
        case UnreadableRequest():
            return Internal()
        case _:
            return Unavailable(
                Reason.STATE_STORE_UNAVAILABLE, "the state store is unavailable", retry_after=RETRY_AFTER_SECONDS
            )


def stream_from_store(stored: StoredRequest, request: ValidRequest) -> TokenStream:
    """Stream of an adopted request, which attempts continue."""
    stream = TokenStream(request, stored.entries)
    _restore_logprobs(stream, stored)
    stream.tail.may_lag_client = True
    stream.begin_writing()
    return stream


def recorded_stream(stored: StoredRequest, request: ValidRequest) -> RecordedStream:
    stream = RecordedStream(request, stored.entries, stored.record)
    _restore_logprobs(stream, stored)
    stream.cached_tokens = stored.record.cached_tokens
    stream.end = finish_from_record(stored)
    for finished in stored.record.finished:
        if finished.index < len(stream.outputs):
            stream.outputs[finished.index].finish = _finish(finished)
    return stream


def _restore_logprobs(stream: TokenStream, stored: StoredRequest) -> None:
    for output in stream.outputs:
        output.logprobs = stored.logprobs_of(output.index)
    stream.prompt_logprobs = stored.prompt_logprobs
    if stored.record.HasField("certain_seq"):
        stream.tail.certain_tokens = list(stored.record.certain_output_seqs) or [stored.record.certain_seq]


def finish_to_record(end: Finish | ServiceError) -> tuple[State, pb.FinishReason | None]:
    """State of a request that has ended, and the finish reason of its outputs that were not complete."""
    match end:
        case Finish():
            return Generation.STATE_SUCCEEDED, None
        case Cancelled():
            return Generation.STATE_CANCELLED, pb.FINISH_REASON_CANCELLED
        case DeadlineExceeded():
            return Generation.STATE_FAILED, pb.FINISH_REASON_TIME_LIMIT
        case _:
            return Generation.STATE_FAILED, None


def finished_outputs(stream: TokenStream, reason: pb.FinishReason | None) -> list[pb.Finished]:
    """Finishes of the complete outputs, and of the others with ``reason``, if there is one."""
    finished = []
    for output in stream.outputs:
        if output.finish is not None:
            finished.append(output.finish.finished(output.index))
        elif reason is not None:
            finished.append(pb.Finished(index=output.index, finish_reason=reason))
    return finished


def finish_from_record(stored: StoredRequest) -> Finish | ServiceError | None:
    """End of a stored request; None while it runs. Raises UnreadableRequest if the record has no end."""
    if not stored.ended:
        return None
    if stored.state == Generation.STATE_CANCELLED:  # the router that cancelled it may not have recorded the error yet
        return Cancelled()
    if stored.state != Generation.STATE_SUCCEEDED:
        return from_detail(from_status(stored.record.error))
    if not stored.record.finished:
        raise UnreadableRequest(stored.key, "its end is missing")
    return _finish(stored.record.finished[0])


def _finish(finished: pb.Finished) -> Finish:
    match = finished.WhichOneof("stop_match")
    stop = {match: getattr(finished, match)} if match else {}
    return Finish(finished.finish_reason, guide_completed=finished.guide_completed, **stop)


LONGEST_DEADLINE = timedelta(days=3650)
"""Longer ones are stored as this."""


def new_record(request: ValidRequest, router: Incarnation, epoch: int) -> OwnedRequest:
    now = datetime.now(UTC)
    record = RequestRecord(
        model=request.engine_request.model,
        seed=request.engine_request.sampling.seed,
        prompt_tokens=request.prompt_tokens,
        prompt_hash=_prompt_hash(request),
        traceparent=request.engine_request.traceparent,
        adapter=request.engine_request.adapter,
    )
    remaining_s = request.deadline.remaining()
    if remaining_s is not None:
        record.deadline.FromDatetime(now + min(timedelta(seconds=min(remaining_s, 1e9)), LONGEST_DEADLINE))
    owned = OwnedRequest.begin(request.key, router, request.payload, record, now)
    owned.epoch = epoch
    return owned


def recorded_decode_worker(stored: StoredRequest) -> Incarnation | None:
    attempts = stored.record.attempts
    if not attempts or attempts[-1].attempt != stored.attempt or not attempts[-1].HasField("decode_worker"):
        return None
    return Incarnation.of(attempts[-1].decode_worker)


def recorded_layout_hash(stored: StoredRequest, pool: WorkerPool) -> int:
    """Layout hash of the last attempt's workers, before the first of all; 0 if unknown or without equal bits."""
    attempts = stored.record.attempts
    if attempts:
        return attempts[-1].layout_hash
    return 0 if stored.entries else pool.layout_hash_of(stored.record.model)


def record_end(owned: OwnedRequest, stream: TokenStream, end: Finish | ServiceError) -> None:
    """Record a request's end, after all its tokens were recorded."""
    record = owned.record
    if stream.tail.certain_tokens is None:  # later readers get the tokens of this router
        record.ClearField("certain_seq")
        record.ClearField("certain_output_seqs")
    record.cached_tokens = stream.cached_tokens
    record.usage.CopyFrom(usage_of(stream))
    record.receipt.CopyFrom(receipt_of(stream, asyncio.get_running_loop().time()))
    state, reason = finish_to_record(end)
    record.finished.extend(finished_outputs(stream, reason))
    if isinstance(end, ServiceError):
        record.error.CopyFrom(to_status(end.detail))
    owned.transition(state, datetime.now(UTC))
