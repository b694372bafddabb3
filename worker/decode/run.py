"""The state of a decode worker's run.

    WAITING ──> ARRIVING ──> RUNNING ──> ENDED ──> forgotten
       └───────────────────────^  (no ticket: no ARRIVING)

A cancelled, refused or failed run leaves from any phase. `RunExecutor` sets the phase, `RunOwnership` the session.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decant.engine.output import SequenceFinished, Token
from decant.engine.plan import TokenLogprobs
from decant.engine.request import Request
from decant.engine.sequence import Timeline
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry.tracing import Span
from decant.worker.decode.notifications import RunNotifier

if TYPE_CHECKING:
    from decant.worker.decode.session import RouterSession

Key = tuple[str, int]
"""Request and attempt; adoption changes a run's epoch, not its key."""


def key_of(ref: wire.Run) -> Key:
    return ref.request, ref.attempt


@dataclass(slots=True, eq=False)
class DecodeRun:
    """State of a run; ``tokens`` are of the output, with those of earlier attempts."""

    ref: wire.Run  # with the present owner's epoch
    request: Request  # ``request.id`` identifies the sequence in the engine
    stopping: wire.Stopping
    queue_key: tuple[float, int]  # the smallest is admitted first
    received: float  # event loop time
    span: Span = field(default_factory=Span)
    router: wire.Peer = field(default_factory=wire.Peer)  # the owner
    session: RouterSession | None = None  # the owner's; None: an orphan
    slot: int = 0  # in that session
    phase: wire.RunStatus.Phase = wire.RunStatus.PHASE_WAITING
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in ``tokens``
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list)  # for a later owner
    ticket: wire.Ticket | None = None  # of the cache that the run fetches
    keeps_ticket: bool = False  # the ticket stays valid for another worker
    migration_ticket: wire.Ticket | None = None  # of the run's own cache, for a migration
    migration_requested: bool = False  # offer a ticket as soon as it runs
    early_tokens: list[Token] = field(default_factory=list)  # reported before the fetch returned
    timeline: Timeline | None = None  # the engine's, once it began
    sent_first_token: bool = False
    decode_started: wire.DecodeStarted | None = None  # not sent yet: the run had no session
    cancel_reason: wire.OutputEnd.Reason | None = None  # set: the run is being cancelled
    truncated_at: int | None = None  # number of tokens that count, if fewer than were generated
    end: wire.OutputEnd | None = None
    is_forgotten: bool = False  # before its end: drop the run as soon as the end is sent
    deadline: asyncio.TimerHandle | None = None
    due: float = math.inf  # the deadline, by time.monotonic
    orphan_timer: asyncio.TimerHandle | None = None
    finished: asyncio.Future[SequenceFinished] = field(default_factory=asyncio.Future)
    notify: RunNotifier = field(init=False)

    def __post_init__(self) -> None:
        self.tokens.extend(self.request.token_ids[self.request.prompt_len :])
        self.notify = RunNotifier(self)

    @property
    def key(self) -> Key:
        return key_of(self.ref)

    @property
    def output(self) -> int:
        return self.request.sampling.output_index

    @property
    def num_cacheable(self) -> int | None:
        """Number of leading tokens that may stay in the prefix cache; None for all."""
        return None if self.truncated_at is None else self.request.prompt_len + self.truncated_at

    @property
    def prior_tokens(self) -> int:
        return len(self.request.token_ids) - self.request.prompt_len

    @property
    def position(self) -> int:
        return self.request.prompt_len + len(self.tokens)

    def index_of(self, position: int) -> int:
        return min(max(0, position - self.request.prompt_len), len(self.tokens))

    def status(self, resume: Iterable[wire.ResumePosition]) -> wire.RunStatus:
        """Status for an owner that has the tokens before ``resume``, by default all."""
        indexes = [self.index_of(each.position) for each in resume if each.output == self.output]
        position = self.request.prompt_len + (indexes[0] if indexes else len(self.tokens))
        slot = wire.Slot(slot=self.slot, output=self.output, position=position)
        return wire.RunStatus(run=self.ref, phase=self.phase, slots=[slot], ended=[self.end] if self.end else [])

    def add_token(self, token: Token) -> None:
        if token.logprobs is not None:
            self.logprobs[len(self.tokens)] = token.logprobs
        self.tokens.append(token.token)

    def on_finished(self, event: SequenceFinished) -> None:
        self.timeline = event.timeline
        if not self.finished.done():
            self.finished.set_result(event)

    def attach(self, session: RouterSession) -> None:
        """Attach the run to a session; it must be detached."""
        self.session, self.router, self.slot = session, session.router, session.take_slot()

    def detach(self) -> None:
        if self.session is not None:
            self.session.free_slot(self.slot)
            self.session = None

    def stop_orphan_timer(self) -> None:
        if self.orphan_timer is not None:
            self.orphan_timer.cancel()
            self.orphan_timer = None

    def stop_timers(self) -> None:
        self.stop_orphan_timer()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
