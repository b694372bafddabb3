"""All requests that are at work here. Each is an `Execution` in a task of its own; this is who begins and ends them.

begin --> waiting for admission, recorded, placed, answered --> ended, forgotten
             '---- cancel, stream_lost, at any point ----^
"""

from __future__ import annotations

import asyncio
from functools import partial

from protos import worker_pb2 as wire
from router.execution import RETRY_SECONDS, Execution, Router
from router.request import Course, ValidRequest
from runtime import logs
from runtime.errors import AlreadyExists, Cancelled, Unavailable, Unimplemented
from runtime.fault import Reason
from state.names import RequestKey

LAST_WRITE_SECONDS = 5.0
"""Of a drain, for a Redis that is away."""

_log = logs.get(__name__)


class Dispatcher:
    """Lives on one event loop. Ends with ``drain``, or with ``close``, which ends every request."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._executions: dict[RequestKey, Execution] = {}
        self._tasks: dict[Execution, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def waiting(self) -> int:
        """Requests that no worker has taken up yet."""
        return len(self._executions) - self.running

    @property
    def running(self) -> int:
        return sum(execution.is_taken_up for execution in self._executions.values())

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def begin(self, request: ValidRequest) -> Course:
        """Returns once the request is admitted and recorded; it is answered from then on, whoever reads it.

        Raises QueueFull, AlreadyExists, Unavailable, DeadlineExceeded, Cancelled, Unimplemented. Cancelled while it
        waits, it ends the request.
        """
        self._check(request)
        execution = Execution(request, self._router, self._forget)
        self._executions[request.key] = execution
        self._idle.clear()
        with logs.bound(request_id=request.key.id):
            task = asyncio.create_task(execution.run())
        execution.task = self._tasks[execution] = task
        task.add_done_callback(partial(self._done, execution))
        try:
            await execution.accepted
        except asyncio.CancelledError:
            self._stop(execution)
            raise
        return execution.course

    def cancel(self, key: RequestKey) -> bool:
        """Ends a request now, in whatever state. False: it does not run here."""
        execution = self._executions.get(key)
        if execution is None:
            return False
        self._stop(execution)
        return True

    def stream_lost(self, course: Course) -> None:
        """Nobody reads this course any more: it is cancelled after a grace, at once where nobody could come back."""
        execution = self._executions.get(course.request.key)
        if execution is None or execution.course is not course or execution.grace is not None:
            return
        seconds = self._router.settings.resume_grace_ms / 1000
        if course.request.id_made_up or seconds == 0:
            self._stop(execution)
        else:
            execution.grace = asyncio.get_running_loop().call_later(seconds, self._stop, execution)

    def window_of(self, model: str) -> int | None:
        """Tokens of the least window among the workers that may get work of that model; None while there are none."""
        return self._router.pool.window_of(model)

    async def drain(self) -> None:
        """Takes no more requests; returns when none is left, and all are written as far as Redis is there."""
        self._draining = True
        await self._idle.wait()
        try:
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                await self._router.flusher.idle()
        except TimeoutError:
            _log.warning("ended requests could not be written", limit_seconds=LAST_WRITE_SECONDS)

    async def close(self) -> None:
        """Ends whatever is still at work."""
        self._draining = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _check(self, request: ValidRequest) -> None:
        key, model = request.key, request.work.model
        if self._draining:
            raise Unavailable(Reason.DRAINING, "this router is draining", retry_after=RETRY_SECONDS)
        present = self._executions.get(key)
        if present is not None:
            same = present.course.request.payload == request.payload
            raise Unimplemented("GenerateRequest.request_id", key.id) if same else AlreadyExists(key.id)
        if next(self._router.pool.of(model), None) is None:
            words = f"no worker serves {model} now"
            raise Unavailable(Reason.NO_WORKER, words, retry_after=RETRY_SECONDS)

    def _stop(self, execution: Execution) -> None:
        execution.end(Cancelled(), wire.Cancel.REASON_CLIENT)

    def _done(self, execution: Execution, task: asyncio.Task[None]) -> None:
        del self._tasks[execution]
        if not self._tasks:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request ended by a bug", exc_info=error)

    def _forget(self, execution: Execution) -> None:
        key = execution.course.request.key
        if self._executions.get(key) is execution:
            del self._executions[key]
