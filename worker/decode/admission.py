"""The way into the engine: runs that wait for room, the most urgent first, and nobody overtakes.

    push ──> asked at once ──> added, or room reserved
                 │ no room                ^
                 v                        │  an end, a release, a cancel, a step: room may have come
              waiting ────────────────────┘

A run from tokens always gets in, for the engine has a queue of its own; it waits here only behind a run that waits for
room, lest that one never gets any. Sequences that the engine preempted go first: it says NoRoom as long as one waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from decant.engine.engine import Engine
from decant.engine.errors import EngineError, EngineStopped, InvalidRequest, OutOfBlocks
from decant.engine.output import StepOutput
from decant.engine.transfer import IncomingSequence
from decant.worker.decode.runs import DecodeRun
from decant.worker.engine_host import EngineHost

Outcome = IncomingSequence | EngineError | None
"""Room; or added (None); or InvalidRequest, EngineStopped, and NoRoom for one that somebody meanwhile wants to end."""


class DecodeAdmission:
    """Runs on their way into a hub's engine. ``on_outcome`` hears what became of each that was not withdrawn."""

    def __init__(self, host: EngineHost, on_outcome: Callable[[DecodeRun, Outcome], None]) -> None:
        self._host = host
        self._on_outcome = on_outcome
        self._waiting: list[DecodeRun] = []  # most urgent first
        self._retried: list[DecodeRun] = []  # those for whom the engine is being asked again
        self._gate = _AdmissionGate()
        self._on_ended = False  # a sequence ended or parked since the last retry
        self._available = 0  # blocks, after the last step

    def push(self, run: DecodeRun) -> None:
        """Let a run in as soon as there is room."""
        if self._waiting or self._retried:
            insort(self._waiting, run, key=_order)
            self._count()
        else:
            self._post([run], is_retry=False)

    def withdraw(self, run: DecodeRun) -> bool:
        """Take a waiting run out; False when the engine is being asked for it, or was."""
        if run not in self._waiting:
            return False
        self._waiting.remove(run)
        self._count()
        return True

    def on_step(self, output: StepOutput) -> None:
        """Hear the engine: when room may have come, ask for those who wait."""
        self._on_ended |= bool(output.ended or output.parked)
        room = output.available
        if self._waiting and not self._retried and (self._on_ended or room != self._available):
            self._retry()
        self._available = room

    def _retry(self) -> None:
        self._on_ended = False
        self._retried, self._waiting = self._waiting, []
        self._post(self._retried, is_retry=True)

    def _post(self, runs: list[DecodeRun], *, is_retry: bool) -> None:
        command = _AdmitCommand(runs, self._gate, is_retry)
        self._host.loop.post(command, then=lambda: self._on_answer(command))

    def _on_answer(self, command: _AdmitCommand) -> None:
        """Tell what came of it; who is left waits on."""
        if command.runs is self._retried:
            self._retried = []
        for run, outcome in command.outcomes:
            self._on_outcome(run, outcome)
        for run in command.left:
            if not command.ran:
                self._on_outcome(run, EngineStopped("the engine has stopped"))
            elif run.ending is not None:
                self._on_outcome(run, OutOfBlocks(0, 0))
            else:
                insort(self._waiting, run, key=_order)
        # What the engine did since it was asked, in the step that came with the answer, may have made room.
        changed = self._on_ended or command.available != self._available
        if self._waiting and not self._retried and changed:
            self._retry()
        self._count()

    def _count(self) -> None:
        self._host.waiting_arrivals = len(self._waiting) + len(self._retried)


class _AdmissionGate:
    """Whether somebody found no room since all who waited were last asked for. The engine's thread alone knows."""

    is_closed = False


class _AdmitCommand:
    """A command for the engine: let these in, in order, up to the first for whom there is no room.

    ``again``: they are all who wait. Others are turned away while the door is shut, or they would overtake.
    """

    def __init__(self, runs: list[DecodeRun], gate: _AdmissionGate, is_retry: bool) -> None:
        self.outcomes: list[tuple[DecodeRun, Outcome]] = []
        self.available = -1  # blocks, when there was no room; never as many when nobody looked
        self.ran = False
        self.runs = runs
        self._gate = gate
        self._is_retry = is_retry

    @property
    def left(self) -> Sequence[DecodeRun]:
        """Who did not get in."""
        return self.runs[len(self.outcomes) :]

    def __call__(self, engine: Engine) -> None:
        """On the engine's thread."""
        self.ran = True
        if self._is_retry or not self._gate.is_closed:
            self._gate.is_closed = False
            self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        for run in self.runs:
            try:
                outcome: Outcome = None
                if run.ticket is None:
                    engine.add(run.request)
                else:
                    outcome = engine.transfers.reserve(run.request)
            except InvalidRequest as error:
                outcome = error
            except OutOfBlocks:
                self._gate.is_closed = True
                self.available = engine.pool.available
                return
            self.outcomes.append((run, outcome))


def _order(run: DecodeRun) -> tuple[float, int]:
    return run.queue_key
