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
    """Runs on their way into a hub's engine. ``settle`` hears what became of each that was not withdrawn."""

    def __init__(self, hub: EngineHost, settle: Callable[[DecodeRun, Outcome], None]) -> None:
        self._hub = hub
        self._settle = settle
        self._waiting: list[DecodeRun] = []  # most urgent first
        self._retried: list[DecodeRun] = []  # those for whom the engine is being asked again
        self._door = _AdmissionGate()
        self._ended = False  # a sequence ended or parked since the last retry
        self._available = 0  # blocks, after the last step

    def push(self, held: DecodeRun) -> None:
        """Let a run in as soon as there is room."""
        if self._waiting or self._retried:
            insort(self._waiting, held, key=_order)
            self._count()
        else:
            self._ask([held], again=False)

    def withdraw(self, held: DecodeRun) -> bool:
        """Take a waiting run out; False when the engine is being asked for it, or was."""
        if held not in self._waiting:
            return False
        self._waiting.remove(held)
        self._count()
        return True

    def on_step(self, output: StepOutput) -> None:
        """Hear the engine: when room may have come, ask for those who wait."""
        self._ended |= bool(output.ended or output.parked)
        room = output.available
        if self._waiting and not self._retried and (self._ended or room != self._available):
            self._retry()
        self._available = room

    def _retry(self) -> None:
        self._ended = False
        self._retried, self._waiting = self._waiting, []
        self._ask(self._retried, again=True)

    def _ask(self, runs: list[DecodeRun], *, again: bool) -> None:
        asking = _AdmitCommand(runs, self._door, again)
        self._hub.loop.post(asking, then=lambda: self._asked(asking))

    def _asked(self, asking: _AdmitCommand) -> None:
        """Tell what came of it; who is left waits on."""
        if asking.runs is self._retried:
            self._retried = []
        for held, outcome in asking.outcomes:
            self._settle(held, outcome)
        for held in asking.left:
            if not asking.ran:
                self._settle(held, EngineStopped("the engine has stopped"))
            elif held.ending is not None:
                self._settle(held, OutOfBlocks(0, 0))
            else:
                insort(self._waiting, held, key=_order)
        # What the engine did since it was asked, in the step that came with the answer, may have made room.
        changed = self._ended or asking.available != self._available
        if self._waiting and not self._retried and changed:
            self._retry()
        self._count()

    def _count(self) -> None:
        self._hub.waiting_arrivals = len(self._waiting) + len(self._retried)


class _AdmissionGate:
    """Whether somebody found no room since all who waited were last asked for. The engine's thread alone knows."""

    shut = False


class _AdmitCommand:
    """A command for the engine: let these in, in order, up to the first for whom there is no room.

    ``again``: they are all who wait. Others are turned away while the door is shut, or they would overtake.
    """

    def __init__(self, runs: list[DecodeRun], door: _AdmissionGate, again: bool) -> None:
        self.outcomes: list[tuple[DecodeRun, Outcome]] = []
        self.available = -1  # blocks, when there was no room; never as many when nobody looked
        self.ran = False
        self.runs = runs
        self._door = door
        self._again = again

    @property
    def left(self) -> Sequence[DecodeRun]:
        """Who did not get in."""
        return self.runs[len(self.outcomes) :]

    def __call__(self, engine: Engine) -> None:
        """On the engine's thread."""
        self.ran = True
        if self._again or not self._door.shut:
            self._door.shut = False
            self._let_in(engine)

    def _let_in(self, engine: Engine) -> None:
        for held in self.runs:
            try:
                outcome: Outcome = None
                if held.ticket is None:
                    engine.add(held.request)
                else:
                    outcome = engine.transfers.reserve(held.request)
            except InvalidRequest as error:
                outcome = error
            except OutOfBlocks:
                self._door.shut = True
                self.available = engine.pool.available
                return
            self.outcomes.append((held, outcome))


def _order(held: DecodeRun) -> tuple[float, int]:
    return held.order
