from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from decant.protos import worker_pb2 as wire
from decant.router.attempt.context import AttemptContext
from decant.router.attempt.leg import Leg
from decant.router.attempt.prefill_leg import PrefillLeg
from decant.router.request.finish import finish_from_tokens
from decant.router.request.output import Finish, Output
from decant.router.workers import turns
from decant.router.workers.turns import Search

_T = TypeVar("_T")


class Legs:
    """All legs that an attempt began, and the one place where it waits for them.

    `Attempt`, `Migration` and the recorder's callers wait here: for a milestone, for a worker with capacity, or for the
    output's end. Messages of workers only ``wake`` it; a leg's failure is raised by the wait that needs that leg.
    """

    def __init__(self, context: AttemptContext) -> None:
        self._stream = stream = context.stream
        unfinished = context.unfinished
        finishes = [finish_from_tokens(stream.request, output.tokens) for output in unfinished]
        if stream.has_prompt_logprobs or not all(finishes):  # else a worker computes the prompt once more
            for output, finish in zip(unfinished, finishes, strict=True):  # its last report may be lost
                output.finish = finish
        self._legs: list[Leg] = []
        self._changed = asyncio.Event()

    @property
    def finish(self) -> Finish | None:
        """Finish of the output; None until it is complete."""
        return self._stream.finish

    def add(self, leg: Leg) -> None:
        self._legs.append(leg)

    def wake(self) -> None:
        self._changed.set()

    def on_stop_string(self, output: Output) -> None:
        if len(self._stream.outputs) > 1:
            for leg in self._legs:
                leg.cancel_output(output)
        self._changed.set()

    async def until(self, milestone: Callable[[], bool], *legs: Leg) -> bool:
        """Wait for ``milestone``; False if the output is complete without it.

        Raises a fatal error of any leg, and the failure of one of ``legs``.
        """
        while not milestone():
            if self._is_complete(*legs):
                return False
            await self.wait_for_change()
        return True

    async def until_complete(self, *legs: Leg) -> None:
        """Wait until the output is complete. Raises a fatal error of any leg, and the failure of one of ``legs``."""
        while not self._is_complete(*legs):
            await self.wait_for_change()

    async def find(self, search: Search[_T], *legs: Leg) -> _T | None:
        """Wait for a worker with capacity; None if the output is complete before.

        Raises the search's failure once its time is over, a fatal error of any leg, and the failure of one of ``legs``.
        """
        return await turns.find(search, self._changed, partial(self._is_complete, *legs))

    async def wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def until_reported(self, is_reported: Callable[[], bool]) -> None:
        """Wait for a report on a complete output. Raises a fatal error of any leg."""
        while not is_reported():
            self._check_fatal()
            await self.wait_for_change()

    def _is_complete(self, *legs: Leg) -> bool:
        self._check_fatal()
        if self.finish is not None:
            return True
        for leg in legs:
            if leg.failure is not None:
                raise leg.failure
        return False

    def _check_fatal(self) -> None:
        for leg in self._legs:
            if leg.fatal is not None:
                raise leg.fatal

    def close(self, cancel: wire.Cancel) -> None:
        is_over = self.finish is not None and not any(output.is_stopped_here for output in self._stream.outputs)
        for leg in self._legs:
            leg.close(None if is_over and isinstance(leg, PrefillLeg) else cancel)
