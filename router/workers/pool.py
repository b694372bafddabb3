from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet

from decant.protos import worker_pb2 as wire
from decant.router.placement.capacity import PoolCapacity
from decant.router.placement.cost_model import PrefillTransferCosts
from decant.router.placement.policy import WorkerSnapshot
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.timings import WorkerTimings
from decant.router.workers.membership import WorkerMembership
from decant.router.workers.needs import NO_NEEDS, Needs
from decant.router.workers.pool_capacity import capacity_of
from decant.router.workers.session import WorkerSession
from decant.router.workers.ticket_renewals import TicketRenewals
from decant.router.workers.waiting_line import CapacityKind, WaitingLine, WaitsFor
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.connections.tls import PeerTls
from decant.state.directory import Workers
from decant.state.ids import Incarnation


class WorkerPool:
    """All workers that this router knows, with the requests that wait for them.

    It owns the membership, the renewals of tickets, and the waiting line of each model. Placement queries it, attempts
    take workers from it, and sessions report heartbeats to it, by which it wakes requests that wait for capacity.
    """

    def __init__(
        self,
        router: wire.Peer,
        directory: Workers,
        tokenizers: Mapping[str, Collection[int]],
        tls: PeerTls,
        handoff_min_tokens: int | None = None,
        timings: WorkerTimings = WorkerTimings(),
    ) -> None:
        now = asyncio.get_running_loop().time
        self.membership = WorkerMembership(router, directory, tokenizers, tls, self, timings)
        self.tickets = TicketRenewals()
        self.costs = {model: PrefillTransferCosts(now) for model in tokenizers}
        self.waiting_lines = {model: WaitingLine() for model in tokenizers}
        self.on_capacity_changed: Callable[[str], None] = lambda model: None
        """Called with a model whose workers have reported, come or gone."""
        self.timings = timings
        self._handoff_min_tokens = handoff_min_tokens
        self._now = now

    # Queries of placement

    @property
    def waiting(self) -> int:
        return sum(map(len, self.waiting_lines.values()))

    def of(self, model: str) -> Iterator[WorkerHandle]:
        return (worker for worker in self.membership if worker.model == model)

    def snapshot(
        self,
        model: str,
        excluded: AbstractSet[Incarnation],
        prefix: PromptBlocks | None = None,
        needs: Needs = NO_NEEDS,
    ) -> list[WorkerSnapshot]:
        """Snapshots of the usable workers that meet the needs; those in ``excluded`` are avoided, not left out."""
        cached = {} if prefix is None else prefix.cached_by_worker(self.membership.prefix_indexes[model])
        return [
            worker.snapshot(cached.get(worker.load.number, 0), is_avoided=worker.incarnation in excluded, needs=needs)
            for worker in self.of(model)
            if worker.is_usable and worker.meets(needs)
        ]

    def adapters(self, model: str) -> Mapping[str, wire.Adapter]:
        """Adapters of the usable workers by name: of several revisions, the one that most workers have."""
        counts: dict[str, Counter[str]] = {}
        found: dict[str, wire.Adapter] = {}
        for worker in self.of(model):
            for adapter in worker.adapters if worker.is_usable else ():
                counts.setdefault(adapter.name, Counter())[adapter.digest] += 1
                found[adapter.digest] = adapter
        best = {name: max(count, key=lambda digest: (count[digest], digest)) for name, count in counts.items()}
        return {name: found[digest] for name, digest in sorted(best.items())}

    def capacity(self, model: str) -> PoolCapacity:
        usable = [worker for worker in self.of(model) if worker.is_usable]
        return capacity_of(usable, self.costs[model].prefill_s_per_token)

    def cache_usage(self, model: str) -> float:
        """Share of the KV blocks of the usable workers that are in use; 0 without such workers."""
        loads = [worker.load for worker in self.of(model) if worker.is_usable]
        total = sum(load.total_blocks for load in loads)
        return sum(load.used_blocks for load in loads) / total if total else 0.0

    def cache_tokens(self, model: str) -> int:
        """Tokens for which the usable workers have KV blocks."""
        usable = (worker.load for worker in self.of(model) if worker.is_usable)
        return sum(load.total_blocks * load.block_size for load in usable)

    def handoff_min_tokens(self, model: str) -> int:
        if self._handoff_min_tokens is not None:
            return self._handoff_min_tokens
        return self.costs[model].handoff_min_tokens

    def block_sizes(self, model: str) -> set[int]:
        return {worker.load.block_size for worker in self.of(model)}

    def layout_hash_of(self, model: str) -> int:
        layout_hashes = {
            worker.registration.layout_hash if worker.registration.equal_bits else 0 for worker in self.of(model)
        }
        return layout_hashes.pop() if len(layout_hashes) == 1 else 0

    def max_context_length(self, model: str) -> int | None:
        usable = [worker for worker in self.of(model) if worker.is_usable]
        return min((worker.registration.capacity.max_context_length for worker in usable), default=None)

    def quantization(self, model: str) -> str:
        """Quantization of the usable workers' weights; empty if there is none, or if they differ."""
        found = {worker.registration.quantization for worker in self.of(model) if worker.is_usable}
        return found.pop() if len(found) == 1 else ""

    def has_usable(self, model: str, needs: Needs = NO_NEEDS) -> bool:
        return any(worker.is_usable and worker.meets(needs) for worker in self.of(model))

    def receivers(
        self, model: str, layout_hash: int, sender: Incarnation, needs: Needs = NO_NEEDS
    ) -> list[WorkerHandle]:
        return [
            worker
            for worker in self.of(model)
            if worker.load.layout_hash == layout_hash and worker.incarnation != sender and not worker.load.is_draining
            if worker.meets(needs)
        ]

    def can_receive(self, source: WorkerHandle, excluded: AbstractSet[Incarnation], needs: Needs = NO_NEEDS) -> bool:
        """Whether a worker can take a migrated run now; cheap: it is called for each sequence at every heartbeat."""
        candidates = [
            worker
            for worker in self.of(source.registration.model)
            if worker is not source and worker.load.layout_hash == source.load.layout_hash
            if worker.meets(needs)
            if worker.is_usable and not worker.is_avoided and worker.incarnation not in excluded
        ]
        decode = [worker for worker in candidates if worker.load.role != wire.ROLE_PREFILL]
        return any(worker.load.has_capacity for worker in decode or candidates)

    def search_ends(self, since: float, unanswered: float | None) -> float:
        """Time at which a search for a worker ends; since ``unanswered`` no eligible worker answers."""
        ends = since + self.timings.no_capacity_timeout_s
        return ends if unanswered is None else min(ends, unanswered + self.timings.no_worker_timeout_s)

    # One worker

    def worker(self, incarnation: Incarnation) -> WorkerHandle:
        """Return a known worker. Raises KeyError if it is gone."""
        worker = self.membership.get(incarnation)
        if worker is None:
            raise KeyError(incarnation)
        return worker

    def record_failure(self, incarnation: Incarnation) -> None:
        if (worker := self.membership.get(incarnation)) is not None:
            worker.record_failure()

    def record_success(self, incarnation: Incarnation) -> None:
        if (worker := self.membership.get(incarnation)) is not None:
            worker.record_success()

    def cancel(self, incarnation: Incarnation, run: wire.Run, reason: wire.Cancel.Reason) -> None:
        if (worker := self.membership.get(incarnation)) is not None:
            worker.session.cancel(wire.Cancel(run=run, reason=reason))

    def is_connected(self, router: Incarnation) -> bool:
        """Whether a worker has a session with ``router``, or has not reported yet."""
        return any(worker.session.is_open and worker.load.may_have_session_with(router) for worker in self.membership)

    # Events of sessions

    def on_opened(self, session: WorkerSession) -> None:
        if (worker := self.membership.get(Incarnation.of(session.worker))) is not None:
            worker.load.reset()
            self.on_members_changed(worker.registration.model)

    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None:
        self.tickets.on_renewed(heartbeat.renew)
        if (worker := self.membership.get(Incarnation.of(session.worker))) is not None:
            worker.load.apply_heartbeat(heartbeat)
            worker.reported_at = self._now()
            own, computed = worker.load.queued_tokens.own, worker.load.computed_tokens
            worker.rates.apply_heartbeat(heartbeat, self._now(), own, computed)
            line = self.waiting_lines[worker.registration.model]
            if line and worker.is_usable and worker.load.has_capacity:
                line.open(kind for kind in line.kinds if self._may_take(worker, kind))
            self.on_capacity_changed(worker.model)

    def on_members_changed(self, model: str) -> None:
        line = self.waiting_lines[model]
        if self.has_usable(model):
            line.open(line.kinds)
        else:
            line.notify_all()
        self.on_capacity_changed(model)

    def _may_take(self, worker: WorkerHandle, kind: CapacityKind) -> bool:
        load, decodes = worker.load, worker.load.role != wire.ROLE_PREFILL
        if not worker.meets(kind.needs):
            return False
        if kind.waits_for is WaitsFor.CACHE:
            fits = kind.layout_hash == load.layout_hash and kind.sender != worker.incarnation
            return fits and (decodes or not self._any_usable(worker, kind.needs, decodes=True))
        if not load.takes_prompts:
            return False
        if kind.waits_for is WaitsFor.FROM_TOKENS:
            return decodes or not self._any_usable(worker, kind.needs, decodes=True)
        if not decodes or not self._any_usable(worker, kind.needs, decodes=False):
            return True
        return kind.waits_for is WaitsFor.SHORT_PREFILL and load.queued_tokens.value < self.handoff_min_tokens(
            worker.registration.model
        )

    def _any_usable(self, like: WorkerHandle, needs: Needs, *, decodes: bool) -> bool:
        return any(
            (worker.load.role != wire.ROLE_PREFILL) == decodes
            and worker.load.layout_hash == like.load.layout_hash
            and worker.is_usable
            and worker.meets(needs)
            for worker in self.of(like.registration.model)
        )
