"""What a session calls: where the tokens of its runs go, and who is notified of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from decant.protos import worker_pb2 as wire
from decant.router.workers.token_sink import TokenSink

if TYPE_CHECKING:
    from decant.router.workers.session import WorkerSession

RunKey = tuple[str, int, int]


def key_of(run: wire.Run) -> RunKey:
    return run.request, run.epoch, run.attempt


class SessionObserver(Protocol):
    """Is notified of what concerns more than one run."""

    def opened(self, session: WorkerSession) -> None:
        """The worker takes new work. Its next heartbeats list its whole prefix cache."""

    def heard(self, session: WorkerSession, beat: wire.Heartbeat) -> None: ...


class SessionDependent(Protocol):
    """Depends on a worker without a run in its session."""

    def on_session_lost(self) -> None:
        """The session broke and did not come back in time."""


class RunListener(Protocol):
    """Is notified of what a worker reports of one run. ``on_ended``, ``on_refused``, ``on_failed`` and
    ``on_superseded`` are final."""

    def on_scheduled(self, message: wire.Scheduled) -> None: ...

    def on_decode_started(self, message: wire.DecodeStarted) -> None: ...

    def on_run_status(self, status: wire.RunStatus) -> None:
        """After a break, or once the run is adopted: reports that were lost are implied."""

    def on_offer(self, ticket: wire.Ticket) -> None:
        """For a worker that goes on with the run."""

    def on_draining(self) -> None:
        """The worker drains; repeated with each of its heartbeats."""

    def on_ended(self, ended: wire.Ended) -> None:
        """Every token of the run has been written."""

    def on_refused(self, refused: wire.Refused) -> None: ...

    def on_failed(self, failed: wire.Failed) -> None: ...

    def on_superseded(self, superseded: wire.Superseded) -> None: ...


class RunSubscription:
    """A run at one worker, with one output, as its session knows it."""

    def __init__(self, opening: wire.Start | wire.Adopt, sink: TokenSink, listener: RunListener) -> None:
        self.run = opening.run
        self.key = key_of(opening.run)
        self.sink = sink
        self.listener = listener
        self.start = opening if isinstance(opening, wire.Start) else None
        """Until the worker has reported anything of it. None for an adopted run: it can't be started again."""
        self.slots: set[int] = set()
        self.ended: wire.Ended | None = None
        self.last_resend_position: int | None = None

    @property
    def position(self) -> int:
        """Of the first missing token."""
        return self.sink.position

    @property
    def end_limit(self) -> int:
        """The position after the last token that the run may generate."""
        return self.sink.end_limit

    @property
    def is_complete(self) -> bool:
        """Whether it ended, and all its tokens are written."""
        return self.ended is not None and self.position >= self.ended.end.end_position

    @property
    def resume_position(self) -> wire.ResumePosition:
        return wire.ResumePosition(output=0, position=self.position)

    def opening_message(self) -> wire.RouterMessage:
        if self.start is not None:
            return wire.RouterMessage(start=self.start)
        return wire.RouterMessage(adopt=wire.Adopt(run=self.run, resume=[self.resume_position]))

    def owned(self) -> wire.Hello.Owned:
        return wire.Hello.Owned(run=self.run, resume=[self.resume_position])
