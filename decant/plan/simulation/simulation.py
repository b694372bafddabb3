"""A plan in simulated time.

arrivals ──> router 0 ──┐ places by its own view      ┌──> prefill workers ──KV cache──> decode workers
         ──> router 1 ──┘    ^                        |             |                         |
                             '── heartbeats, each 250 ms ───────────'─────────────────────────'

Routers use the product's placement and take requests in turn. Networks take no time, no worker fails. All but the CPU
time of placement depends on the seed alone.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from decant.plan.capacity.memory import KvCapacity
from decant.plan.costs.speed import Speed
from decant.plan.errors import InvalidPlan
from decant.plan.simulation.workers import DecodeWorker, PrefillWorker, SimulatedRequest
from decant.plan.workload import Workload
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.policy import PlacementRequest, WorkerSnapshot, choose_decode_worker, choose_first_worker
from decant.router.placement.prefix_index import PrefixIndex, PromptBlocks
from decant.router.placement.worker_load import LoadReservation, WorkerLoad
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS

_LAYOUT_HASH = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """Workers and requests of a simulation; arrivals with `burstiness` 1 are a Poisson process, below 1 they come in
    bursts. Each prompt begins with one of `prefixes` texts of `prefix_tokens`.
    """

    prefill_workers: int
    decode_workers: int
    routers: int = 1
    requests: int = 1000
    burstiness: float = 1.0
    prefix_tokens: int = 0
    prefixes: int = 1
    seed: int = 0

    def check(self, shortest_prompt: int) -> None:
        for name in ("routers", "requests", "prefixes"):
            if getattr(self, name) < 1:
                raise InvalidPlan(f"--{name}", "at least 1", getattr(self, name))
        if not 1e-9 <= self.burstiness <= 1e9:
            raise InvalidPlan("--burstiness", "1e-09 to 1e+09", self.burstiness)
        if not 0 <= self.prefix_tokens < shortest_prompt:
            limit = f"at least 0 and below the shortest prompt ({shortest_prompt:,} tokens)"
            raise InvalidPlan("--prefix-tokens", limit, self.prefix_tokens)


class SimulatedRouter:
    """Router with the product's placement; ids are worker numbers, those of prefill workers come first."""

    def __init__(self, prefill: int, decode: int, kv_capacity: KvCapacity) -> None:
        self.placement_seconds = 0.0
        """CPU time."""
        self._index = PrefixIndex()
        capacity = Capacity(
            total_blocks=kv_capacity.tokens // kv_capacity.block_size, block_size=kv_capacity.block_size
        )
        roles = [wire.ROLE_PREFILL] * prefill + [wire.ROLE_DECODE] * decode
        self.loads = [
            WorkerLoad(
                WorkerRegistration(
                    peer=wire.Peer(id=str(number), incarnation=1),
                    role=role,
                    layout_hash=_LAYOUT_HASH,
                    capacity=capacity,
                ),
                self._index,
            )
            for number, role in enumerate(roles)
        ]

    def place_prompt(self, request: SimulatedRequest) -> tuple[int, LoadReservation]:
        began = time.process_time()
        choice = choose_first_worker(self._workers(request.blocks), PlacementRequest(request.prompt_tokens))
        assert choice is not None
        assert choice.is_split
        number = int(choice.incarnation.id)
        reservation = self.loads[number].reserve(request.blocks, request.prompt_tokens, computes_prompt=True)
        self.placement_seconds += time.process_time() - began
        return number, reservation

    def place_cache(self, request: SimulatedRequest) -> tuple[int, LoadReservation]:
        began = time.process_time()
        sender = self.loads[request.prefill_worker].incarnation
        need = PlacementRequest(request.prompt_tokens + 1)
        incarnation = choose_decode_worker(self._workers(request.blocks), need, _LAYOUT_HASH, sender)
        assert incarnation is not None
        number = int(incarnation.id)
        reservation = self.loads[number].reserve(request.blocks, request.prompt_tokens, computes_prompt=False)
        self.placement_seconds += time.process_time() - began
        return number, reservation

    def _workers(self, blocks: PromptBlocks) -> list[WorkerSnapshot]:
        cached = blocks.cached_by_worker(self._index)
        return [load.snapshot_with(cached.get(load.number, 0), is_avoided=False) for load in self.loads]


class Simulation:
    """Simulation that runs once. Raises InvalidPlan for an impossible scenario."""

    def __init__(self, speed: Speed, kv_capacity: KvCapacity, workload: Workload, scenario: Scenario) -> None:
        scenario.check(workload.prompt.low)
        self.requests: list[SimulatedRequest] = list(_requests(workload, scenario))
        self.routers = [
            SimulatedRouter(scenario.prefill_workers, scenario.decode_workers, kv_capacity)
            for _ in range(scenario.routers)
        ]
        self.prefill_workers = [PrefillWorker(speed, kv_capacity) for _ in range(scenario.prefill_workers)]
        self.decode_workers = [
            DecodeWorker(speed, kv_capacity, workload.context) for _ in range(scenario.decode_workers)
        ]
        self._unfinished = len(self.requests)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        for request in self.requests:
            self._at(request.arrival, partial(self._arrive, request))
        workers: list[PrefillWorker | DecodeWorker] = [*self.prefill_workers, *self.decode_workers]
        for number, worker in enumerate(workers):
            self._at(HEARTBEAT_SECONDS * number / len(workers), partial(self._beat, number, worker))
        while self._unfinished:
            self._now, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, time: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happens))

    def _beat(self, number: int, worker: PrefillWorker | DecodeWorker) -> None:
        heartbeat = worker.heartbeat()
        for router in self.routers:
            router.loads[number].apply_heartbeat(heartbeat)
        self._at(self._now + HEARTBEAT_SECONDS, partial(self._beat, number, worker))

    def _arrive(self, request: SimulatedRequest) -> None:
        request.prefill_worker, request.reservation = self.routers[request.router].place_prompt(request)
        worker = self.prefill_workers[request.prefill_worker]
        worker.queue.append(request)
        if worker.current is None:
            self._begin_prefill(worker)

    def _begin_prefill(self, worker: PrefillWorker) -> None:
        self._at(self._now + worker.begin(self._now), partial(self._end_prefill, worker))

    def _end_prefill(self, worker: PrefillWorker) -> None:
        request = worker.finish()
        request.first_token = self._now
        self._release(request)
        if request.output_tokens > 1:
            number, request.reservation = self.routers[request.router].place_cache(request)
            request.decode_worker = number - len(self.prefill_workers)
            decode = self.decode_workers[request.decode_worker]
            decode.add(request, self._now)
            self._expect_end(decode)
        else:
            self._end(request)
        if worker.queue:
            self._begin_prefill(worker)

    def _expect_end(self, worker: DecodeWorker) -> None:
        if (at := worker.next_end()) is not None:
            self._at(at, partial(self._end_decode, worker, worker.version))

    def _end_decode(self, worker: DecodeWorker, version: int) -> None:
        if version == worker.version:  # else the sequences have changed since, and another event was made
            request = worker.finish(self._now)
            self._release(request)
            self._end(request)
            self._expect_end(worker)

    def _end(self, request: SimulatedRequest) -> None:
        request.end = self._now
        self._unfinished -= 1

    def _release(self, request: SimulatedRequest) -> None:
        assert request.reservation is not None
        request.reservation.release()
        request.reservation = None


def _requests(workload: Workload, scenario: Scenario) -> Iterator[SimulatedRequest]:
    rng = Random(scenario.seed)
    prefixes = [rng.randbytes(4 * scenario.prefix_tokens) for _ in range(scenario.prefixes)]
    arrivals = itertools.islice(_arrivals(workload, scenario, rng), scenario.requests)
    for number, (arrival, prompt, output) in enumerate(arrivals):
        prefix = rng.choice(prefixes)
        tokens = prefix + rng.randbytes(4 * prompt - len(prefix))
        blocks = PromptBlocks(wire.EngineRequest(prompt=tokens))
        yield SimulatedRequest(arrival, prompt, output, blocks, router=number % scenario.routers)


def _arrivals(workload: Workload, scenario: Scenario, rng: Random) -> Iterator[tuple[float, int, int]]:
    if workload.trace is not None:
        slower = workload.trace.rate / workload.rate
        for recorded in workload.trace.requests:
            yield recorded.arrival_s * slower, recorded.prompt_tokens, recorded.output_tokens
        return
    arrival, shape = 0.0, scenario.burstiness
    while True:
        arrival += rng.gammavariate(shape, 1 / (workload.rate * shape))
        yield arrival, workload.prompt.draw(rng), workload.output.draw(rng)
