from __future__ import annotations

import time
from itertools import count

from decant.protos import worker_pb2 as wire
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.protocol import is_compatible
from decant.worker.engine_host import EngineHost
from decant.worker.prefill.prefill_queue import PrefillQueue
from decant.worker.prefill.run import PrefillRun, StaleOwner
from decant.worker.wire_codec import RequestRejected, other_request, queue_key, to_request


class CallValidator:
    def __init__(self, host: EngineHost, queue: PrefillQueue) -> None:
        self._host = host
        self._queue = queue
        self._numbers = count()

    def validate(self, call: wire.PrefillRequest) -> PrefillRun:
        """The run is not yet in the queue. Raises RequestRejected, StaleOwner."""
        host, work = self._host, call.engine_request
        self._check_now(call)
        name = f"prefill-{next(self._numbers)}:{call.run.request}"  # never reused: a late event belongs to no other run
        request = to_request(name, work, model=host.model, park_after=call.handoff or _needs_park(work))
        if len(request.token_ids) > host.context_length:
            detail = f"{len(request.token_ids)} tokens; the maximum context length is {host.context_length}"
            raise _rejected(wire.CAUSE_NEVER_FITS, detail)
        if self._queue.not_begun + host.waiting_arrivals >= host.max_waiting:
            raise _rejected(wire.CAUSE_BUSY, f"{host.max_waiting} runs wait already")
        if work.HasField("remaining_ms") and not work.remaining_ms:
            raise _rejected(wire.CAUSE_DEADLINE, "the deadline has passed")
        now = time.monotonic()
        return PrefillRun(
            ref=call.run,
            request=request,
            stopping=work.stopping,
            handoff=call.handoff,
            received=now,
            queue_key=queue_key(work, now),
            remaining_s=work.remaining_ms / 1000 if work.HasField("remaining_ms") else None,
            traceparent=work.traceparent,
        )

    def _check_now(self, call: wire.PrefillRequest) -> None:
        host = self._host
        if not is_compatible(call.router.protocol):
            raise _rejected(wire.CAUSE_WRONG_PROTOCOL, f"protocol {call.router.protocol} is not supported")
        if not same_incarnation(call.worker, host.peer):
            raise _rejected(wire.CAUSE_WRONG_PEER, "the request is for another incarnation of this worker")
        if host.epochs.is_other_request(call.run):
            raise RequestRejected(other_request())
        if (superseded := host.epochs.check(call.run)) is not None:
            raise StaleOwner(superseded)
        if host.draining:
            raise _rejected(wire.CAUSE_DRAINING, "this worker is draining")
        if not host.loop.is_healthy:
            raise _rejected(wire.CAUSE_ENGINE, "the engine of this worker has stopped")


def _needs_park(work: wire.EngineRequest) -> bool:
    """Whether to park after one token, because more are allowed."""
    written = len(work.outputs[0].tokens) // 4 if work.outputs else 0
    return work.stopping.max_tokens > written + 1


def _rejected(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
