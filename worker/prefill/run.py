"""A prefill run. Steps, leases and calls record facts or `cancel` it; only `PrefillExecutor` decides what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from decant.engine.output import SequenceFinished, SequenceStarted, Token
from decant.engine.request import Request
from decant.protos import worker_pb2 as wire
from decant.worker.wire_codec import RequestRejected


class PrefillFailed(Exception):
    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure

    @classmethod
    def because(cls, cause: wire.Cause, detail: str, peer: wire.Peer | None = None) -> PrefillFailed:
        return cls(wire.Failure(cause=cause, detail=detail, peer=peer))


class StaleOwner(Exception):
    def __init__(self, superseded: wire.Superseded) -> None:
        self.superseded = superseded


@dataclass(slots=True, eq=False)
class PrefillRun:
    """Facts of a prompt's run, and the events for its call.

    `PrefillService` records what steps and leases report, and `PrefillExecutor` waits for it; call `wake` after a
    change.
    """

    ref: wire.Run
    requests: list[Request]  # of each output; their ids identify the sequences in the engine
    stopping: wire.Stopping
    handoff: bool
    received: float  # time.monotonic
    queue_key: float  # the smallest is admitted first
    remaining_s: float | None  # until the deadline; None: there is none
    traceparent: str = ""
    is_admitted: bool = False
    started: SequenceStarted | None = None
    first_tokens: dict[str, Token] = field(default_factory=dict)  # by sequence, as the next two
    parked: set[str] = field(default_factory=set)  # the first token is sampled, and more may follow
    finished: dict[str, SequenceFinished] = field(default_factory=dict)  # the first token is the last
    ticket: wire.Ticket | None = None
    is_released: bool = False  # the receiver has the cache
    error: PrefillFailed | RequestRejected | StaleOwner | None = None
    events: asyncio.Queue[wire.PrefillEvent | None] = field(default_factory=asyncio.Queue)  # None ends the call
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def request(self) -> Request:
        """Request of the first output, whose sequence computes the prompt."""
        return self.requests[0]

    @property
    def sequences(self) -> list[str]:
        return [request.id for request in self.requests]

    @property
    def phase(self) -> wire.RunStatus.Phase:
        return wire.RunStatus.PHASE_RUNNING if self.started else wire.RunStatus.PHASE_WAITING

    @property
    def has_first_tokens(self) -> bool:
        return len(self.parked) + len(self.finished) == len(self.requests)

    @property
    def is_parked(self) -> bool:
        """Whether all outputs have their first token, and any continues."""
        return self.has_first_tokens and bool(self.parked)

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == len(self.requests)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a fact. Raises the error of `cancel` unless the fact came first."""
        while not reached():
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()

    def cancel(self, error: PrefillFailed | RequestRejected | StaleOwner) -> None:
        """End the run at its next wait. The first error counts."""
        self.error = self.error or error
        self.wake()

    def send(self, **event: object) -> None:
        self.events.put_nowait(wire.PrefillEvent(**event))  # type: ignore[arg-type]

    def close(self, **event: object) -> None:
        """End the call, with ``event`` as the last; idempotent."""
        if event:
            self.send(**event)
        self.events.put_nowait(None)
