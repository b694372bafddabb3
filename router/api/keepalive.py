"""Messages ``waiting`` on streams that have sent nothing for a while, so that proxies do not cut them.

accepted --silent--> waiting --silent--> waiting --> started, deltas --silent--> waiting --> deltas, finished

One timer of the router looks at all open streams, so a message that is sent costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from decant.protos import inference_pb2 as pb
from decant.router.api.auth import AuthenticatedCall
from decant.router.request.reader_lease import Write
from decant.runtime.background import start_task
from decant.state.ids import RequestKey

LOOKS = 4
"""Looks in the time after which a stream is silent, which is the error of that time."""

DescribeProgress = Callable[[RequestKey], pb.Waiting]


class StreamKeepalive:
    """Owner of the timer. A stream is silent after ``silent_s``; with 0 it never is."""

    def __init__(self, silent_s: float, describe: DescribeProgress) -> None:
        self._silent_s = silent_s
        self._describe = describe
        self.streams: set[KeptStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, call: AuthenticatedCall, id: str, write: Write, seq: int = 0) -> KeptStream:
        """Return the stream of a request, to open by ``with``; the client has its tokens up to ``seq``."""
        return KeptStream(self, call, RequestKey(call.tenant.name, id), write, seq)

    def open(self, stream: KeptStream) -> None:
        if self._silent_s:
            self.streams.add(stream)
            if self._timer is None:
                self._start_timer()

    def close(self, stream: KeptStream) -> None:
        self.streams.discard(stream)
        if not self.streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def describe(self, key: RequestKey) -> pb.Waiting:
        return self._describe(key)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._silent_s / LOOKS, self._look)

    def _look(self) -> None:
        before = asyncio.get_running_loop().time() - self._silent_s
        for stream in self.streams:
            if stream.sent_at <= before:
                stream.send_waiting()
        self._start_timer()


class KeptStream:
    """Messages of one request to its client. Those of a call with several requests share the order of its writes."""

    __slots__ = (
        "_call",
        "_has_all",
        "_is_writing",
        "_keepalive",
        "_message_at",
        "_now",
        "_seq",
        "_task",
        "_write",
        "key",
        "sent_at",
    )

    def __init__(
        self, keepalive: StreamKeepalive, call: AuthenticatedCall, key: RequestKey, write: Write, seq: int
    ) -> None:
        self.key = key
        """Its id is empty until the router has made one."""
        self._keepalive = keepalive
        self._call = call
        self._write = write
        self._seq = seq
        self._has_all = self._is_writing = False
        self._now = asyncio.get_running_loop().time
        self._message_at = self.sent_at = self._now()
        self._task: asyncio.Task[None] | None = None

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        self._seq = message.seq
        self._has_all = message.HasField("usage")
        self._message_at = self.sent_at = self._now()
        await self._write(message)

    def send_waiting(self) -> None:
        """Send ``waiting`` unless the request is not accepted yet, or a message is on its way to the client."""
        if self._call.is_accepted and not self._call.is_sending and not self._has_all:
            self.sent_at = self._now()
            self._task = start_task("keepalive", self._send_waiting())

    async def _send_waiting(self) -> None:
        if self._call.is_sending or self._has_all:  # since the task was made
            return
        waiting = self._keepalive.describe(self.key)
        waiting.silent_ms = 1000 * (self._now() - self._message_at)
        message = pb.GenerateStreamResponse(request_id=self.key.id, seq=self._seq, waiting=waiting)
        self._is_writing = True
        with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # the client has left: its call ends by itself
            await self._write(message)
        self._is_writing = False

    def __enter__(self) -> Self:
        self._keepalive.open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keepalive.close(self)
        # A write that has begun keeps its turn until gRPC has sent its message or the call ends: if another request of
        # the call wrote meanwhile, its message would be lost, and the call would not end.
        if self._task is not None and not self._is_writing:
            self._task.cancel()
