from __future__ import annotations

import asyncio

from decant.protos import worker_pb2 as wire
from decant.router.attempt.failures import RETRY_ELSEWHERE, AttemptFailed, error_for
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.workers.prefill_call import PrefillCall
from decant.router.workers.stream_io import StreamBroken
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.error_details import Reason
from decant.runtime.packed import count


class WorkerFull(Exception):
    """The worker has no capacity, or drains: the prompt goes to another one, or there later."""


class AdapterMissing(Exception):
    """The worker does not have the adapter: the prompt goes to another one."""


class ComputedPrompt:
    """What a worker reports about one prompt.

    ``logprobs``: of the positions from ``prompt_logprobs_from`` on. ``embedding``: packed float32.
    """

    def __init__(self) -> None:
        self.logprobs: list[wire.TokenLogprobs] = []
        self.embedding = b""
        self.cached_tokens = 0


class PromptRun:
    """One prompt's computation at one worker, which keeps nothing of it.

    `PromptRunner` makes it, waits for its ``result`` and closes it. The call and the worker's session report to its
    ``on_`` methods.
    """

    def __init__(self, worker: WorkerHandle, request: wire.PrefillRequest, prefix: PromptBlocks) -> None:
        self.worker = worker
        self._request = request.engine_request
        self._computed = ComputedPrompt()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_computed = False
        tokens = count(self._request.prompt)
        self._reservation = worker.load.reserve(prefix, tokens, computes_prompt=True)
        worker.session.dependents.add(self)
        self._call = PrefillCall(worker.prefill, request, self)

    async def result(self) -> ComputedPrompt:
        """Raises WorkerFull, AdapterMissing, AttemptFailed, or a ServiceError that is final for the request."""
        await self._ended
        return self._computed

    def close(self) -> None:
        """Release everything here and at the worker, in any state."""
        self._reservation.release()
        self.worker.session.dependents.discard(self)
        self._call.close()
        self._end(None)
        self._ended.exception()  # retrieved here: the waiting call may be gone

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _fail(self, cause: wire.Cause, detail: str) -> None:
        failure = wire.Failure(cause=cause, detail=detail)
        self._end(AttemptFailed(failure, self.worker.incarnation))

    def on_ticket(self, ticket: wire.Ticket) -> None:
        self._fail(wire.CAUSE_CORRUPT, "it issued a ticket for a prompt without handoff")

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None:
        """Keep the next part, from the first position that is wanted; parts arrive in order."""
        known = self._computed.logprobs
        next = max(1, self._request.prompt_logprobs_from) + len(known)
        if message.first_position <= next:  # a worker of the previous version sends them from the prompt's start
            known.extend(message.logprobs[next - message.first_position :])

    def on_embedding(self, message: wire.PromptEmbedding) -> None:
        self._computed.embedding = message.values

    def on_first_tokens(self, message: wire.FirstTokens) -> None:
        self._computed.cached_tokens = message.cached_tokens
        self._is_computed = True
        self._reservation.mark_prefilled()

    def on_refused(self, refused: wire.Refused) -> None:
        if refused.failure.cause == wire.CAUSE_UNKNOWN_ADAPTER:
            self.worker.remove_adapter(self._request.adapter)
            self._end(AdapterMissing())
        elif refused.failure.cause in RETRY_ELSEWHERE:
            self._end(WorkerFull())
        else:
            self._end(error_for(refused.failure, self.worker.incarnation))

    def on_failed(self, failed: wire.Failed) -> None:
        self._end(error_for(failed.failure, self.worker.incarnation))

    def on_superseded(self, superseded: wire.Superseded) -> None:
        self._fail(wire.CAUSE_CORRUPT, f"it knows an owner of the call in epoch {superseded.epoch}")

    def on_session_lost(self) -> None:
        self._fail(wire.CAUSE_PEER_LOST, "the worker's session broke and was not opened again")

    def on_call_ended(self, broken: StreamBroken | None) -> None:
        if broken is not None and broken.reason is Reason.DRAINING:
            self._end(WorkerFull())
        elif broken is not None or not self._is_computed:
            self._fail(wire.CAUSE_PEER_LOST, str(broken or "the call ended without a final event"))
        elif self._missing:
            self._fail(wire.CAUSE_CORRUPT, f"it returned no {self._missing}")
        else:
            self._end(None)

    @property
    def _missing(self) -> str:
        request, computed = self._request, self._computed
        if request.HasField("embedding") and not computed.embedding:
            return "embedding"
        wanted = count(request.prompt) - max(1, request.prompt_logprobs_from)
        if request.HasField("prompt_logprobs") and len(computed.logprobs) < wanted:
            return "log-probabilities"
        return ""
