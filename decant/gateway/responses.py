"""Responses as ASGI writes them: one object, or events that a client may leave.

The first event is awaited before the status is sent, so that a refusal has its own. A slow reader stops the writer,
which stops reading from the router.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decant.gateway.errors import ErrorObject
from decant.runtime.errors import ServiceError

KEEPALIVE_S = 15.0
"""Silence after which a comment is sent, so that no proxy cuts the connection."""
PIECE_BYTES = 64 * 1024
"""Size of the parts of a whole answer: one at most waits in memory for its client after the request has ended."""

_T = TypeVar("_T")


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), PIECE_BYTES):
            piece = bytes(self.body[start : start + PIECE_BYTES])
            is_last = start + PIECE_BYTES >= len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def unless_left(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled if the client leaves. Raises ClientLeft."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        await _cancel(working, leaving)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class EventStream:
    """Server-sent events of `chunks`, then ``[DONE]``; after the first chunk an error is an event, and the last one.

    It is used as the response of a Starlette endpoint.
    """

    chunks: AsyncGenerator[Mapping[str, Any], None]
    headers: Mapping[str, str]
    error_of: Callable[[ServiceError], ErrorObject]
    _is_started: bool = False
    _has_written: bool = False
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        keeping, leaving = asyncio.create_task(self._keep_alive(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _cancel(writing, keeping, leaving)

    async def _write(self, send: Send) -> None:
        try:
            async for chunk in self.chunks:
                await self._send(send, b"data: " + to_json(chunk) + b"\n\n")
            await self._send(send, b"data: [DONE]\n\n")
        except ServiceError as error:
            if not self._is_started:
                raise
            await self._send(send, b"data: " + to_json(self.error_of(error).body) + b"\n\n")
        finally:
            await self.chunks.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._has_written = False
            await asyncio.sleep(KEEPALIVE_S)
            if not self._has_written and not self._sending.locked():
                await self._send(send, b": waiting\n\n")

    async def _send(self, send: Send, event: bytes) -> None:
        """Send an event, the first one after the headers."""
        async with self._sending:
            self._has_written = True
            if not self._is_started:
                self._is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._raw_headers()})
            await send({"type": "http.response.body", "body": event, "more_body": True})

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        # Nginx collects what it passes on unless this header says otherwise.
        every = {**fixed, "x-accel-buffering": "no", **self.headers}
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
