"""The state of a decode worker's run.

    WAITING ──> ARRIVING ──> RUNNING ──> ENDED ──> forgotten
       └───────────────────────^  (no ticket: no ARRIVING)

A cancelled, refused or failed run leaves from any phase. `RunExecutor` sets the phase, `RunOwnership` the owner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decant.engine.request import Request
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry.tracing import Span
from decant.worker.decode.notifications import RunNotifier
from decant.worker.decode.output import Output

if TYPE_CHECKING:
    from decant.worker.decode.session import RouterSession

Key = tuple[str, int]
"""Request and attempt; adoption changes a run's epoch, not its key."""


def key_of(ref: wire.Run) -> Key:
    return ref.request, ref.attempt


@dataclass(slots=True)
class Owner:
    """Owner of a run: its router, and that router's session; without a session the run is an orphan."""

    router: wire.Peer = field(default_factory=wire.Peer)
    session: RouterSession | None = None
    orphan_timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class MigrationOffer:
    """Offer of a run's own KV cache to another worker."""

    ticket: wire.Ticket | None = None
    is_requested: bool = False  # as soon as the run's cache is here


class DecodeRun:
    """A run with its outputs; ``root`` is the one whose sequence computes or fetches the prompt."""

    def __init__(
        self,
        ref: wire.Run,
        requests: Iterable[Request],
        stopping: wire.Stopping,
        queue_key: tuple[float, int],
        received: float,
        ticket: wire.Ticket | None = None,
    ) -> None:
        self.ref = ref  # with the present owner's epoch
        self.outputs = [Output(self, request, stopping) for request in requests]
        self.queue_key = queue_key  # the smallest is admitted first
        self.received = received  # event loop time
        self.span = Span()
        self.owner = Owner()
        self.phase: wire.RunStatus.Phase = wire.RunStatus.PHASE_WAITING
        self.ticket = ticket  # of the cache that the run fetches
        self.keeps_ticket = False  # the ticket stays valid for another worker
        self.offer = MigrationOffer()
        self.cancel_reason: wire.OutputEnd.Reason | None = None  # set: the run is being cancelled
        self.is_forgotten = False  # before its end: forget the run as soon as the end is sent
        self.deadline: asyncio.TimerHandle | None = None
        self.due = math.inf  # the deadline, by time.monotonic
        self.notify = RunNotifier(self)

    @property
    def key(self) -> Key:
        return key_of(self.ref)

    @property
    def root(self) -> Output:
        return self.outputs[0]

    @property
    def forks(self) -> list[Request]:
        """Requests of the outputs besides the root."""
        return [output.request for output in self.outputs[1:]]

    @property
    def unfinished(self) -> list[Output]:
        return [output for output in self.outputs if output.end is None]

    @property
    def has_ended(self) -> bool:
        return all(output.end is not None for output in self.outputs)

    def output(self, index: int) -> Output | None:
        return next((output for output in self.outputs if output.index == index), None)

    def status(self, resume: Iterable[wire.ResumePosition]) -> wire.RunStatus:
        """Status for an owner that has the tokens before ``resume``, by default all."""
        positions = {each.output: each.position for each in resume}
        return wire.RunStatus(
            run=self.ref,
            phase=self.phase,
            slots=[output.status_slot(positions.get(output.index)) for output in self.outputs],
            ended=[output.end for output in self.outputs if output.end is not None],
        )

    def attach(self, session: RouterSession) -> None:
        """Attach the run to a session; it must have none."""
        self.owner.session, self.owner.router = session, session.router
        for output in self.outputs:
            output.slot = session.take_slot()

    def release_session(self) -> None:
        session, self.owner.session = self.owner.session, None
        if session is not None:
            for output in self.outputs:
                session.free_slot(output.slot)

    def stop_orphan_timer(self) -> None:
        if self.owner.orphan_timer is not None:
            self.owner.orphan_timer.cancel()
            self.owner.orphan_timer = None

    def stop_timers(self) -> None:
        self.stop_orphan_timer()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
