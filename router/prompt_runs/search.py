from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.router.attempt.failures import NoWorker
from decant.router.placement.policy import PlacementRequest, choose_prompt_worker
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.workers.needs import Needs, needs_of
from decant.router.workers.pool import WorkerPool
from decant.router.workers.waiting_line import CapacityKind, WaitingLine, WaitsFor
from decant.runtime.errors import NotFound
from decant.runtime.packed import count
from decant.state.ids import Incarnation


@dataclass(frozen=True, slots=True)
class PromptWorkerSearch:
    """Search for a worker that computes a prompt alone.

    ``failed`` workers come last; ``preferred`` has the prompt's beginning in its prefix cache. ``adapter_name``: of the
    request's adapter, empty for none.
    """

    pool: WorkerPool
    request: wire.EngineRequest
    order: float
    prefix: PromptBlocks
    failed: Set[Incarnation]
    preferred: Incarnation | None
    adapter_name: str = ""

    @property
    def kind(self) -> CapacityKind:
        return CapacityKind(WaitsFor.PREFILL, needs=needs_of(self.request))

    @property
    def line(self) -> WaitingLine:
        return self.pool.waiting_lines[self.request.model]

    def choose(self) -> Incarnation | None:
        workers = self.pool.snapshot(self.request.model, self.failed, self.prefix, needs_of(self.request))
        return choose_prompt_worker(workers, PlacementRequest(count(self.request.prompt)), self.preferred)

    def is_answered(self) -> bool:
        return self.pool.has_usable(self.request.model, needs_of(self.request))

    def timeout_ends(self, since: float, unanswered: float | None) -> float:
        return self.pool.search_ends(since, unanswered)

    def failure(self) -> Exception:
        """Error of a search that found none in time."""
        pool, model = self.pool, self.request.model
        if pool.has_usable(model) and not pool.has_usable(model, Needs(self.request.adapter)):
            return NotFound("adapter", self.adapter_name, pool.adapters(model))
        return NoWorker()
