from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.failures import NoCapacity, error_for
from decant.router.attempt.leg import Leg, LegOwner
from decant.router.attempt.recorder import AttemptRecorder
from decant.router.workers.pool import WorkerPool
from decant.router.workers.prefill_call import PrefillCall
from decant.router.workers.stream_io import StreamBroken
from decant.router.workers.subscription import WriteError
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.error_details import Reason
from decant.runtime.packed import count
from decant.runtime.telemetry import logs

_log = logs.get(__name__)


class PrefillLeg(Leg):
    """The prompt's computation on one worker: a Prefill call, a ticket and its renewal, and the first tokens.

    `Attempt` makes it; the call and the worker's session report to it.
    """

    def __init__(
        self,
        context: AttemptContext,
        pool: WorkerPool,
        worker: WorkerHandle,
        request: wire.PrefillRequest,
        recorder: AttemptRecorder,
        owner: LegOwner,
    ) -> None:
        super().__init__(context, pool, worker, owner)
        self.ticket: wire.Ticket | None = None
        self.is_over = False
        self._ticket_has_receiver = False
        self._recorder = recorder
        self.has_first_tokens = False
        self._first_positions = {
            prefix.output: context.stream.request.prompt_tokens + count(prefix.tokens)
            for prefix in request.engine_request.outputs
        }
        self._reservation = worker.load.reserve(context.prefix, context.num_tokens, computes_prompt=True)
        worker.session.dependents.add(self)
        self._call = PrefillCall(worker.prefill, request, self)

    @property
    def failure(self) -> Exception | None:
        """First failure. The end of the call is one unless a decode worker has the ticket: it may have the KV cache."""
        if self._failure is None and self.is_over and not self._ticket_has_receiver:
            return self._error(wire.CAUSE_PEER_LOST, "the prefill call ended without a final event")
        return self._failure

    @property
    def can_report(self) -> bool:
        """Whether messages of the worker may still arrive."""
        return not self.is_over and self.failure is None

    def is_scheduled(self) -> bool:
        return self.ticket is not None or self.has_first_tokens

    def has_ticket(self) -> bool:
        return self.ticket is not None

    def give_ticket(self) -> wire.Ticket:
        """Return the ticket for a decode worker, which renews it until ``take_ticket_back``."""
        assert self.ticket is not None
        self._ticket_has_receiver = True
        return self.ticket

    def take_ticket_back(self) -> None:
        """Renew the ticket again, which its receiver has refused."""
        self._ticket_has_receiver = False
        self._renew_ticket()

    def _renew_ticket(self) -> None:
        if self.ticket is not None:
            self._pool.tickets.renew(self.ticket, self.worker)

    def _release(self) -> None:
        self._reservation.release()
        self.worker.session.dependents.discard(self)

    def _close(self, cancel: wire.Cancel | None) -> None:
        if self.ticket is not None:
            self._pool.tickets.forget(self.ticket)
        self._call.close()
        if cancel is not None and not self.is_over:
            self.worker.session.cancel(cancel)

    def on_ticket(self, ticket: wire.Ticket) -> None:
        self.ticket = ticket
        self._renew_ticket()
        self._owner.wake()

    def on_first_tokens(self, message: wire.FirstTokens) -> None:
        self.has_first_tokens = True
        self._reservation.mark_prefilled()
        self._recorder.on_first_tokens(message, self.started_at)
        for first in message.tokens:
            error = self._write(first)
            if error is WriteError.CONFLICT:
                _log.error("a first token differs from the known one", worker=self.worker.incarnation.id)
            elif error is WriteError.MALFORMED:
                self._fail_attempt(self._error(wire.CAUSE_CORRUPT, "the first token or its logprobs are malformed"))
            if first.HasField("finished"):
                self._finish_output(first.finished)
        if all(first.HasField("finished") for first in message.tokens):
            self._recorder.on_finished_at_first_token()
        self._owner.wake()

    def _write(self, first: wire.FirstTokens.First) -> WriteError | None:
        position = self._first_positions.get(first.output)
        if position is None:
            return WriteError.MALFORMED
        logprobs = first.logprobs if first.HasField("logprobs") else None
        return self._context.stream.outputs[first.output].write(position, first.token, logprobs)

    def on_embedding(self, message: wire.PromptEmbedding) -> None:
        detail = "it sent an embedding, which was not requested"
        self._fail_attempt(self._error(wire.CAUSE_CORRUPT, detail))

    def on_failed(self, failed: wire.Failed) -> None:
        self._fail(error_for(failed.failure, self.worker.incarnation))

    def on_call_ended(self, broken: StreamBroken | None) -> None:
        self.is_over = True
        self._release()
        if broken is None:
            self._owner.wake()
        elif broken.reason is Reason.DRAINING:
            self._fail(NoCapacity(self))
        else:
            self._fail(self._error(wire.CAUSE_PEER_LOST, str(broken)))

    def on_session_lost(self) -> None:
        detail = "the prefill worker's session broke and was not opened again"
        self._fail(self._error(wire.CAUSE_PEER_LOST, detail))
