"""The Prefill service: computes a prompt, sends its first token, and keeps its KV cache for a receiver.

A call that breaks, or whose owner is superseded, cancels its run unless a fetch is open: then the run continues
under the lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TypeVar

import grpc

from decant.engine.errors import EngineStopped
from decant.engine.output import (
    PromptEmbedding,
    PromptLogprobs,
    SequenceFinished,
    SequenceStarted,
    StepOutput,
    Token,
)
from decant.engine.request import FinishReason
from decant.handoff.leases import Lease
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.telemetry import logs
from decant.worker.engine_host import EngineHost
from decant.worker.prefill.execution import PrefillExecutor
from decant.worker.prefill.messages import prompt_embedding, prompt_logprobs
from decant.worker.prefill.run import PrefillFailed, PrefillRun, StaleOwner
from decant.worker.prefill.validation import CallValidator
from decant.worker.wire_codec import RequestRejected

_log = logs.get(__name__)

_Event = TypeVar("_Event", SequenceStarted, PromptLogprobs, PromptEmbedding, Token, SequenceFinished)


class PrefillService(services.PrefillServicer):
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._executor = PrefillExecutor(host)
        self._runs = self._executor.queue
        self._validator = CallValidator(host, self._runs)
        host.steps.subscribe(self._on_step)
        host.crashes.subscribe(self._on_crash)
        host.epochs.new_owners.subscribe(self._on_new_owner)
        host.sender.leases.ends.subscribe(self._on_lease_end)

    def runs(self) -> Iterator[tuple[wire.Run, int, wire.RunStatus.Phase, str]]:
        for run in self._runs:
            for request in run.requests:
                yield run.ref, request.sampling.output_index, run.phase, request.id

    async def drain(self) -> None:
        await self._runs.wait_empty()

    async def close(self) -> None:
        await self._executor.close()

    async def Prefill(  # noqa: N802 - the name on the wire
        self, request: wire.PrefillRequest, _: grpc.aio.ServicerContext[wire.PrefillRequest, wire.PrefillEvent]
    ) -> AsyncIterator[wire.PrefillEvent]:
        engine_request, ref = request.engine_request, request.run
        with logs.bound(request_id=ref.request, attempt=ref.attempt, traceparent=engine_request.traceparent):
            try:
                run = self._validator.validate(request)
            except RequestRejected as rejection:
                yield wire.PrefillEvent(refused=wire.Refused(run=ref, failure=rejection.failure))
                return
            except StaleOwner as error:
                yield wire.PrefillEvent(superseded=error.superseded)
                return
            self._executor.start(run)
            try:
                while (event := await run.events.get()) is not None:
                    yield event
            finally:
                self._on_call_end(run)

    def _on_call_end(self, run: PrefillRun) -> None:
        if not self._has_open_fetch(run):
            run.cancel(PrefillFailed.because(wire.CAUSE_OWNER_LOST, "the call broke"))

    def _has_open_fetch(self, run: PrefillRun) -> bool:
        lease = self._host.sender.leases.find(run.ticket.id) if run.ticket else None
        return lease is not None and lease.is_opened

    # -- events -----------------------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        if not self._runs:
            return
        for run, started in self._live(output.started):
            if started.id == run.id:
                run.started = started
                run.wake()
        for run, part in self._live(output.prompt_logprobs):
            run.send(prompt_logprobs=prompt_logprobs(run, part))
        for run, embedding in self._live(output.embeddings):
            run.send(embedding=prompt_embedding(run, embedding))
        for run, token in self._live(output.tokens):
            run.first_tokens[token.id] = token
        for id in output.parked:
            if parked := self._runs.get(id):
                parked.parked.add(id)
                parked.wake()
        for run, finished in self._live(output.ended):
            self._on_finished(run, finished)
        if output.started:
            self._runs.admit()  # cached prefixes leave blocks for other prompts

    def _live(self, events: Iterable[_Event]) -> Iterator[tuple[PrefillRun, _Event]]:
        for event in events:
            if run := self._runs.get(event.id):
                yield run, event

    def _on_finished(self, run: PrefillRun, finished: SequenceFinished) -> None:
        if finished.fault is not None:
            run.cancel(PrefillFailed(RequestRejected.of(finished.fault).failure))
        elif finished.reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            run.cancel(PrefillFailed.because(wire.CAUSE_ENGINE, finished.detail or "ended by the engine"))
        else:
            run.finished[finished.id] = finished
            run.wake()

    def _on_lease_end(self, lease: Lease) -> None:
        run = self._runs.get(lease.sequence)
        if run is None:
            return
        if lease.failure is not None:
            _log.warning("lease ended without a release", request_id=lease.ticket.run.request, opened=lease.is_opened)
            run.cancel(PrefillFailed(lease.failure))
        elif run.is_parked:
            run.is_released = True
            run.wake()
        else:
            detail = "the receiver released the cache before the first token"
            run.cancel(PrefillFailed.because(wire.CAUSE_PEER_LOST, detail, lease.receiver))

    def _on_new_owner(self, ref: wire.Run) -> None:
        for run in self._runs:
            if run.ref.request == ref.request and run.ref.epoch < ref.epoch:
                superseded = wire.Superseded(run=run.ref, epoch=ref.epoch)
                if self._has_open_fetch(run):
                    run.close(superseded=superseded)
                else:
                    run.cancel(StaleOwner(superseded))

    def _on_crash(self, stopped: EngineStopped) -> None:
        for run in self._runs:
            run.cancel(PrefillFailed.because(wire.CAUSE_ENGINE, str(stopped)))
