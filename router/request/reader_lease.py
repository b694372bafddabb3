from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from decant.protos import inference_pb2 as pb
from decant.router.request.token_stream import AdoptedTail, Counts, TokenStream, exceeds, resume_point
from decant.router.timings import RouterTimings
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, OutOfRange, ServiceError

Write = Callable[[pb.GenerateStreamResponse], Awaitable[None]]
"""The message has been serialized when this returns."""


async def wait_for_resume_point(stream: TokenStream, sent: Counts) -> None:
    """Wait until a client that was ``sent`` tokens can continue here.

    Raises OutOfRange if no client was sent so many, Aborted(TAIL_UNCERTAIN) if its last tokens may differ from those
    here, and the stream's error if it ended before.
    """
    await stream.wait_until_caught_up(sent)
    certain = stream.tail.certain_tokens
    if certain is not None and stream.tail.is_uncertain(sent):
        point = resume_point(certain)
        seqs = f"{list(point.output_seqs)} of the outputs" if point.output_seqs else f"{point.last_seq}"
        detail = f"tokens after seq {seqs} are lost and may differ when they are generated again: resume there"
        raise Aborted(Reason.TAIL_UNCERTAIN, detail, resume=point)
    if exceeds(sent, stream.counts):
        if stream.tail.may_lag_client and isinstance(stream.end, ServiceError):
            raise stream.end
        if len(sent) > 1:
            raise OutOfRange.of_outputs(sent, stream.resume_point)
        raise OutOfRange(sent[0], 0, stream.num_tokens)
    stream.tail = AdoptedTail()


class ReaderLease:
    """Right to read a stream in a ``with`` block, until a newer call reads it, or until a ``watched`` write takes
    ``unread_s`` after the request's end.

    The call's task is then cancelled, because it may wait for tokens or for its client, and the block raises
    Aborted(SUPERSEDED) or Aborted(SLOW_READER), unless the call itself was cancelled too.
    """

    def __init__(self, stream: TokenStream, unread_s: float = RouterTimings().unread_s) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._unread_s = unread_s
        self._task = task
        self._now = loop.time
        self._call_later = loop.call_later
        self._timer: asyncio.TimerHandle | None = None
        self._error: Aborted | None = None
        self._sending_since: float | None = None
        self._ended_since: float | None = None  # as of the last check

    @property
    def is_last(self) -> bool:
        return self._error is None or self._error.reason is not Reason.SUPERSEDED

    def supersede(self) -> None:
        self._stop(Aborted(Reason.SUPERSEDED, "a newer stream of this request is open"))

    def watched(self, write: Write) -> Write:
        async def send(message: pb.GenerateStreamResponse) -> None:
            self._sending_since = self._now()
            await write(message)
            self._sending_since = None

        return send

    def _check(self) -> None:
        now, since = self._now(), self._sending_since
        if self._stream.end is not None:
            self._ended_since = self._ended_since or now
            if since is not None and now - max(since, self._ended_since) >= self._unread_s:
                detail = f"the client read no message for {self._unread_s:g} s after the request's end"
                self._stop(Aborted(Reason.SLOW_READER, detail, resume=self._stream.resume_point))
                return
        self._timer = self._call_later(self._unread_s / 4, self._check)

    def _stop(self, error: Aborted) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        self._check()
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
