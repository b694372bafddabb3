"""One try at one request: which workers run it, and in which order.

split      prefill worker    ticket ------------> first token(s) ----------------> over
           decode worker        '-- Start(ticket) --> scheduled --> decode started --> frames --> ended
local      Start --------------------------------> scheduled --> decode started --> frames --> ended
adopted    Adopt --------------------------------> scheduled, decode started -----> frames --> ended
migration  offer --> Start(ticket) at a target --> scheduled --> decode started: the target has the run

The output may be complete at any wait: its first token may be the last, or complete a stop string.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.decode_leg import DecodeLeg
from decant.router.attempt.failures import AttemptFailed, NoCapacity, NothingToFetch
from decant.router.attempt.legs import Legs
from decant.router.attempt.migration import Migration
from decant.router.attempt.placement_search import CacheSearch, PromptSearch
from decant.router.attempt.prefill_leg import PrefillLeg
from decant.router.attempt.recorder import AttemptRecorder
from decant.router.request.output import Finish
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.telemetry import tracing
from decant.state.ids import Incarnation


class Attempt:
    def __init__(self, context: AttemptContext, pool: WorkerPool, router: wire.Peer) -> None:
        self._context = context
        self._pool = pool
        self._router = router
        self._run = context.run_id
        self._span = tracing.span(
            "attempt", context.stream.request.engine_request.traceparent, attempt=context.owned.attempt
        )
        context.traceparent = self._span.traceparent
        self._recorder = AttemptRecorder(context, pool)
        self._legs = Legs(context)
        self._prefixes = context.output_prefixes()  # as it begins
        self._prefill: PrefillLeg | None = None
        self._migration = Migration(context, pool, self._run, self._legs)

    async def run(self) -> Finish:
        """Run once. Raises AttemptFailed, NoWorker, OwnedElsewhere, or a ServiceError that is final for the request."""
        self._context.stream.begin_attempt(self._legs)
        with self._span:
            try:
                finish = self._legs.finish  # the tokens of earlier attempts may be all
                holder = self._context.current_decode_worker
                if finish is None:
                    finish = await self._finish_of(await self._begin())
                elif holder is not None:  # it keeps the tokens for a router that is lost, and answers with its end
                    self._pool.cancel(holder, self._run, wire.Cancel.REASON_ATTEMPT)
                await self._until_prompt_logprobs()
            finally:
                trace = self._context.stream.trace
                self._span.set(prefill_worker=trace.prefill_worker, decode_worker=trace.decode_worker)
        for worker in trace.workers:
            self._pool.record_success(worker)
        return finish

    async def wait_for_report(self) -> None:
        """After ``run``, wait up to ``late_report_s`` for the prefill worker's first tokens, which bring its times: the
        decode worker's end may overtake them.
        """
        prefill = self._prefill
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pool.timings.late_report_s):
                while prefill is not None and prefill.can_report and not prefill.has_first_tokens:
                    await self._legs.wait_for_change()

    async def _finish_of(self, decode: DecodeLeg | None) -> Finish:
        """Wait for the end of the output; move its run away from a worker that drains. None: it has ended."""
        while True:
            if decode is not None:
                await self._legs.until(decode.has_offer, decode)
            if (finish := self._legs.finish) is not None:
                return finish
            assert decode is not None
            decode = await self._migrate(decode)

    async def _migrate(self, source: DecodeLeg) -> DecodeLeg:
        decode = await self._migration.move(source)
        if decode is not source:
            self._recorder.assign_decode(decode.worker)
            self._context.record_attempt()
            self._span.event("migrated", to=decode.worker.incarnation.id)
        return decode

    @property
    def had_ticket(self) -> bool:
        return self._prefill is not None and self._prefill.has_ticket()

    def close(self, reason: wire.Cancel.Reason) -> None:
        """Release all that the attempt holds; may be called at any time."""
        cancel = wire.Cancel(run=self._run, reason=reason)
        output, *others = self._context.stream.outputs
        if output.is_stopped_here and not others:  # of several, each was cancelled as it stopped
            cancel.reason = wire.Cancel.REASON_STOP_STRING
            cancel.end_position = output.position
        self._legs.close(cancel)

    # Paths: adopted, local, split

    async def _begin(self) -> DecodeLeg | None:
        """Have a worker decode the output; None if the output is complete before."""
        holder = self._context.current_decode_worker
        while True:
            try:
                if holder is not None:
                    return await self._decode_started(self._adopt(holder))
                placement = await self._legs.find(PromptSearch(self._context, self._pool))
                if placement is None:
                    return None
                worker = self._pool.worker(placement.incarnation)
                if placement.is_split:
                    return await self._split(worker)
                return await self._decode_started(self._start(worker))
            except NoCapacity as refusal:
                holder = None
                self._close_refused(refusal)

    async def _split(self, worker: WorkerHandle) -> DecodeLeg | None:
        prefill = self._call_prefill(worker)
        if await self._legs.until(prefill.is_scheduled, prefill):
            self._recorder.on_prefill_scheduled()
        await self._legs.until(prefill.has_ticket, prefill)
        while prefill.ticket is not None:
            search = CacheSearch(self._context, self._pool, prefill.ticket, worker)
            target = await self._legs.find(search, prefill)
            if target is None:
                return None
            decode = self._start(self._pool.worker(target), prefill.give_ticket())
            try:
                return await self._decode_started(decode, prefill)
            except NoCapacity as refusal:
                if refusal.leg is prefill:
                    raise
                self._close_refused(refusal)
                prefill.take_ticket_back()
            except NothingToFetch:
                if prefill.is_over:
                    raise
                self._close_decode(decode)
                prefill.take_ticket_back()
                await self._legs.until_complete(prefill)  # the first token was the last, and is on its way
                return None
        return None

    async def _decode_started(self, decode: DecodeLeg, *others: PrefillLeg) -> DecodeLeg:
        """Wait until the worker decodes, or the output is complete."""
        if await self._legs.until(decode.is_scheduled, decode, *others):
            self._recorder.on_decode_scheduled(decode.scheduled, decode.started_at, has_ticket=decode.has_ticket)
            if await self._legs.until(decode.has_decode_started, decode):
                self._recorder.on_decode_started(decode.decode_started, decode.scheduled)
        return decode

    # Legs

    def _adopt(self, holder: Incarnation) -> DecodeLeg:
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
            self._context.mark_uncertain_tail(worker)
        request = self._context.engine_request(self._prefixes)
        return self._decode_on(worker, wire.Start(run=self._run, engine_request=request, ticket=ticket))

    def _decode_on(self, worker: WorkerHandle, opening: wire.Start | wire.Adopt) -> DecodeLeg:
        self._recorder.assign_decode(worker)
        leg = self._migration.source = DecodeLeg(self._context, self._pool, worker, opening, self._migration)
        self._legs.add(leg)
        return leg

    def _call_prefill(self, worker: WorkerHandle) -> PrefillLeg:
        self._recorder.is_split = True
        self._recorder.assign_prefill(worker)
        self._context.mark_uncertain_tail(worker)
        request = wire.PrefillRequest(
            run=self._run,
            router=self._router,
            worker=worker.registration.peer,
            engine_request=self._context.engine_request(self._prefixes),
            handoff=self._context.needs_decode,
        )
        leg = self._prefill = PrefillLeg(self._context, self._pool, worker, request, self._recorder, self._legs)
        self._legs.add(leg)
        return leg

    def _close_refused(self, refusal: NoCapacity) -> None:
        refusal.apply()
        if self._migration.source is not None:
            self._close_decode(self._migration.source)
        if refusal.leg is self._prefill:
            refusal.leg.close(None)
            self._prefill = None
            self._recorder.assign_prefill(None)

    def _close_decode(self, leg: DecodeLeg) -> None:
        leg.close(wire.Cancel(run=self._run, reason=wire.Cancel.REASON_ATTEMPT))
        self._migration.source = None
        self._recorder.assign_decode(None)

    async def _until_prompt_logprobs(self) -> None:
        prefill, stream = self._prefill, self._context.stream
        if prefill is not None:
            await self._legs.until_reported(lambda: stream.has_prompt_logprobs or not prefill.can_report)
