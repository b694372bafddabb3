"""A course has one reader: the newest. Who reads it when another comes is ended, wherever he waits.

    first reader   ---deltas-------X ABORTED (SUPERSEDED)
    second reader            '-----deltas---------------> finished

He may wait for the course, or for a client that takes nothing any more; so it is his task that is stopped, and reading
itself pays nothing for it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from router.request import Course
from runtime.errors import Aborted, OutOfRange, ServiceError
from runtime.fault import Reason, ResumePoint


async def begin_behind(course: Course, after_seq: int) -> None:
    """Wait until what somebody lacks who has so many tokens can be read; he is the course's reader.

    Raises OutOfRange where nobody was shown as many, Aborted(TAIL_UNCERTAIN) where his last ones may be others than
    those written here, and the course's error where it was over before it was as far.
    """
    await course.reached(after_seq)
    certain = course.certain
    if certain is not None and after_seq > certain:
        words = f"what was shown after token {certain} is lost, and may not come out the same again"
        raise Aborted(Reason.TAIL_UNCERTAIN, words, resume=ResumePoint(0, certain))
    if after_seq > len(course.tokens):
        if course.is_behind and isinstance(course.end, ServiceError):
            raise course.end
        raise OutOfRange(after_seq, 0, len(course.tokens))
    course.is_behind, course.certain = False, None


class Reading:
    """A call reads a course for as long as the block runs, and may be ended by the next one.

    The block's end raises Aborted(SUPERSEDED) then, unless the call itself was cancelled too.
    """

    def __init__(self, course: Course) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._course = course
        self._task = task
        self._is_superseded = False

    @property
    def is_last(self) -> bool:
        """Whether nobody came after."""
        return not self._is_superseded

    def supersede(self) -> None:
        self._is_superseded = True
        self._task.cancel()

    def __enter__(self) -> Self:
        before, self._course.reader = self._course.reader, self
        if before is not None:
            before.supersede()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._course.reader is self:
            self._course.reader = None
        if self._is_superseded and self._task.uncancel() == 0:
            raise Aborted(Reason.SUPERSEDED, "a newer stream of this request is open") from None
