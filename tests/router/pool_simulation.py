"""Workers in simulated time, whose roles a `MoveDecision` changes; requests are placed by the router's own code.

A tick is a heartbeat. A worker that has both prompts and sequences gives half of its time to each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.policy import PlacementRequest, WorkerSnapshot, choose_decode_worker, choose_first_worker
from decant.router.placement.pool_demand import DemandMeter, Report
from decant.router.placement.pool_rules import MoveDecision, PoolRules
from decant.router.placement.prefix_index import PrefixIndex, PromptBlocks
from decant.router.placement.worker_load import LoadReservation, WorkerLoad
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS
from decant.state.ids import Incarnation

PREFILL, DECODE = wire.ROLE_PREFILL, wire.ROLE_DECODE
PROMPT_TOKENS_PER_S = 4000.0
STEP_S, STEP_S_PER_SEQUENCE = 0.02, 0.0005
MAX_RUNNING = 64
BLOCK_SIZE = 64
BLOCKS = 2048
LAYOUT = 1


@dataclass(eq=False, slots=True)
class Request:
    arrival: float
    prompt: int
    output: int
    left: float = 0.0  # of the prompt, then of the output
    first_token: float = 0.0
    end: float = 0.0
    reservation: LoadReservation | None = None

    @property
    def tpot(self) -> float:
        return (self.end - self.first_token) / self.output


@dataclass(eq=False)
class Worker:
    id: str
    role: wire.Role
    prompts: deque[tuple[Request, bool]] = field(default_factory=deque)  # with whether another worker decodes it
    sequences: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    busy_s: float = 0.0
    busy_tokens: int = 0
    steps: int = 0

    def load(self) -> wire.Load:
        used = sum(_blocks(one) for one in self.sequences)
        return wire.Load(
            role=self.role,
            total_blocks=BLOCKS,
            free_blocks=BLOCKS - used,
            running=len(self.sequences),
            waiting=len(self.waiting) + len(self.prompts),
            queued_tokens=round(sum(one.left for one, _ in self.prompts)),
            takes_prompts=True,
            busy_us=round(self.busy_s * 1e6),
            busy_steps=self.steps,
            busy_tokens=self.busy_tokens,
        )

    def compute(self, seconds: float) -> tuple[list[tuple[Request, bool]], list[Request]]:
        """Return prompts and sequences that ended."""
        share = seconds / 2 if self.prompts and (self.sequences or self.waiting) else seconds
        return self._prefill(share), self._decode(share)

    def _prefill(self, seconds: float) -> list[tuple[Request, bool]]:
        ended, left = [], seconds * PROMPT_TOKENS_PER_S
        while self.prompts and left > 0:
            request = self.prompts[0][0]
            done = min(left, request.left)
            request.left, left = request.left - done, left - done
            self.busy_s += done / PROMPT_TOKENS_PER_S
            self.busy_tokens += round(done)
            self.steps += 1
            if request.left <= 0:
                ended.append(self.prompts.popleft())
        return ended

    def _decode(self, seconds: float) -> list[Request]:
        free = BLOCKS - sum(_blocks(one) for one in self.sequences)
        while self.waiting and len(self.sequences) < MAX_RUNNING and _blocks(self.waiting[0]) <= free:
            free -= _blocks(self.waiting[0])
            self.sequences.append(self.waiting.popleft())
        if not self.sequences:
            return []
        steps = seconds / (STEP_S + STEP_S_PER_SEQUENCE * len(self.sequences))
        for one in self.sequences:
            one.left -= steps
        self.busy_s += seconds
        self.busy_tokens += round(steps * len(self.sequences))
        self.steps += round(steps)
        ended = [one for one in self.sequences if one.left <= 0]
        self.sequences = [one for one in self.sequences if one.left > 0]
        return ended


@dataclass(frozen=True)
class Move:
    at: float
    role: wire.Role


class Simulation:
    def __init__(self, prefill: int, decode: int, rules: PoolRules | None) -> None:
        """``rules`` None: the roles stay."""
        roles = [PREFILL] * prefill + [DECODE] * decode
        self.workers = {str(number): Worker(str(number), role) for number, role in enumerate(roles)}
        index = PrefixIndex()
        self.loads = {id: WorkerLoad(_registration(worker), index) for id, worker in self.workers.items()}
        self.moves: list[Move] = []
        self.ended: list[Request] = []
        self.now = 0.0
        self._waiting: deque[Request] = deque()
        self._meter = DemandMeter()
        self._decision = None if rules is None else MoveDecision(rules)

    def run(self, requests: Iterable[Request], seconds: float) -> None:
        """Run until ``seconds``; ``requests`` are in the order of arrival."""
        coming = deque(requests)
        while self.now < seconds:
            self.now += HEARTBEAT_SECONDS
            while coming and coming[0].arrival <= self.now:
                self._waiting.append(coming.popleft())
            while self._waiting and self._place(self._waiting[0]):
                self._waiting.popleft()
            for worker in self.workers.values():
                prompts, sequences = worker.compute(HEARTBEAT_SECONDS)
                for request, is_split in prompts:
                    self._on_first_token(worker, request, is_split)
                for request in sequences:
                    self._release(request)
                    request.end = self.now
                    self.ended.append(request)
            for id, worker in self.workers.items():
                self.loads[id].apply_heartbeat(wire.Heartbeat(load=worker.load()))
            self._balance()

    def size(self, role: wire.Role) -> int:
        return sum(worker.role == role for worker in self.workers.values())

    def _place(self, request: Request) -> bool:
        choice = choose_first_worker(self._snapshots(), PlacementRequest(request.prompt))
        if choice is None:
            return False
        request.left = request.prompt
        self._reserve(choice.incarnation.id, request, computes_prompt=True)
        self.workers[choice.incarnation.id].prompts.append((request, choice.is_split))
        return True

    def _on_first_token(self, worker: Worker, request: Request, is_split: bool) -> None:
        request.first_token, request.left = self.now, request.output
        target = worker.id
        if is_split:
            need, sender = PlacementRequest(request.prompt + 1), self.loads[worker.id].incarnation
            choice = choose_decode_worker(self._snapshots(), need, LAYOUT, sender)
            assert choice is not None
            target = choice.id
            self._release(request)
            self._reserve(target, request, computes_prompt=False)
        elif request.reservation is not None:
            request.reservation.mark_prefilled()
        self.workers[target].waiting.append(request)

    def _balance(self) -> None:
        reports = [
            Report(Incarnation(id, 1), worker.load(), MAX_RUNNING, self.now) for id, worker in self.workers.items()
        ]
        demands = self._meter.observe(reports)
        if self._decision is None or (role := self._decision.decide(demands, self.now)) is None:
            return
        giving = [worker for worker in self.workers.values() if worker.role != role]
        min(giving, key=lambda one: (len(one.sequences) + len(one.waiting), len(one.prompts))).role = role
        self._decision.mark_moved(self.now)
        self.moves.append(Move(self.now, role))

    def _snapshots(self) -> list[WorkerSnapshot]:
        return [load.snapshot_with(0, is_avoided=False) for load in self.loads.values()]

    def _reserve(self, id: str, request: Request, *, computes_prompt: bool) -> None:
        blocks = PromptBlocks(wire.EngineRequest(prompt=b""))
        request.reservation = self.loads[id].reserve(blocks, request.prompt, computes_prompt=computes_prompt)

    def _release(self, request: Request) -> None:
        assert request.reservation is not None
        request.reservation.release()
        request.reservation = None


def arrivals(
    rate: Callable[[float], float], seconds: float, prompt: int, output: int, seed: int = 0, start: float = 0.0
) -> list[Request]:
    """Poisson arrivals whose rate changes with the time since ``start``; lengths vary by a half."""
    rng, at = Random(seed), 0.0
    made: list[Request] = []
    while True:
        at += rng.expovariate(max(rate(at), 1e-6)) if rate(at) > 0 else 0.25
        if at >= seconds:
            return made
        if rate(at) > 0:
            lengths = round(prompt * rng.uniform(0.5, 1.5)), round(output * rng.uniform(0.5, 1.5))
            made.append(Request(start + at, *lengths))


RECORDED_S = 183.06
RECORDED = """
0.00 4808 10   0.05 3180 8    0.10 110 27    0.14 7433 14   0.44 34 12     0.54 374 14    0.70 6985 9    1.02 34 23
1.30 1145 7    1.30 201 24    1.40 137 9     1.40 7427 8    29.48 1555 19  29.58 3893 19  29.61 1827 10  29.68 394 17
29.72 675 6    30.18 7436 9   30.23 158 26   30.48 6587 18  30.50 763 8    30.98 1556 18  31.29 5108 12  31.45 159 127
31.46 458 67   31.64 2464 30  31.81 4009 51  32.63 1632 9   32.71 2567 45  33.08 730 36   33.34 5108 10  33.53 2569 7
33.58 1832 7   33.59 1630 9   33.68 6587 13  33.68 7436 6   33.78 1044 16  33.88 327 124  33.98 1630 9   34.28 3351 9
34.45 1562 18  34.88 3724 9   34.98 328 43   35.03 965 8    35.35 6586 11  35.35 2366 7   35.80 328 40   35.98 1513 29
36.28 328 9    36.65 2025 9   36.70 2169 13  36.78 74 14    37.38 771 142  37.42 76 18    37.90 75 16    38.08 527 27
38.21 2024 97  38.68 197 7    38.69 109 12   38.89 432 10   39.08 2025 19  39.29 6586 9   39.33 7435 9
"""
"""Arrival, prompt and output of the first requests of AzureLLMInferenceTrace_code (Azure Public Dataset, CC BY; Patel
et al., Splitwise, ISCA 2024), and the time from the first of them to the next burst."""


def recorded(times: int) -> list[Request]:
    """Return the recorded requests, so many times one after the other."""
    values = [float(text) for text in RECORDED.split()]
    rows = list(zip(values[::3], values[1::3], values[2::3], strict=True))
    return [
        Request(turn * RECORDED_S + arrival, int(prompt), int(output))
        for turn in range(times)
        for arrival, prompt, output in rows
    ]


def _blocks(request: Request) -> int:
    return -(-(request.prompt + request.output) // BLOCK_SIZE)


def _registration(worker: Worker) -> WorkerRegistration:
    capacity = Capacity(total_blocks=BLOCKS, block_size=BLOCK_SIZE, max_running=MAX_RUNNING)
    peer = wire.Peer(id=worker.id, incarnation=1)
    return WorkerRegistration(peer=peer, role=worker.role, layout_hash=LAYOUT, capacity=capacity)
