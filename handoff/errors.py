from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.runtime.enum_names import enum_name


class HandoffFailed(Exception):
    """A failed handoff; ``cause`` decides whether and where to retry."""

    def __init__(self, cause: wire.Cause, detail: str, peer: wire.Peer | None = None) -> None:
        super().__init__(f"{enum_name(wire.Cause, cause)}: {detail}")
        self.cause = cause
        self.detail = detail
        self.peer = peer

    def message(self) -> wire.Failure:
        return wire.Failure(cause=self.cause, detail=self.detail, peer=self.peer)

    @classmethod
    def of(cls, failure: wire.Failure) -> HandoffFailed:
        return cls(failure.cause, failure.detail, failure.peer if failure.HasField("peer") else None)


class SequenceAlreadyFinished(Exception):
    """The sequence ended before the commit: nothing is left to fetch."""
