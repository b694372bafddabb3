"""Details of an error as a frozen value, google.rpc.Status and trailing metadata. Parsing is lenient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from decant.protos import inference_pb2 as pb

DOMAIN = "decant"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

MAX_PART = 80
"""Maximum characters of a name or value."""
MAX_MESSAGE = 300
"""Characters; message and details fit gRPC's 8 KiB of metadata."""

_Detail = TypeVar("_Detail", bound=Message)


class Reason(StrEnum):
    """The names of ``decant.v1.ErrorReason`` without prefix, and two internal ones."""

    UNSPECIFIED = "UNSPECIFIED"
    """Reason of an error from the transport or another server."""
    INVALID_FIELD = "INVALID_FIELD"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    FIELD_NOT_SUPPORTED = "FIELD_NOT_SUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    SEQ_NOT_KEPT = "SEQ_NOT_KEPT"
    NO_CREDENTIALS = "NO_CREDENTIALS"
    NOT_ALLOWED = "NOT_ALLOWED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    NO_WORKER = "NO_WORKER"
    DRAINING = "DRAINING"
    WORKERS_LOST = "WORKERS_LOST"
    STATE_STORE_UNAVAILABLE = "STATE_STORE_UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    SUPERSEDED = "SUPERSEDED"
    TAIL_UNCERTAIN = "TAIL_UNCERTAIN"
    INTERNAL = "INTERNAL"
    OWNER_CHANGED = "OWNER_CHANGED"
    SLOW_READER = "SLOW_READER"
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    WRONG_PEER = "WRONG_PEER"  # between router and worker only, as in decant.internal.v1.Cause
    WRONG_PROTOCOL = "WRONG_PROTOCOL"


@dataclass(frozen=True, slots=True)
class Violation:
    field: str
    limit: str
    value: str


@dataclass(frozen=True, slots=True)
class Resource:
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a stream can resume: the least ``after_seq``, and the last seq that is certain.

    With several outputs, ``output_seqs`` has the certain tokens of each.
    """

    first_seq: int
    last_seq: int
    output_seqs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """Details of an error. `code` is gRPC's, `retry_after` in seconds, `subject` the tenant of an exhausted quota."""

    code: int
    message: str
    reason: Reason = Reason.UNSPECIFIED
    violation: Violation | None = None
    resource: Resource | None = None
    subject: str | None = None
    retry_after: float | None = None
    resume: ResumePoint | None = None


def shorten(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode() or "''"
    return text if len(text) <= MAX_PART else text[: MAX_PART - 3] + "..."


def message_text(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def to_status(detail: ErrorDetail) -> Status:
    status = Status(code=detail.code, message=detail.message)
    for message in _detail_messages(detail):
        status.details.add().Pack(message)
    return status


def trailers(detail: ErrorDetail) -> tuple[tuple[str, str | bytes], ...]:
    pairs: list[tuple[str, str | bytes]] = [(DETAILS_KEY, to_status(detail).SerializeToString())]
    if detail.retry_after is not None:
        pairs.append((PUSHBACK_KEY, str(_milliseconds(detail.retry_after))))
    return tuple(pairs)


def from_trailers(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]]) -> ErrorDetail:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = Status.FromString(value)
            except DecodeError:
                break
            if status.code == code:
                return from_status(status)
    return ErrorDetail(code, message)


def from_status(status: Status) -> ErrorDetail:
    info = _find(status, ErrorInfo)
    bad = _find(status, BadRequest)
    resource = _find(status, ResourceInfo)
    quota = _find(status, QuotaFailure)
    retry = _find(status, RetryInfo)
    resume = _find(status, pb.ResumePoint)
    return ErrorDetail(
        code=status.code,
        message=status.message,
        reason=_reason(info),
        violation=_violation(info, bad, quota),
        resource=Resource(resource.resource_type, resource.resource_name) if resource else None,
        subject=quota.violations[0].subject if quota and quota.violations else None,
        retry_after=retry.retry_delay.ToMilliseconds() / 1000 if retry else None,
        resume=ResumePoint(resume.first_seq, resume.last_seq, tuple(resume.output_seqs)) if resume else None,
    )


def _detail_messages(detail: ErrorDetail) -> list[Message]:
    info = ErrorInfo(reason=detail.reason.value, domain=DOMAIN)
    messages: list[Message] = [info]
    if detail.violation is not None:
        bad = detail.violation
        info.metadata.update({"field": bad.field, "limit": bad.limit, "value": bad.value})
        messages.append(_violation_message(bad, detail))
    if detail.resource is not None:
        messages.append(
            ResourceInfo(
                resource_type=detail.resource.kind, resource_name=detail.resource.name, description=detail.message
            )
        )
    if detail.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(_milliseconds(detail.retry_after))
        messages.append(RetryInfo(retry_delay=delay))
    if detail.resume is not None:
        point = detail.resume
        messages.append(
            pb.ResumePoint(first_seq=point.first_seq, last_seq=point.last_seq, output_seqs=point.output_seqs)
        )
    return messages


def _violation_message(bad: Violation, detail: ErrorDetail) -> Message:
    text = f"{bad.limit}, got {bad.value}"
    field = BadRequest.FieldViolation(field=bad.field, description=text, reason=detail.reason.value)
    message: Message = BadRequest(field_violations=[field])
    if detail.subject is not None:
        used = QuotaFailure.Violation(subject=detail.subject, description=f"{bad.field}: {text}")
        message = QuotaFailure(violations=[used])
    return message


def _find(status: Status, kind: type[_Detail]) -> _Detail | None:
    for detail in status.details:
        found = kind()
        if detail.Is(kind.DESCRIPTOR):
            try:
                detail.Unpack(found)
            except DecodeError:
                continue
            return found
    return None


def _reason(info: ErrorInfo | None) -> Reason:
    if info is None or info.domain != DOMAIN:
        return Reason.UNSPECIFIED
    try:
        return Reason(info.reason)
    except ValueError:  # of a newer build
        return Reason.UNSPECIFIED


def _violation(info: ErrorInfo | None, bad: BadRequest | None, quota: QuotaFailure | None) -> Violation | None:
    if quota is not None and quota.violations:
        about = info.metadata if info is not None else {}
        limit = about.get("limit", quota.violations[0].description)
        return Violation(about.get("field", ""), limit, about.get("value", ""))
    if bad is None or not bad.field_violations:
        return None
    first = bad.field_violations[0]
    if info is not None and info.metadata.get("field") == first.field:
        return Violation(first.field, info.metadata["limit"], info.metadata["value"])
    return Violation(first.field, first.description, "")


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
