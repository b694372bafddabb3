"""One worker's part of an attempt.

    PrefillLeg   called --> scheduled --> ticket, first tokens (in either order) --> over
    DecodeLeg    started, or adopted --> scheduled (blocks reserved) --> decode started (in the batch) --> ended

A milestone implies those before it: reports may be lost with a session.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.failures import (
    RETRY_ELSEWHERE,
    AttemptFailed,
    NoCapacity,
    OwnedElsewhere,
    error_for,
)
from decant.router.request.finish import finish_from_worker
from decant.router.request.output import Output
from decant.router.workers.needs import Needs
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.enum_names import enum_name
from decant.runtime.errors import DeadlineExceeded, NotFound


class LegOwner(Protocol):
    def wake(self) -> None: ...


class Leg(ABC):
    """One worker's part of an attempt: the reports of its run, its first failure, and what it holds at the worker.

    An attempt makes it, waits for its milestones by `Legs`, and closes it. Sessions and calls report to its ``on_``
    methods, which record and wake the attempt, and decide nothing.
    """

    def __init__(self, context: AttemptContext, pool: WorkerPool, worker: WorkerHandle, owner: LegOwner) -> None:
        self.worker = worker
        self.started_at = asyncio.get_running_loop().time()
        self.fatal: Exception | None = None
        """Ends the attempt, whichever leg it waits for."""
        self._context = context
        self._pool = pool
        self._owner = owner
        self._failure: Exception | None = None
        self._is_closed = False

    @property
    def failure(self) -> Exception | None:
        """First failure: NoCapacity, AttemptFailed, or a ServiceError that is final for the request."""
        return self._failure

    def close(self, cancel: wire.Cancel | None) -> None:
        """Release everything at the worker, and send it ``cancel`` if it may still work; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self._close(cancel)

    def cancel_output(self, output: Output) -> None:
        """End one output at the worker, whose others go on, if the worker decodes it."""
        return

    @abstractmethod
    def _release(self) -> None:
        """Release what the leg holds; idempotent."""

    @abstractmethod
    def _close(self, cancel: wire.Cancel | None) -> None: ...

    def on_refused(self, refused: wire.Refused) -> None:
        if refused.failure.cause == wire.CAUSE_UNKNOWN_ADAPTER:
            self._fail(self._adapter_missing())
        elif refused.failure.cause in RETRY_ELSEWHERE:
            self._fail(NoCapacity(self))
        else:
            self._fail(error_for(refused.failure, self.worker.incarnation))

    def _adapter_missing(self) -> Exception:
        """Have another worker take the request; end it if this one has refused it before, and no other has the adapter.

        A worker that cannot read an adapter's folder offers it all the same, so it would get the request for ever.
        """
        context, pool, worker = self._context, self._pool, self.worker.incarnation
        self.worker.remove_adapter(context.needs.adapter)
        if worker in context.lacking_adapter and not pool.has_usable(context.model, Needs(context.needs.adapter)):
            return NotFound("adapter", context.adapter_name, pool.adapters(context.model))
        context.lacking_adapter.add(worker)
        return NoCapacity(self, is_full=False)

    def on_superseded(self, superseded: wire.Superseded) -> None:
        self._fail_attempt(OwnedElsewhere(superseded.epoch))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._owner.wake()

    def _fail_attempt(self, error: Exception) -> None:
        self.fatal = self.fatal or error
        self._owner.wake()

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None:
        if self._context.stream.add_prompt_logprobs(message) is not None:
            self._fail_attempt(self._error(wire.CAUSE_CORRUPT, "its logprobs of the prompt are malformed"))
        self._owner.wake()

    def _error(self, cause: wire.Cause, detail: str) -> AttemptFailed:
        return AttemptFailed(wire.Failure(cause=cause, detail=detail), self.worker.incarnation)

    def _finish_output(self, end: wire.OutputEnd) -> None:
        stream = self._context.stream
        if end.output >= len(stream.outputs):
            self._fail_attempt(self._error(wire.CAUSE_CORRUPT, f"it ended output {end.output}, which there is not"))
            return
        output = stream.outputs[end.output]
        try:
            finish = finish_from_worker(end, stream.request, output.tokens)
        except DeadlineExceeded as error:
            self._fail(error)
            return
        output.finish = output.finish or finish
        if output.finish is None:  # the worker cancelled it, and not for this router
            reason = enum_name(wire.OutputEnd.Reason, end.reason)
            detail = f"worker {self.worker.incarnation.id} ended the output: {reason}"
            self._fail(AttemptFailed(wire.Failure(cause=wire.CAUSE_CANCELLED, detail=detail), None))
        self._owner.wake()
