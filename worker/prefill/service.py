"""The Prefill service: computes a prompt, sends its first token, and keeps its KV cache for a receiver.

    call ── accepted ── its turn ── engine: first chunk ──> ticket ── first token ── cache released ── OK
              │                        └── prompt_logprobs ──^         └── it was the last token ── OK
              └──> refused, superseded            failed <── deadline, lease, engine, receiver

A call that breaks, or whose owner is superseded, cancels its run unless a fetch is open: then the run continues under
the lease, and only the deadline is still enforced here.
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
from decant.worker.prefill.messages import first_logprobs, first_tokens, prompt_logprobs
from decant.worker.prefill.prefill_queue import PrefillQueue, PrefillRun
from decant.worker.wire_codec import RequestRejected, other_request, queue_key, to_request

_log = logs.get(__name__)

_Event = TypeVar("_Event", SequenceStarted, PromptLogprobs, Token, SequenceFinished)


class PrefillService(services.PrefillServicer, HostHandler):
    """Prefill over one host; a handler of the host's events. A run frees what it has when its call or lease ends."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._prompts = PrefillQueue(host.block_size, host.total_blocks, host.epochs)
        self._numbers = itertools.count()

    def runs(self) -> Iterator[tuple[wire.Run, int, wire.RunStatus.Phase, str]]:
        """Run, output, phase and sequence id of every run."""
        for run in self._prompts:
            yield run.ref, run.output, run.phase, run.id

    async def drain(self) -> None:
        """Wait until there is no run."""
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

    # -- admission -----------------------------------------------------------------------------------------------

    def _accept(self, request: wire.PrefillRequest) -> PrefillRun:
        """Add a run to the queue. Raises RequestRejected, _StaleOwner."""
        host, work = self._host, request.engine_request
        _check(host, request)
        name = f"prefill-{next(self._numbers)}:{request.run.request}"
        engine_request = to_request(name, work, model=host.model, park_after=request.handoff or _needs_park(work))
        if len(engine_request.token_ids) > host.window:
            detail = f"{len(engine_request.token_ids)} tokens; the maximum context length is {host.window}"
            raise _rejected(wire.CAUSE_NEVER_FITS, detail)
        if self._prompts.not_begun + host.waiting_arrivals >= host.max_waiting:
            raise _rejected(wire.CAUSE_BUSY, f"{host.max_waiting} runs wait already")
        if work.HasField("remaining_ms") and not work.remaining_ms:
            raise _rejected(wire.CAUSE_DEADLINE, "the deadline has passed")
        now = time.monotonic()
        run = PrefillRun(
            ref=request.run,
            request=engine_request,
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

    def _admit(self) -> None:
        """Add the runs whose turn it is to the engine."""
        for run in self._prompts.admit():
            self._add_to_engine(run)
        self._host.waiting_prompts = len(self._prompts.waiting)
        self._host.waiting_tokens = self._prompts.waiting_tokens

    def _add_to_engine(self, run: PrefillRun) -> None:
        """Without waiting for the answer, which comes with a step: the deadline may be earlier."""
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

    # -- events of the engine ------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        if not self._prompts:
            return
        for run, begun in self._live(output.begun):
            run.begun = begun
        for run, part in self._live(output.prompt_logprobs):
            run.send(prompt_logprobs=prompt_logprobs(run, part))
        for run, token in self._live(output.tokens):
            run.first = token
        for id in output.parked:
            if parked := self._prompts.get(id):
                self._on_parked(parked)
        for run, ended in self._live(output.ended):
            self._on_ended(run, ended)
        for run, _ in self._live(output.begun):  # last: first tokens must not wait for tickets
            if run.handoff:
                self._issue_ticket(run)
        if output.begun:
            self._admit()  # cached prefixes leave blocks for other prompts

    def _live(self, events: Iterable[_Event]) -> Iterator[tuple[PrefillRun, _Event]]:
        """The events of runs that have not ended, with their runs."""
        for event in events:
            if run := self._prompts.get(event.id):
                yield run, event

    def _issue_ticket(self, run: PrefillRun) -> None:
        """The first chunk is computed: now the router chooses the receiver."""
        ticket = wire.Ticket(
            run=run.ref,
            sender=self._host.peer,
            address=self._host.address,
            layout=self._host.layout,
            salt=run.request.salt,
            tokens=len(run.request.token_ids),
            outputs=[run.output],
        )
        logprobs = partial(first_logprobs, run)
        run.ticket = self._host.sender.issue(ticket, run.id, run.request.prompt_len, logprobs)
        run.send(ticket=run.ticket)

    def _on_parked(self, run: PrefillRun) -> None:
        run.send(first=first_tokens(run))
        run.sent_first_token = True
        if not run.handoff:
            self._end(run)

    def _on_ended(self, run: PrefillRun, ended: SequenceFinished) -> None:
        """The engine finished the sequence. Its ticket stays: a late fetch is answered that nothing is left."""
        if ended.reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=ended.detail or "ended by the engine"))
            return
        run.ticket = None
        self._end(run, first=first_tokens(run, ended))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, run: PrefillRun, failure: wire.Failure | None = None, **event: object) -> None:
        """End a run: free its blocks, send ``event`` as the last of the call, and admit others.

        ``failure`` is sent to an open fetch.
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
        """The call has ended, or its owner is superseded: end the run, unless its fetch is open."""
        lease = self._host.sender.leases.find(run.ticket.id) if run.ticket else None
        if lease is None or not lease.opened:
            self._end(run, wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail="the call broke"), **event)
        elif event:
            run.send(**event)
            run.events.put_nowait(None)

    def _on_deadline(self, run: PrefillRun) -> None:
        self._fail(run, wire.Failure(cause=wire.CAUSE_DEADLINE, detail="the deadline has passed"))

    def on_lease_end(self, lease: Lease) -> None:
        """The receiver released the cache, or the ticket expired."""
        run = self._prompts.get(lease.sequence)
        if run is None:
            return
        if lease.failure is not None:
            _log.warning("lease over", request_id=lease.ticket.run.request, opened=lease.opened)
            self._fail(run, lease.failure)
        elif run.sent_first_token:
            self._end(run)
        else:
            detail = "the receiver released the cache before the first token"
            self._fail(run, wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver))

    def on_new_owner(self, ref: wire.Run) -> None:
        for run in self._prompts:
            if run.ref.request == ref.request and run.ref.epoch < ref.epoch:
                self._on_call_closed(run, superseded=wire.Superseded(run=run.ref, epoch=ref.epoch))

    def on_crash(self, stopped: EngineStopped) -> None:
        for run in self._prompts:
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))


class _StaleOwner(Exception):
    """The request has a newer owner."""

    def __init__(self, superseded: wire.Superseded) -> None:
        self.superseded = superseded


def _check(host: EngineHost, request: wire.PrefillRequest) -> None:
    """Whether this worker can accept the request now. Raises RequestRejected, _StaleOwner."""
    if not is_compatible(request.router.protocol):
        raise _rejected(wire.CAUSE_WRONG_PROTOCOL, f"protocol {request.router.protocol} is not supported")
    if not same_incarnation(request.worker, host.peer):
        raise _rejected(wire.CAUSE_WRONG_PEER, "the request is for another incarnation of this worker")
    if host.epochs.is_other_request(request.run):
        raise RequestRejected(other_request())
    if (superseded := host.epochs.check(request.run)) is not None:
        raise _StaleOwner(superseded)
    if host.draining:
        raise _rejected(wire.CAUSE_DRAINING, "this worker is draining")
    if not host.loop.healthy:
        raise _rejected(wire.CAUSE_ENGINE, "the engine of this worker has stopped")


def _needs_park(work: wire.EngineRequest) -> bool:
    """Whether the sequence must be parked after one token, because more are allowed."""
    written = len(work.outputs[0].tokens) // 4 if work.outputs else 0
    return work.stopping.max_tokens > written + 1


def _rejected(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
