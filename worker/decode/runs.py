"""The runs that a worker holds for decoding, from the start that brought them until nobody needs them any more.

    waiting ──> arriving ──> running ──> ended ──> retired: forgotten
       └──────────────────────^  (from tokens: no arriving)

A run that is cancelled, refused or lost goes from any of these. One whose owner's session broke is an orphan: it
goes on, and is dropped after one lease unless somebody names it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decant.engine.output import SequenceFinished, Token
from decant.engine.plan import TokenLogprobs
from decant.engine.request import Request
from decant.engine.sequence import Timeline
from decant.handoff.receiver import TransferResult
from decant.protos import worker_pb2 as wire
from decant.worker.epochs import Epochs

if TYPE_CHECKING:
    from decant.worker.decode.session import RouterSession

Key = tuple[str, int]
"""A request and an attempt at it. Adoption changes the epoch of a run, never this."""


def key_of(run: wire.Run) -> Key:
    """What a run is called here, whoever owns it."""
    return run.request, run.attempt


@dataclass(slots=True, eq=False)
class DecodeRun:
    """One run and its one output. ``tokens`` are that output's, what earlier attempts wrote included."""

    run: wire.Run  # as its owner last named it
    request: Request  # for the engine, whose name of the sequence is ``request.id``
    stopping: wire.Stopping
    order: tuple[float, int]  # among those that wait, most urgent first
    received: float  # the event loop's clock, as all times here
    router: wire.Peer = field(default_factory=wire.Peer)  # the owner
    session: RouterSession | None = None  # of the owner; None: an orphan
    slot: int = 0  # good for that session
    phase: wire.RunStatus.Phase = wire.RunStatus.PHASE_WAITING
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in ``tokens``
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list)
    ticket: wire.Ticket | None = None
    offered: wire.Ticket | None = None  # by which it is being given away, or was
    is_asked_for: bool = False  # to be given away as soon as it runs
    fetch: asyncio.Task[TransferResult] | None = None
    early: list[Token] = field(default_factory=list)  # heard before the fetch said that the sequence is ours
    early_end: SequenceFinished | None = None
    timeline: Timeline | None = None  # the engine's, once it began
    wrote: bool = False  # a frame brought a token
    decode_started: wire.DecodeStarted | None = None  # not told yet, for want of somebody to tell
    ending: wire.OutputEnd.Reason | None = None  # asked for; the engine has not let go of it yet
    cut: int | None = None  # tokens that count, where fewer do than were written
    end: wire.OutputEnd | None = None
    is_retired: bool = False  # before its end: it is forgotten as soon as that was sent
    deadline: asyncio.TimerHandle | None = None
    patience: asyncio.TimerHandle | None = None  # how long it is kept without a session

    def __post_init__(self) -> None:
        self.tokens.extend(self.request.token_ids[self.request.prompt_len :])

    @property
    def key(self) -> Key:
        return key_of(self.run)

    @property
    def output(self) -> int:
        """Index of its output."""
        return self.request.sampling.output_index

    @property
    def kept(self) -> int | None:
        """Tokens of prompt and output that count, where that was said; what lies behind isn't cached."""
        return None if self.cut is None else self.request.prompt_len + self.cut

    @property
    def written_before(self) -> int:
        """Output tokens that came with the work."""
        return len(self.request.token_ids) - self.request.prompt_len

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.request.prompt_len + len(self.tokens)

    def index_of(self, position: int) -> int:
        """The place in ``tokens`` of the one at ``position``, or the nearest place that there is."""
        return min(max(0, position - self.request.prompt_len), len(self.tokens))

    def message(self, next: Iterable[wire.ResumePosition]) -> wire.RunStatus:
        """Its state for an owner that has the tokens before ``next``; without one, all that are here."""
        wanted = [self.index_of(wish.position) for wish in next if wish.output == self.output]
        position = self.request.prompt_len + (wanted[0] if wanted else len(self.tokens))
        slot = wire.Slot(slot=self.slot, output=self.output, position=position)
        return wire.RunStatus(run=self.run, phase=self.phase, slots=[slot], ended=[self.end] if self.end else [])

    def note(self, token: Token) -> None:
        """Keep a token that a step wrote."""
        if token.logprobs is not None:
            self.logprobs[len(self.tokens)] = token.logprobs
        self.tokens.append(token.token)

    def stop_clocks(self) -> None:
        """Neither deadline nor patience runs on."""
        for timer in (self.deadline, self.patience):
            if timer is not None:
                timer.cancel()
        self.deadline = self.patience = None


class RunTable:
    """All held runs by name and by sequence, and the marks that cancels of unknown runs left."""

    def __init__(self, epochs: Epochs) -> None:
        self.marks: dict[Key, tuple[int, asyncio.TimerHandle]] = {}
        self.leaving: set[DecodeRun] = set()
        """Ended early, and the engine has not let go of them yet. An audit finds here those that are forgotten."""
        self._epochs = epochs
        self._runs: dict[Key, DecodeRun] = {}
        self._stepping: dict[str, DecodeRun] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[DecodeRun]:
        return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run: wire.Run) -> DecodeRun | None:
        return self._runs.get(key_of(run))

    @property
    def by_sequence(self) -> dict[str, DecodeRun]:
        """Those of whom the engine may tell something, by the engine's name. To be read only."""
        return self._stepping

    def holds(self, held: DecodeRun) -> bool:
        """Whether it has not been forgotten."""
        return self._runs.get(held.key) is held

    def add(self, held: DecodeRun) -> None:
        self._empty.clear()
        self._runs[held.key] = held
        self._epochs.hold(held.run)
        self._stepping[held.request.id] = held

    def silence(self, held: DecodeRun) -> None:
        """Whatever the engine still tells of it is passed over."""
        self._stepping.pop(held.request.id, None)

    def remove(self, held: DecodeRun) -> None:
        """Forget it. May be said twice."""
        held.stop_clocks()
        self.silence(held)
        if self._runs.get(held.key) is held:
            del self._runs[held.key]
            self._epochs.release(held.run)
            if not self._runs:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until no run is left."""
        await self._empty.wait()

    def mark(self, run: wire.Run, seconds: float) -> None:
        """A start of this run or of an earlier owner's that comes within ``seconds`` is refused."""
        key = key_of(run)
        if key in self.marks:
            self.marks.pop(key)[1].cancel()
        timer = asyncio.get_running_loop().call_later(seconds, self.marks.pop, key, None)
        self.marks[key] = run.epoch, timer

    def is_marked(self, run: wire.Run) -> bool:
        mark = self.marks.get(key_of(run))
        return mark is not None and run.epoch <= mark[0]

    def clear_marks(self) -> None:
        for _, timer in self.marks.values():
            timer.cancel()
        self.marks.clear()
