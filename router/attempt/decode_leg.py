from __future__ import annotations

from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.failures import NothingToFetch, error_for
from decant.router.attempt.leg import Leg, LegOwner
from decant.router.placement.batch_rules import expected_steps
from decant.router.placement.worker_load import LoadReservation
from decant.router.request.output import Output
from decant.router.workers.pool import WorkerPool
from decant.router.workers.subscription import MoveTest, RunSubscription
from decant.router.workers.worker_handle import WorkerHandle


class DecodeLegOwner(LegOwner, Protocol):
    def on_draining(self, leg: DecodeLeg) -> None: ...
    def on_crowded(self, leg: DecodeLeg) -> bool: ...

    def on_resumed(self, leg: DecodeLeg) -> None:
        """Called after a break or an adoption: messages of the worker, offers too, may be lost."""


class DecodeLeg(Leg):
    """The run on one decode worker: its start or adoption, its frames and its end, and the offer of a draining worker.

    `Attempt` makes it, and `Migration` the one of a target. The worker's session reports to it.
    """

    _owner: DecodeLegOwner

    def __init__(
        self,
        context: AttemptContext,
        pool: WorkerPool,
        worker: WorkerHandle,
        opening: wire.Start | wire.Adopt,
        owner: DecodeLegOwner,
    ) -> None:
        super().__init__(context, pool, worker, owner)
        self.scheduled: wire.Scheduled | None = None
        self.decode_started: wire.DecodeStarted | None = None
        self.offer: wire.Ticket | None = None
        self._is_scheduled = False
        self._has_decode_started = False
        self._ticket: wire.Ticket | None = None
        self._reservation: LoadReservation | None = None
        if isinstance(opening, wire.Start):
            has_ticket = opening.HasField("ticket")
            self._reservation = worker.load.reserve(context.prefix, context.num_tokens, computes_prompt=not has_ticket)
            if has_ticket:
                self._ticket = opening.ticket
                pool.tickets.stop_renewing(opening.ticket)
        self._subscription = RunSubscription(opening, context.unfinished, self)
        worker.session.start(self._subscription)
        if isinstance(opening, wire.Start) and len(context.stream.outputs) > 1:
            for prefix in opening.engine_request.outputs:
                output = context.stream.outputs[prefix.output]
                if output.is_stopped_here:  # its first token, of another worker, completed a stop string
                    self.cancel_output(output)

    @property
    def has_ticket(self) -> bool:
        return self._ticket is not None

    def is_scheduled(self) -> bool:
        return self._is_scheduled

    def has_decode_started(self) -> bool:
        return self._has_decode_started

    def has_offer(self) -> bool:
        return self.offer is not None

    def request_offer(self) -> None:
        self.worker.session.migrate(wire.Migrate(run=self._subscription.run))

    def cancel_offer(self) -> None:
        self.offer = None
        self.worker.session.migrate(wire.Migrate(run=self._subscription.run, withdrawn=True))

    def cancel_output(self, output: Output) -> None:
        if not self._is_closed:
            cancel = wire.Cancel(
                run=self._subscription.run,
                output=output.index,
                reason=wire.Cancel.REASON_STOP_STRING,
                end_position=output.position,
            )
            self.worker.session.cancel(cancel)

    def forget(self) -> None:
        """Release the leg once another worker has the run with all its tokens."""
        self._is_closed = True
        self._release()
        self.worker.session.forget(self._subscription)

    def _release(self) -> None:
        self._release_ticket()
        if self._reservation is not None:
            self._reservation.release()

    def _close(self, cancel: wire.Cancel | None) -> None:
        if cancel is not None:
            self.worker.session.close_run(self._subscription, cancel)

    def _release_ticket(self) -> None:
        if self._ticket is not None:
            self._pool.tickets.forget(self._ticket)

    def _set_scheduled(self) -> None:
        self._is_scheduled = True
        self._release_ticket()

    def _set_decode_started(self) -> None:
        self._set_scheduled()
        self._has_decode_started = True
        if self._reservation is not None:
            self._reservation.mark_prefilled()

    def on_scheduled(self, message: wire.Scheduled) -> None:
        self.scheduled = message
        self._set_scheduled()
        self._owner.wake()

    def on_decode_started(self, message: wire.DecodeStarted) -> None:
        self.decode_started = message
        self._set_decode_started()
        self._owner.wake()

    def on_run_status(self, status: wire.RunStatus) -> None:
        if status.phase != wire.RunStatus.PHASE_WAITING:
            self._set_scheduled()
        if status.phase in (wire.RunStatus.PHASE_RUNNING, wire.RunStatus.PHASE_ENDED):
            self._set_decode_started()
        self._owner.on_resumed(self)
        self._owner.wake()

    def on_offer(self, ticket: wire.Ticket) -> None:
        self.offer = ticket
        self._owner.wake()

    def on_draining(self) -> None:
        self._owner.on_draining(self)

    def on_crowded(self, count: int, is_worth: MoveTest) -> int:
        """Ask to move, all outputs together, if they are at most ``count``; return how many move."""
        context, outputs = self._context, self._context.unfinished
        if not self._has_decode_started or self._is_closed or self.offer is not None or len(outputs) > count:
            return 0
        limit = max((output.end_limit - output.position for output in outputs), default=0)
        steps = expected_steps(max(context.stream.counts), limit)
        return len(outputs) if is_worth(context.num_tokens, steps) and self._owner.on_crowded(self) else 0

    def on_ended(self, end: wire.OutputEnd, *, is_last: bool) -> None:
        self._set_decode_started()
        if is_last:
            self._release()
        self._finish_output(end)

    def on_failed(self, failed: wire.Failed) -> None:
        if failed.failure.cause == wire.CAUSE_CANCELLED and self._ticket is not None:
            self._fail(NothingToFetch(failed.failure, None))
        else:
            self._fail(error_for(failed.failure, self.worker.incarnation))
