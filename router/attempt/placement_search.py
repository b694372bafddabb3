from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.failures import AttemptFailed, NoWorker
from decant.router.placement.policy import (
    Placement,
    PlacementRequest,
    WorkerSnapshot,
    choose_decode_worker,
    choose_first_worker,
)
from decant.router.workers.needs import Needs
from decant.router.workers.pool import WorkerPool
from decant.router.workers.waiting_line import CapacityKind, WaitsFor
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.errors import NotFound
from decant.runtime.priority import queue_key
from decant.state.ids import Incarnation

_T = TypeVar("_T")


class Search(ABC, Generic[_T]):
    def __init__(self, context: AttemptContext, pool: WorkerPool) -> None:
        request = context.stream.request
        self._context = context
        self._pool = pool
        self.line = pool.waiting_lines[context.model]
        self.order = queue_key(request.accepted_at, request.engine_request.priority)
        self.kind = self._kind()

    def timeout_ends(self, since: float, unanswered: float | None) -> float:
        """Time at which a search that began at ``since`` ends; since ``unanswered`` no eligible worker answers."""
        return self._pool.search_ends(since, unanswered)

    def failure(self) -> Exception:
        """Error of a search that found none in time."""
        context, has_usable = self._context, self._pool.has_usable
        adapter = Needs(context.needs.adapter)
        if has_usable(context.model) and not has_usable(context.model, adapter):
            return NotFound("adapter", context.adapter_name, self._pool.adapters(context.model))
        return NoWorker()

    def is_answered(self) -> bool:
        return self._pool.has_usable(self._context.model, self._context.needs)

    @abstractmethod
    def choose(self) -> _T | None: ...

    @abstractmethod
    def _kind(self) -> CapacityKind: ...

    def _workers(self) -> list[WorkerSnapshot]:
        context = self._context
        return self._pool.snapshot(context.model, context.excluded_workers, context.prefix, context.needs)

    def _request(self) -> PlacementRequest:
        context = self._context
        return PlacementRequest(
            tokens=context.num_tokens,
            from_tokens=context.local_prefill,
            session=context.stream.request.session if context.prefix.may_hit else "",
            handoff_min_tokens=self._pool.handoff_min_tokens(context.model) if context.needs_decode else 0,
        )


class PromptSearch(Search[Placement]):
    def choose(self) -> Placement | None:
        return choose_first_worker(self._workers(), self._request())

    def _kind(self) -> CapacityKind:
        request, needs = self._request(), self._context.needs
        if request.from_tokens:
            return CapacityKind(WaitsFor.FROM_TOKENS, needs=needs)
        is_short = request.tokens < request.handoff_min_tokens
        return CapacityKind(WaitsFor.SHORT_PREFILL if is_short else WaitsFor.PREFILL, needs=needs)


class CacheSearch(Search[Incarnation]):
    def __init__(
        self, context: AttemptContext, pool: WorkerPool, ticket: wire.Ticket, prefill_worker: WorkerHandle
    ) -> None:
        self._ticket = ticket
        self._prefill_worker = prefill_worker.incarnation
        super().__init__(context, pool)

    def timeout_ends(self, since: float, unanswered: float | None) -> float:
        return super().timeout_ends(since, unanswered) if self._receivers() else since

    def failure(self) -> Exception:
        """Without a receiver, have another attempt compute the prompt where it can be decoded."""
        if self.is_answered():
            return NoWorker()
        failure = wire.Failure(cause=wire.CAUSE_PEER_LOST, detail="no worker that could fetch the KV cache answers")
        return AttemptFailed(failure, None)

    def is_answered(self) -> bool:
        return any(worker.is_usable for worker in self._receivers())

    def _receivers(self) -> list[WorkerHandle]:
        context = self._context
        return self._pool.receivers(context.model, self._ticket.layout_hash, self._prefill_worker, context.needs)

    def choose(self) -> Incarnation | None:
        return choose_decode_worker(self._workers(), self._request(), self._ticket.layout_hash, self._prefill_worker)

    def _kind(self) -> CapacityKind:
        return CapacityKind(WaitsFor.CACHE, self._ticket.layout_hash, self._prefill_worker, self._context.needs)


def choose_migration_target(
    context: AttemptContext, pool: WorkerPool, source: WorkerHandle, excluded: set[Incarnation]
) -> Incarnation | None:
    workers = pool.snapshot(context.model, context.excluded_workers | excluded, context.prefix, context.needs)
    candidates = [worker for worker in workers if not worker.is_avoided]
    return choose_decode_worker(
        candidates,
        PlacementRequest(tokens=context.num_tokens),
        source.registration.layout_hash,
        source.incarnation,
    )
