"""A run from start to end as one coroutine, until the worker keeps only its tokens.

A cancel interrupts the coroutine where it waits; it then releases the engine's blocks and the sender's ticket.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped, InvalidRequest
from decant.engine.request import FinishReason
from decant.engine.transfer import IncomingSequence
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.receiver import TransferResult
from decant.protos import worker_pb2 as wire
from decant.runtime.background import start_task
from decant.runtime.packed import unpack
from decant.runtime.telemetry import tracing
from decant.worker.adapter_store import AdapterUse
from decant.worker.decode.admission import DecodeAdmission
from decant.worker.decode.migration import MigrationSource
from decant.worker.decode.output import Output, end_of
from decant.worker.decode.run import DecodeRun
from decant.worker.decode.run_table import RunTable
from decant.worker.decode.spans import run_span
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected, logprobs_from_wire, microseconds


class EngineFailed(Exception):
    """The engine could not compute a sequence, by its own fault or the request's."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class RunExecutor:
    """Runs decode runs: a coroutine each, from admission to the end, and what interrupts it.

    `DecodeRunManager` starts, cancels and forgets runs by it; ownership does so for those without a router. Cancel all
    runs before ``close``, which waits for them.
    """

    def __init__(self, host: EngineHost, runs: RunTable) -> None:
        self.admission = DecodeAdmission(host)
        self.migrations = MigrationSource(host, runs, self.fail)
        self.step = 0
        self._host = host
        self._runs = runs
        self._tasks: dict[DecodeRun, asyncio.Task[None]] = {}
        self._interruptible: set[DecodeRun] = set()

    @property
    def executing(self) -> list[DecodeRun]:
        return list(self._tasks)

    def start(self, run: DecodeRun, remaining_ms: int | None) -> None:
        loop = asyncio.get_running_loop()
        if remaining_ms is not None:
            run.due = time.monotonic() + remaining_ms / 1000
            run.deadline = loop.call_later(remaining_ms / 1000, self.cancel, run, wire.OutputEnd.REASON_DEADLINE)
        on_failure = partial(self._on_failure, run)
        task = start_task("decode run", self.execute(run), on_failure, request_id=run.ref.request)
        self._tasks[run] = task
        task.add_done_callback(lambda _: self._tasks.pop(run))

    async def execute(self, run: DecodeRun) -> None:
        with self._host.adapters.use(run.root.request.adapter) as adapter:
            await self._execute(run, adapter)

    async def _execute(self, run: DecodeRun, adapter: AdapterUse) -> None:
        try:
            with run_span(run):
                await self._until_finished(run, adapter)
        except asyncio.CancelledError:
            if run.cancel_reason is None:
                raise
            await self._release(run)
            self._finish(run)
        except InvalidRequest as error:
            self.refuse(run, RequestRejected.of(error).failure)
        except EngineStopped as error:
            self.refuse(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(error)))
        except (HandoffFailed, SequenceAlreadyFinished) as error:
            assert run.ticket is not None
            self.fail(run, _failure_from(error, run.ticket.sender))
        except EngineFailed as error:
            await self._release(run)  # its other outputs
            self.fail(run, error.failure)
        except Exception:
            await self._release(run)
            raise
        else:
            self._finish(run)

    async def _until_finished(self, run: DecodeRun, adapter: AdapterUse) -> None:
        """Wait until all outputs are finished: the only part that `cancel` interrupts. Raises EngineFailed."""
        if run.cancel_reason is not None:  # cancelled before the coroutine began
            raise asyncio.CancelledError
        self._interruptible.add(run)
        try:
            await adapter.begin()
            await self._host.prepare(run.root.request)
            arrival = await self.admission.enter(run)
            if arrival is not None:
                await self._fetch(run, arrival)
            while waiting := [output.finished for output in run.unfinished if not output.finished.done()]:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self._end_finished(run)
        finally:
            self._interruptible.discard(run)

    def _end_finished(self, run: DecodeRun) -> None:
        """End what is finished, except the last outputs, with which the run ends. Raises EngineFailed."""
        finished = [output for output in run.unfinished if output.finished.done()]
        for output in finished:
            event = output.finished.result()
            if event.fault is not None:
                raise EngineFailed(RequestRejected.of(event.fault).failure)
            if event.reason is FinishReason.FAILED:
                raise EngineFailed(wire.Failure(cause=wire.CAUSE_ENGINE, detail=event.detail))
        if len(finished) < len(run.unfinished):
            for output in finished:
                self._end(output)

    async def _fetch(self, run: DecodeRun, arrival: IncomingSequence) -> None:
        assert run.ticket is not None
        run.phase = wire.RunStatus.PHASE_ARRIVING
        run.notify.scheduled(arrival.cached_blocks * self._host.transfer_layout.block_size)
        source = self._host.transport.source(run.ticket.address)
        with tracing.span("handoff", run.span.traceparent, sender=run.ticket.sender.id) as span:
            transfer = await self._host.receiver.receive(source, run.ticket, arrival)
            span.set(bytes=transfer.received_bytes)
        run.phase = wire.RunStatus.PHASE_RUNNING
        committed = {output.output: output for output in transfer.outputs}
        for output in run.outputs:
            _add_committed(output, committed.get(output.index))
        run.notify.arrived(_decode_started(run.root, transfer))
        for output in run.outputs:
            run.notify.tokens_from(output, output.prior_tokens, self.step)
            if output.end is not None:
                self._runs.stop_events([output])
                run.notify.ended([output])
            elif output.is_cancelled:
                self.cancel_output(output)
        if run.offer.is_requested:
            self.migrations.issue_ticket(run)

    async def _release(self, run: DecodeRun) -> None:
        if run.ticket is not None and run.phase != wire.RunStatus.PHASE_RUNNING and not run.keeps_ticket:
            self._host.receiver.release(self._host.transport.source(run.ticket.address), run.ticket)
        self.migrations.release(run, is_finished=False)
        is_done = asyncio.Event()

        def cancel(engine: Engine) -> None:
            for output in run.outputs:
                engine.cancel(output.request.id, output.num_cacheable)

        self._host.loop.post(cancel, then=is_done.set)
        await is_done.wait()

    def _finish(self, run: DecodeRun) -> None:
        if run.has_ended or run not in self._runs:
            return
        for output in run.unfinished:
            self._end(output)
        run.phase = wire.RunStatus.PHASE_ENDED
        self.migrations.release(run, is_finished=True)
        run.stop_timers()
        if run.owner.session is None:
            self.start_orphan_timer(run)
        if run.is_forgotten:
            self.forget(run)

    def _end(self, output: Output) -> None:
        """End an output and report it. The sequence has ended in the engine, or never began there."""
        if output.finished.done() and output.num_cacheable is not None:  # cancelled too late for the engine
            self.truncate_cached(output, output.num_cacheable)
        output.truncate()
        output.end = end_of(output)
        self._runs.stop_events([output])
        output.run.notify.ended([output])

    def _on_failure(self, run: DecodeRun, error: BaseException) -> None:
        self.fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=f"{type(error).__name__}: {error}"))

    # -- from outside the coroutine -----------------------------------------------------------------------------

    def cancel(self, run: DecodeRun, reason: wire.OutputEnd.Reason) -> None:
        """Cancel the run in any phase. Ended follows once all it held is released; the first reason counts."""
        if not run.has_ended and run.cancel_reason is None:
            run.cancel_reason = reason
            if run in self._interruptible:
                self._interruptible.discard(run)
                self._tasks[run].cancel()

    def cancel_output(self, output: Output) -> None:
        """Cancel one output of a run whose others go on."""
        output.is_cancelled = True
        if output.run.phase == wire.RunStatus.PHASE_RUNNING:  # else as soon as the engine has it
            self._host.loop.post(lambda engine: engine.cancel(output.request.id, output.num_cacheable))

    def fail(self, run: DecodeRun, failure: wire.Failure) -> None:
        """End and forget a run before its output is complete."""
        if run in self._runs and not run.has_ended:
            run.notify.failed(failure)
            self._close(run)

    def refuse(self, run: DecodeRun, failure: wire.Failure) -> None:
        """End and forget a run that the engine has not started; its ticket stays valid."""
        if run in self._runs and not run.has_ended:
            run.notify.refused(failure)
            self._close(run)

    def forget(self, run: DecodeRun) -> None:
        """Cancel and forget a run, without a message to its owner."""
        run.release_session()
        self.cancel(run, wire.OutputEnd.REASON_CANCELLED)
        self._runs.remove(run)

    def start_orphan_timer(self, run: DecodeRun) -> None:
        run.stop_orphan_timer()
        run.owner.orphan_timer = asyncio.get_running_loop().call_later(self._host.lease_s, self.forget, run)

    def truncate_cached(self, output: Output, position: int) -> None:
        request = output.request
        tokens = [*request.token_ids[: request.prompt_len], *output.tokens]
        self._host.loop.post(lambda engine: engine.evict_cached(tokens, request.cache_salt, position))

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._host.receiver.close()

    def _close(self, run: DecodeRun) -> None:
        self.migrations.release(run, is_finished=False)
        run.release_session()
        self._runs.remove(run)
        run.keeps_ticket = True
        self.cancel(run, wire.OutputEnd.REASON_CANCELLED)


def _decode_started(output: Output, transfer: TransferResult) -> wire.DecodeStarted:
    began = output.timeline.scheduled if output.timeline else None
    owned_at = transfer.owned_at if began is None else min(began, transfer.owned_at)
    message = wire.DecodeStarted.Handoff(
        handoff_us=microseconds(owned_at - transfer.opened_at), bytes=transfer.received_bytes
    )
    message.decode_wait_us = 0 if began is None else microseconds(began - owned_at)
    return wire.DecodeStarted(handoff=message)


def _add_committed(output: Output, committed: wire.TransferCommit.Output | None) -> None:
    """Add the tokens that the sender generated, and its end there. Raises HandoffFailed."""
    if committed is None:
        raise HandoffFailed(wire.CAUSE_CORRUPT, f"a commit without output {output.index}")
    tokens = unpack(committed.tokens)
    output.tokens.extend(tokens[output.prior_tokens :])
    for entry in committed.logprobs:
        if output.prior_tokens <= entry.entry < len(tokens):
            output.logprobs[entry.entry] = logprobs_from_wire(tokens[entry.entry], entry)
    output.add_early_tokens()
    if committed.HasField("finished"):
        output.end = wire.OutputEnd()
        output.end.CopyFrom(committed.finished)


def _failure_from(error: HandoffFailed | SequenceAlreadyFinished, sender: wire.Peer) -> wire.Failure:
    if isinstance(error, SequenceAlreadyFinished):
        detail = "nothing is left to fetch: the sequence ended with its first token"
        return wire.Failure(cause=wire.CAUSE_CANCELLED, detail=detail)
    failure = error.message()
    if not failure.HasField("peer") and failure.cause != wire.CAUSE_ENGINE:
        failure.peer.CopyFrom(sender)
    return failure
