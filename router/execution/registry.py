from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import NamedTuple

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation, Waiting
from decant.router.admission.first_worker import FirstWorkerQueue
from decant.router.admission.request_size import RequestSize
from decant.router.execution.adoption import Adoptions
from decant.router.execution.execution import Execution
from decant.router.execution.execution_table import ExecutionTable
from decant.router.execution.services import RouterServices
from decant.router.request.output import Finish
from decant.router.request.stored import RequestSnapshot, finish_from_record
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, AlreadyExists, Cancelled, QueueFull, ServiceError, Unavailable
from decant.runtime.telemetry import logs
from decant.state.errors import StateError
from decant.state.ids import RequestKey
from decant.state.owned import StoredRequest

_log = logs.get(__name__)


class AcceptedAdapter(NamedTuple):
    """Model and adapter of an accepted request; the adapter's name may stand for another one now, or for none."""

    model: str
    adapter_name: str
    adapter: str


OnWaiting = Callable[[], Awaitable[None]]


async def _ignore() -> None:
    pass


class RequestRegistry:
    """Entry to the requests of this router: begin, resume, cancel, read, take over and drain.

    It owns no request itself: the table has the executions, and `Adoptions` brings in those of other routers. The API's
    services call it for clients, recovery calls it for dead routers, and the process for its drain.
    """

    def __init__(self, router: RouterServices) -> None:
        self.executions = ExecutionTable(router)
        self.is_draining = False
        self.num_left_behind = 0
        self.kv_events = router.kv_events
        self._router = router
        pool, settings = router.pool, router.settings
        self.first_workers = FirstWorkerQueue(
            settings.worker_wait_seconds,
            settings.queue_limit,
            lambda model: pool.max_context_length(model) is not None,
            pool.membership.why_unserved,
        )
        self._adoptions = Adoptions(router, self.executions, self.on_disconnect)

    def load(self) -> wire.Load:
        table = self.executions
        waiting = table.waiting + len(self.first_workers)
        return wire.Load(running=table.running, waiting=waiting, draining=self.is_draining)

    async def begin(self, request: ValidRequest, on_waiting: OnWaiting = _ignore) -> TokenStream:
        """Return a request's stream once it is admitted, and recorded if Redis is available. Call ``on_waiting`` if
        that takes longer than ``timings.silent_s``.

        For an equal request with the same id, live or stored, return its stream, but restart one that failed before its
        first token. Cancelling this call while it waits is a disconnection: the request keeps its turn for its grace.

        Raises QueueFull, QuotaExceeded, AlreadyExists, Unavailable, DeadlineExceeded, Cancelled.
        """
        epoch = 1
        while (execution := self.executions.find(request.key)) is not None:
            if execution.stream.request.payload != request.payload:
                raise AlreadyExists(request.key.id)
            if not execution.can_restart:
                break
            epoch = execution.owned.epoch + 1
            await _wait_persisted(execution, self._router)
            execution.owned.is_listed = False  # the entry among the open requests belongs to the new one
            self.executions.on_persisted(execution)  # if it is not, the new one's write replaces it
        if execution is None:
            try:
                self._check(request)
            except QueueFull:
                if (stored := await self._read_accepted(request)) is None:
                    raise
                return await self._attach_stored(stored)
            execution = self.executions.launch(request, epoch=epoch)
        return await self._attach(execution, on_waiting)

    async def resume(self, key: RequestKey, on_waiting: OnWaiting = _ignore) -> TokenStream:
        """Return the stream from its first token; see `begin`. Raises NotFound, Unavailable, or why it was refused."""
        execution = self.executions.find(key)
        if execution is not None:
            return await self._attach(execution, on_waiting)
        return await self._attach_stored(await self._adoptions.read(key))

    async def get(self, key: RequestKey) -> RequestSnapshot:
        """Return a request as it is here or in the store. Raises NotFound, Unavailable, Internal."""
        execution = self.executions.find(key)
        if execution is not None and execution.is_recorded:
            owned = execution.owned
            expires_in_s = self._router.ended_s if owned.ended else None
            return RequestSnapshot(execution.stream, owned.state, owned.record, expires_in_s)
        stored = await self._adoptions.read(key)
        stream = await self._adoptions.replay(stored)
        return RequestSnapshot(stream, stored.state, stored.record, stored.expires_in_s if stored.ended else None)

    async def cancel(self, key: RequestKey) -> Finish | ServiceError:
        """Cancel a request; return how it has ended, by this call or before. Raises NotFound, Unavailable."""
        execution = self.executions.find(key)
        if execution is None:
            stored = await self._adoptions.read(key)
            if (end := finish_from_record(stored)) is not None:
                return end
            self._check_not_draining()
            execution = await self._adoptions.adopt_for_client(stored, self._router.requests.cancel, _cancel)
            if execution is None:
                return await self.cancel(key)
        was_recorded = execution.is_recorded
        _cancel(execution)
        if was_recorded:
            await _wait_persisted(execution, self._router)
        if execution.is_superseded:
            return await self.cancel(key)
        assert execution.stream.end is not None
        return execution.stream.end

    async def take_over(self, key: RequestKey) -> None:
        """Continue a request whose router is lost, or that this router owns and does not run.

        Raises StateError, OwnerRegistered and Superseded among them, and ServiceError where it can't run here.
        """
        stored = await self._router.requests.read(key)
        if stored.ended or self.has_request(key):
            return
        model = stored.record.model
        if self._router.pool.max_context_length(model) is None:
            raise self._router.pool.membership.why_unserved(model)
        self._check_not_draining()
        await self._adoptions.adopt(
            stored, self._router.requests.adopt_orphan, lambda new: self.on_disconnect(new.stream)
        )

    def has_request(self, key: RequestKey) -> bool:
        """Whether the request runs here, is being adopted, or ended here and is not yet persisted."""
        return self.executions.find(key) is not None or self._adoptions.is_adopting(key)

    def on_disconnect(self, stream: TokenStream) -> None:
        """Cancel the request after its grace or detach time; at once if its id was generated: it can't be resumed."""
        execution = self.executions.open.get(stream.request.key)
        if execution is None or execution.stream is not stream or execution.disconnect_timer is not None:
            return
        detach_ms = stream.request.detach_ms
        seconds = (self._router.settings.resume_grace_ms if detach_ms is None else detach_ms) / 1000
        if stream.request.id_generated or seconds == 0:
            _cancel(execution)
        else:
            execution.disconnect_timer = asyncio.get_running_loop().call_later(seconds, _cancel, execution)

    def progress(self, key: RequestKey) -> Waiting:
        """What a request waits for, as far as this router knows."""
        execution = self.executions.find(key)
        return Waiting(state=Generation.STATE_QUEUED, attempt=1) if execution is None else execution.progress()

    def max_context_length(self, model: str) -> int | None:
        return self._router.pool.max_context_length(model)

    def quantization(self, model: str) -> str:
        return self._router.pool.quantization(model)

    def adapters(self, model: str) -> Mapping[str, wire.Adapter]:
        """Adapters that can be used now, by name."""
        return self._router.pool.adapters(model)

    async def find_accepted(self, key: RequestKey) -> AcceptedAdapter | None:
        """Return what a request with this id was accepted with; None if it is unknown here and in the store."""
        if (execution := self.executions.find(key)) is not None:
            request = execution.stream.request
            accepted = request.engine_request
            return AcceptedAdapter(accepted.model, request.payload.lora_name, accepted.adapter)
        if not key.id or self._router.journal_writer.is_unavailable:
            return None
        try:
            stored = await self._adoptions.read(key)
        except ServiceError:
            return None
        return AcceptedAdapter(stored.record.model, stored.payload.lora_name, stored.record.adapter)

    def hold_quota(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Count a call that needs no worker as in flight during the block, which raises QuotaExceeded at its start."""
        if self._router.journal_writer.is_unavailable:
            return nullcontext()
        return self._router.quota_leases.lease(RequestKey(tenant, f"call-{uuid.uuid4()}"))

    async def check_load(
        self, key: RequestKey, model: str, size: RequestSize, priority: int, deadline: Deadline
    ) -> None:
        """Raise QueueFull for a request that could not end in time, unless it is already accepted."""
        if self.executions.find(key) is not None:
            return
        try:
            self._check_load(model, size, priority, deadline)
        except QueueFull:
            if not key.id or self._router.journal_writer.is_unavailable:
                raise
            with suppress(StateError):
                if await self._router.requests.exists(key):
                    return
            raise

    async def wait_for_worker(
        self, key: RequestKey, model: str, prompt_tokens: int, deadline: Deadline, on_waiting: OnWaiting = _ignore
    ) -> None:
        """Wait until a worker serves ``model``, unless the request is known here; see `FirstWorkerQueue.wait`."""
        if self.executions.find(key) is None and self.first_workers.may_wait(model):
            await self.first_workers.wait(model, prompt_tokens, deadline, on_waiting)

    def check_open(self, model: str) -> None:
        """Raise Unavailable while this router drains, or knows no worker of ``model``."""
        self._check_not_draining()
        if next(self._router.pool.of(model), None) is None:
            raise self._router.pool.membership.why_unserved(model)

    def on_workers_changed(self, model: str) -> None:
        self._router.admission.grant(model)
        self.first_workers.notify(model)

    async def drain(self, seconds: float | None = None) -> None:
        """Accept no more requests; return when none is left, and all are persisted as far as Redis is available.

        After ``seconds`` those left go to other routers.
        """
        self.is_draining = True
        self.first_workers.close()
        self.kv_events.close()
        try:
            async with asyncio.timeout(seconds):
                await self.executions.wait_idle()
        except TimeoutError:
            left = list(self.executions.open.values())
            self.num_left_behind = len(left)
            _log.warning("requests are left to other routers", requests=len(left), limit_seconds=seconds)
            for execution in left:
                execution.close_for_peers()
        limit_s = self._router.timings.last_write_s
        try:
            async with asyncio.timeout(limit_s):
                await self._router.journal_writer.wait_idle()
        except TimeoutError:
            _log.warning("ended requests could not be written", limit_seconds=limit_s)

    async def close(self) -> None:
        self.is_draining = True
        await self.executions.close()

    # What begin, resume and cancel share

    def _check(self, request: ValidRequest) -> None:
        model = request.engine_request.model
        self._check_not_draining()
        self._check_load(model, request.size, request.engine_request.priority, request.deadline)
        if next(self._router.pool.of(model), None) is None:
            raise self._router.pool.membership.why_unserved(model)

    def _check_not_draining(self) -> None:
        if self.is_draining:
            raise Unavailable(Reason.DRAINING, "this router is draining", retry_after=RETRY_AFTER_SECONDS)

    def _check_load(self, model: str, size: RequestSize, priority: int, deadline: Deadline) -> None:
        self._router.admission.of(model).check(size, priority, deadline, self._router.pool.waiting)

    async def _read_accepted(self, request: ValidRequest) -> StoredRequest | None:
        try:
            stored = await self._adoptions.read(request.key)
        except ServiceError:
            return None
        if stored.state == Generation.STATE_FAILED and not stored.length:
            return None
        if stored.payload != request.payload:
            raise AlreadyExists(request.key.id)
        return stored

    async def _attach(self, execution: Execution, on_waiting: OnWaiting) -> TokenStream:
        execution.reattach_reader()
        execution.num_waiting_callers += 1
        try:
            done, _ = await asyncio.wait([execution.accepted], timeout=self._router.timings.silent_s)
            if not done:
                await on_waiting()
            stored = await asyncio.shield(execution.accepted)
        except asyncio.CancelledError:
            if execution.num_waiting_callers == 1 and execution.stream.reader is None:
                self.on_disconnect(execution.stream)
            raise
        finally:
            execution.num_waiting_callers -= 1
        return execution.reattach_reader() if stored is None else await self._attach_stored(stored)

    async def _attach_stored(self, stored: StoredRequest) -> TokenStream:
        if stored.ended:
            return await self._adoptions.replay(stored)
        self._check_not_draining()
        execution = await self._adoptions.adopt_for_client(stored, self._router.requests.adopt)
        return await self.resume(stored.key) if execution is None else execution.reattach_reader()


async def _wait_persisted(execution: Execution, router: RouterServices) -> None:
    if not router.journal_writer.is_unavailable:
        with suppress(TimeoutError):
            async with asyncio.timeout(router.timings.persist_s):
                await execution.persisted.wait()


def _cancel(execution: Execution) -> None:
    execution.close(Cancelled(), wire.Cancel.REASON_CLIENT)
