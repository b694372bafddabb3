from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from decant.protos import worker_pb2 as wire
from decant.worker.decode.output import Output
from decant.worker.decode.run import DecodeRun, Key, key_of
from decant.worker.epochs import Epochs


class RunTable:
    """Runs of a worker; safe to iterate while they are added and removed."""

    def __init__(self, epochs: Epochs) -> None:
        self.cancel_tombstones: dict[Key, tuple[int, asyncio.TimerHandle]] = {}  # epoch and expiry
        self._epochs = epochs
        self._runs: dict[Key, DecodeRun] = {}
        self._by_sequence: dict[str, Output] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[DecodeRun]:
        return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: DecodeRun) -> bool:
        return self._runs.get(run.key) is run

    def get(self, ref: wire.Run) -> DecodeRun | None:
        return self._runs.get(key_of(ref))

    @property
    def by_sequence(self) -> dict[str, Output]:
        return self._by_sequence

    def add(self, run: DecodeRun) -> None:
        self._empty.clear()
        self._runs[run.key] = run
        self._epochs.hold(run.ref)
        for output in run.outputs:
            self._by_sequence[output.request.id] = output

    def stop_events(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self._by_sequence.pop(output.request.id, None)

    def remove(self, run: DecodeRun) -> None:
        run.stop_timers()
        self.stop_events(run.outputs)
        if run in self:
            del self._runs[run.key]
            self._epochs.release(run.ref)
            if not self._runs:
                self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def add_tombstone(self, ref: wire.Run, seconds: float) -> None:
        """For ``seconds``, refuse a Start of this run by this or an earlier owner."""
        key = key_of(ref)
        if key in self.cancel_tombstones:
            self.cancel_tombstones.pop(key)[1].cancel()
        timer = asyncio.get_running_loop().call_later(seconds, self.cancel_tombstones.pop, key, None)
        self.cancel_tombstones[key] = ref.epoch, timer

    def has_tombstone(self, ref: wire.Run) -> bool:
        tombstone = self.cancel_tombstones.get(key_of(ref))
        return tombstone is not None and ref.epoch <= tombstone[0]

    def clear_tombstones(self) -> None:
        for _, timer in self.cancel_tombstones.values():
            timer.cancel()
        self.cancel_tombstones.clear()
