"""One worker as this router sees it: what it told of itself last, corrected by what this router has there.

told, at most some beats old      [ of others ][ of ours ]
since then, of ours                             + sent  - over
and never less than               [ all of ours that is there now ]
"""

from __future__ import annotations

import sys

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.placement.policy import WorkerSnapshot
from decant.router.placement.prefix_index import ExpectedBlocks, PromptBlocks, WorkerPrefixCache
from decant.state.ids import Incarnation

FIRST_AGAIN = 16
"""Sequences that go to a worker which had no room, before it tells its load another time."""


class CorrectedCounter:
    """How much is there, of one kind."""

    def __init__(self) -> None:
        self.ours = 0
        self._told = 0
        self._since = 0

    @property
    def now(self) -> int:
        return max(self.ours, self._told + self._since)

    def add(self, amount: int) -> None:
        """Of ours, come (or gone, where it is negative)."""
        self.ours += amount
        self._since += amount

    def tell(self, told: int) -> None:
        """Of everybody's, as the worker counts."""
        self._told, self._since = told, 0


class WorkerLoad:
    """What placement looks at, of one incarnation of one worker."""

    def __init__(self, facts: WorkerRegistration) -> None:
        self.incarnation = Incarnation.of(facts.peer)
        self.block_tokens = facts.capacity.block_tokens or 1
        self.work = CorrectedCounter()
        """Tokens to be computed."""
        self.sequences = CorrectedCounter()
        self.layout = facts.layout
        self._routers: frozenset[Incarnation] | None = None
        """Routers with a live session at the worker, as it said last; None until it has said that in this session."""
        self._load = wire.Load(role=facts.role, free_blocks=facts.capacity.total_blocks, takes_prompts=True)
        self._cached = WorkerPrefixCache()
        self._is_full = False
        self._allowance = sys.maxsize  # sequences that are sent before its next load report
        self._sent_sequences = 0  # since then
        self._sent_tokens = 0

    @property
    def is_draining(self) -> bool:
        return self._load.draining

    @property
    def role(self) -> wire.Role:
        return self._load.role

    @property
    def takes_prompts(self) -> bool:
        return self._load.takes_prompts

    def may_reach(self, router: Incarnation) -> bool:
        """Whether the router has a live session at the worker, or may have. Void while this router has none."""
        return self._routers is None or router in self._routers

    @property
    def has_capacity(self) -> bool:
        """Whether anything may be sent there before its next load report."""
        return not self._is_full and self._sent_sequences < self._allowance

    def snapshot(self, prefix: PromptBlocks | None = None, *, avoided: bool = False) -> WorkerSnapshot:
        """For a request with that prompt; None: for any."""
        load, has_capacity = self._load, self.has_capacity
        return WorkerSnapshot(
            incarnation=self.incarnation,
            role=load.role,
            layout=self.layout,
            block_tokens=self.block_tokens,
            free_blocks=load.free_blocks + load.cached_blocks - self._sent_tokens // self.block_tokens,
            sequences=self.sequences.now,
            queued_tokens=self.work.now,
            cached_tokens=self.cached_tokens(prefix) if prefix is not None and has_capacity else 0,
            takes_prompts=load.takes_prompts,
            has_capacity=has_capacity,
            avoided=avoided,
        )

    def cached_tokens(self, prefix: PromptBlocks) -> int:
        """Leading tokens of a prompt that are in its cache, as far as is known."""
        return prefix.cached_tokens(self._cached, self.block_tokens)

    def reserve(self, prefix: PromptBlocks, tokens: int, *, computed: bool) -> LoadReservation:
        """A sequence of so many tokens goes there, to be computed or to be fetched. Release what is returned
        when it is no longer there."""
        fresh = max(0, tokens - self.cached_tokens(prefix))
        self._sent_sequences += 1
        self._sent_tokens += fresh
        return LoadReservation(self, fresh if computed else 0, self._cached.expect(prefix.hashes(self.block_tokens)))

    def apply_heartbeat(self, beat: wire.Heartbeat) -> None:
        """It tells how it stands."""
        if beat.HasField("load"):
            role = self._load.role
            self._load = wire.Load()  # a copy: a part of a message keeps all of it alive
            self._load.CopyFrom(beat.load)
            self._load.role = beat.load.role or role
        self.work.tell(self._load.queued_tokens)
        self.sequences.tell(self._load.running + self._load.waiting)
        self._cached.apply_heartbeat(beat)
        if beat.routers or self._routers is None:
            self._routers = frozenset(Incarnation.of(router) for router in beat.routers)
        self._sent_sequences = self._sent_tokens = 0
        if not self._is_full:
            self._allowance *= 2
        self._is_full = False

    def forget(self) -> None:
        """Its next heartbeats list all that it has cached, and the routers that it has sessions with."""
        self._cached, self._routers = WorkerPrefixCache(), None

    def mark_full(self) -> None:
        """It has no room: nothing goes there until it tells its load again, and then few before the next time."""
        self._is_full = True
        self._allowance = FIRST_AGAIN


class LoadReservation:
    """One sequence of this router's at a worker."""

    def __init__(self, view: WorkerLoad, work: int, expected: ExpectedBlocks) -> None:
        self._view = view
        self._work = work
        self._expected = expected
        self._is_over = False
        view.sequences.add(1)
        view.work.add(work)

    def mark_prefilled(self) -> None:
        """Its prompt is computed. May be said twice."""
        work, self._work = self._work, 0
        self._view.work.add(-work)

    def release(self) -> None:
        """It is not there any more. May be said twice."""
        if not self._is_over:
            self._is_over = True
            self.mark_prefilled()
            self._view.sequences.add(-1)
            self._expected.release()
