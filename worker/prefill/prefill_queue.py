"""The prefill runs of a worker, and their order.

    waiting ──> admitted ──> begun ──> first token sent ──> removed
       │        (engine)   (ticket)
       └───────────┴──────────┴── ended, cancelled, lost ──^

A cache that waits for its receiver keeps blocks. So a prompt is admitted only while the admitted ones keep at most half
of the pool.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from decant.engine.output import SequenceStarted, Token
from decant.engine.request import Request
from decant.protos import worker_pb2 as wire
from decant.worker.epochs import Epochs


@dataclass(slots=True, eq=False)
class PrefillRun:
    """A prompt. ``events`` go to its call; None ends them."""

    ref: wire.Run
    request: Request  # ``request.id`` identifies the sequence in the engine
    stopping: wire.Stopping
    handoff: bool
    received: float  # time.monotonic
    queue_key: float  # the smallest is admitted first
    is_admitted: bool = False
    begun: SequenceStarted | None = None
    ticket: wire.Ticket | None = None
    first: Token | None = None
    sent_first_token: bool = False
    deadline: asyncio.TimerHandle | None = None
    events: asyncio.Queue[wire.PrefillEvent | None] = field(default_factory=asyncio.Queue)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def output(self) -> int:
        """Index of the output."""
        return self.request.sampling.output_index

    @property
    def phase(self) -> wire.RunStatus.Phase:
        return wire.RunStatus.PHASE_RUNNING if self.begun else wire.RunStatus.PHASE_WAITING

    def send(self, **event: object) -> None:
        self.events.put_nowait(wire.PrefillEvent(**event))  # type: ignore[arg-type]


class PrefillQueue:
    """All runs by sequence id; the waiting ones are sorted."""

    def __init__(self, block_size: int, total_blocks: int, epochs: Epochs) -> None:
        self.waiting: list[PrefillRun] = []
        self.waiting_tokens = 0
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._epochs = epochs
        self._alive: dict[str, PrefillRun] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[PrefillRun]:
        return iter(tuple(self._alive.values()))

    def __bool__(self) -> bool:
        return bool(self._alive)

    def get(self, id: str) -> PrefillRun | None:
        return self._alive.get(id)

    async def emptied(self) -> None:
        """Wait until there is no run."""
        await self._empty.wait()

    @property
    def not_begun(self) -> int:
        """Number of runs that wait, here or in the engine."""
        return sum(run.begun is None for run in self._alive.values())

    @property
    def full(self) -> bool:
        """Whether the admitted runs keep, or will keep, more than half of the pool."""
        blocks = sum(self._blocks(run) for run in self._alive.values() if run.is_admitted)
        return 2 * blocks > self._total_blocks

    def add(self, run: PrefillRun) -> None:
        self._alive[run.id] = run
        self._epochs.hold(run.ref)
        self._empty.clear()
        insort(self.waiting, run, key=_order)
        self.waiting_tokens += len(run.request.token_ids)

    def admit(self) -> Iterator[PrefillRun]:
        """Admit the runs whose turn it is, in order."""
        while self.waiting and not self.full:
            run = self.waiting[0]
            self._leave_queue(run)
            run.is_admitted = True
            yield run

    def remove(self, run: PrefillRun) -> bool:
        """Remove a run in any phase; False if it was removed before."""
        if self._alive.pop(run.id, None) is None:
            return False
        self._epochs.release(run.ref)
        if not run.is_admitted:
            self._leave_queue(run)
        if run.deadline is not None:
            run.deadline.cancel()
        if not self._alive:
            self._empty.set()
        return True

    def _leave_queue(self, run: PrefillRun) -> None:
        self.waiting.remove(run)
        self.waiting_tokens -= len(run.request.token_ids)

    def _blocks(self, run: PrefillRun) -> int:
        """Blocks that the run needs beyond its cached prefix."""
        blocks = -(-(len(run.request.token_ids) + 1) // self._block_size)
        return blocks if run.begun is None else blocks - run.begun.cached // self._block_size


def _order(run: PrefillRun) -> float:
    return run.queue_key
