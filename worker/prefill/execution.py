"""A prefill run from start to end as one coroutine, until the worker keeps nothing of it.

Deadline, end of the lease, broken call, newer owner and crash of the engine release everything at once.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest
from decant.protos import worker_pb2 as wire
from decant.runtime.background import start_task
from decant.runtime.telemetry import tracing
from decant.worker.adapter_store import AdapterUse
from decant.worker.engine_host import EngineHost
from decant.worker.prefill.messages import committed_outputs, first_tokens
from decant.worker.prefill.prefill_queue import PrefillQueue
from decant.worker.prefill.run import PrefillFailed, PrefillRun, StaleOwner
from decant.worker.wire_codec import RequestRejected


class PrefillExecutor:
    """Runs prefill runs, a coroutine each, which alone decides what follows. `PrefillService` starts and cancels
    runs.
    """

    def __init__(self, host: EngineHost) -> None:
        self.queue = PrefillQueue(host)
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, run: PrefillRun) -> None:
        self.queue.add(run)
        on_failure = partial(self._on_failure, run)
        task = start_task("prefill run", self.execute(run), on_failure, request_id=run.ref.request)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def execute(self, run: PrefillRun) -> None:
        with self._host.adapters.use(run.request.adapter) as adapter:
            await self._execute(run, adapter)

    async def _execute(self, run: PrefillRun, adapter: AdapterUse) -> None:
        failure: wire.Failure | None = None
        last_event: dict[str, object] = {}
        try:
            async with asyncio.timeout(run.remaining_s):
                with tracing.span("prefill", run.traceparent) as span:
                    await self._prepare(run, adapter)
                    self._add_to_engine(run)
                    await run.until(lambda: run.started is not None)
                    span.event("scheduled")
                    if run.handoff and not run.has_first_tokens:
                        self._issue_ticket(run)  # the router chooses the receiver while the other chunks are computed
                    await run.until(lambda: run.has_first_tokens)
                    cached = run.started.cached if run.started is not None else 0
                    span.set(worker=self._host.peer.id, tokens=len(run.request.token_ids), cached_tokens=cached)
                run.send(first=first_tokens(run))
                if run.handoff and run.is_parked:
                    if run.ticket is None:  # one step computed the prompt: first tokens do not wait for tickets
                        self._issue_ticket(run)
                    await run.until(lambda: run.is_released)
        except RequestRejected as rejection:
            last_event["refused"] = wire.Refused(run=run.ref, failure=rejection.failure)
        except StaleOwner as stale:
            last_event["superseded"] = stale.superseded
        except PrefillFailed as failed:
            failure = failed.failure
        except TimeoutError:
            failure = wire.Failure(cause=wire.CAUSE_DEADLINE, detail="the deadline has passed")
        finally:
            self._release(run, failure)
        if failure is not None:
            last_event["failed"] = wire.Failed(run=run.ref, failure=failure)
        run.close(**last_event)

    async def _prepare(self, run: PrefillRun, adapter: AdapterUse) -> None:
        """Wait until the engine may have the run."""
        try:
            await self._host.prepare(run.request)
            await run.until(lambda: run.is_admitted)
            if run.request.adapter:  # not before: an admitted run may wait for its memory, and keep others waiting
                await self._begin(run, adapter)
        except InvalidRequest as error:
            raise RequestRejected.of(error) from None

    async def _begin(self, run: PrefillRun, adapter: AdapterUse) -> None:
        """Wait for the run's adapter, but no longer than the run is wanted."""
        begin = asyncio.create_task(adapter.begin())
        begin.add_done_callback(lambda _: run.wake())
        try:
            await run.until(begin.done)
            begin.result()
        finally:
            if begin.cancel():
                await asyncio.wait([begin])

    def _add_to_engine(self, run: PrefillRun) -> None:
        """Add the run without waiting for the answer, which comes with a step: the deadline may be earlier."""

        def add(engine: Engine) -> None:
            if run.remaining_s is not None and time.monotonic() >= run.received + run.remaining_s:
                return  # its coroutine ends it: the prompt costs no step
            try:
                engine.add(run.request, run.requests[1:])
            except InvalidRequest as error:
                rejections.append(RequestRejected.of(error))

        def on_answer() -> None:
            for rejection in rejections:
                run.cancel(rejection)

        rejections: list[RequestRejected] = []
        self._host.loop.post(add, then=on_answer)

    def _issue_ticket(self, run: PrefillRun) -> None:
        ticket = self._host.new_ticket(run.ref, run.requests, len(run.request.token_ids))
        run.ticket = self._host.sender.issue(
            ticket,
            run.sequences,
            run.request.prompt_len,
            partial(committed_outputs, run),
            is_parked=run.is_parked,
        )
        run.send(ticket=run.ticket)

    def _release(self, run: PrefillRun, failure: wire.Failure | None) -> None:
        self.queue.remove(run)
        # The ticket of a finished sequence stays: a late fetch is answered that nothing is left.
        if run.ticket is not None and not run.is_finished:
            self._host.sender.cancel(run.ticket.id, failure or wire.Failure(cause=wire.CAUSE_RECLAIMED))
        if run.is_admitted:
            self._host.loop.post(lambda engine: [engine.cancel(sequence) for sequence in run.sequences])

    def _on_failure(self, run: PrefillRun, error: BaseException) -> None:
        failure = wire.Failure(cause=wire.CAUSE_ENGINE, detail=f"{type(error).__name__}: {error}")
        run.close(failed=wire.Failed(run=run.ref, failure=failure))

    async def close(self) -> None:
        for run in self.queue:
            run.cancel(PrefillFailed.because(wire.CAUSE_RECLAIMED, "the worker stops"))
        if self._tasks:
            await asyncio.wait(self._tasks)
