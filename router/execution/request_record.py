"""The stored record of a request: as it begins, what an adopting router reads from it, and its end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from decant.protos.state_pb2 import RequestRecord
from decant.router.execution.stored import finish_to_record
from decant.router.execution.token_stream import Finish, TokenStream
from decant.router.execution.usage import receipt_of, usage_of
from decant.router.execution.valid_request import ValidRequest
from decant.router.workers.pool import WorkerPool
from decant.runtime.error_details import to_status
from decant.runtime.errors import ServiceError
from decant.state.ids import Incarnation
from decant.state.owned import OwnedRequest, StoredRequest

LONGEST_DEADLINE = timedelta(days=3650)
"""What is stored of one that is longer."""


def new_record(request: ValidRequest, router: Incarnation, epoch: int) -> OwnedRequest:
    """Of a request that `router` accepts now."""
    now = datetime.now(UTC)
    record = RequestRecord(
        model=request.engine_request.model,
        seed=request.engine_request.sampling.seed,
        prompt_tokens=request.prompt_tokens,
    )
    remaining_s = request.deadline.remaining()
    if remaining_s is not None:
        record.deadline.FromDatetime(now + min(timedelta(seconds=min(remaining_s, 1e9)), LONGEST_DEADLINE))
    owned = OwnedRequest.begin(request.key, router, request.payload, record, now)
    owned.epoch = epoch
    return owned


def recorded_decode_worker(stored: StoredRequest) -> Incarnation | None:
    """Where the last attempt is decoded, as far as is recorded."""
    attempts = stored.record.attempts
    if not attempts or attempts[-1].attempt != stored.attempt or not attempts[-1].HasField("decode_worker"):
        return None
    return Incarnation.of(attempts[-1].decode_worker)


def recorded_layout(stored: StoredRequest, pool: WorkerPool) -> int:
    """Layout of the last attempt's workers; 0 where they don't give equal bits, or where no attempt is recorded though
    there are tokens. Without attempt and tokens it is the layout of all workers, if they have one."""
    attempts = stored.record.attempts
    if attempts:
        return attempts[-1].layout
    return 0 if stored.entries else pool.layout_of(stored.record.model)


def record_end(owned: OwnedRequest, stream: TokenStream, end: Finish | ServiceError) -> None:
    """Usage, receipt, and how the request ended. All tokens are recorded before."""
    record = owned.record
    if stream.certain_tokens is None:  # later readers get the tokens of this router
        record.ClearField("certain_seq")
    record.cached_tokens = stream.cached_tokens
    record.usage.CopyFrom(usage_of(stream))
    record.receipt.CopyFrom(receipt_of(stream, asyncio.get_running_loop().time()))
    state, finished = finish_to_record(end)
    if finished is not None:
        record.finished.append(finished)
    if isinstance(end, ServiceError):
        record.error.CopyFrom(to_status(end.fault))
    owned.transition(state, datetime.now(UTC))
