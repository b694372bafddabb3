"""The Prefill service: reads a prompt, tells its first token, and gives the cache away.

    call ── accept ── its turn ── engine: first chunk ──> ticket ── first token ── cache released ── OK
              │                        └── prompt_logprobs ──^         └── the token was the last ── OK
              └──> refused, superseded            failed <── deadline, lease over, engine, taker gave up

A call that breaks, or whose owner is superseded, ends its work, unless a fetch is open: from then on the fetch and
its lease keep it, and only the deadline is still enforced here.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import TypeVar

import grpc

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped, InvalidRequest
from decant.engine.output import PromptLogprobs, SequenceFinished, SequenceStarted, StepOutput, Token
from decant.engine.request import FinishReason
from decant.handoff.leases import Lease
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime import logs
from decant.runtime.peer import is_compatible, same_incarnation
from decant.worker.engine_host import EngineHost, HostHandler
from decant.worker.prefill.prefill_queue import PrefillQueue, PrefillRun
from decant.worker.wire_codec import RequestRejected, end_reason, logprobs_to_wire, other_request, queue_key, to_request

_log = logs.get(__name__)

_Told = TypeVar("_Told", SequenceStarted, PromptLogprobs, Token, SequenceFinished)


class PrefillService(services.PrefillServicer, HostHandler):
    """Serves prompts over one hub. ``async with`` is not needed: what it holds goes with its calls and leases."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._prompts = PrefillQueue(host.block_size, host.total_blocks, host.epochs)
        self._numbers = itertools.count()

    def runs(self) -> Iterator[tuple[wire.Run, int, wire.RunStatus.Phase, str]]:
        """Run, output, phase and the engine's name of all that is at work."""
        for run in self._prompts:
            yield run.ref, run.output, run.phase, run.id

    async def drain(self) -> None:
        """Wait until nothing is at work."""
        await self._prompts.emptied()

    async def Prefill(  # noqa: N802 - the name on the wire
        self, request: wire.PrefillRequest, _: grpc.aio.ServicerContext[wire.PrefillRequest, wire.PrefillEvent]
    ) -> AsyncIterator[wire.PrefillEvent]:
        work, ref = request.engine_request, request.run
        with logs.bound(request_id=ref.request, attempt=ref.attempt, traceparent=work.traceparent):
            try:
                run = self._accept(request)
            except RequestRejected as refused:
                yield wire.PrefillEvent(refused=wire.Refused(run=ref, failure=refused.failure))
                return
            except _StaleOwner as error:
                yield wire.PrefillEvent(superseded=error.superseded)
                return
            try:
                while (event := await run.events.get()) is not None:
                    yield event
            finally:
                self._on_call_closed(run)

    # -- taking up -----------------------------------------------------------------------------------------------

    def _accept(self, request: wire.PrefillRequest) -> PrefillRun:
        """The call's place in the queue. Raises WorkRefused, _NotTheOwner."""
        host, work = self._host, request.engine_request
        self._check_addressed(request)
        name = f"prefill-{next(self._numbers)}:{request.run.request}"
        asked = to_request(name, work, model=host.model, park_after=request.handoff or _needs_park(work))
        if len(asked.token_ids) > host.window:
            detail = f"{len(asked.token_ids)} tokens, and the window here is {host.window}"
            raise _rejected(wire.CAUSE_NEVER_FITS, detail)
        if self._prompts.not_begun + host.waiting_arrivals >= host.max_waiting:
            raise _rejected(wire.CAUSE_BUSY, f"{host.max_waiting} runs wait already")
        if work.HasField("remaining_ms") and not work.remaining_ms:
            raise _rejected(wire.CAUSE_DEADLINE, "nothing is left of its time")
        now = time.monotonic()
        run = PrefillRun(
            ref=request.run,
            request=asked,
            stopping=work.stopping,
            handoff=request.handoff,
            received=now,
            queue_key=queue_key(work, now),
        )
        if work.HasField("remaining_ms"):
            loop = asyncio.get_running_loop()
            run.deadline = loop.call_later(work.remaining_ms / 1000, self._on_deadline, run)
        self._prompts.add(run)
        self._admit()
        return run

    def _check_addressed(self, request: wire.PrefillRequest) -> None:
        """Raises WorkRefused where it can't be for this worker or not now, _NotTheOwner."""
        if not is_compatible(request.router.protocol):
            raise _rejected(wire.CAUSE_WRONG_PROTOCOL, f"protocol {request.router.protocol} is not spoken here")
        if not same_incarnation(request.worker, self._host.peer):
            raise _rejected(wire.CAUSE_WRONG_PEER, "another life of this worker is meant")
        if self._host.epochs.is_other_request(request.run):
            raise RequestRejected(other_request())
        if (superseded := self._host.epochs.check(request.run)) is not None:
            raise _StaleOwner(superseded)
        if self._host.draining:
            raise _rejected(wire.CAUSE_DRAINING, "this worker is draining")
        if not self._host.loop.healthy:
            raise _rejected(wire.CAUSE_ENGINE, "this worker's engine has ended")

    def _admit(self) -> None:
        """Give those to the engine whose turn it is."""
        for run in self._prompts.admit():
            self._add_to_engine(run)
        self._host.waiting_prompts = len(self._prompts.waiting)
        self._host.waiting_tokens = self._prompts.waiting_tokens

    def _add_to_engine(self, run: PrefillRun) -> None:
        """Its caller doesn't wait for the answer, which comes with a step: he may have to be told something sooner."""
        refusals: list[InvalidRequest] = []

        def add(engine: Engine) -> None:
            try:
                engine.add(run.request)
            except InvalidRequest as error:
                refusals.append(error)

        def answered() -> None:
            for error in refusals:
                self._end(run, refused=wire.Refused(run=run.ref, failure=RequestRejected.of(error).failure))

        self._host.loop.post(add, then=answered)

    # -- what the engine tells -----------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        if not self._prompts:
            return
        for run, begun in self._live(output.begun):
            run.begun = begun
        for run, told in self._live(output.prompt_logprobs):
            entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(told.entries)]
            part = wire.PromptLogprobs(run=run.ref, first_position=told.position, logprobs=entries)
            run.send(prompt_logprobs=part)
        for run, token in self._live(output.tokens):
            run.first = token
        for id in output.parked:
            if parked := self._prompts.get(id):
                self._on_parked(parked)
        for run, ended in self._live(output.ended):
            self._on_ended(run, ended)
        for run, _ in self._live(output.begun):  # last: a client waits for a first token that came with this step
            if run.handoff:
                self._issue_ticket(run)
        if output.begun:
            self._admit()  # what they found in the cache makes room for others

    def _live(self, told: Iterable[_Told]) -> Iterator[tuple[PrefillRun, _Told]]:
        """What is told of prompts that are still at work here, with the prompt."""
        for one in told:
            if run := self._prompts.get(one.id):
                yield run, one

    def _issue_ticket(self, run: PrefillRun) -> None:
        """Its first chunk is computed: the taker is chosen now."""
        ticket = wire.Ticket(
            run=run.ref,
            sender=self._host.peer,
            address=self._host.address,
            layout=self._host.layout,
            salt=run.request.salt,
            tokens=len(run.request.token_ids),
            outputs=[run.output],
        )
        logprobs = partial(_first_logprobs, run)
        run.ticket = self._host.sender.issue(ticket, run.id, run.request.prompt_len, logprobs)
        run.send(ticket=run.ticket)

    def _on_parked(self, run: PrefillRun) -> None:
        run.send(first=_first_tokens(run))
        run.sent_first_token = True
        if not run.handoff:
            self._end(run)

    def _on_ended(self, run: PrefillRun, ended: SequenceFinished) -> None:
        """It ended by itself. Its ticket stays, for who opens it late is to hear that nothing is left."""
        if ended.reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=ended.detail or "ended by the engine"))
            return
        run.ticket = None
        self._end(run, first=_first_tokens(run, ended))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, run: PrefillRun, failure: wire.Failure | None = None, **event: object) -> None:
        """The one way out: frees what it holds, tells its caller the last event, and lets others enter.

        ``failure`` is what an open fetch is told.
        """
        if not self._prompts.remove(run):
            return
        self._free(run, failure)
        if event:
            run.send(**event)
        run.events.put_nowait(None)
        self._admit()

    def _fail(self, run: PrefillRun, failure: wire.Failure) -> None:
        self._end(run, failure, failed=wire.Failed(run=run.ref, failure=failure))

    def _free(self, run: PrefillRun, failure: wire.Failure | None) -> None:
        if run.ticket is not None:
            self._host.sender.reclaim(run.ticket.id, failure or wire.Failure(cause=wire.CAUSE_RECLAIMED))
        if run.is_admitted:
            self._host.loop.post(lambda engine: engine.cancel(run.id))

    def _on_call_closed(self, run: PrefillRun, **event: object) -> None:
        """Its caller goes, or is sent away: the work ends too, unless somebody fetches it."""
        lease = self._host.sender.leases.find(run.ticket.id) if run.ticket else None
        if lease is None or not lease.opened:
            self._end(run, wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail="the call broke"), **event)
        elif event:
            run.send(**event)
            run.events.put_nowait(None)

    def _on_deadline(self, run: PrefillRun) -> None:
        self._fail(run, wire.Failure(cause=wire.CAUSE_DEADLINE, detail="its time was over"))

    def on_lease_end(self, lease: Lease) -> None:
        """Its taker is done with the cache, or nobody renewed the ticket."""
        run = self._prompts.get(lease.sequence)
        if run is None:
            return
        if lease.failure is not None:
            _log.warning("lease over", request_id=lease.ticket.run.request, opened=lease.opened)
            self._fail(run, lease.failure)
        elif run.sent_first_token:
            self._end(run)
        else:
            detail = "the taker let go before the first token"
            self._fail(run, wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver))

    def on_new_owner(self, ref: wire.Run) -> None:
        for run in self._prompts:
            if run.ref.request == ref.request and run.ref.epoch < ref.epoch:
                self._on_call_closed(run, superseded=wire.Superseded(run=run.ref, epoch=ref.epoch))

    def on_crash(self, stopped: EngineStopped) -> None:
        for run in self._prompts:
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))


class _StaleOwner(Exception):
    """A later owner of the request was heard of."""

    def __init__(self, superseded: wire.Superseded) -> None:
        self.superseded = superseded


def _needs_park(work: wire.EngineRequest) -> bool:
    """Whether the engine, left alone, would write more than the one token that is wanted."""
    written = len(work.outputs[0].tokens) // 4 if work.outputs else 0
    return work.stopping.max_tokens > written + 1


def _first_tokens(run: PrefillRun, ended: SequenceFinished | None = None) -> wire.FirstTokens:
    begun, token = run.begun, run.first
    assert begun is not None
    assert token is not None
    timeline = begun.timeline
    assert timeline.scheduled is not None
    assert timeline.first_token is not None
    return wire.FirstTokens(
        tokens=[_first(run, token, ended)],
        cached_tokens=min(begun.cached, run.request.prompt_len),
        queued_us=_microseconds(timeline.scheduled - run.received),
        prefill_us=_microseconds(timeline.first_token - timeline.scheduled),
    )


def _first(run: PrefillRun, token: Token, ended: SequenceFinished | None) -> wire.FirstTokens.First:
    first = wire.FirstTokens.First(output=run.output, token=token.token)
    if token.logprobs is not None:
        first.logprobs.CopyFrom(logprobs_to_wire(0, token.logprobs))
    if ended is not None:
        first.finished.output = run.output
        first.finished.reason = end_reason(ended.reason, run.stopping)
        first.finished.end_position = run.request.prompt_len + token.position + 1
    return first


def _first_logprobs(run: PrefillRun) -> list[wire.TokenLogprobs]:
    """Of the token that the seal speaks of."""
    token = run.first
    return [] if token is None or token.logprobs is None else [logprobs_to_wire(token.position, token.logprobs)]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _rejected(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
