"""Load of one worker: its last report, corrected by what this router has sent and finished since, and never less than
what this router has there.
"""

from __future__ import annotations

import sys

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.placement.policy import WorkerSnapshot, blocks_for
from decant.router.placement.prefix_index import ExpectedBlocks, PrefixIndex, PromptBlocks, WorkerPrefixCache
from decant.state.ids import Incarnation

SLOW_START_SEQUENCES = 16
"""Sequences to place after a refusal, until the next load report; doubles with each report."""


class CorrectedCounter:
    def __init__(self) -> None:
        self.own = 0
        self._reported = 0
        self._since = 0

    @property
    def value(self) -> int:
        return max(self.own, self._reported + self._since)

    def add(self, amount: int) -> None:
        self.own += amount
        self._since += amount

    def set_reported(self, amount: int) -> None:
        self._reported, self._since = amount, 0


class WorkerLoad:
    def __init__(self, registration: WorkerRegistration, index: PrefixIndex | None = None) -> None:
        self.incarnation = Incarnation.of(registration.peer)
        self.block_size = registration.capacity.block_size or 1
        self._group_blocks = tuple(registration.capacity.group_blocks) or (0,)
        self._index = index or PrefixIndex()
        self.number = self._index.add_worker(self.block_size)
        self.queued_tokens = CorrectedCounter()
        """Prompt tokens to compute."""
        self.computed_tokens = 0
        """Prompt tokens of this router that the worker has computed, ever."""
        self.sequences = CorrectedCounter()
        self.layout_hash = registration.layout_hash
        self._routers: frozenset[Incarnation] | None = None
        """Routers in the last report; None before the first in this session."""
        blocks = registration.capacity.total_blocks
        self._load = wire.Load(role=registration.role, total_blocks=blocks, free_blocks=blocks, takes_prompts=True)
        self._cached = WorkerPrefixCache(self._index, self.number)
        self._snapshots: dict[tuple[int, bool, bool], WorkerSnapshot] = {}
        self._is_full = False
        self._slow_start_limit = sys.maxsize  # sequences sent before the next load report
        self._sent_sequences = 0  # since the last one
        self._sent_blocks = 0

    @property
    def is_draining(self) -> bool:
        return self._load.draining

    @property
    def reported(self) -> wire.Load:
        """Load as the worker last reported it; not to be changed."""
        return self._load

    @property
    def role(self) -> wire.Role:
        return self._load.role

    @property
    def takes_prompts(self) -> bool:
        return self._load.takes_prompts

    def may_have_session_with(self, router: Incarnation) -> bool:
        """Whether the worker has a session with ``router`` or has not reported yet; outdated if this router has no
        session there.
        """
        return self._routers is None or router in self._routers

    @property
    def has_capacity(self) -> bool:
        return not self._is_full and self._sent_sequences < self._slow_start_limit

    @property
    def total_blocks(self) -> int:
        return self._load.total_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that the worker last reported in use, cached ones left out."""
        return self._load.total_blocks - self._load.free_blocks - self._load.cached_blocks

    def snapshot(self, prefix: PromptBlocks | None = None, *, is_avoided: bool = False) -> WorkerSnapshot:
        return self.snapshot_with(0 if prefix is None else self.cached_tokens(prefix), is_avoided)

    def snapshot_with(self, cached_tokens: int, is_avoided: bool, lacks_adapter: bool = False) -> WorkerSnapshot:
        key = cached_tokens, is_avoided, lacks_adapter
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            snapshot = self._snapshots[key] = self._new_snapshot(*key)
        return snapshot

    def _new_snapshot(self, cached_tokens: int, is_avoided: bool, lacks_adapter: bool = False) -> WorkerSnapshot:
        load, has_capacity = self._load, self.has_capacity
        return WorkerSnapshot(
            incarnation=self.incarnation,
            role=load.role,
            layout_hash=self.layout_hash,
            block_size=self.block_size,
            free_blocks=load.free_blocks + load.cached_blocks - self._sent_blocks,
            sequences=self.sequences.value,
            queued_tokens=self.queued_tokens.value,
            cached_tokens=cached_tokens if has_capacity else 0,
            takes_prompts=load.takes_prompts,
            has_capacity=has_capacity,
            is_avoided=is_avoided,
            group_blocks=self._group_blocks,
            lacks_adapter=lacks_adapter,
        )

    def cached_tokens(self, prefix: PromptBlocks) -> int:
        return prefix.cached_tokens(self._cached, self.block_size)

    def reserve(self, prefix: PromptBlocks, tokens: int, *, computes_prompt: bool) -> LoadReservation:
        """Count a sequence just sent, which fetches unless ``computes_prompt``; ``release`` the result when it has
        left.
        """
        fresh = max(0, tokens - self.cached_tokens(prefix))
        self._sent_sequences += 1
        self._sent_blocks += blocks_for(fresh, self.block_size, self._group_blocks)
        return LoadReservation(
            self, fresh if computes_prompt else 0, self._cached.expect(prefix.hashes(self.block_size))
        )

    def add(self, sequences: int, queued_tokens: int) -> None:
        self.sequences.add(sequences)
        self.queued_tokens.add(queued_tokens)
        self._snapshots.clear()

    def apply_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        if heartbeat.HasField("load"):
            role = self._load.role
            self._load = wire.Load()  # a copy: a part of a message keeps the whole message in memory
            self._load.CopyFrom(heartbeat.load)
            self._load.role = heartbeat.load.role or role
        self.queued_tokens.set_reported(self._load.queued_tokens)
        self.sequences.set_reported(self._load.running + self._load.waiting)
        self._cached.apply_heartbeat(heartbeat)
        if heartbeat.routers or self._routers is None:
            self._routers = frozenset(Incarnation.of(router) for router in heartbeat.routers)
        self._sent_sequences = self._sent_blocks = 0
        if not self._is_full:
            self._slow_start_limit *= 2
        self._is_full = False
        self._snapshots.clear()

    def reset(self) -> None:
        self._cached.close()
        self._cached, self._routers = WorkerPrefixCache(self._index, self.number), None

    def close(self) -> None:
        self._cached.close()
        self._index.remove_worker(self.number, self.block_size)

    def mark_full(self) -> None:
        """Send no sequence before the worker's next load report, then few."""
        self._snapshots.clear()
        self._is_full = True
        self._slow_start_limit = SLOW_START_SEQUENCES


class LoadReservation:
    """One sequence in the load of a worker; both methods are idempotent."""

    def __init__(self, load: WorkerLoad, queued_tokens: int, expected: ExpectedBlocks) -> None:
        self._load = load
        self._queued_tokens = queued_tokens
        self._expected = expected
        self._is_released = False
        load.add(1, queued_tokens)

    def mark_prefilled(self) -> None:
        self._load.computed_tokens += self._queued_tokens
        self._release_queued_tokens()

    def _release_queued_tokens(self) -> None:
        queued_tokens, self._queued_tokens = self._queued_tokens, 0
        self._load.add(0, -queued_tokens)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._release_queued_tokens()
            self._load.add(-1, 0)
            self._expected.release()
