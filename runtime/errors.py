"""Everything that the service answers with, when it doesn't answer with a result.

ServiceError                     any status; of this type itself when it is none of those below
├── InvalidArgument              a field, its limit, the value              INVALID_ARGUMENT
├── Unimplemented                a field that this build can't honour       UNIMPLEMENTED
├── NotFound                     a kind and a name                          NOT_FOUND
├── AlreadyExists                an id with another payload                 ALREADY_EXISTS
├── OutOfRange                   a seq before what is kept                  OUT_OF_RANGE
├── Unauthenticated              no credentials, or wrong ones              UNAUTHENTICATED
├── PermissionDenied             credentials that don't suffice             PERMISSION_DENIED
├── QuotaExceeded                a tenant's share is used up                RESOURCE_EXHAUSTED
├── QueueFull                    the service takes no more for now          RESOURCE_EXHAUSTED
├── Unavailable                  not here or not now                        UNAVAILABLE
├── DeadlineExceeded             the request's time is over                 DEADLINE_EXCEEDED
├── Cancelled                    somebody cancelled the request             CANCELLED
├── Aborted                      a stream that can't go on here             ABORTED
├── FailedPrecondition           router and worker that don't fit           FAILED_PRECONDITION
└── Internal                     a bug; says nothing of the inside          INTERNAL

An error is an ``ErrorDetail`` that can be raised. ``from_fault`` and ``from_call`` make the typed error on the other
side. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import grpc

from decant.runtime.error_details import (
    ErrorDetail,
    Reason,
    Resource,
    ResumePoint,
    Violation,
    from_trailers,
    message_text,
    part,
)

RETRY_AFTER_SECONDS = 1.0
"""When a client may ask again that was refused for a reason whose end is not known."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class FaultOwner(StrEnum):
    """Whose doing an error is. Only SERVER is a failure of this service."""

    CLIENT = "client"
    CAPACITY = "capacity"
    SERVER = "server"


_CLIENT_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
_CLIENT_REASONS = frozenset({Reason.QUOTA_EXCEEDED, Reason.SUPERSEDED, Reason.SLOW_READER})
_CAPACITY_REASONS = frozenset(
    {Reason.QUEUE_FULL, Reason.NO_WORKER, Reason.DRAINING, Reason.OWNER_CHANGED, Reason.DEADLINE_EXCEEDED}
)


class ServiceError(Exception):
    """An answer that is no result. ``fault`` is all that the other side learns; the rest is derived from it."""

    def __init__(self, fault: ErrorDetail) -> None:
        super().__init__(fault.message)
        self.fault = fault

    @property
    def code(self) -> grpc.StatusCode:
        return _CODES.get(self.fault.code, grpc.StatusCode.UNKNOWN)

    @property
    def reason(self) -> Reason:
        return self.fault.reason

    @property
    def label(self) -> str:
        """For metrics: the reason in lower case, one of as many as ``Reason`` has."""
        return self.fault.reason.value.lower()

    @property
    def blame(self) -> FaultOwner:
        if self.reason in _CLIENT_REASONS or self.code in _CLIENT_CODES:
            return FaultOwner.CLIENT
        return FaultOwner.CAPACITY if self.reason in _CAPACITY_REASONS else FaultOwner.SERVER

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed when it is simply made again, after ``retry_after`` where that is set."""
        return self.code is grpc.StatusCode.UNAVAILABLE or self.reason in (Reason.QUOTA_EXCEEDED, Reason.QUEUE_FULL)

    @property
    def resumable(self) -> bool:
        """Whether ``ResumeStream`` may go on from ``resume.last_seq``."""
        return self.resume is not None and self.code is grpc.StatusCode.ABORTED

    @property
    def retry_after(self) -> float | None:
        return self.fault.retry_after

    @property
    def resume(self) -> ResumePoint | None:
        return self.fault.resume


class _FieldError(ServiceError):
    """An error about one field of a request, or one quota."""

    @property
    def violation(self) -> Violation:
        return self.fault.violation or Violation("", "", "")

    @property
    def field(self) -> str:
        return self.violation.field

    @property
    def limit(self) -> str:
        return self.violation.limit

    @property
    def value(self) -> str:
        return self.violation.value


class InvalidArgument(_FieldError):
    """A field breaks a limit. `reason` may also be EMPTY_PROMPT or PROMPT_TOO_LONG; `advice` is the message where it
    says more than "field: limit, got value"."""

    def __init__(
        self, field: str, limit: str, value: object, *, reason: Reason = Reason.INVALID_FIELD, advice: str = ""
    ) -> None:
        fault = _field_fault(grpc.StatusCode.INVALID_ARGUMENT, reason, field, limit, value)
        super().__init__(replace(fault, message=message_text(advice)) if advice else fault)


class Unimplemented(_FieldError):
    """A field that is set and that this build can't honour, or not beyond `limit`."""

    LIMIT = "not supported by this build"

    def __init__(self, field: str, value: object = "a value", *, limit: str = LIMIT) -> None:
        super().__init__(_field_fault(grpc.StatusCode.UNIMPLEMENTED, Reason.FIELD_NOT_SUPPORTED, field, limit, value))


class NotFound(ServiceError):
    """Nothing of that name. `kind` is "model" or "request"; a request may also be expired, or another tenant's."""

    REASONS: ClassVar = {"model": Reason.MODEL_NOT_FOUND, "request": Reason.REQUEST_NOT_FOUND}

    def __init__(self, kind: str, name: str) -> None:
        resource = Resource(kind, part(name))
        fault = _fault(grpc.StatusCode.NOT_FOUND, self.REASONS[kind], f"{kind}: none is called {resource.name}")
        super().__init__(replace(fault, resource=resource))


class AlreadyExists(ServiceError):
    """A request id used again with another payload."""

    def __init__(self, request_id: str) -> None:
        text = f"request_id: already used with another payload, got {part(request_id)}"
        super().__init__(_fault(grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_REUSED, text))


class OutOfRange(ServiceError):
    """A resume from before what is kept. `first_seq` is the earliest that would do, `last_seq` counts all entries."""

    def __init__(self, after_seq: int, first_seq: int, last_seq: int) -> None:
        text = f"after_seq: from {first_seq} to {last_seq}, got {after_seq}"
        fault = _fault(grpc.StatusCode.OUT_OF_RANGE, Reason.SEQ_NOT_KEPT, text)
        super().__init__(replace(fault, resume=ResumePoint(first_seq, last_seq)))


class Unauthenticated(ServiceError):
    """No credentials, or wrong ones: it doesn't say which."""

    def __init__(self) -> None:
        text = "no credentials that are known here"
        super().__init__(_fault(grpc.StatusCode.UNAUTHENTICATED, Reason.NO_CREDENTIALS, text))


class PermissionDenied(ServiceError):
    """Known credentials that don't allow `action`."""

    def __init__(self, action: str) -> None:
        text = f"these credentials don't allow: {part(action)}"
        super().__init__(_fault(grpc.StatusCode.PERMISSION_DENIED, Reason.NOT_ALLOWED, text))


class QuotaExceeded(_FieldError):
    """A share is used up: `subject` is whose, `quota` what of, as "in_flight", and `value` what this would make."""

    def __init__(self, subject: str, quota: str, limit: int, value: int, *, retry_after: float) -> None:
        code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUOTA_EXCEEDED
        fault = _field_fault(code, reason, quota, f"at most {limit}", value)
        super().__init__(replace(fault, subject=part(subject), retry_after=_seconds(retry_after)))


class QueueFull(ServiceError):
    """As much waits as is taken in: `limit` requests, or what the text `limit` says."""

    def __init__(self, limit: int | str, *, retry_after: float) -> None:
        words = limit if isinstance(limit, str) else f"at most {limit} requests wait"
        fault = _fault(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, f"queue: {words}")
        super().__init__(replace(fault, retry_after=_seconds(retry_after)))


class Unavailable(ServiceError):
    """Not here, or not now. `reason` is NO_WORKER, DRAINING, OWNER_CHANGED, WORKERS_LOST or STATE_STORE_AWAY."""

    def __init__(self, reason: Reason, message: str, *, retry_after: float) -> None:
        fault = _fault(grpc.StatusCode.UNAVAILABLE, reason, message)
        super().__init__(replace(fault, retry_after=_seconds(retry_after)))


class DeadlineExceeded(ServiceError):
    """The request's time is over; what was written can be fetched."""

    def __init__(self, message: str = "the request's deadline has passed") -> None:
        super().__init__(_fault(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED, message))


class Cancelled(ServiceError):
    """The request was cancelled by a call of its own, or after its stream was lost."""

    def __init__(self, message: str = "the request was cancelled") -> None:
        super().__init__(_fault(grpc.StatusCode.CANCELLED, Reason.CANCELLED, message))


class Aborted(ServiceError):
    """A stream that can't go on here. `reason` is DRAINING, OWNER_CHANGED, WORKERS_LOST, SLOW_READER or TAIL_UNCERTAIN
    with a point to resume from, or SUPERSEDED without."""

    def __init__(self, reason: Reason, message: str, *, resume: ResumePoint | None = None) -> None:
        super().__init__(replace(_fault(grpc.StatusCode.ABORTED, reason, message), resume=resume))


class FailedPrecondition(ServiceError):
    """Between router and worker: another incarnation than the one meant, or no common protocol. `reason` is
    WRONG_PEER or WRONG_PROTOCOL."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(_fault(grpc.StatusCode.FAILED_PRECONDITION, reason, message))


class Internal(ServiceError):
    """A bug. It takes no words, so that nothing of the inside gets out: those are in the log."""

    def __init__(self) -> None:
        super().__init__(_fault(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "internal error"))


class EndedCall(Protocol):
    """What ``grpc.RpcError`` of a call and ``grpc.aio.AioRpcError`` have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...  # None, or pairs of a str and a str or bytes


def from_call(call: EndedCall) -> ServiceError:
    """The typed error that a failed call brought."""
    metadata = call.trailing_metadata() or ()
    return from_fault(from_trailers(call.code().value[0], call.details() or "", metadata))


def from_fault(fault: ErrorDetail) -> ServiceError:
    """The typed error that says `fault`; ServiceError itself where the status has no type of its own."""
    kind = _TYPES.get(_CODES.get(fault.code, grpc.StatusCode.UNKNOWN), ServiceError)
    if kind is QuotaExceeded and fault.reason is not Reason.QUOTA_EXCEEDED:  # gRPC's own says RESOURCE_EXHAUSTED too
        kind = QueueFull if fault.reason is Reason.QUEUE_FULL else ServiceError
    error = kind.__new__(kind)
    ServiceError.__init__(error, fault)
    return error


_TYPES: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.INTERNAL: Internal,
}


def _fault(code: grpc.StatusCode, reason: Reason, message: str) -> ErrorDetail:
    return ErrorDetail(code.value[0], message_text(message), reason)


def _field_fault(code: grpc.StatusCode, reason: Reason, field: str, limit: str, value: object) -> ErrorDetail:
    bad = Violation(part(field), part(limit), part(value))
    return replace(_fault(code, reason, f"{bad.field}: {bad.limit}, got {bad.value}"), violation=bad)


def _seconds(retry_after: float) -> float:
    """To the millisecond that the wire carries."""
    return max(0, round(retry_after * 1000)) / 1000
