from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from decant.protos import worker_pb2 as wire

if TYPE_CHECKING:
    from decant.router.workers.session import WorkerSession

RunKey = tuple[str, int, int]


def key_of(run: wire.Run) -> RunKey:
    return run.request, run.epoch, run.attempt


class WriteError(Enum):
    GAP = "gap"
    CONFLICT = "conflict"  # the position has another token
    MALFORMED = "malformed"  # no token of this output, or without the logprobs that the request needs


class TokenSink(Protocol):
    @property
    def position(self) -> int:
        """Position of the first missing token."""

    @property
    def end_limit(self) -> int:
        """Position after the last token that may be written."""

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None: ...

    def add_prompt_logprobs(self, message: wire.PromptLogprobs) -> WriteError | None: ...


class SessionObserver(Protocol):
    def on_opened(self, session: WorkerSession) -> None:
        """Called when the worker takes new work; its next heartbeats list its whole prefix cache."""

    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None: ...


class SessionDependent(Protocol):
    def on_session_lost(self) -> None:
        """Called when the session is given up, not at each break."""


class RunListener(Protocol):
    """Events of one run. ``on_ended``, ``on_refused``, ``on_failed`` and ``on_superseded`` are final."""

    def on_scheduled(self, message: wire.Scheduled) -> None: ...

    def on_decode_started(self, message: wire.DecodeStarted) -> None: ...

    def on_run_status(self, status: wire.RunStatus) -> None:
        """Called after a break or an adoption; the status implies reports that were lost."""

    def on_offer(self, ticket: wire.Ticket) -> None: ...

    def on_draining(self) -> None:
        """Called with each heartbeat of a draining worker."""

    def on_ended(self, ended: wire.Ended) -> None:
        """Called once every token has been written."""

    def on_refused(self, refused: wire.Refused) -> None: ...

    def on_failed(self, failed: wire.Failed) -> None: ...

    def on_superseded(self, superseded: wire.Superseded) -> None: ...


class RunSubscription:
    def __init__(self, opening: wire.Start | wire.Adopt, sink: TokenSink, listener: RunListener) -> None:
        self.run = opening.run
        self.key = key_of(opening.run)
        self.sink = sink
        self.listener = listener
        self.start = opening if isinstance(opening, wire.Start) else None
        """Message that starts the run, until the worker has reported anything of it. None if adopted."""
        self.slots: set[int] = set()
        self.ended: wire.Ended | None = None
        self.last_resend_position: int | None = None

    @property
    def position(self) -> int:
        return self.sink.position

    @property
    def end_limit(self) -> int:
        return self.sink.end_limit

    @property
    def is_complete(self) -> bool:
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


class RunTable:
    def __init__(self) -> None:
        self.by_slot: dict[int, RunSubscription] = {}
        self.incomplete: set[RunSubscription] = set()
        self._by_key: dict[RunKey, RunSubscription] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[RunSubscription]:
        """Iterate over a copy: runs may be removed meanwhile."""
        return iter(list(self._by_key.values()))

    def get(self, run: wire.Run) -> RunSubscription | None:
        return self._by_key.get(key_of(run))

    def mark_reported(self, run: wire.Run) -> RunSubscription | None:
        subscription = self.get(run)
        if subscription is not None:
            subscription.start = None
        return subscription

    def pop(self, run: wire.Run) -> RunSubscription | None:
        subscription = self.get(run)
        if subscription is not None:
            self.remove(subscription)
        return subscription

    def add(self, run: RunSubscription) -> None:
        self._by_key[run.key] = run

    def remove(self, run: RunSubscription) -> bool:
        if self._by_key.get(run.key) is not run:
            return False
        del self._by_key[run.key]
        self.incomplete.discard(run)
        for slot in run.slots:
            if self.by_slot.get(slot) is run:
                del self.by_slot[slot]
        return True

    def assign_slots(self, run: RunSubscription, slots: Iterable[wire.Slot]) -> None:
        for slot in slots:
            self.by_slot[slot.slot] = run
            run.slots.add(slot.slot)

    def clear_slots(self) -> None:
        """Forget slots and resends, which belong to one connection."""
        self.by_slot.clear()
        for run in self:
            run.slots.clear()
            run.last_resend_position = None
