"""The prompts of one call, within its quota, its place in the queue, and its deadline.

call --> quota --> admission --> its prompts, some at once:  worker --> result
                                                             '--> failed: another worker, up to --attempts
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from decant.protos import worker_pb2 as wire
from decant.router.admission.request_size import RequestSize
from decant.router.attempt.failures import AttemptFailed, NoWorker
from decant.router.execution.services import RouterServices
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.prompt_runs.prompt_run import AdapterMissing, ComputedPrompt, PromptRun, WorkerFull
from decant.router.prompt_runs.search import PromptWorkerSearch
from decant.router.workers import turns
from decant.router.workers.needs import Needs
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.background import task_group
from decant.runtime.connections.channel import Deadline, whole_ms
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, NotFound, Unavailable
from decant.runtime.priority import queue_key
from decant.runtime.telemetry import logs
from decant.state.ids import Incarnation, RequestKey

AT_ONCE = 16
"""Prompts of one call that workers have at the same time: a large call leaves turns to others."""

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """A valid call: the requests for its prompts, and what it counts in quota and admission.

    ``shares_first``: the other prompts begin as the first does, so they follow it to its worker. ``adapter_name``: that
    of the adapter of all of them, empty for none.
    """

    tenant: str
    requests: Sequence[wire.EngineRequest]
    tokens: int
    priority: int
    deadline: Deadline
    shares_first: bool = False
    adapter_name: str = ""

    @property
    def model(self) -> str:
        return self.requests[0].model


@dataclass(slots=True)
class _RunningBatch:
    batch: PromptBatch
    key: RequestKey
    accepted_at: float
    attempts: count[int] = field(default_factory=lambda: count(1))
    is_started: bool = False


class PromptRunner:
    """Computes the prompts of calls. It owns nothing between calls, and a call's quota, slot and runs during one."""

    def __init__(self, router: RouterServices) -> None:
        self._router = router

    async def run(self, batch: PromptBatch, on_accepted: Callable[[], Awaitable[None]]) -> list[ComputedPrompt]:
        """Return the results in the order of the requests; cancelling this call ends the prompts at their workers.

        Calls ``on_accepted`` before the call waits for its turn.

        Raises QueueFull, QuotaExceeded, Unavailable, DeadlineExceeded, NotFound for the adapter, InvalidArgument,
        Unimplemented.
        """
        router, key = self._router, RequestKey(batch.tenant, f"call-{uuid.uuid4()}")
        running = _RunningBatch(batch, key, asyncio.get_running_loop().time())
        if not router.journal_writer.is_unavailable:
            await router.quota_leases.acquire(key, batch.tokens)
        try:
            await on_accepted()
            admission = router.admission.of(batch.model)
            size = RequestSize(batch.tokens, max_tokens=1)
            slot = await admission.enter(admission.accepted(size, batch.priority, batch.deadline))
            try:
                return await self._run_in_time(running)
            finally:
                slot.release()
        finally:
            router.quota_leases.release(key, batch.tokens if running.is_started else 0)

    async def _run_in_time(self, running: _RunningBatch) -> list[ComputedPrompt]:
        try:
            async with asyncio.timeout(running.batch.deadline.remaining()) as limit:
                return await self._run_all(running)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None

    async def _run_all(self, running: _RunningBatch) -> list[ComputedPrompt]:
        requests, slots = running.batch.requests, asyncio.Semaphore(AT_ONCE)

        async def one(request: wire.EngineRequest, preferred: Incarnation | None) -> ComputedPrompt:
            async with slots:
                return (await self._compute(running, request, preferred))[0]

        first: list[ComputedPrompt] = []
        preferred: Incarnation | None = None
        if running.batch.shares_first:
            computed, preferred = await self._compute(running, requests[0], None)
            first.append(computed)
        async with task_group() as group:
            tasks = [group.create_task(one(request, preferred)) for request in requests[len(first) :]]
        return [*first, *(task.result() for task in tasks)]

    async def _compute(
        self, running: _RunningBatch, request: wire.EngineRequest, preferred: Incarnation | None
    ) -> tuple[ComputedPrompt, Incarnation]:
        """Compute a prompt, at another worker after a failure; return the worker with the result."""
        pool, prefix, failed = self._router.pool, PromptBlocks(request), set[Incarnation]()
        lacking_adapter = set[Incarnation]()
        for block_size in pool.block_sizes(request.model):
            await prefix.prepare(block_size)
        order = queue_key(running.accepted_at, running.batch.priority)
        failures = 0
        while True:
            name = running.batch.adapter_name
            worker = await self._find(PromptWorkerSearch(pool, request, order, prefix, failed, preferred, name))
            run = PromptRun(worker, self._call(running, request, worker), prefix)
            running.is_started = True
            try:
                computed = await run.result()
            except WorkerFull:
                worker.load.mark_full()
            except AdapterMissing:
                if worker.incarnation in lacking_adapter and not pool.has_usable(request.model, Needs(request.adapter)):
                    raise NotFound("adapter", name, pool.adapters(request.model)) from None
                lacking_adapter.add(worker.incarnation)
            except AttemptFailed as error:
                failures += 1
                failed.add(worker.incarnation)
                self._record_failure(running, request.model, error, failures)
            else:
                pool.record_success(worker.incarnation)
                return computed, worker.incarnation
            finally:
                run.close()

    async def _find(self, search: PromptWorkerSearch) -> WorkerHandle:
        try:
            found = await turns.find(search, asyncio.Event())
        except NoWorker:
            message = "no worker can take the prompt now"
            raise Unavailable(Reason.NO_WORKER, message, retry_after=RETRY_AFTER_SECONDS) from None
        assert found is not None
        return self._router.pool.worker(found)

    def _call(self, running: _RunningBatch, request: wire.EngineRequest, worker: WorkerHandle) -> wire.PrefillRequest:
        timed = wire.EngineRequest()
        timed.CopyFrom(request)
        timed.age_ms = whole_ms(asyncio.get_running_loop().time() - running.accepted_at)
        remaining_ms = running.batch.deadline.remaining_ms()
        if remaining_ms is not None:
            timed.remaining_ms = remaining_ms
        run = wire.Run(request=str(running.key), epoch=1, attempt=next(running.attempts))
        return wire.PrefillRequest(
            run=run, router=self._router.peer, worker=worker.registration.peer, engine_request=timed
        )

    def _record_failure(self, running: _RunningBatch, model: str, error: AttemptFailed, failures: int) -> None:
        """Count a failure at a worker. Raises Unavailable after the last attempt."""
        router = self._router
        router.metrics.failovers.labels(model, error.label).inc()
        _log.warning("prompt failed at a worker", request_id=running.key.id, error=str(error))
        if error.faulty_worker is not None:
            router.pool.record_failure(error.faulty_worker)
        if failures >= router.settings.attempts:
            message = f"{failures} attempts failed"
            raise Unavailable(Reason.WORKERS_LOST, message, retry_after=RETRY_AFTER_SECONDS) from None
