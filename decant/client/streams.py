"""Streams of an answer that resume at another router when they break.

    GenerateStream --started, deltas--X                                     a connection breaks, a router drains
                                       ResumeStream(id, seq) --deltas----X
                                                                          ResumeStream(id, seq) --deltas, finished

A seq is the same position at every router: no token is repeated or lost. The first call begins with ``with`` or with
the first read, which both end it: a stream that is dropped before has no call and no request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

from decant.client.results import Delta
from decant.client.retry import RetryState
from decant.client.routers import AsyncRouters, Routers, call_span, closed_error, typed_errors, typed_errors_until
from decant.client.transcript import Transcript
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import ServiceError
from decant.runtime.telemetry import tracing

StreamRequest = pb.GenerateRequest | pb.ResumeStreamRequest


def is_cancelled_when_left(request: StreamRequest) -> bool:
    return (
        isinstance(request, pb.GenerateRequest)
        and request.stream.on_disconnect != pb.StreamOptions.ON_DISCONNECT_DETACH
    )


class ResumableStream(Transcript):
    def __init__(self, request: StreamRequest, addresses: tuple[str, ...], retries: RetryState) -> None:
        super().__init__(request.request_id)
        self.resumed_at: list[str] = []
        """Addresses of routers, in order."""
        self._request = request
        self._addresses = addresses
        self._retries = retries
        self._call: Any = None
        self._is_over = False
        self._is_resuming = False
        self._span = tracing.Span()
        if isinstance(request, pb.ResumeStreamRequest):
            self.seq = request.after_seq
            self.output_seqs = list(request.after_output_seqs) or [request.after_seq]

    @property
    def router(self) -> str:
        return self._addresses[self._retries.router]

    def _next_call(self) -> tuple[str, Message]:
        """Repeat GenerateStream until the first token, to which a router attaches or which it starts; then resume."""
        if not self.seq and isinstance(self._request, pb.GenerateRequest):
            return "GenerateStream", self._request
        return "ResumeStream", pb.ResumeStreamRequest(
            request_id=self.request_id,
            after_seq=self.seq,
            after_output_seqs=self.output_seqs if len(self.output_seqs) > 1 else (),
        )

    def _first_call(self) -> tuple[str, Message]:
        """Start the deadline and the span."""
        self._retries.start_deadline()
        method, message = self._next_call()
        self._span = call_span(method, self._request, self._retries)
        return method, message

    def _resumption(self) -> tuple[str, Message]:
        self._is_resuming = self.started is not None
        return self._next_call()

    def _receive(self, message: pb.GenerateStreamResponse) -> Delta | None:
        if message.HasField("waiting"):
            return self._take(message)
        if message.seq > self.seq or self.started is None or message.HasField("usage"):
            self._retries.mark_progress()  # a resumed stream begins with messages that are known already
        if self._is_resuming:
            self._is_resuming = False
            self.resumed_at.append(self.router)
        return self._take(message)


class Stream(ResumableStream):
    """Iterate for deltas; iterating raises the stream's error. `text` and `outputs` grow; after the end it has
    `finished`, `usage` and `receipt`.

    A broken stream resumes at another router; `resumed_at` lists them. Leaving it early (a break, an exception, the end
    of a ``with``) cancels the request, unless it is detached or `Client.resume` made the stream.
    """

    def __init__(self, routers: Routers, request: StreamRequest, retries: RetryState) -> None:
        super().__init__(request, routers.addresses, retries)
        self._routers = routers
        self._signal = routers.cancel_signal()

    def __iter__(self) -> Iterator[Delta]:
        try:
            self._begin()
            while not self.is_complete:
                try:
                    with typed_errors(self._retries):
                        for message in self._call:
                            if delta := self._receive(message):
                                yield delta
                    break
                except ServiceError as error:
                    self._resume_after(error)
            self._is_over = True
        except ServiceError as error:
            self._is_over = True
            self._span.end(error.label)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Leave the stream; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._signal.set()
            if self._call is None:
                return
            try:
                if is_cancelled_when_left(self._request):
                    self._routers.cancel_request(self.request_id)
            finally:
                self._call.cancel()
                self._span.event("left")
        self._span.end()

    def disconnect(self) -> None:
        """End the call, not the request; iterating raises Cancelled. For any thread or signal handler."""
        self._signal.set()
        if self._call is not None:
            self._call.cancel()

    def _begin(self) -> None:
        if self._signal.is_set:
            raise closed_error()
        if self._call is None:
            self._start(*self._first_call())

    def _resume_after(self, error: ServiceError) -> None:
        if self.is_complete:  # only the call's end was missing
            return
        self._routers.wait(self._retries, self._signal, error)
        self._start(*self._resumption())

    def _start(self, method: str, request: Message) -> None:
        self._call = self._routers.start_call(method, request, self._retries)
        if self._signal.is_set:  # by another thread, which may not have seen the call
            self._call.cancel()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(ResumableStream):
    """See `Stream`. Cancelling the task that reads it leaves it too."""

    def __init__(self, routers: AsyncRouters, request: StreamRequest, retries: RetryState) -> None:
        super().__init__(request, routers.addresses, retries)
        self._routers = routers
        self._signal = routers.cancel_signal()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            self._begin()
            while not self.is_complete:
                try:
                    with typed_errors_until(self._signal, self._retries):
                        async for message in self._call:
                            if delta := self._receive(message):
                                yield delta
                    break
                except ServiceError as error:
                    await self._resume_after(error)
            self._is_over = True
        except ServiceError as error:
            self._is_over = True
            self._span.end(error.label)
            raise
        finally:
            await self.close()

    async def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._signal.set()
            if self._call is None:
                return
            try:
                if is_cancelled_when_left(self._request):
                    await self._routers.cancel_request(self.request_id)
            finally:
                self._call.cancel()
                self._span.event("left")
        self._span.end()

    def disconnect(self) -> None:
        """End the call, not the request; iterating raises Cancelled."""
        self._signal.set()
        if self._call is not None:
            self._call.cancel()

    def _begin(self) -> None:
        if self._signal.is_set:
            raise closed_error()
        if self._call is None:
            self._start(*self._first_call())

    async def _resume_after(self, error: ServiceError) -> None:
        if self.is_complete:
            return
        await self._routers.wait(self._retries, self._signal, error)
        self._start(*self._resumption())

    def _start(self, method: str, request: Message) -> None:
        self._call = self._routers.start_call(method, request, self._retries)

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
