"""Calls of an ASGI application in this event loop, by clients that may leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 300.0


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    has_ended: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[str]:
        return [event for event in self.body.decode().split("\n\n") if event]

    @property
    def chunks(self) -> list[Any]:
        """The objects of the events, without the last one."""
        *chunks, done = self.events
        assert done == "data: [DONE]"
        return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


@dataclass
class HttpCall:
    """A call of `app`. Its client leaves when `leaves` is set, and reads nothing while `reads` is clear."""

    app: Any
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: Reply = field(default_factory=Reply)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    has_sent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an event or a body has arrived."""
    _is_read: bool = False

    def __post_init__(self) -> None:
        self.reads.set()

    async def __call__(self) -> Reply:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET" if self.body is None else "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        async with asyncio.timeout(PATIENCE_S):
            await self.app(scope, self._receive, self._send)
        return self.reply

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            raw = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
            return {"type": "http.request", "body": raw, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.reply.body += message["body"]
        self.reply.has_ended = not message.get("more_body")
        self.has_sent.set()


async def call(app: Any, path: str, body: Any = None, **headers: str) -> Reply:
    """A whole call; ``X_Request_Id=`` is the header X-Request-Id."""
    return await HttpCall(app, path, body, {name.replace("_", "-"): value for name, value in headers.items()})()
