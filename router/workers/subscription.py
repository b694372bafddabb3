"""A run at one worker, as this router follows it, and who else hears what a session is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from decant.protos import worker_pb2 as wire
from decant.router.execution.token_writer import TokenWriter

if TYPE_CHECKING:
    from decant.router.workers.session import WorkerSession

RunKey = tuple[str, int, int]


def key_of(run: wire.Run) -> RunKey:
    return run.request, run.epoch, run.attempt


class WorkerDraining:
    """Told to each run of a worker, at every beat of one that drains."""


class SessionObserver(Protocol):
    """Who hears what concerns more than one run."""

    def opened(self, session: WorkerSession) -> None:
        """New work may go there; what the worker told of its cache it will tell again."""

    def heard(self, session: WorkerSession, beat: wire.Heartbeat) -> None:
        """The worker told how it stands: there may be room."""


class SessionDependent(Protocol):
    """Who depends on a worker without a run in its session."""

    def lost(self, session: WorkerSession) -> None: ...


class RunSubscription:
    """What a session must know of a run: where its tokens go, and who hears of the rest. One output.

    ``tell`` hears TakenUp, Joined, Held, Ticket, Drains, and one last word: Ended once every token is written, Failed,
    Refused or Superseded.
    """

    def __init__(self, first: wire.Start | wire.Adopt, pen: TokenWriter, tell: Callable[[Any], None]) -> None:
        self.run = first.run
        self.key = key_of(first.run)
        self.start = first if isinstance(first, wire.Start) else None
        """Until the worker has said a word of it. None for a run that was adopted: it can't begin a second time."""
        self.put = pen.put
        self.explain = pen.explain
        self.tell = tell
        self.slots: set[int] = set()
        self.ended: wire.Ended | None = None
        self.asked: int | None = None
        """The position from which tokens were last asked for again."""
        self._pen = pen

    @property
    def position(self) -> int:
        """Of the first token that is lacking."""
        return self._pen.position

    @property
    def end_limit(self) -> int:
        """The position after the last token that the run may write."""
        return self._pen.end_limit

    @property
    def is_complete(self) -> bool:
        """Whether it ended, and all that it wrote is here."""
        return self.ended is not None and self.position >= self.ended.end.end_position

    def first_word(self) -> wire.RouterMessage:
        """Begins it, or takes it over."""
        if self.start is not None:
            return wire.RouterMessage(start=self.start)
        return wire.RouterMessage(
            adopt=wire.Adopt(run=self.run, resume=[wire.ResumePosition(output=0, position=self.position)])
        )

    def owned(self) -> wire.Hello.Owned:
        return wire.Hello.Owned(run=self.run, resume=[wire.ResumePosition(output=0, position=self.position)])
