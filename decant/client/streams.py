"""An answer that is being written, for whoever blocks and for whoever awaits.

    GenerateStream --started, deltas--X                                     a connection breaks, a router drains
                                       ResumeStream(id, seq) --deltas----X
                                                                          ResumeStream(id, seq) --deltas, finished

Nothing comes twice and nothing is left out: a seq means the same on every router.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from google.protobuf.message import Message

from decant.client.results import Delta
from decant.client.retry import RetryState
from decant.client.routers import AsyncRouters, Routers, typed_errors, typed_errors_until
from decant.client.transcript import Transcript
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import ServiceError

Asked = pb.GenerateRequest | pb.ResumeStreamRequest
"""With what a stream begins."""


class ResumableStream(Transcript):
    """What both kinds of stream share: how far it is, and what it would be resumed with."""

    def __init__(self, asked: Asked, addresses: tuple[str, ...], tries: RetryState) -> None:
        super().__init__(asked.request_id)
        self.resumed_at: list[str] = []
        """The routers that the stream went on at after it broke; empty if it never did."""
        self._asked = asked
        self._addresses = addresses
        self._tries = tries
        self._is_over = False
        self._is_resuming = False
        if isinstance(asked, pb.ResumeStreamRequest):
            self.seq = asked.after_seq

    @property
    def router(self) -> str:
        """The router that it is read from, by its address."""
        return self._addresses[self._tries.router]

    @property
    def _cancels(self) -> bool:
        """Whether the request ends with whoever leaves its stream: it began with this one, and wasn't detached."""
        asked = self._asked
        return (
            isinstance(asked, pb.GenerateRequest)
            and asked.stream.on_disconnect != pb.StreamOptions.ON_DISCONNECT_DETACH
        )

    def _next_call(self) -> tuple[str, Message]:
        """The method and request that bring what has not come yet. Before anything has, the same request again
        finds what runs under its id, or runs it where nobody has heard of it."""
        if not self.seq and isinstance(self._asked, pb.GenerateRequest):
            return "GenerateStream", self._asked
        return "ResumeStream", pb.ResumeStreamRequest(request_id=self.request_id, after_seq=self.seq)

    def _resumption(self) -> tuple[str, Message]:
        self._is_resuming = self.started is not None
        return self._next_call()

    def _heard(self, message: pb.GenerateStreamResponse) -> Delta | None:
        if message.seq > self.seq or self.started is None or message.HasField("usage"):
            self._tries.heard()  # something new: a stream that is resumed begins with what is known
        if self._is_resuming:
            self._is_resuming = False
            self.resumed_at.append(self.router)
        return self._take(message)


class Stream(ResumableStream):
    """An answer that is being written; iterating gives its deltas. What has arrived so far stays readable: `text`,
    `outputs`, and after the end `finished`, `usage` and `receipt`.

    A stream that breaks goes on at another router by itself; `resumed_at` says where. Whoever leaves it early (a
    break, an exception, the end of a ``with``) cancels the request, unless it was detached.
    """

    def __init__(self, routers: Routers, asked: Asked, tries: RetryState) -> None:
        """For `Client.stream` and `Client.resume`."""
        super().__init__(asked, routers.addresses, tries)
        self._routers = routers
        self._bell = routers.bell()
        self._call = routers.begin(*self._next_call(), tries)

    def __iter__(self) -> Iterator[Delta]:
        """Raises the error with which the stream ended, if it did."""
        try:
            while not self.is_complete:
                try:
                    with typed_errors():
                        for message in self._call:
                            if delta := self._heard(message):
                                yield delta
                    break
                except ServiceError as error:
                    self._go_on(error)
            self._is_over = True
        except ServiceError:
            self._is_over = True
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the request unless it has ended or was detached. May be repeated."""
        if not self._is_over:
            self._is_over = True
            self._bell.ring()
            try:
                if self._cancels:
                    self._routers.leave(self.request_id)
            finally:
                self._call.cancel()

    def break_off(self) -> None:
        """Ends the call and tells nobody: iterating raises Cancelled. From any thread, and from a signal handler."""
        self._bell.ring()
        self._call.cancel()

    def _go_on(self, error: ServiceError) -> None:
        """Opens the next call after `error` ended the last. Raises `error` where there is none."""
        if self.is_complete:  # all had arrived but the call's end
            return
        self._routers.wait(self._tries, self._bell, error)
        self._call = self._routers.begin(*self._resumption(), self._tries)
        if self._bell.has_rung:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(ResumableStream):
    """An answer that is being written; see `Stream`. Cancelling the task that reads leaves it too."""

    def __init__(self, routers: AsyncRouters, asked: Asked, tries: RetryState) -> None:
        """For `AsyncClient.stream` and `AsyncClient.resume`."""
        super().__init__(asked, routers.addresses, tries)
        self._routers = routers
        self._bell = routers.bell()
        self._call = routers.begin(*self._next_call(), tries)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises the error with which the stream ended, if it did."""
        try:
            while not self.is_complete:
                try:
                    with typed_errors_until(self._bell):
                        async for message in self._call:
                            if delta := self._heard(message):
                                yield delta
                    break
                except ServiceError as error:
                    await self._go_on(error)
            self._is_over = True
        except ServiceError:
            self._is_over = True
            raise
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancels the request unless it has ended or was detached. May be repeated."""
        if not self._is_over:
            self._is_over = True
            self._bell.ring()
            try:
                if self._cancels:
                    await self._routers.leave(self.request_id)
            finally:
                self._call.cancel()

    def break_off(self) -> None:
        """Ends the call and tells nobody: iterating raises Cancelled."""
        self._bell.ring()
        self._call.cancel()

    async def _go_on(self, error: ServiceError) -> None:
        """Opens the next call after `error` ended the last. Raises `error` where there is none."""
        if self.is_complete:
            return
        await self._routers.wait(self._tries, self._bell, error)
        self._call = self._routers.begin(*self._resumption(), self._tries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
