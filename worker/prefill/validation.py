from __future__ import annotations

import time
from itertools import count

from decant.protos import worker_pb2 as wire
from decant.runtime import packed
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.protocol import is_compatible
from decant.worker.checks import check_accepts, rejected
from decant.worker.engine_host import EngineHost
from decant.worker.prefill.prefill_queue import PrefillQueue
from decant.worker.prefill.run import PrefillRun, StaleOwner
from decant.worker.wire_codec import RequestRejected, other_request, queue_key, to_requests


class CallValidator:
    def __init__(self, host: EngineHost, queue: PrefillQueue) -> None:
        self._host = host
        self._queue = queue
        self._numbers = count()

    def validate(self, call: wire.PrefillRequest) -> PrefillRun:
        host, engine_request = self._host, call.engine_request
        self._check_now(call)
        name = f"prefill-{next(self._numbers)}:{call.run.request}"  # never reused: a late event belongs to no other run
        parks = call.handoff or _needs_park(engine_request)
        requests = to_requests(
            name,
            engine_request,
            model=host.model,
            park_after=parks,
            guides=host.guides,
            adapters=host.adapters,
        )
        longest = max(len(request.token_ids) for request in requests)
        if longest > host.context_length:
            detail = f"{longest} tokens; the maximum context length is {host.context_length}"
            raise rejected(wire.CAUSE_NEVER_FITS, detail)
        now = time.monotonic()
        return PrefillRun(
            ref=call.run,
            requests=requests,
            stopping=engine_request.stopping,
            handoff=call.handoff,
            received=now,
            queue_key=queue_key(engine_request, now),
            remaining_s=engine_request.remaining_ms / 1000 if engine_request.HasField("remaining_ms") else None,
            traceparent=engine_request.traceparent,
        )

    def _check_now(self, call: wire.PrefillRequest) -> None:
        host = self._host
        if not is_compatible(call.router.protocol):
            raise rejected(wire.CAUSE_WRONG_PROTOCOL, f"protocol {call.router.protocol} is not supported")
        if not same_incarnation(call.worker, host.peer):
            raise rejected(wire.CAUSE_WRONG_PEER, "the request is for another incarnation of this worker")
        if host.epochs.is_other_request(call.run):
            raise RequestRejected(other_request())
        if (superseded := host.epochs.check(call.run)) is not None:
            raise StaleOwner(superseded)
        check_accepts(host, call.engine_request, self._queue.num_unstarted + host.num_waiting(besides=self._queue))


def _needs_park(engine_request: wire.EngineRequest) -> bool:
    """Whether to park after one token, because more are allowed."""
    prior_tokens = min((packed.count(output.tokens) for output in engine_request.outputs), default=0)
    return engine_request.stopping.max_tokens > prior_tokens + 1
