"""What a call brings beside its body: its key, id, deadline and priority, and the body within its limits."""

from __future__ import annotations

import asyncio
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from decant.client import AsyncClient
from decant.gateway.errors import ApiError, refused
from decant.gateway.responses import ClientLeft
from decant.gateway.settings import LONGEST_TIMEOUT_S

REQUEST_ID, IDEMPOTENCY_KEY = "X-Request-Id", "Idempotency-Key"
TIMEOUT, PRIORITY = "X-Request-Timeout", "X-Priority"
BODY_S = 30.0
"""Time for a client to send its body."""

_ID = re.compile(r"[!-~]{1,96}")
_WHOLE_NUMBER = re.compile(r"-?\d{1,9}")


def client_of(request: Request, client: AsyncClient) -> AsyncClient:
    """The client with the credentials of a call, which the router checks. Raises ApiError."""
    given = request.headers.get("authorization")
    if given is None:
        return client.with_token(None)
    scheme, _, secret = given.partition(" ")
    if scheme.lower() == "bearer":
        try:
            return client.with_token(secret.strip())
        except ValueError:
            pass  # no router has such a secret
    message = "Authorization: Bearer and a key"
    raise ApiError(401, message, code="invalid_api_key", type="authentication_error")


def ids_of(request: Request) -> tuple[str, str]:
    """The id of the router's request, and what the response's X-Request-Id says. Raises ApiError.

    A proxy may give several calls one X-Request-Id, so the router's id is another one, which begins with it. A repeated
    Idempotency-Key is the same request.
    """
    shown, key = (_id(request, name) for name in (REQUEST_ID, IDEMPOTENCY_KEY))
    own = key or (f"{shown}-{uuid.uuid4().hex[:8]}" if shown else str(uuid.uuid4()))
    return own, shown or own


def _id(request: Request, name: str) -> str | None:
    given = request.headers.get(name)
    if given is not None and not _ID.fullmatch(given):
        raise refused(name, "1 to 96 printable ASCII characters without spaces", given)
    return given


def timeout_of(request: Request, longest: float | None) -> float | None:
    """Seconds from the arrival of a call's headers until its deadline. Raises ApiError."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return longest
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise refused(TIMEOUT, f"a number of seconds above 0, to {LONGEST_TIMEOUT_S:.0f}", given)
    return seconds if longest is None else min(seconds, longest)


async def body_of(request: Request, most: int) -> dict[str, Any]:
    """The object that a call sends, with the priority of its headers. Raises ApiError, ClientLeft."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(request, most)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_S:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise ClientLeft from None
    try:
        body = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return _with_priority(request, body)


async def _read(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            message = f"the body: at most {most} bytes (--max-body-bytes)"
            raise ApiError(413, message, code="request_too_large")
        parts.append(part)
    return b"".join(parts)


def _with_priority(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    given = request.headers.get(PRIORITY)
    if given is None or body.get("priority") is not None:
        return body
    if not _WHOLE_NUMBER.fullmatch(given):
        raise refused(PRIORITY, "a whole number", given)
    return {**body, "priority": int(given)}


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def frame(prefix: str, id: str, created: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What each object of an answer begins with; an empty model is that of the router."""
    return {"id": f"{prefix}-{id}", "created": created, "model": body.get("model") or ""}
