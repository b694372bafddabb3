from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.decode_leg import DecodeLeg
from decant.router.attempt.failures import AttemptFailed, NoCapacity, NothingToFetch
from decant.router.attempt.legs import Legs
from decant.router.attempt.placement_search import choose_migration_target
from decant.router.workers.pool import WorkerPool
from decant.runtime.errors import ServiceError
from decant.state.ids import Incarnation


class Migration:
    """Moves of a run from draining or crowded workers. ``source`` is None while a target takes the run over."""

    def __init__(self, context: AttemptContext, pool: WorkerPool, run: wire.Run, legs: Legs) -> None:
        self.source: DecodeLeg | None = None
        self._context = context
        self._pool = pool
        self._run = run
        self._legs = legs
        self._failed_targets: set[Incarnation] = set()

    async def move(self, source: DecodeLeg) -> DecodeLeg:
        """Move the run that ``source`` offers; return the leg that has it now, ``source`` if the move has failed."""
        target = self._start_target(source)
        if target is not None and await self._has_moved(source, target):
            source.forget()
            self.source = target
            return target
        if self._legs.finish is None:
            source.cancel_offer()
        return source

    async def _has_moved(self, source: DecodeLeg, target: DecodeLeg) -> bool:
        self.source = None
        try:
            await self._legs.until(target.is_scheduled, target, source)
            # From here the target may have everything, even if the source is lost now.
            return await self._legs.until(target.has_decode_started, target)
        except (AttemptFailed, NoCapacity, ServiceError):
            if target.failure is None:
                raise
            self._close(target)
            return False
        finally:
            self.source = source

    def _start_target(self, source: DecodeLeg) -> DecodeLeg | None:
        ticket, source.offer = source.offer, None
        assert ticket is not None
        context, pool = self._context, self._pool
        choice = choose_migration_target(context, pool, source.worker, self._failed_targets)
        unfinished = [output.index for output in context.unfinished]
        if choice is None or (ticket.outputs and ticket.outputs[0] not in unfinished):
            return None
        pool.tickets.renew(ticket, source.worker)
        request = context.engine_request(context.output_prefixes())
        opening = wire.Start(run=self._run, engine_request=request, ticket=ticket)
        target = DecodeLeg(context, pool, pool.worker(choice), opening, self)
        self._legs.add(target)
        return target

    def _close(self, target: DecodeLeg) -> None:
        target.close(wire.Cancel(run=self._run, reason=wire.Cancel.REASON_ATTEMPT))
        failure, worker = target.failure, target.worker
        if isinstance(failure, NoCapacity):
            failure.apply()
            return
        if isinstance(failure, NothingToFetch):
            return  # the output whose KV was offered has ended: the source offers that of another one
        self._failed_targets.add(worker.incarnation)
        if isinstance(failure, AttemptFailed) and failure.faulty_worker == worker.incarnation:
            worker.record_failure()

    # Called by decode legs

    def wake(self) -> None:
        self._legs.wake()

    def on_draining(self, leg: DecodeLeg) -> None:
        self._request_offer(leg)

    def on_crowded(self, leg: DecodeLeg) -> bool:
        return self._request_offer(leg)

    def _request_offer(self, leg: DecodeLeg) -> bool:
        excluded = self._context.excluded_workers | self._failed_targets
        is_possible = leg is self.source and self._pool.can_receive(leg.worker, excluded, self._context.needs)
        if is_possible:
            leg.request_offer()
        return is_possible

    def on_resumed(self, leg: DecodeLeg) -> None:
        if leg is self.source:
            leg.cancel_offer()  # it may have been lost with the session
