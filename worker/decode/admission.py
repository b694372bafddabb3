"""Admission of runs to the engine: by queue key, then first come, first served; no run overtakes another.

A run without free blocks waits here until a step, an end or a release changes them. A run without a ticket
waits only behind such a run, which would starve otherwise.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Sequence

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped, InvalidRequest, OutOfBlocks
from decant.engine.output import StepOutput
from decant.engine.transfer import IncomingSequence
from decant.worker.decode.run import DecodeRun
from decant.worker.engine_host import EngineHost


class Expired(Exception):
    """The deadline has passed before the engine got the run, which ends by its timer."""


Outcome = IncomingSequence | InvalidRequest | Expired | None
"""None: added to the engine."""


class DecodeAdmission:
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._waiting: list[DecodeRun] = []  # by queue key
        self._retried: list[DecodeRun] = []  # those of a retry that the engine has not answered
        self._answers: dict[DecodeRun, asyncio.Future[IncomingSequence | None]] = {}
        self._gate = _AdmissionGate()
        self._has_ended = False  # a sequence ended or parked since the last retry
        self._available = 0  # blocks, after the last step
        host.add_queue(self)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._retried)

    @property
    def waiting_tokens(self) -> int:
        return 0  # a cache that arrives is computed

    async def enter(self, run: DecodeRun) -> IncomingSequence | None:
        """Wait until the engine has the run; None if it computes the prompt itself.

        Raises InvalidRequest, EngineStopped. A cancelled caller must also cancel the run in the engine, which may still
        add it.
        """
        answer: asyncio.Future[IncomingSequence | None] = asyncio.get_running_loop().create_future()
        self._answers[run] = answer
        if self._waiting or self._retried:
            insort(self._waiting, run, key=_queue_key)
        else:
            self._post([run], is_retry=False)
        try:
            return await answer
        finally:
            del self._answers[run]
            if run in self._waiting:
                self._waiting.remove(run)

    def on_step(self, output: StepOutput) -> None:
        self._has_ended |= bool(output.ended or output.parked)
        available = output.available_blocks
        if self._waiting and not self._retried and (self._has_ended or available != self._available):
            self._retry()
        self._available = available

    def _retry(self) -> None:
        self._has_ended = False
        self._retried, self._waiting = self._waiting, []
        self._post(self._retried, is_retry=True)

    def _post(self, runs: list[DecodeRun], *, is_retry: bool) -> None:
        command = _AdmitCommand(runs, self._gate, is_retry)
        self._host.loop.post(command, then=lambda: self._on_answer(command))

    def _on_answer(self, command: _AdmitCommand) -> None:
        if command.runs is self._retried:
            self._retried = []
        for run, outcome in command.outcomes:
            self._answer(run, outcome)
        for run in command.unanswered:
            if not command.has_run:
                self._answer(run, EngineStopped("the engine has stopped"))
            elif run in self._answers and run.cancel_reason is None:
                insort(self._waiting, run, key=_queue_key)
        # The step that came with the answer may have freed blocks.
        changed = self._has_ended or command.available != self._available
        if self._waiting and not self._retried and changed:
            self._retry()

    def _answer(self, run: DecodeRun, outcome: Outcome | EngineStopped) -> None:
        answer = self._answers.get(run)
        if answer is None or answer.done() or isinstance(outcome, Expired):
            return  # the run was cancelled, or is about to be
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


class _AdmissionGate:
    """Gate that is closed while a run waits for blocks; for the engine's thread only."""

    is_closed = False


class _AdmitCommand:
    """Command that admits runs in order, up to the first without blocks.

    With ``is_retry`` these are all waiting runs; others would overtake them while the gate is closed.
    """

    def __init__(self, runs: list[DecodeRun], gate: _AdmissionGate, is_retry: bool) -> None:
        self.outcomes: list[tuple[DecodeRun, Outcome]] = []
        self.available = -1  # blocks, when they did not suffice; -1 equals no real number
        self.has_run = False
        self.runs = runs
        self._gate = gate
        self._is_retry = is_retry

    @property
    def unanswered(self) -> Sequence[DecodeRun]:
        return self.runs[len(self.outcomes) :]

    def __call__(self, engine: Engine) -> None:
        self.has_run = True
        if self._is_retry or not self._gate.is_closed:
            self._gate.is_closed = False
            self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        for run in self.runs:
            if time.monotonic() >= run.due:
                self.outcomes.append((run, Expired()))
                continue
            try:
                outcome: Outcome = None
                if run.ticket is None:
                    engine.add(run.root.request, run.forks)
                else:
                    outcome = engine.transfers.reserve(run.root.request, run.forks)
            except InvalidRequest as error:
                outcome = error
            except OutOfBlocks:
                self._gate.is_closed = True
                self.available = engine.pool.available_blocks
                return
            self.outcomes.append((run, outcome))


def _queue_key(run: DecodeRun) -> tuple[float, int]:
    return run.queue_key
