"""One try at one request: which workers run it, and in which order.

    split      prefill worker    ticket ------------> first token(s) ----------------> over
               decode worker        '-- Start(ticket) --> scheduled --> joined --> frames --> ended
               state    QUEUED   PREFILLING            HANDING_OFF   DECODING         SUCCEEDED

    local      Start --------------------------------> scheduled --> joined --> frames --> ended
               state    QUEUED                         DECODING                       SUCCEEDED

    adopted    Adopt --------------------------------> scheduled, joined -----> frames --> ended

    migration  the worker drains: offer --> Start(ticket) at a target --> scheduled --> joined: the target has the run

Each way is a coroutine. `Legs.until` is where they wait: the legs that it names are those whose failures matter then.
"""

from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import AttemptFailed, NoCapacity, NothingToFetch
from decant.router.execution.leg import DecodeLeg, Leg, PrefillLeg
from decant.router.execution.legs import Complete, Legs
from decant.router.execution.placement_search import CacheSearch, PromptSearch, choose_migration_target
from decant.router.execution.recorder import AttemptRecorder
from decant.router.execution.token_stream import Finish
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.errors import ServiceError
from decant.state.ids import Incarnation


class Attempt:
    """Runs once, under the request's present attempt number. ``close`` releases all that it began, at any time."""

    def __init__(self, context: AttemptContext, pool: WorkerPool, router: wire.Peer) -> None:
        self._context = context
        self._pool = pool
        self._router = router
        self._run = context.run()
        self._num_tokens = len(context.stream.tokens)  # as it begins
        self._recorder = AttemptRecorder(context, pool)
        self._legs = Legs(context)
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeLeg | None = None
        self._target: DecodeLeg | None = None  # of a migration
        self._failed_targets: set[Incarnation] = set()

    async def run(self) -> Finish:
        """Until the output is complete. Raises AttemptFailed, NoWorker, OwnedElsewhere, or a ServiceError that is final
        for the request."""
        try:
            await self._run_legs()
        except Complete:
            await self._until_prompt_logprobs()
        for worker in self._recorder.workers:
            worker.record_success()
        finish = self._legs.finish
        assert finish is not None
        return finish

    async def _run_legs(self) -> None:
        """Until Complete is raised."""
        self._legs.check()  # the tokens of earlier attempts may be all
        decode = await self._begin()
        while True:
            await self._legs.until(decode.has_offer, decode)
            decode = await self._migrate(decode)

    @property
    def workers(self) -> list[WorkerHandle]:
        return self._recorder.workers

    @property
    def had_ticket(self) -> bool:
        """Whether a prefill worker computed the prompt, or began to: what failed is the handoff, or came after it."""
        return self._prefill is not None and self._prefill.has_ticket()

    def record(self, failure: wire.Failure | None = None) -> None:
        """The workers, and why it failed, into the stored record."""
        self._recorder.record(failure)

    def close(self, reason: wire.Cancel.Reason) -> None:
        """Release everything at workers, which are sent ``reason`` unless a stop string was found."""
        cancel = wire.Cancel(run=self._run, reason=reason)
        writer = self._context.writer
        if writer.stopped is not None:
            cancel.reason = wire.Cancel.REASON_STOP_TEXT
            cancel.end_position = writer.position
        self._legs.close(cancel)

    # Called by its legs

    def wake(self) -> None:
        self._legs.wake()

    def on_draining(self, leg: DecodeLeg) -> None:
        excluded = self._context.excluded_workers | self._failed_targets
        if leg is self._decode and self._target is None and self._pool.can_receive(leg.worker, excluded):
            leg.request_offer()

    def on_resumed(self, leg: DecodeLeg) -> None:
        if leg is self._decode and self._target is None:
            leg.withdraw_offer()  # it may have been lost with the session

    # The ways

    async def _begin(self) -> DecodeLeg:
        """Until the run is in the batch of a decode worker."""
        holder = self._context.current_decode_worker
        while True:
            try:
                if holder is not None:
                    return await self._until_joined(self._adopt(holder))
                placement = await self._legs.until_search_ends(PromptSearch(self._context, self._pool))
                worker = self._pool.worker(placement.incarnation)
                return await (self._split(worker) if placement.prefill else self._until_joined(self._start(worker)))
            except NoCapacity as refusal:
                holder = None
                self._drop_refused(refusal.leg)

    async def _split(self, worker: WorkerHandle) -> DecodeLeg:
        """Prefill on this worker, decode on another."""
        prefill = self._call_prefill(worker)
        await self._legs.until(prefill.is_scheduled, prefill)
        self._recorder.on_prefill_scheduled()
        await self._legs.until(prefill.has_ticket, prefill)
        assert prefill.ticket is not None
        while True:
            search = CacheSearch(self._context, self._pool, prefill.ticket, worker)
            target = await self._legs.until_search_ends(search, prefill)
            decode = prefill.target = self._start(self._pool.worker(target), prefill.ticket)
            try:
                return await self._until_joined(decode, prefill)
            except NoCapacity as refusal:
                if refusal.leg is prefill:
                    raise
                self._drop_refused(decode)
                prefill.renew_ticket()
            except NothingToFetch:
                if prefill.is_over:
                    raise
                self._drop_decode(decode)
                await self._legs.until(_never, prefill)  # the first token was the last, and is on its way

    async def _until_joined(self, decode: DecodeLeg, *others: PrefillLeg) -> DecodeLeg:
        """Until the run is in the batch. ``others`` matter until it has its blocks."""
        await self._legs.until(decode.is_scheduled, decode, *others)
        self._recorder.on_decode_scheduled(decode.scheduled, decode.started_at, has_ticket=decode.has_ticket)
        await self._legs.until(decode.is_joined, decode)
        self._recorder.on_decode_started(decode.started, decode.cached_tokens)
        return decode

    async def _migrate(self, source: DecodeLeg) -> DecodeLeg:
        """To another worker, with the ticket that the draining one offers. Returns the leg that has the run then."""
        target = self._start_target(source)
        if target is None:
            source.withdraw_offer()
            return source
        self._target = target
        try:
            await self._legs.until(target.is_scheduled, target, source)
            await self._legs.until(target.is_joined, target)  # it may have everything, even if the source is lost now
        except (AttemptFailed, NoCapacity, ServiceError):
            if target.failure is None:
                raise
            self._drop_target(target)
            source.withdraw_offer()
            return source
        finally:
            self._target = None
        source.retire()
        self._decode = target
        self._recorder.assign_decode(target.worker)
        self._recorder.record()
        return target

    # Their legs

    def _adopt(self, holder: Incarnation) -> DecodeLeg:
        """An earlier owner of the request started the run there."""
        try:
            worker = self._pool.worker(holder)
        except KeyError:
            detail = f"{holder.id}, where it ran, has gone"
            raise AttemptFailed(wire.Failure(cause=wire.CAUSE_UNKNOWN_RUN, detail=detail), None) from None
        self._recorder.is_split = self._context.owned.state > Generation.STATE_QUEUED
        return self._decode_on(worker, wire.Adopt(run=self._run))

    def _start(self, worker: WorkerHandle, ticket: wire.Ticket | None = None) -> DecodeLeg:
        if ticket is None:
            self._recorder.is_split = False
            self._context.check_determinism(worker)
        request = self._context.engine_request(self._num_tokens)
        return self._decode_on(worker, wire.Start(run=self._run, engine_request=request, ticket=ticket))

    def _decode_on(self, worker: WorkerHandle, opening: wire.Start | wire.Adopt) -> DecodeLeg:
        self._recorder.assign_decode(worker)
        leg = self._decode = DecodeLeg(self._context, self._pool, worker, opening, self)
        self._legs.add(leg)
        return leg

    def _start_target(self, source: DecodeLeg) -> DecodeLeg | None:
        """None: no worker can go on with the run."""
        ticket, source.offer = source.offer, None
        assert ticket is not None
        choice = choose_migration_target(self._context, self._pool, source.worker, self._failed_targets)
        if choice is None:
            return None
        self._pool.tickets.renew(ticket, source.worker)
        request = self._context.engine_request(len(self._context.stream.tokens))
        opening = wire.Start(run=self._run, engine_request=request, ticket=ticket)
        leg = DecodeLeg(self._context, self._pool, self._pool.worker(choice), opening, self)
        self._legs.add(leg)
        return leg

    def _call_prefill(self, worker: WorkerHandle) -> PrefillLeg:
        self._recorder.is_split = True
        self._recorder.assign_prefill(worker)
        self._context.check_determinism(worker)
        request = wire.PrefillRequest(
            run=self._run,
            router=self._router,
            worker=worker.facts.peer,
            engine_request=self._context.engine_request(self._num_tokens),
            handoff=self._context.needs_decode(self._num_tokens),
        )
        leg = self._prefill = PrefillLeg(self._context, self._pool, worker, request, self._recorder, self)
        self._legs.add(leg)
        return leg

    def _drop_refused(self, leg: Leg) -> None:
        """Its worker has no capacity: it holds nothing of the run."""
        leg.worker.load.mark_full()
        if self._decode is not None:
            self._drop_decode(self._decode)
        if leg is self._prefill:
            leg.close(None)
            self._prefill = None
            self._recorder.assign_prefill(None)

    def _drop_decode(self, leg: DecodeLeg) -> None:
        leg.close(wire.Cancel(run=self._run, reason=wire.Cancel.REASON_ATTEMPT))
        self._decode = None
        self._recorder.assign_decode(None)
        if self._prefill is not None:
            self._prefill.target = None

    def _drop_target(self, leg: DecodeLeg) -> None:
        """A migration's target failed: another one may do, at the next offer."""
        leg.close(wire.Cancel(run=self._run, reason=wire.Cancel.REASON_ATTEMPT))
        failure, worker = leg.failure, leg.worker
        if isinstance(failure, NoCapacity):
            worker.load.mark_full()
            return
        self._failed_targets.add(worker.incarnation)
        if isinstance(failure, AttemptFailed) and failure.blamed == worker.incarnation:
            worker.record_failure()

    async def _until_prompt_logprobs(self) -> None:
        """The prefill call is a stream of its own: it may be slower than the answer."""
        prefill, stream = self._prefill, self._context.stream
        if prefill is not None:
            await self._legs.until_over(
                lambda: stream.has_prompt_logprobs or prefill.is_over or prefill.failure is not None
            )


def _never() -> bool:
    return False
