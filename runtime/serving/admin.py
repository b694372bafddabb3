"""HTTP port for operators, plaintext, on the event loop: /alive also shows that it runs.

GET /alive      200, or 503 after a failure
GET /ready      200 while READY, else 503
GET /metrics    Prometheus' text format
GET /NAME       a page of the Registry, in JSON, for callers on this machine: it lists ids of requests and tenants
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server_settings import is_loopback
from decant.runtime.telemetry.metrics import Registry

MAX_REQUEST_BYTES = 16 * 1024
CALL_SECONDS = 5.0
"""Time to read a request and send the page."""


class AdminServer:
    def __init__(self, readiness: Readiness, registry: Registry, call_seconds: float = CALL_SECONDS) -> None:
        self._readiness = readiness
        self._registry = registry
        self._call_seconds = call_seconds
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Return the port that was bound. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._call_seconds):
                head = await reader.readuntil(b"\r\n\r\n")
                is_local = is_loopback(writer.get_extra_info("peername")[0])
                writer.write(self._answer(head.split(b"\r\n", 1)[0].decode("latin-1"), is_local=is_local))
                await writer.drain()
        except TimeoutError:
            writer.transport.abort()  # close() would keep what the client does not read
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the client is gone, or sent no request
        finally:
            writer.close()

    def _answer(self, request_line: str, *, is_local: bool) -> bytes:
        method, _, rest = request_line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n"
        else:
            status, kind, body = self._page(path, is_local=is_local)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode("latin-1") + (b"" if method == "HEAD" else body)

    def _page(self, path: str, *, is_local: bool) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._registry.text()
        page = self._registry.pages.get(path)
        if page is not None and not is_local:
            return HTTPStatus.FORBIDDEN, "text/plain", b"only for callers on this machine\n"
        if page is not None:
            return HTTPStatus.OK, "application/json", page()
        holds = {"/alive": self._readiness.is_alive, "/ready": self._readiness.is_ready}.get(path)
        if holds is None:
            known = ", ".join(("/alive", "/ready", "/metrics", *self._registry.pages))
            return HTTPStatus.NOT_FOUND, "text/plain", f"{known}\n".encode()
        body = f"{self._readiness.state.value}\n".encode()
        return (HTTPStatus.OK if holds else HTTPStatus.SERVICE_UNAVAILABLE), "text/plain", body
