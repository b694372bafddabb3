"""Simulated workers: prompts run in order, with an LRU prefix cache; sequences wait until they fit in memory."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import deque
from dataclasses import dataclass

from decant.plan.capacity.memory import KvCapacity
from decant.plan.costs.speed import Speed
from decant.protos import worker_pb2 as wire
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.placement.worker_load import LoadReservation


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: PromptBlocks
    router: int = 0
    cached_tokens: int = 0
    prefill_worker: int = -1
    decode_worker: int = -1
    prefill_began: float = math.nan
    first_token: float = math.nan
    end: float = math.nan
    reservation: LoadReservation | None = None

    @property
    def tpot(self) -> float:
        return (self.end - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


class PrefillWorker:
    def __init__(self, speed: Speed, kv_capacity: KvCapacity) -> None:
        self.busy_seconds = 0.0
        self.queue = deque[SimulatedRequest]()
        self.current: SimulatedRequest | None = None
        self._speed = speed
        self._block_size = kv_capacity.block_size
        self._capacity = kv_capacity.tokens // kv_capacity.block_size
        self._cache: dict[int, None] = {}  # least recently used first
        self._published: dict[int, None] = {}
        self._dropped: dict[int, None] = {}

    def begin(self, now: float) -> float:
        """Begin the next prompt of the queue; return its seconds."""
        request = self.current = self.queue.popleft()
        request.cached_tokens, request.prefill_began = self._cached_tokens(request), now
        seconds = self._seconds(request)
        self.busy_seconds += seconds
        return seconds

    def finish(self) -> SimulatedRequest:
        request, self.current = self.current, None
        assert request is not None
        for block_hash in request.blocks.hashes(self._block_size):
            if block_hash not in self._cache:
                self._published[block_hash] = None
                self._dropped.pop(block_hash, None)
            self._cache.pop(block_hash, None)
            self._cache[block_hash] = None
        while len(self._cache) > self._capacity:
            block_hash = next(iter(self._cache))
            del self._cache[block_hash]
            if self._published.pop(block_hash, block_hash) is not None:
                self._dropped[block_hash] = None
        return request

    def heartbeat(self) -> wire.Heartbeat:
        """Return the load, and changes of the prefix cache since the last call."""
        queued = sum(request.prompt_tokens - self._cached_tokens(request) for request in self.queue)
        current = self.current.prompt_tokens - self.current.cached_tokens if self.current else 0
        load = wire.Load(
            free_blocks=self._capacity - len(self._cache),
            cached_blocks=len(self._cache),
            running=1 if self.current else 0,
            waiting=len(self.queue),
            queued_tokens=queued + current,
            takes_prompts=True,
            role=wire.ROLE_PREFILL,
        )
        published, dropped = (array("Q", hashes).tobytes() for hashes in (self._published, self._dropped))
        self._published.clear()
        self._dropped.clear()
        return wire.Heartbeat(load=load, cache=wire.PrefixCacheUpdate(published=published, dropped=dropped))

    def _cached_tokens(self, request: SimulatedRequest) -> int:
        """Return the cached tokens of a prompt; its last token is always computed."""
        hashes = request.blocks.hashes(self._block_size)[: (request.prompt_tokens - 1) // self._block_size]
        return sum(1 for _ in itertools.takewhile(self._cache.__contains__, hashes)) * self._block_size

    def _seconds(self, request: SimulatedRequest) -> float:
        """Return the seconds of the uncached tokens, which attend to the cached ones too."""
        tokens, cached, prefill = request.prompt_tokens, request.cached_tokens, self._speed.prefill
        return max(prefill(tokens - cached), prefill(tokens) - prefill(cached)) if cached else prefill(tokens)


class DecodeWorker:
    def __init__(self, speed: Speed, kv_capacity: KvCapacity, context: float) -> None:
        self.taken = 0
        self.version = 0
        """Grows when the next end changes; see `next_end`."""
        self._speed = speed
        self._context = context
        self._block_size = kv_capacity.block_size
        self._free_blocks = kv_capacity.tokens // kv_capacity.block_size
        self._steps = 0.0  # so far
        self._now = 0.0
        self._running: list[tuple[float, int, SimulatedRequest]] = []  # a heap by the step of the end
        self._waiting = deque[SimulatedRequest]()
        self._order = itertools.count()

    def add(self, request: SimulatedRequest, now: float) -> None:
        self._advance(now)
        self.taken += 1
        self._waiting.append(request)
        self._start_waiting()

    def next_end(self) -> float | None:
        """Return when a sequence ends if none is added before; None if nothing runs."""
        return self._now + (self._running[0][0] - self._steps) * self._step_seconds() if self._running else None

    def finish(self, now: float) -> SimulatedRequest:
        self._advance(now)
        request = heapq.heappop(self._running)[2]
        self._free_blocks += self._blocks(request)
        self._start_waiting()
        return request

    def heartbeat(self) -> wire.Heartbeat:
        load = wire.Load(
            free_blocks=self._free_blocks,
            running=len(self._running),
            waiting=len(self._waiting),
            takes_prompts=True,
            role=wire.ROLE_DECODE,
        )
        return wire.Heartbeat(load=load)

    def _advance(self, now: float) -> None:
        if self._running:
            self._steps += (now - self._now) / self._step_seconds()
        self._now = now

    def _start_waiting(self) -> None:
        self.version += 1
        while self._waiting and self._blocks(self._waiting[0]) <= self._free_blocks:
            request = self._waiting.popleft()
            self._free_blocks -= self._blocks(request)
            heapq.heappush(self._running, (self._steps + request.output_tokens - 1, next(self._order), request))

    def _step_seconds(self) -> float:
        return self._speed.step(len(self._running), self._context)

    def _blocks(self, request: SimulatedRequest) -> int:
        return -(-(request.prompt_tokens + request.output_tokens) // self._block_size)
