"""Routers and workers in simulated time.

    arrivals ──> router a ──┐ places by its own view        ┌──> worker 1: one prompt after another, with a cache
             ──> router b ──┘  ^                            └──> worker 2 ...
                               └── heartbeats: load and cache events as of the last sample <───┘

Blocks, eviction, cache events and the routers' views are the product's own code.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.conversations import Arrival
from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.prefix_index import CachedPrefix
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.policy import WorkerSnapshot
from decant.router.placement.worker_load import LoadReservation, WorkerLoad
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS
from decant.state.ids import Incarnation
from decant.worker.prefix_cache_feed import PrefixCacheFeed

BLOCK_SIZE = 16
TOKENS_PER_SECOND = 20_000.0
PROMPT_SECONDS = 0.005

Choose = Callable[[Sequence[WorkerSnapshot], int], Incarnation]
"""``int``: the prompt's tokens."""


@dataclass(slots=True)
class Prompt:
    arrival: Arrival
    hashes: Sequence[bytes]
    sent: LoadReservation


class Worker:
    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK_SIZE)
        self.cache_feed = PrefixCacheFeed()
        self.queue = deque[Prompt]()
        self.running: tuple[Prompt, BlockTable, int] | None = None
        self._load = wire.Load()

    def begin(self) -> float:
        prompt = self.queue.popleft()
        prefix = self._cached(prompt)
        tokens, cached = prompt.arrival.tokens, prefix.num_blocks * BLOCK_SIZE
        block_table = self.pool.allocate("prompt", self.pool.blocks_for(tokens), prefix.groups)
        self.running = prompt, block_table, cached
        return PROMPT_SECONDS + (tokens - cached) / TOKENS_PER_SECOND

    def end(self) -> tuple[Prompt, int]:
        assert self.running is not None
        (prompt, block_table, cached), self.running = self.running, None
        self.pool.publish(0, block_table.blocks[0][: len(prompt.hashes)], prompt.hashes)
        block_table.release()
        prompt.sent.release()
        return prompt, cached

    def sample(self) -> None:
        self.cache_feed.record(self.pool.index.changed())
        self.cache_feed.collect()
        prompts = [*self.queue, *([self.running[0]] if self.running else [])]
        queued = sum(prompt.arrival.tokens - self._cached(prompt).num_blocks * BLOCK_SIZE for prompt in prompts)
        self._load = wire.Load(
            free_blocks=self.pool.free_blocks,
            cached_blocks=self.pool.cached_blocks,
            running=0 if self.running is None else 1,
            waiting=len(self.queue),
            queued_tokens=queued,
            takes_prompts=True,
            role=wire.ROLE_PREFILL,
        )

    def _cached(self, prompt: Prompt) -> CachedPrefix:
        return self.pool.index.longest_prefix(prompt.hashes[: (prompt.arrival.tokens - 1) // BLOCK_SIZE])

    def heartbeat(self, router: int) -> wire.Heartbeat:
        return wire.Heartbeat(load=self._load, cache=self.cache_feed.next_update(router))


class Simulation:
    def __init__(self, choose: Sequence[Choose], workers: int, blocks: int) -> None:
        self.wait_times: list[float] = []  # seconds from arrival to first token
        self.prompt_tokens = self.cached_tokens = 0
        self._choose = choose
        self._workers = [Worker(blocks) for _ in range(workers)]
        self._loads = [[_worker_load(number, blocks) for number in range(workers)] for _ in choose]
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for router, worker in itertools.product(range(len(choose)), self._workers):
            worker.cache_feed.add_session(router)

    def run(self, load: Sequence[Arrival]) -> None:
        routers = itertools.cycle(range(len(self._choose)))
        for arrival in load:
            self._at(arrival.at, partial(self._arrive, next(routers), arrival))
        for number in range(len(self._workers)):
            phase = HEARTBEAT_SECONDS * number / len(self._workers)
            self._at(phase, partial(self._sample, number, len(load)))
            self._at(phase + HEARTBEAT_SECONDS / 2, partial(self._send_heartbeat, number, len(load)))
        while self._events:
            self._now, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, time: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happens))

    def _arrive(self, router: int, arrival: Arrival) -> None:
        loads = self._loads[router]
        incarnation = self._choose[router]([load.snapshot(arrival.prefix) for load in loads], arrival.tokens)
        number = next(number for number, load in enumerate(loads) if load.incarnation == incarnation)
        sent = loads[number].reserve(arrival.prefix, arrival.tokens, computes_prompt=True)
        hashes = [block_hash.to_bytes(8, "little") for block_hash in arrival.prefix.hashes(BLOCK_SIZE)]
        self._workers[number].queue.append(Prompt(arrival, hashes, sent))
        self._start_next(number)

    def _start_next(self, number: int) -> None:
        worker = self._workers[number]
        if worker.queue and worker.running is None:
            self._at(self._now + worker.begin(), partial(self._end, number))

    def _end(self, number: int) -> None:
        prompt, cached = self._workers[number].end()
        self.wait_times.append(self._now - prompt.arrival.at)
        self.prompt_tokens += prompt.arrival.tokens
        self.cached_tokens += cached
        self._start_next(number)

    def _sample(self, number: int, prompts: int) -> None:
        self._workers[number].sample()
        if len(self.wait_times) < prompts:
            self._at(self._now + HEARTBEAT_SECONDS, partial(self._sample, number, prompts))

    def _send_heartbeat(self, number: int, prompts: int) -> None:
        for router, loads in enumerate(self._loads):
            loads[number].apply_heartbeat(self._workers[number].heartbeat(router))
        if len(self.wait_times) < prompts:
            self._at(self._now + HEARTBEAT_SECONDS, partial(self._send_heartbeat, number, prompts))


def _worker_load(number: int, blocks: int) -> WorkerLoad:
    peer = wire.Peer(id=f"worker-{number}", incarnation=1)
    capacity = Capacity(total_blocks=blocks, block_size=BLOCK_SIZE)
    return WorkerLoad(WorkerRegistration(peer=peer, role=wire.ROLE_PREFILL, capacity=capacity))
