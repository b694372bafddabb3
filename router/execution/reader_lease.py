"""A course has one reader: the newest. Who reads it when another comes is ended, wherever he waits.

    first reader   ---deltas-------X ABORTED (SUPERSEDED)
    second reader            '-----deltas---------------> finished

He may wait for the course, or for a client that takes nothing any more; so it is his task that is stopped, and reading
itself pays nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from decant.protos import inference_pb2 as pb
from decant.router.execution.token_stream import TokenStream
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import Aborted, OutOfRange, ServiceError

UNREAD_SECONDS = 60.0
"""How long a message may wait for its client once the request has ended."""


Write = Callable[[pb.GenerateStreamResponse], Awaitable[None]]
"""Sends a message; it has been serialized when this returns."""


async def wait_for_resume_point(stream: TokenStream, after_seq: int) -> None:
    """Wait until what somebody lacks who has so many tokens can be read; he is the course's reader.

    Raises OutOfRange where nobody was shown as many, Aborted(TAIL_UNCERTAIN) where his last ones may be others than
    those written here, and the course's error where it was over before it was as far.
    """
    await stream.wait_until_caught_up(after_seq)
    certain = stream.certain_tokens
    if certain is not None and after_seq > certain:
        words = f"what was shown after token {certain} is lost, and may not come out the same again"
        raise Aborted(Reason.TAIL_UNCERTAIN, words, resume=ResumePoint(0, certain))
    if after_seq > len(stream.tokens):
        if stream.may_lag_client and isinstance(stream.end, ServiceError):
            raise stream.end
        raise OutOfRange(after_seq, 0, len(stream.tokens))
    stream.may_lag_client, stream.certain_tokens = False, None


class ReaderLease:
    """A call reads a course for as long as the block runs. It may be ended by the next call, or where its client takes
    nothing any more: finished courses would stay in memory for as long as such clients stay connected.

    The block's end raises Aborted(SUPERSEDED) or Aborted(SLOW_READER) then, unless the call itself was cancelled too.
    """

    def __init__(self, stream: TokenStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._task = task
        self._now = loop.time
        self._call_later = loop.call_later
        self._timer: asyncio.TimerHandle | None = None
        self._error: Aborted | None = None
        self._sending_since: float | None = None
        self._over_since: float | None = None  # as far as was looked

    @property
    def is_last(self) -> bool:
        """Whether no newer call reads the course."""
        return self._error is None or self._error.reason is not Reason.SUPERSEDED

    def supersede(self) -> None:
        self._stop(Aborted(Reason.SUPERSEDED, "a newer stream of this request is open"))

    def watched(self, write: Write) -> Write:
        """``write``, whose time is limited once the course has ended."""

        async def send(message: pb.GenerateStreamResponse) -> None:
            self._sending_since = self._now()
            await write(message)
            self._sending_since = None

        return send

    def _look(self) -> None:
        now, since = self._now(), self._sending_since
        if self._stream.end is not None:
            self._over_since = self._over_since or now
            if since is not None and now - max(since, self._over_since) >= UNREAD_SECONDS:
                words = f"the request has ended, and no message was taken for {UNREAD_SECONDS:g} s"
                resume = ResumePoint(0, len(self._stream.tokens))
                self._stop(Aborted(Reason.SLOW_READER, words, resume=resume))
                return
        self._timer = self._call_later(UNREAD_SECONDS / 4, self._look)

    def _stop(self, error: Aborted) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        self._look()
        before, self._stream.reader = self._stream.reader, self
        if before is not None:
            before.supersede()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream.reader is self:
            self._stream.reader = None
        if self._timer is not None:
            self._timer.cancel()
        if self._error is not None and self._task.uncancel() == 0:
            raise self._error from None
