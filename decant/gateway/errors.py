"""OpenAI's error objects, and the HTTP status of each error of the service.

INVALID_ARGUMENT, UNIMPLEMENTED   400   with `param`
UNAUTHENTICATED                   401
PERMISSION_DENIED                 403
NOT_FOUND                         404   code model_not_found
ALREADY_EXISTS, SUPERSEDED        409
CANCELLED                         409
QUOTA_EXCEEDED                    429   with Retry-After
QUEUE_FULL, UNAVAILABLE, ABORTED  503   with Retry-After
DEADLINE_EXCEEDED                 504
any other                         500
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from decant.runtime.error_details import Reason, shorten
from decant.runtime.errors import RETRY_AFTER_SECONDS, InvalidArgument, ServiceError

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.CANCELLED: 409,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_OF_REASONS = {Reason.QUOTA_EXCEEDED: 429, Reason.QUEUE_FULL: 503, Reason.SUPERSEDED: 409}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_CODES = {
    Reason.NO_CREDENTIALS: "invalid_api_key",
    Reason.QUOTA_EXCEEDED: "rate_limit_exceeded",
    Reason.PROMPT_TOO_LONG: "context_length_exceeded",
    Reason.FIELD_NOT_SUPPORTED: "unsupported_parameter",
    Reason.UNSPECIFIED: "service_unavailable",
}
OF_HEADERS: Mapping[str, str] = {"request_id": "Idempotency-Key"}
"""Names of Decant's fields that are headers of a call, for errors."""
_GROUPS = ("sampling.", "stopping.", "response.", "guided.", "cache.", "stream.")


class ApiError(Exception):
    """An error of the gateway itself, as its client gets it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.error = ErrorObject(status, message, type, code, param, retry_after)


@dataclass(frozen=True, slots=True)
class ErrorObject:
    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    retry_after: float | None = None
    is_final: bool = False
    """The same call would fail again, although the status suggests a retry."""

    @property
    def body(self) -> Mapping[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.is_final:
            headers["X-Should-Retry"] = "false"  # OpenAI's clients read it
        return headers


def refused(param: str, limit: str, value: object, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param}: {limit}, got {shorten(value)}", code=code, param=param)


def unsupported(param: str, limit: str = "is not supported by Decant; leave it unset") -> ApiError:
    return ApiError(400, f"{param}: {limit}", code="unsupported_parameter", param=param)


def error_object(error: ServiceError, names: Mapping[str, str]) -> ErrorObject:
    """The object of an error of the service. `names` has the body's names of Decant's fields that differ."""
    status = _OF_REASONS.get(error.reason) or _STATUSES.get(error.code, 500)
    param = _param(error, names)
    message = str(error) or error.code.name
    field_name = _field_of(error)
    if param is not None and field_name and param != field_name and message.startswith(f"{field_name}:"):
        message = param + message.removeprefix(field_name)
    retry_after = error.retry_after
    if status == 503 and retry_after is None:
        retry_after = RETRY_AFTER_SECONDS
    return ErrorObject(
        status=status,
        message=message,
        type=_TYPES.get(status) or ("invalid_request_error" if status < 499 else "server_error"),
        code=_CODES.get(error.reason) or ("invalid_value" if isinstance(error, InvalidArgument) else error.label),
        param=param,
        retry_after=retry_after if status in (429, 503) else None,
        is_final=status in (409, 504),
    )


def _field_of(error: ServiceError) -> str | None:
    if error.reason is Reason.REQUEST_ID_REUSED:
        return "request_id"
    return error.detail.violation.field if error.detail.violation else None


def _param(error: ServiceError, names: Mapping[str, str]) -> str | None:
    if error.reason is Reason.MODEL_NOT_FOUND:
        return "model"
    name = _field_of(error)
    if name is None or error.reason is Reason.QUOTA_EXCEEDED:
        return None
    for group in _GROUPS:
        name = name.removeprefix(group)
    name = name.removeprefix("messages.") if name.startswith("messages.") else name
    first = name.partition("[")[0].partition(".")[0]
    return names[first] + name[len(first) :] if first in names else name
