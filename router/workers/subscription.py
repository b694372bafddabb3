from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from decant.protos import worker_pb2 as wire

if TYPE_CHECKING:
    from decant.router.workers.session import WorkerSession

RunKey = tuple[str, int, int]


def key_of(run: wire.Run) -> RunKey:
    return run.request, run.epoch, run.attempt


MoveTest = Callable[[int, int], bool]
"""Whether the move of a sequence is worth its cost, by its tokens and by the steps that are likely left to it."""


class WriteError(Enum):
    GAP = "gap"
    CONFLICT = "conflict"  # the position has another token
    MALFORMED = "malformed"  # no token of this output, or without the logprobs that the request needs


class TokenSink(Protocol):
    """One output of a run."""

    index: int

    @property
    def position(self) -> int:
        """Position of the first missing token."""

    @property
    def end_limit(self) -> int:
        """Position after the last token that may be written."""

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None: ...


class SessionObserver(Protocol):
    def on_opened(self, session: WorkerSession) -> None:
        """Called when the worker takes new work; its next heartbeats list its whole prefix cache."""

    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None: ...


class SessionDependent(Protocol):
    def on_session_lost(self) -> None:
        """Called when the session's runs have failed, not at each break."""


class RunListener(Protocol):
    """Events of one run. Final are ``on_refused``, ``on_failed``, ``on_superseded``, and the ``on_ended`` of its last
    output.
    """

    def on_scheduled(self, message: wire.Scheduled) -> None: ...

    def on_decode_started(self, message: wire.DecodeStarted) -> None: ...

    def on_run_status(self, status: wire.RunStatus) -> None:
        """Called after a break or an adoption; the status implies reports that were lost."""

    def on_offer(self, ticket: wire.Ticket) -> None: ...

    def on_draining(self) -> None:
        """Called with each heartbeat of a draining worker."""

    def on_crowded(self, count: int, is_worth: MoveTest) -> int:
        """Called when another worker has a smaller batch: ask to move there if it is worth it; whether it did."""

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None: ...

    def on_ended(self, end: wire.OutputEnd, *, is_last: bool) -> None:
        """Called once every token of the output has been written; ``is_last`` if no other output still runs."""

    def on_refused(self, refused: wire.Refused) -> None: ...

    def on_failed(self, failed: wire.Failed) -> None: ...

    def on_superseded(self, superseded: wire.Superseded) -> None: ...


class OutputSubscription:
    """One output of a run that has not ended; ``end`` is set while tokens before it are missing."""

    def __init__(self, run: RunSubscription, sink: TokenSink) -> None:
        self.run = run
        self.sink = sink
        self.slot: int | None = None  # in the present connection
        self.end: wire.OutputEnd | None = None
        self.last_resend_position: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.end is not None and self.sink.position >= self.end.end_position

    @property
    def resume_position(self) -> wire.ResumePosition:
        return wire.ResumePosition(output=self.sink.index, position=self.sink.position)


class RunSubscription:
    """A run at a worker, with the outputs of it that have not ended."""

    def __init__(self, opening: wire.Start | wire.Adopt, sinks: Iterable[TokenSink], listener: RunListener) -> None:
        self.run = opening.run
        self.key = key_of(opening.run)
        self.outputs = {sink.index: OutputSubscription(self, sink) for sink in sinks}
        self.listener = listener
        self.start = opening if isinstance(opening, wire.Start) else None
        """Message that starts the run, until the worker has reported anything of it. None if adopted."""

    def opening_message(self) -> wire.RouterMessage:
        if self.start is not None:
            return wire.RouterMessage(start=self.start)
        return wire.RouterMessage(adopt=wire.Adopt(run=self.run, resume=self._resume_positions()))

    def owned(self) -> wire.Hello.Owned:
        return wire.Hello.Owned(run=self.run, resume=self._resume_positions())

    def _resume_positions(self) -> list[wire.ResumePosition]:
        return [output.resume_position for output in self.outputs.values()]


class RunTable:
    """The runs of one session: by key for messages, and by slot for frames. `SessionRuns` owns it."""

    def __init__(self) -> None:
        self.by_slot: dict[int, OutputSubscription] = {}
        self.incomplete: set[OutputSubscription] = set()
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
        for output in run.outputs.values():
            self._forget_slot(output)
        return True

    def remove_output(self, output: OutputSubscription) -> bool:
        """Remove an output that has ended, and its run with the last one, for which this is True."""
        self._forget_slot(output)
        del output.run.outputs[output.sink.index]
        if output.run.outputs:
            return False
        self.remove(output.run)
        return True

    def assign_slots(self, run: RunSubscription, slots: Iterable[wire.Slot]) -> None:
        for slot in slots:
            if (output := run.outputs.get(slot.output)) is not None:
                self.by_slot[slot.slot] = output
                output.slot = slot.slot

    def clear_slots(self) -> None:
        """Forget slots and resends, which belong to one connection."""
        self.by_slot.clear()
        for run in self:
            for output in run.outputs.values():
                output.slot = output.last_resend_position = None

    def _forget_slot(self, output: OutputSubscription) -> None:
        self.incomplete.discard(output)
        if output.slot is not None and self.by_slot.get(output.slot) is output:
            del self.by_slot[output.slot]
