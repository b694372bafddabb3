"""What a worker's failure means for the request and the worker.

cause                               the request                     faulty worker
INVALID, NEVER_FITS                 InvalidArgument                 none
UNSUPPORTED                         Unimplemented                   none
BUSY, DRAINING                      another worker, same attempt    none, but no new work until its next load report
UNKNOWN_ADAPTER                     another worker, same attempt    none, but no work with the adapter until listed
DEADLINE                            DeadlineExceeded                none
ID_REUSED                           AlreadyExists, or another worker if the store has the request; none
others of _NO_FAULTY_WORKER         another attempt                 none
all others                          another attempt                 the named peer, else the worker that reports it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decant.protos import worker_pb2 as wire
from decant.runtime.enum_names import enum_label, enum_name
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, InvalidArgument, ServiceError, Unimplemented
from decant.state.ids import Incarnation

if TYPE_CHECKING:
    from decant.router.attempt.leg import Leg

RETRY_ELSEWHERE = frozenset({wire.CAUSE_BUSY, wire.CAUSE_DRAINING})
"""The same attempt goes to another worker, or to this one later, as after UNKNOWN_ADAPTER."""
_NO_FAULTY_WORKER = frozenset(
    {
        wire.CAUSE_CANCELLED,
        wire.CAUSE_LEASE_EXPIRED,
        wire.CAUSE_RECLAIMED,
        wire.CAUSE_OWNER_LOST,
        wire.CAUSE_ID_REUSED,
        wire.CAUSE_LAYOUT_DIFFERS,
        wire.CAUSE_SALT_DIFFERS,
    }
)


class AttemptFailed(Exception):
    """Failure after which another attempt may succeed; ``faulty_worker`` is the one at fault, if any."""

    def __init__(self, failure: wire.Failure, faulty_worker: Incarnation | None) -> None:
        super().__init__(f"{enum_name(wire.Cause, failure.cause)}: {failure.detail}")
        self.failure = failure
        self.faulty_worker = faulty_worker

    @property
    def label(self) -> str:
        return enum_label(wire.Cause, self.failure.cause)


class OwnedElsewhere(Exception):
    def __init__(self, epoch: int) -> None:
        super().__init__(f"another router owns the request, in epoch {epoch}")
        self.epoch = epoch


class NothingToFetch(AttemptFailed):
    """The sequence ended before the handoff: the first token was the last."""


class NoCapacity(Exception):
    """A worker took nothing. It is full, unless what the request needs is not there: it may take other requests."""

    def __init__(self, leg: Leg, *, is_full: bool = True) -> None:
        super().__init__(f"{leg.worker.incarnation.id} has no capacity")
        self.leg = leg
        self._is_full = is_full

    def apply(self) -> None:
        """Have the worker get no request before its next load report, if it is full."""
        if self._is_full:
            self.leg.worker.load.mark_full()


class NoWorker(Exception):
    pass


def error_for(failure: wire.Failure, sender: Incarnation) -> ServiceError | AttemptFailed:
    """Map a failure with a cause outside RETRY_ELSEWHERE to an error."""
    match failure.cause:
        case wire.CAUSE_INVALID:
            return InvalidArgument(*_violation(failure))
        case wire.CAUSE_NEVER_FITS:
            return InvalidArgument(*_violation(failure), reason=Reason.PROMPT_TOO_LONG)
        case wire.CAUSE_UNSUPPORTED:
            return Unimplemented(failure.violation.field or "GenerateRequest", failure.violation.value or "a value")
        case wire.CAUSE_DEADLINE:
            return DeadlineExceeded()
        case cause if cause in _NO_FAULTY_WORKER:
            return AttemptFailed(failure, None)
        case _:
            return AttemptFailed(failure, Incarnation.of(failure.peer) if failure.HasField("peer") else sender)


def _violation(failure: wire.Failure) -> tuple[str, str, str]:
    violation = failure.violation
    limit = violation.limit or failure.detail or "what a worker can run"
    return violation.field or "GenerateRequest", limit, violation.value or "a value"
