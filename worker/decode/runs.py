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


def key_of(ref: wire.Run) -> Key:
    """What a run is called here, whoever owns it."""
    return ref.request, ref.attempt


@dataclass(slots=True, eq=False)
class DecodeRun:
    """One run and its one output. ``tokens`` are that output's, what earlier attempts wrote included."""

    ref: wire.Run  # as its owner last named it
    request: Request  # for the engine, whose name of the sequence is ``request.id``
    stopping: wire.Stopping
    queue_key: tuple[float, int]  # among those that wait, most urgent first
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
    migration_requested: bool = False  # to be given away as soon as it runs
    fetch: asyncio.Task[TransferResult] | None = None
    tokens_before_join: list[Token] = field(
        default_factory=list
    )  # heard before the fetch said that the sequence is ours
    end_before_join: SequenceFinished | None = None
    timeline: Timeline | None = None  # the engine's, once it began
    sent_first_token: bool = False  # a frame brought a token
    decode_started: wire.DecodeStarted | None = None  # not told yet, for want of somebody to tell
    ending: wire.OutputEnd.Reason | None = None  # asked for; the engine has not let go of it yet
    truncated_at: int | None = None  # tokens that count, where fewer do than were written
    end: wire.OutputEnd | None = None
    is_retired: bool = False  # before its end: it is forgotten as soon as that was sent
    deadline: asyncio.TimerHandle | None = None
    orphan_timer: asyncio.TimerHandle | None = None  # how long it is kept without a session

    def __post_init__(self) -> None:
        self.tokens.extend(self.request.token_ids[self.request.prompt_len :])

    @property
    def key(self) -> Key:
        return key_of(self.ref)

    @property
    def output(self) -> int:
        """Index of its output."""
        return self.request.sampling.output_index

    @property
    def kept(self) -> int | None:
        """Tokens of prompt and output that count, where that was said; what lies behind isn't cached."""
        return None if self.truncated_at is None else self.request.prompt_len + self.truncated_at

    @property
    def prior_tokens(self) -> int:
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
        return wire.RunStatus(run=self.ref, phase=self.phase, slots=[slot], ended=[self.end] if self.end else [])

    def note(self, token: Token) -> None:
        """Keep a token that a step wrote."""
        if token.logprobs is not None:
            self.logprobs[len(self.tokens)] = token.logprobs
        self.tokens.append(token.token)

    def stop_clocks(self) -> None:
        """Neither deadline nor patience runs on."""
        for timer in (self.deadline, self.orphan_timer):
            if timer is not None:
                timer.cancel()
        self.deadline = self.orphan_timer = None


class RunTable:
    """All held runs by name and by sequence, and the marks that cancels of unknown runs left."""

    def __init__(self, epochs: Epochs) -> None:
        self.cancel_tombstones: dict[Key, tuple[int, asyncio.TimerHandle]] = {}
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

    def get(self, ref: wire.Run) -> DecodeRun | None:
        return self._runs.get(key_of(ref))

    @property
    def by_sequence(self) -> dict[str, DecodeRun]:
        """Those of whom the engine may tell something, by the engine's name. To be read only."""
        return self._stepping

    def holds(self, run: DecodeRun) -> bool:
        """Whether it has not been forgotten."""
        return self._runs.get(run.key) is run

    def add(self, run: DecodeRun) -> None:
        self._empty.clear()
        self._runs[run.key] = run
        self._epochs.hold(run.ref)
        self._stepping[run.request.id] = run

    def stop_events(self, run: DecodeRun) -> None:
        """Whatever the engine still tells of it is passed over."""
        self._stepping.pop(run.request.id, None)

    def remove(self, run: DecodeRun) -> None:
        """Forget it. May be said twice."""
        run.stop_clocks()
        self.stop_events(run)
        if self._runs.get(run.key) is run:
            del self._runs[run.key]
            self._epochs.release(run.ref)
            if not self._runs:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until no run is left."""
        await self._empty.wait()

    def add_tombstone(self, ref: wire.Run, seconds: float) -> None:
        """A start of this run or of an earlier owner's that comes within ``seconds`` is refused."""
        key = key_of(ref)
        if key in self.cancel_tombstones:
            self.cancel_tombstones.pop(key)[1].cancel()
        timer = asyncio.get_running_loop().call_later(seconds, self.cancel_tombstones.pop, key, None)
        self.cancel_tombstones[key] = ref.epoch, timer

    def has_tombstone(self, ref: wire.Run) -> bool:
        add_tombstone = self.cancel_tombstones.get(key_of(ref))
        return add_tombstone is not None and ref.epoch <= add_tombstone[0]

    def clear_tombstones(self) -> None:
        for _, timer in self.cancel_tombstones.values():
            timer.cancel()
        self.cancel_tombstones.clear()
