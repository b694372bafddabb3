"""HTTP connections with limits on what a client sends beside bodies, and on how long it leaves an answer unread."""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from decant.gateway.errors import ErrorObject
from decant.gateway.responses import to_json

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a request line and headers, and of the trailers of a body, to within one piece that is parsed."""
UNREAD_S = 60.0
"""Time for a client to read what one send has written; then its connection is cut."""
_PARSED_BYTES = 16 * 1024


class _SecondRequest(Exception):
    pass


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which by itself has no limits on heads or on the time that an answer stays unread.

    One request runs at a time. uvicorn queues a second one that arrives behind it, and then notices no disconnect of
    the first. Here the second one is dropped, and the connection closes after the first one's answer, so that the
    client sends the second one again.
    """

    _num_unplaced = 0
    """Bytes since the last part of a body, or the end of a head or of a request."""
    _ignores_input = False
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Each send waits until the one before it has left this process.
        transport.set_write_buffer_limits(high=1, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_unread()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PARSED_BYTES):
            if self._ignores_input or self.transport.is_closing():
                return
            self._parse(data[start : start + _PARSED_BYTES])

    def _parse(self, piece: bytes) -> None:
        self._num_unplaced += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # it is answered as a request without an upgrade
        except httptools.HttpParserError:
            self._end_input(ErrorObject(400, "this is no HTTP request", "invalid_request_error", "invalid_http"))
        if self._num_unplaced > MAX_HEAD_BYTES:
            text = f"request line and headers: at most {MAX_HEAD_BYTES} bytes"
            self._end_input(ErrorObject(431, text, "invalid_request_error", "headers_too_large"))

    def on_message_begin(self) -> None:
        if self._is_running():
            raise _SecondRequest
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_unplaced = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unplaced = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unplaced = 0
        super().on_message_complete()

    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_input(self, error: ErrorObject) -> None:
        """Refuse what arrives, or ignore it behind a whole request that still runs."""
        if self._ignores_input or self.transport.is_closing():
            return
        if self._is_running() and not self.cycle.more_body:
            self._ignores_input = True
            self.cycle.keep_alive = False
            return
        if not (self._is_running() and self.cycle.response_started):
            self._refuse(error)
        self.transport.close()

    def _refuse(self, error: ErrorObject) -> None:
        body = to_json(error.body)
        size = str(len(body)).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
        headers = [*self.server_state.default_headers, *own]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
