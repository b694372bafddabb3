"""The prefill runs of a worker, and their order.

A prompt is admitted only while the admitted ones keep at most half of the pool: caches that wait for receivers keep
blocks.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterator

from decant.worker.engine_host import EngineHost
from decant.worker.prefill.run import PrefillRun


class PrefillQueue:
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._waiting: list[PrefillRun] = []
        self._runs: dict[str, PrefillRun] = {}  # by the first sequence
        self._by_sequence: dict[str, PrefillRun] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        host.add_queue(self)

    def __iter__(self) -> Iterator[PrefillRun]:
        return iter(tuple(self._runs.values()))

    def __bool__(self) -> bool:
        return bool(self._runs)

    def get(self, sequence: str) -> PrefillRun | None:
        return self._by_sequence.get(sequence)

    async def wait_empty(self) -> None:
        await self._empty.wait()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(run.request.token_ids) for run in self._waiting)

    @property
    def num_unstarted(self) -> int:
        return sum(run.started is None and run.error is None for run in self._runs.values())

    def add(self, run: PrefillRun) -> None:
        self._runs[run.id] = run
        self._by_sequence.update(dict.fromkeys(run.sequences, run))
        self._host.epochs.hold(run.ref)
        self._empty.clear()
        insort(self._waiting, run, key=_order)
        self.admit()

    def admit(self) -> None:
        while self._waiting and not self._is_full():
            run = self._waiting.pop(0)
            run.is_admitted = True
            run.wake()

    def remove(self, run: PrefillRun) -> None:
        del self._runs[run.id]
        for sequence in run.sequences:
            del self._by_sequence[sequence]
        self._host.epochs.release(run.ref)
        if not run.is_admitted:
            self._waiting.remove(run)
        if not self._runs:
            self._empty.set()
        self.admit()

    def _is_full(self) -> bool:
        blocks = sum(self._blocks(run) for run in self._runs.values() if run.is_admitted)
        return 2 * blocks > self._host.total_blocks

    def _blocks(self, run: PrefillRun) -> int:
        cached = 0 if run.started is None else run.started.cached
        own_blocks = (len(run.requests) - 1) * self._host.blocks_for(1)  # copies of the prompt's last, partial block
        return self._host.blocks_for(len(run.request.token_ids) + 1 - cached) + own_blocks


def _order(run: PrefillRun) -> float:
    return run.queue_key
