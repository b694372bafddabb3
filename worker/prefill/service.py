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
from decant.worker.engine_host import EngineHost
from decant.worker.prefill.prefill_queue import PrefillQueue, PrefillRun
from decant.worker.wire_codec import RequestRejected, end_reason, other_request, to_request, token_logprobs, urgency

_log = logs.get(__name__)

_Told = TypeVar("_Told", SequenceStarted, PromptLogprobs, Token, SequenceFinished)


class PrefillService(services.PrefillServicer):
    """Serves prompts over one hub. ``async with`` is not needed: what it holds goes with its calls and leases."""

    def __init__(self, hub: EngineHost) -> None:
        self._hub = hub
        self._prompts = PrefillQueue(hub.block_size, hub.total_blocks, hub.epochs)
        self._numbers = itertools.count()
        hub.step_listeners.append(self._on_step)
        hub.crash_listeners.append(self._on_crash)
        hub.epochs.listeners.append(self._on_new_owner)
        hub.sender.office.listeners.append(self._on_lease_end)

    def runs(self) -> Iterator[tuple[wire.Run, int, wire.RunStatus.Phase, str]]:
        """Run, output, phase and the engine's name of all that is at work."""
        for prompt in self._prompts:
            yield prompt.run, prompt.output, prompt.phase, prompt.id

    async def drain(self) -> None:
        """Wait until nothing is at work."""
        await self._prompts.emptied()

    async def Prefill(  # noqa: N802 - the name on the wire
        self, request: wire.PrefillRequest, _: grpc.aio.ServicerContext[wire.PrefillRequest, wire.PrefillEvent]
    ) -> AsyncIterator[wire.PrefillEvent]:
        work, run = request.engine_request, request.run
        with logs.bound(request_id=run.request, attempt=run.attempt, traceparent=work.traceparent):
            try:
                prompt = self._accept(request)
            except RequestRejected as refused:
                yield wire.PrefillEvent(refused=wire.Refused(run=run, failure=refused.failure))
                return
            except _StaleOwner as error:
                yield wire.PrefillEvent(superseded=error.superseded)
                return
            try:
                while (event := await prompt.events.get()) is not None:
                    yield event
            finally:
                self._part(prompt)

    # -- taking up -----------------------------------------------------------------------------------------------

    def _accept(self, request: wire.PrefillRequest) -> PrefillRun:
        """The call's place in the queue. Raises WorkRefused, _NotTheOwner."""
        hub, work = self._hub, request.engine_request
        self._check_addressed(request)
        name = f"prefill-{next(self._numbers)}:{request.run.request}"
        asked = to_request(name, work, model=hub.model, park_after=request.handoff or _goes_on(work))
        if len(asked.token_ids) > hub.window:
            detail = f"{len(asked.token_ids)} tokens, and the window here is {hub.window}"
            raise _cannot(wire.CAUSE_NEVER_FITS, detail)
        if self._prompts.not_begun + hub.waiting_arrivals >= hub.max_waiting:
            raise _cannot(wire.CAUSE_BUSY, f"{hub.max_waiting} runs wait already")
        if work.HasField("remaining_ms") and not work.remaining_ms:
            raise _cannot(wire.CAUSE_DEADLINE, "nothing is left of its time")
        now = time.monotonic()
        prompt = PrefillRun(
            run=request.run,
            request=asked,
            stopping=work.stopping,
            handoff=request.handoff,
            received=now,
            order=urgency(work, now),
        )
        if work.HasField("remaining_ms"):
            loop = asyncio.get_running_loop()
            prompt.deadline = loop.call_later(work.remaining_ms / 1000, self._time_over, prompt)
        self._prompts.add(prompt)
        self._admit()
        return prompt

    def _check_addressed(self, request: wire.PrefillRequest) -> None:
        """Raises WorkRefused where it can't be for this worker or not now, _NotTheOwner."""
        if not is_compatible(request.router.protocol):
            raise _cannot(wire.CAUSE_WRONG_PROTOCOL, f"protocol {request.router.protocol} is not spoken here")
        if not same_incarnation(request.worker, self._hub.peer):
            raise _cannot(wire.CAUSE_WRONG_PEER, "another life of this worker is meant")
        if self._hub.epochs.is_other_request(request.run):
            raise RequestRejected(other_request())
        if (superseded := self._hub.epochs.check(request.run)) is not None:
            raise _StaleOwner(superseded)
        if self._hub.draining:
            raise _cannot(wire.CAUSE_DRAINING, "this worker is draining")
        if not self._hub.loop.healthy:
            raise _cannot(wire.CAUSE_ENGINE, "this worker's engine has ended")

    def _admit(self) -> None:
        """Give those to the engine whose turn it is."""
        for prompt in self._prompts.admit():
            self._enter(prompt)
        self._hub.waiting_prompts = len(self._prompts.waiting)
        self._hub.waiting_tokens = self._prompts.waiting_tokens

    def _enter(self, prompt: PrefillRun) -> None:
        """Its caller doesn't wait for the answer, which comes with a step: he may have to be told something sooner."""
        refusals: list[InvalidRequest] = []

        def add(engine: Engine) -> None:
            try:
                engine.add(prompt.request)
            except InvalidRequest as error:
                refusals.append(error)

        def answered() -> None:
            for error in refusals:
                self._end(prompt, refused=wire.Refused(run=prompt.run, failure=RequestRejected.of(error).failure))

        self._hub.loop.post(add, then=answered)

    # -- what the engine tells -----------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        if not self._prompts:
            return
        for prompt, begun in self._ours(output.begun):
            prompt.begun = begun
        for prompt, told in self._ours(output.prompt_logprobs):
            entries = [token_logprobs(entry, logprobs) for entry, logprobs in enumerate(told.entries)]
            part = wire.PromptLogprobs(run=prompt.run, first_position=told.position, logprobs=entries)
            prompt.tell(prompt_logprobs=part)
        for prompt, token in self._ours(output.tokens):
            prompt.first = token
        for id in output.parked:
            if parked := self._prompts.get(id):
                self._parked(parked)
        for prompt, ended in self._ours(output.ended):
            self._ended(prompt, ended)
        for prompt, _ in self._ours(output.begun):  # last: a client waits for a first token that came with this step
            if prompt.handoff:
                self._issue(prompt)
        if output.begun:
            self._admit()  # what they found in the cache makes room for others

    def _ours(self, told: Iterable[_Told]) -> Iterator[tuple[PrefillRun, _Told]]:
        """What is told of prompts that are still at work here, with the prompt."""
        for one in told:
            if prompt := self._prompts.get(one.id):
                yield prompt, one

    def _issue(self, prompt: PrefillRun) -> None:
        """Its first chunk is computed: the taker is chosen now."""
        ticket = wire.Ticket(
            run=prompt.run,
            sender=self._hub.peer,
            address=self._hub.address,
            layout=self._hub.layout,
            salt=prompt.request.salt,
            tokens=len(prompt.request.token_ids),
            outputs=[prompt.output],
        )
        logprobs = partial(_first_logprobs, prompt)
        prompt.ticket = self._hub.sender.issue(ticket, prompt.id, prompt.request.prompt_len, logprobs)
        prompt.tell(ticket=prompt.ticket)

    def _parked(self, prompt: PrefillRun) -> None:
        prompt.tell(first=_first_tokens(prompt))
        prompt.told = True
        if not prompt.handoff:
            self._end(prompt)

    def _ended(self, prompt: PrefillRun, ended: SequenceFinished) -> None:
        """It ended by itself. Its ticket stays, for who opens it late is to hear that nothing is left."""
        if ended.reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            self._fail(prompt, wire.Failure(cause=wire.CAUSE_ENGINE, detail=ended.detail or "ended by the engine"))
            return
        prompt.ticket = None
        self._end(prompt, first=_first_tokens(prompt, ended))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, prompt: PrefillRun, failure: wire.Failure | None = None, **event: object) -> None:
        """The one way out: frees what it holds, tells its caller the last event, and lets others enter.

        ``failure`` is what an open fetch is told.
        """
        if not self._prompts.remove(prompt):
            return
        self._free(prompt, failure)
        if event:
            prompt.tell(**event)
        prompt.events.put_nowait(None)
        self._admit()

    def _fail(self, prompt: PrefillRun, failure: wire.Failure) -> None:
        self._end(prompt, failure, failed=wire.Failed(run=prompt.run, failure=failure))

    def _free(self, prompt: PrefillRun, failure: wire.Failure | None) -> None:
        if prompt.ticket is not None:
            self._hub.sender.reclaim(prompt.ticket.id, failure or wire.Failure(cause=wire.CAUSE_RECLAIMED))
        if prompt.entered:
            self._hub.loop.post(lambda engine: engine.cancel(prompt.id))

    def _part(self, prompt: PrefillRun, **event: object) -> None:
        """Its caller goes, or is sent away: the work ends too, unless somebody fetches it."""
        lease = self._hub.sender.office.find(prompt.ticket.id) if prompt.ticket else None
        if lease is None or not lease.opened:
            self._end(prompt, wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail="the call broke"), **event)
        elif event:
            prompt.tell(**event)
            prompt.events.put_nowait(None)

    def _time_over(self, prompt: PrefillRun) -> None:
        self._fail(prompt, wire.Failure(cause=wire.CAUSE_DEADLINE, detail="its time was over"))

    def _on_lease_end(self, lease: Lease) -> None:
        """Its taker is done with the cache, or nobody renewed the ticket."""
        prompt = self._prompts.get(lease.sequence)
        if prompt is None:
            return
        if lease.failure is not None:
            _log.warning("lease over", request_id=lease.ticket.run.request, opened=lease.opened)
            self._fail(prompt, lease.failure)
        elif prompt.told:
            self._end(prompt)
        else:
            detail = "the taker let go before the first token"
            self._fail(prompt, wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver))

    def _on_new_owner(self, run: wire.Run) -> None:
        for prompt in self._prompts:
            if prompt.run.request == run.request and prompt.run.epoch < run.epoch:
                self._part(prompt, superseded=wire.Superseded(run=prompt.run, epoch=run.epoch))

    def _on_crash(self, stopped: EngineStopped) -> None:
        for prompt in self._prompts:
            self._fail(prompt, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))


class _StaleOwner(Exception):
    """A later owner of the request was heard of."""

    def __init__(self, superseded: wire.Superseded) -> None:
        self.superseded = superseded


def _goes_on(work: wire.EngineRequest) -> bool:
    """Whether the engine, left alone, would write more than the one token that is wanted."""
    written = len(work.outputs[0].tokens) // 4 if work.outputs else 0
    return work.stopping.max_tokens > written + 1


def _first_tokens(prompt: PrefillRun, ended: SequenceFinished | None = None) -> wire.FirstTokens:
    begun, token = prompt.begun, prompt.first
    assert begun is not None
    assert token is not None
    timeline = begun.timeline
    assert timeline.scheduled is not None
    assert timeline.first_token is not None
    return wire.FirstTokens(
        tokens=[_first(prompt, token, ended)],
        cached_tokens=min(begun.cached, prompt.request.prompt_len),
        queued_us=_microseconds(timeline.scheduled - prompt.received),
        prefill_us=_microseconds(timeline.first_token - timeline.scheduled),
    )


def _first(prompt: PrefillRun, token: Token, ended: SequenceFinished | None) -> wire.FirstTokens.First:
    first = wire.FirstTokens.First(output=prompt.output, token=token.token)
    if token.logprobs is not None:
        first.logprobs.CopyFrom(token_logprobs(0, token.logprobs))
    if ended is not None:
        first.finished.output = prompt.output
        first.finished.reason = end_reason(ended.reason, prompt.stopping)
        first.finished.end_position = prompt.request.prompt_len + token.position + 1
    return first


def _first_logprobs(prompt: PrefillRun) -> list[wire.TokenLogprobs]:
    """Of the token that the seal speaks of."""
    token = prompt.first
    return [] if token is None or token.logprobs is None else [token_logprobs(token.position, token.logprobs)]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _cannot(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
