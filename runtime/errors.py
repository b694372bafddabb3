"""The typed errors of the service. Times are in seconds.

ServiceError                     any status without a subclass
├── InvalidArgument              a field, its limit, the value              INVALID_ARGUMENT
├── Unimplemented                a field that is not implemented            UNIMPLEMENTED
├── NotFound                     a kind and a name                          NOT_FOUND
├── AlreadyExists                an id with another payload                 ALREADY_EXISTS
├── OutOfRange                   a seq that is no longer kept               OUT_OF_RANGE
├── Unauthenticated              missing or unknown credentials             UNAUTHENTICATED
├── PermissionDenied             an action that is not allowed              PERMISSION_DENIED
├── QuotaExceeded                the tenant's quota is exhausted            RESOURCE_EXHAUSTED
├── QueueFull                    the queue is full                          RESOURCE_EXHAUSTED
├── Unavailable                  not possible here or now                   UNAVAILABLE
├── DeadlineExceeded             the deadline has passed                    DEADLINE_EXCEEDED
├── Cancelled                    the request was cancelled                  CANCELLED
├── Aborted                      a stream that can't continue here          ABORTED
├── FailedPrecondition           incompatible router and worker             FAILED_PRECONDITION
└── Internal                     a bug; only the log has details            INTERNAL
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import islice
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
    shorten,
)

RETRY_AFTER_SECONDS = 1.0
"""Where the end of the cause is unknown."""
RETRY_ELSEWHERE_SECONDS = 0.1
"""Retry delay while this process drains: another one may take the call."""

MAX_NAMES = 20
"""Names that a message lists."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class FaultOwner(StrEnum):
    """Side that caused an error; only SERVER is a failure of this service."""

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
    {
        Reason.QUEUE_FULL,
        Reason.NO_WORKER,
        Reason.DRAINING,
        Reason.OWNER_CHANGED,
        Reason.DEADLINE_EXCEEDED,
        Reason.TOKENIZER_MISMATCH,
    }
)


class ServiceError(Exception):
    """Base of the service's errors; also a status without a subclass."""

    def __init__(self, detail: ErrorDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail

    @property
    def code(self) -> grpc.StatusCode:
        return _CODES.get(self.detail.code, grpc.StatusCode.UNKNOWN)

    @property
    def reason(self) -> Reason:
        return self.detail.reason

    @property
    def label(self) -> str:
        return self.detail.reason.value.lower()

    @property
    def fault_owner(self) -> FaultOwner:
        if self.reason in _CLIENT_REASONS or self.code in _CLIENT_CODES:
            return FaultOwner.CLIENT
        return FaultOwner.CAPACITY if self.reason in _CAPACITY_REASONS else FaultOwner.SERVER

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later, after `retry_after` if set."""
        return self.code is grpc.StatusCode.UNAVAILABLE or self.reason in (Reason.QUOTA_EXCEEDED, Reason.QUEUE_FULL)

    @property
    def resumable(self) -> bool:
        """Whether `ResumeStream` can continue from `resume.last_seq`."""
        return self.resume is not None and self.code is grpc.StatusCode.ABORTED

    @property
    def retry_after(self) -> float | None:
        return self.detail.retry_after

    @property
    def resume(self) -> ResumePoint | None:
        return self.detail.resume


class _FieldError(ServiceError):
    @property
    def violation(self) -> Violation:
        return self.detail.violation or Violation("", "", "")

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
    """An invalid field. `reason` may also be EMPTY_PROMPT or PROMPT_TOO_LONG; `advice` replaces the message."""

    def __init__(
        self, field: str, limit: str, value: object, *, reason: Reason = Reason.INVALID_FIELD, advice: str = ""
    ) -> None:
        detail = _field_detail(grpc.StatusCode.INVALID_ARGUMENT, reason, field, limit, value)
        super().__init__(replace(detail, message=message_text(advice)) if advice else detail)


class Unimplemented(_FieldError):
    LIMIT = "not supported by this build"

    def __init__(self, field: str, value: object = "a value", *, limit: str = LIMIT) -> None:
        super().__init__(_field_detail(grpc.StatusCode.UNIMPLEMENTED, Reason.FIELD_NOT_SUPPORTED, field, limit, value))


class NotFound(ServiceError):
    REASONS: ClassVar = {
        "adapter": Reason.MODEL_NOT_FOUND,
        "model": Reason.MODEL_NOT_FOUND,
        "request": Reason.REQUEST_NOT_FOUND,
    }

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        """``known``: names of that kind, of which the message has the first ones."""
        resource, first = Resource(kind, shorten(name)), list(islice(known, MAX_NAMES))
        limit = f"one of {', '.join(first)}" if first else "not found"
        detail = _detail(grpc.StatusCode.NOT_FOUND, self.REASONS[kind], f"{kind}: {limit}, got {resource.name}")
        super().__init__(replace(detail, resource=resource))


class AlreadyExists(ServiceError):
    def __init__(self, request_id: str) -> None:
        text = f"request_id: already used with another payload, got {shorten(request_id)}"
        super().__init__(_detail(grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_REUSED, text))


class OutOfRange(ServiceError):
    def __init__(self, after_seq: int, first_seq: int, last_seq: int) -> None:
        text = f"after_seq: from {first_seq} to {last_seq}, got {after_seq}"
        self._set(text, ResumePoint(first_seq, last_seq))

    @classmethod
    def of_outputs(cls, sent: Sequence[int], last: ResumePoint) -> OutOfRange:
        """Error for several outputs: of each, as many tokens were ``sent``."""
        error = cls(sum(sent), last.first_seq, last.last_seq)
        error._set(f"after_output_seqs: at most {list(last.output_seqs)}, got {list(sent)}", last)
        return error

    @classmethod
    def of_kv_events(cls, after: int, first: int, last: int) -> OutOfRange:
        """Error for a subscriber that has the batches up to ``after``."""
        error = cls(after, first, last)
        error._set(f"start_sequence_number: 0, or from {first} to {last}, got {after}", ResumePoint(first, last))
        return error

    def _set(self, text: str, resume: ResumePoint) -> None:
        detail = _detail(grpc.StatusCode.OUT_OF_RANGE, Reason.SEQ_NOT_KEPT, text)
        super().__init__(replace(detail, resume=resume))


class Unauthenticated(ServiceError):
    """Missing or unknown credentials; the message does not distinguish them."""

    def __init__(self) -> None:
        text = "missing or unknown credentials"
        super().__init__(_detail(grpc.StatusCode.UNAUTHENTICATED, Reason.NO_CREDENTIALS, text))


class PermissionDenied(ServiceError):
    def __init__(self, action: str) -> None:
        text = f"these credentials don't allow: {shorten(action)}"
        super().__init__(_detail(grpc.StatusCode.PERMISSION_DENIED, Reason.NOT_ALLOWED, text))


class QuotaExceeded(_FieldError):
    """An exhausted quota, such as "in_flight", of the tenant `subject`; `value` is the use with this request."""

    def __init__(self, subject: str, quota: str, limit: int, value: int, *, retry_after: float) -> None:
        code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUOTA_EXCEEDED
        detail = _field_detail(code, reason, quota, f"at most {limit}", value)
        super().__init__(replace(detail, subject=shorten(subject), retry_after=_seconds(retry_after)))


class QueueFull(ServiceError):
    def __init__(self, limit: int | str, *, retry_after: float) -> None:
        text = limit if isinstance(limit, str) else f"at most {limit} requests wait"
        detail = _detail(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, f"queue: {text}")
        super().__init__(replace(detail, retry_after=_seconds(retry_after)))


class Unavailable(ServiceError):
    """A call that can't be served now.

    `reason` is NO_WORKER, DRAINING, OWNER_CHANGED, WORKERS_LOST, STATE_STORE_UNAVAILABLE or TOKENIZER_MISMATCH.
    """

    def __init__(self, reason: Reason, message: str, *, retry_after: float) -> None:
        detail = _detail(grpc.StatusCode.UNAVAILABLE, reason, message)
        super().__init__(replace(detail, retry_after=_seconds(retry_after)))


class DeadlineExceeded(ServiceError):
    def __init__(self, message: str = "the request's deadline has passed") -> None:
        super().__init__(_detail(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED, message))


class Cancelled(ServiceError):
    def __init__(self, message: str = "the request was cancelled") -> None:
        super().__init__(_detail(grpc.StatusCode.CANCELLED, Reason.CANCELLED, message))


class Aborted(ServiceError):
    """A stream that can't continue here.

    `reason` is DRAINING, OWNER_CHANGED, WORKERS_LOST, SLOW_READER or TAIL_UNCERTAIN with `resume`; SUPERSEDED
    without, SLOW_READER for a subscriber of KV events, and QUEUE_FULL for a session whose router reads too slowly.
    """

    def __init__(self, reason: Reason, message: str, *, resume: ResumePoint | None = None) -> None:
        super().__init__(replace(_detail(grpc.StatusCode.ABORTED, reason, message), resume=resume))


class FailedPrecondition(ServiceError):
    """Incompatible router and worker. `reason` is WRONG_PEER (another incarnation) or WRONG_PROTOCOL."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(_detail(grpc.StatusCode.FAILED_PRECONDITION, reason, message))


class Internal(ServiceError):
    def __init__(self) -> None:
        super().__init__(_detail(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "internal error"))


class EndedCall(Protocol):
    """Common part of ``grpc.RpcError`` of a call and ``grpc.aio.AioRpcError``."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...  # None, or pairs of a str and a str or bytes


def from_call(call: EndedCall) -> ServiceError:
    metadata = call.trailing_metadata() or ()
    return from_detail(from_trailers(call.code().value[0], call.details() or "", metadata))


def from_detail(detail: ErrorDetail) -> ServiceError:
    kind = _TYPES.get(_CODES.get(detail.code, grpc.StatusCode.UNKNOWN), ServiceError)
    if kind is QuotaExceeded and detail.reason is not Reason.QUOTA_EXCEEDED:  # gRPC itself uses RESOURCE_EXHAUSTED too
        kind = QueueFull if detail.reason is Reason.QUEUE_FULL else ServiceError
    error = kind.__new__(kind)
    ServiceError.__init__(error, detail)
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


def _detail(code: grpc.StatusCode, reason: Reason, message: str) -> ErrorDetail:
    return ErrorDetail(code.value[0], message_text(message), reason)


def _field_detail(code: grpc.StatusCode, reason: Reason, field: str, limit: str, value: object) -> ErrorDetail:
    bad = Violation(shorten(field), shorten(limit), shorten(value))
    return replace(_detail(code, reason, f"{bad.field}: {bad.limit}, got {bad.value}"), violation=bad)


def _seconds(retry_after: float) -> float:
    return max(0, round(retry_after * 1000)) / 1000
