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

from engine.engine import Engine
from engine.errors import EngineError, EngineStopped, InvalidRequest, NoRoom
from engine.loop import EngineLoop
from engine.output import StepOutput
from engine.transfer import Arrival
from worker.runs import HeldRun

Outcome = Arrival | EngineError | None
"""Room; or added (None); or InvalidRequest, EngineStopped, and NoRoom for one that somebody meanwhile wants to end."""


class Entrance:
    """Runs on their way into one engine. ``settle`` hears what became of each that was not withdrawn."""

    def __init__(self, loop: EngineLoop, settle: Callable[[HeldRun, Outcome], None]) -> None:
        self._loop = loop
        self._settle = settle
        self._waiting: list[HeldRun] = []  # most urgent first
        self._retrying = False
        self._ended = False  # a sequence ended or parked since the last retry
        self._available = 0  # blocks, after the last step

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, held: HeldRun) -> None:
        """Let a run in as soon as there is room."""
        if self._waiting or self._retrying:
            insort(self._waiting, held, key=_order)
        else:
            self._ask([held], self._asked)

    def withdraw(self, held: HeldRun) -> bool:
        """Take a waiting run out; False when the engine is being asked for it, or was."""
        if held not in self._waiting:
            return False
        self._waiting.remove(held)
        return True

    def on_step(self, output: StepOutput) -> None:
        """Hear the engine: when room may have come, ask for those who wait."""
        self._ended |= bool(output.ended or output.parked)
        room = output.available
        if self._waiting and not self._retrying and (self._ended or room != self._available):
            self._retry()
        self._available = room

    def _retry(self) -> None:
        self._retrying, self._ended = True, False
        waiting, self._waiting = self._waiting, []
        self._ask(waiting, self._retried)

    def _ask(self, runs: list[HeldRun], then: Callable[[_Asking], None]) -> None:
        asking = _Asking(runs)
        self._loop.post(asking, then=lambda: then(asking))

    def _retried(self, asking: _Asking) -> None:
        self._retrying = False
        self._asked(asking)

    def _asked(self, asking: _Asking) -> None:
        """Tell what came of it; who is left waits on."""
        for held, outcome in asking.outcomes:
            self._settle(held, outcome)
        for held in asking.left:
            if not asking.ran:
                self._settle(held, EngineStopped("the engine has stopped"))
            elif held.ending is not None:
                self._settle(held, NoRoom(0, 0))
            else:
                insort(self._waiting, held, key=_order)
        # What the engine did since it was asked, in the step that came with the answer, may have made room.
        changed = self._ended or asking.available != self._available or not asking.left
        if self._waiting and not self._retrying and changed:
            self._retry()


class _Asking:
    """A command for the engine: let these in, in order, up to the first for whom there is no room."""

    def __init__(self, runs: Sequence[HeldRun]) -> None:
        self.outcomes: list[tuple[HeldRun, Outcome]] = []
        self.available = 0
        self.ran = False
        self._runs = runs

    @property
    def left(self) -> Sequence[HeldRun]:
        """Who did not get in."""
        return self._runs[len(self.outcomes) :]

    def __call__(self, engine: Engine) -> None:
        """On the engine's thread."""
        for held in self._runs:
            try:
                outcome: Outcome = None
                if held.ticket is None:
                    engine.add(held.request)
                else:
                    outcome = engine.reserve(held.request)
            except InvalidRequest as error:
                outcome = error
            except NoRoom:
                break
            self.outcomes.append((held, outcome))
        self.available = engine.pool.available
        self.ran = True


def _order(held: HeldRun) -> tuple[float, int]:
    return held.order
