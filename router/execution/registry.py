"""All requests that are at work here. Each is an `Execution` in a task of its own; this is who begins and ends them.

begin --> waiting for admission, recorded, placed, answered --> ended, forgotten
             '---- cancel, stream_lost, at any point ----^
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.admission.overload import check_wait
from decant.router.execution.execution import Execution, RouterServices
from decant.router.execution.stored import (
    RequestSnapshot,
    check_stored,
    finish_from_record,
    finished_stream,
    store_error,
)
from decant.router.execution.token_stream import Finish, TokenStream
from decant.router.execution.valid_request import ValidRequest
from decant.runtime import logs
from decant.runtime.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, AlreadyExists, Cancelled, QueueFull, ServiceError, Unavailable
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import StoredRequest

SETTLE_SECONDS = 2.0
"""For the store to learn an end that somebody waits for; a store that is slower is as good as away."""
LAST_WRITE_SECONDS = 5.0
"""Of a drain, for a Redis that is away."""

Adopt = Callable[[RequestKey, Incarnation], Awaitable[StoredRequest]]
"""Makes a router a request's owner; `adopt`, `adopt_orphan` or `cancel` of `Requests`."""

Then = Callable[["Execution"], None]

_log = logs.get(__name__)


class RequestRegistry:
    """Lives on one event loop. Ends with ``drain``, or with ``close``, which ends every request."""

    def __init__(self, router: RouterServices) -> None:
        self._router = router
        self._executions: dict[RequestKey, Execution] = {}
        self._unwritten: dict[RequestKey, Execution] = {}  # ended, and the store may not know yet
        self._tasks: dict[Execution, asyncio.Task[None]] = {}
        self._adoptions: dict[asyncio.Task[Execution | None], RequestKey] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.cut_off = 0
        """Requests that a drain did not wait for."""

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

    def load(self) -> wire.Load:
        """What the directory shows of this router: requests that run and that wait, and whether it drains."""
        return wire.Load(running=self.running, waiting=self.waiting, draining=self._draining)

    async def begin(self, request: ValidRequest) -> TokenStream:
        """Returns once the request is admitted and recorded; it is answered from then on, whoever reads it.

        An id that an equal request has brings that request's course: the one that runs here, or what is stored of
        it. Where that one failed before its first token, it begins anew. Cancelled while it waits, it ends the request.

        Raises QueueFull, AlreadyExists, Unavailable, DeadlineExceeded, Cancelled.
        """
        epoch = 1
        while (execution := self._here(request.key)) is not None:
            if execution.course.request.payload != request.payload:
                raise AlreadyExists(request.key.id)
            if not execution.is_void:
                break
            epoch = execution.owned.epoch + 1
            await self._until_settled(execution)
            execution.owned.is_listed = False  # the entry among the open requests is the new one's from now on
            self.settled(execution)  # the store has it, or will have it before the one that begins now
        if execution is None:
            try:
                self._check(request)
            except QueueFull:
                if (found := await self._accepted_before(request)) is None:
                    raise
                return await self._stored(found)
            execution = self._launched(request, epoch=epoch)
        found = await self._accepted(execution)
        return execution.come_back() if found is None else await self._stored(found)

    async def _accepted_before(self, request: ValidRequest) -> StoredRequest | None:
        """An equal request that a router has accepted, and that begins no more. Raises AlreadyExists."""
        try:
            found = await self._read(request.key)
        except ServiceError:
            return None
        if found.state == Generation.STATE_FAILED and not found.length:
            return None
        if found.payload != request.payload:
            raise AlreadyExists(request.key.id)
        return found

    async def resume(self, key: RequestKey) -> TokenStream:
        """The course of a request that was accepted, from its beginning.

        Raises NotFound, Unavailable, and the error that it was refused with.
        """
        execution = self._here(key)
        found = await self._read(key) if execution is None else await self._accepted(execution)
        if execution is not None and found is None:
            return execution.come_back()
        assert found is not None
        return await self._stored(found)

    async def look(self, key: RequestKey) -> RequestSnapshot:
        """How a request stands, here or in the store. Raises NotFound, Unavailable."""
        execution = self._here(key)
        if execution is not None and execution.is_recorded:
            owned = execution.owned
            kept = self._router.ended_s if owned.ended else None
            return RequestSnapshot(execution.course, owned.state, owned.record, kept)
        found = await self._read(key)
        course = await self._replayed(found)
        return RequestSnapshot(course, found.state, found.record, found.expires_in_s if found.ended else None)

    async def _until_settled(self, ended: Execution) -> None:
        """Until the store knows how it ended, unless that is away."""
        if not self._router.flusher.is_unavailable:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS):
                    await ended.is_settled.wait()

    def _launched(self, request: ValidRequest, adopted: StoredRequest | None = None, epoch: int = 1) -> Execution:
        execution = Execution(request, self._router, self, adopted, epoch)
        self._executions[request.key] = execution
        self._idle.clear()
        with logs.bound(request_id=request.key.id):
            task = asyncio.create_task(execution.run())
        execution.task = self._tasks[execution] = task
        task.add_done_callback(partial(self._done, execution))
        return execution

    async def _accepted(self, execution: Execution) -> StoredRequest | None:
        """None once it runs; else what the store has in its place. The last who gives up waiting ends it."""
        execution.awaited += 1
        try:
            return await asyncio.shield(execution.accepted)
        except asyncio.CancelledError:
            if execution.awaited == 1 and execution.course.reader is None:
                self._stop(execution)
            raise
        finally:
            execution.awaited -= 1

    async def cancel(self, key: RequestKey) -> Finish | ServiceError:
        """Ends a request now, in whatever state; how it has ended, by this or before.

        Raises NotFound, Unavailable.
        """
        execution = self._here(key)
        if execution is None:
            found = await self._read(key)
            if (end := finish_from_record(found)) is not None:
                return end
            execution = await self._taken(found, self._router.requests.cancel, self._stop)
            if execution is None:
                return await self.cancel(key)
        self._stop(execution)
        if execution.is_recorded:
            await self._until_settled(execution)
        if execution.is_superseded:
            return await self.cancel(key)
        assert execution.course.end is not None
        return execution.course.end

    async def take_over(self, key: RequestKey) -> None:
        """Go on with a request whose router is gone, or that this router owns and does not run. Its grace begins,
        unless a client has resumed it here meanwhile.

        Raises StateError, OwnerAlive and Superseded among them, and ServiceError where it can't be run here.
        """
        found = await self._router.requests.read(key)
        if found.ended or self.knows(key):
            return
        if self.max_context_length(found.record.model) is None:
            words = f"this router reaches no worker that serves {found.record.model}"
            raise Unavailable(Reason.NO_WORKER, words, retry_after=RETRY_AFTER_SECONDS)
        await self._adopted(found, self._router.requests.adopt_orphan, self._begin_grace)

    def knows(self, key: RequestKey) -> bool:
        """Whether the request runs here, is about to, or has ended here and the store may not know yet."""
        return self._here(key) is not None or key in self._adoptions.values()

    def stream_lost(self, course: TokenStream) -> None:
        """Nobody reads this course any more: it is cancelled after its grace or the time for which it was detached, at
        once where nobody could come back."""
        execution = self._executions.get(course.request.key)
        if execution is None or execution.course is not course or execution.grace is not None:
            return
        detach_ms = course.request.detach_ms
        seconds = (self._router.settings.resume_grace_ms if detach_ms is None else detach_ms) / 1000
        if course.request.id_generated or seconds == 0:
            self._stop(execution)
        else:
            execution.grace = asyncio.get_running_loop().call_later(seconds, self._stop, execution)

    def max_context_length(self, model: str) -> int | None:
        """Tokens of the least window among the workers that may get work of that model; None while there are none."""
        return self._router.pool.max_context_length(model)

    def booked(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Counts a call that needs no worker among its tenant's requests at work. Raises QuotaExceeded."""
        if self._router.flusher.is_unavailable:
            return nullcontext()
        return self._router.bookings.during(RequestKey(tenant, f"call-{uuid.uuid4()}"))

    async def drain(self, seconds: float | None = None) -> None:
        """Takes no more requests; returns when none is left, and all are written as far as Redis is there.

        What is left after ``seconds`` is left to other routers, and its readers are told so.
        """
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cut_off = len(self._executions)
            _log.warning("requests are left to other routers", requests=self.cut_off, limit_seconds=seconds)
            for execution in list(self._executions.values()):
                execution.leave()
        try:
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                await self._router.flusher.idle()
        except TimeoutError:
            _log.warning("ended requests could not be written", limit_seconds=LAST_WRITE_SECONDS)

    async def close(self) -> None:
        """Ends whatever is still at work."""
        self._draining = True
        tasks = [*self._adoptions, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def check_wait(self, key: RequestKey, model: str, priority: int, deadline: Deadline) -> None:
        """Raises QueueFull for a new request that would have to wait behind too many, or for longer than it may. One
        that any router has accepted is not new: whoever asks for it again reads it."""
        if self._here(key) is not None:
            return
        try:
            self._check_wait(model, priority, deadline)
        except QueueFull:
            if not key.id or self._router.flusher.is_unavailable or not await self._is_known(key):
                raise

    async def _is_known(self, key: RequestKey) -> bool:
        try:
            return await self._router.requests.exists(key)
        except StateError:
            return False

    def _check(self, request: ValidRequest) -> None:
        model = request.engine_request.model
        if self._draining:
            raise _draining()
        self._check_wait(model, request.engine_request.priority, request.deadline)
        if next(self._router.pool.of(model), None) is None:
            words = f"no worker serves {model} now"
            raise Unavailable(Reason.NO_WORKER, words, retry_after=RETRY_AFTER_SECONDS)

    def _check_wait(self, model: str, priority: int, deadline: Deadline) -> None:
        router = self._router
        waiting = router.admission.waiting + router.pool.waiting
        check_wait(router.settings, waiting, router.pool.wait_predictors[model].predict(priority), deadline)

    def _stop(self, execution: Execution) -> None:
        execution.end(Cancelled(), wire.Cancel.REASON_CLIENT)

    def _done(self, execution: Execution, task: asyncio.Task[None]) -> None:
        del self._tasks[execution]
        self._see_if_idle()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request ended by a bug", exc_info=error)

    def _see_if_idle(self) -> None:
        if not self._tasks and not self._adoptions:
            self._idle.set()

    def ended(self, execution: Execution) -> None:
        key = execution.course.request.key
        if self._executions.get(key) is execution:
            del self._executions[key]
            self._unwritten[key] = execution

    def settled(self, execution: Execution) -> None:
        key = execution.course.request.key
        if self._unwritten.get(key) is execution:
            del self._unwritten[key]

    # What is here, and what only the store has

    def _here(self, key: RequestKey) -> Execution | None:
        return self._executions.get(key) or self._unwritten.get(key)

    async def _read(self, key: RequestKey) -> StoredRequest:
        try:
            found = await self._router.requests.read(key)
            finish_from_record(found)  # raises here for one that can't be read
        except StateError as error:
            raise store_error(error, key) from None
        return found

    async def _stored(self, found: StoredRequest) -> TokenStream:
        """A request that doesn't run here, to be read."""
        if found.ended:
            return await self._replayed(found)
        execution = await self._taken(found, self._router.requests.adopt)
        return await self.resume(found.key) if execution is None else execution.come_back()

    async def _replayed(self, found: StoredRequest) -> TokenStream:
        """As it stands in the store. Raises Internal where that can't be read."""
        try:
            return finished_stream(found, await self._revived(found))
        except StateError as error:
            raise store_error(error, found.key) from None

    async def _revived(self, found: StoredRequest) -> ValidRequest:
        """Raises UnreadableRequest, and what it comes to where its model is not served here."""
        request = await self._router.revive(found)
        check_stored(found, request)
        return request

    async def _taken(self, found: StoredRequest, adopt: Adopt, then: Then | None = None) -> Execution | None:
        """`_adopted` for a client that asks. Raises NotFound, Unavailable."""
        try:
            return await self._adopted(found, adopt, then)
        except StateError as error:
            raise store_error(error, found.key) from None

    async def _adopted(self, found: StoredRequest, adopt: Adopt, then: Then | None) -> Execution | None:
        """The request is this router's from now on; None where it has ended meanwhile. `then` is called with an
        execution that begins by this, in the same instant.

        A caller that is cancelled leaves the adoption to this dispatcher: what the store says is this router's runs
        here, and without a reader its grace begins.

        Raises StateError, Unavailable, and what it comes to where its model is not served here.
        """
        if self._draining:
            raise _draining()
        request = await self._revived(found)
        adoption = asyncio.create_task(self._adopt(request, adopt, then))
        self._adoptions[adoption] = request.key
        self._idle.clear()
        adoption.add_done_callback(self._adoption_done)
        try:
            return await asyncio.shield(adoption)
        except asyncio.CancelledError:
            adoption.add_done_callback(self._left_by_caller)
            raise

    async def _adopt(self, request: ValidRequest, adopt: Adopt, then: Then | None) -> Execution | None:
        found = await adopt(request.key, Incarnation.of(self._router.peer))
        execution = self._here(found.key)  # another call may have been faster
        if execution is not None or found.ended:
            return execution
        _log.info("request adopted", request_id=found.key.id, epoch=found.epoch, entries=found.length)
        execution = self._launched(request, found)
        if then is not None:
            then(execution)
        return execution

    def _adoption_done(self, adoption: asyncio.Task[Execution | None]) -> None:
        del self._adoptions[adoption]
        self._see_if_idle()

    def _left_by_caller(self, adoption: asyncio.Task[Execution | None]) -> None:
        if adoption.cancelled() or adoption.exception() is not None:
            return  # what the store made of it is seen to by `Takeover`
        execution = adoption.result()
        if execution is not None and execution.course.reader is None:
            self.stream_lost(execution.course)

    def _begin_grace(self, execution: Execution) -> None:
        self.stream_lost(execution.course)


def _draining() -> Unavailable:
    return Unavailable(Reason.DRAINING, "this router is draining", retry_after=RETRY_AFTER_SECONDS)
