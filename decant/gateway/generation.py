"""What a call of an endpoint wants of the routers: a run for each prompt, and its answers and deltas in one order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from decant.client import Answer, AsyncClient, AsyncStream, Delta, Finished, Prompt, Usage
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import QuotaExceeded

PROMPTS_AT_ONCE = 16
"""Prompts of one call that run at once."""
RELEASE_S = 2.0
"""Time for a router to record that a run no longer counts as running, after its answer."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class GenerationRequest:
    """`prompts` have the same options. `messages` are the one prompt of a chat."""

    options: Mapping[str, Any]
    prompts: Sequence[Prompt] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    is_stream: bool = False
    includes_usage: bool = False

    @property
    def outputs_each(self) -> int:
        n = self.options.get("n")
        return n if isinstance(n, int) and n > 0 else 1


@dataclass(frozen=True)
class Caller:
    """Client, id and deadline of one call.

    A request with a key of its client's outlives the call, so that the call can be repeated.
    """

    client: AsyncClient
    id: str
    deadline: Deadline
    has_key: bool = False

    def remaining(self) -> float | None:
        """Seconds until the deadline. Raises DeadlineExceeded."""
        self.deadline.check()
        return self.deadline.remaining()

    def options(self, request: GenerationRequest, index: int) -> dict[str, Any]:
        """Options of the run of the prompt `index`."""
        # No id or key of a client has a space, so no other call takes the same id.
        id = self.id if len(request.prompts) < 2 else f"{self.id} {index}"
        own: dict[str, Any] = {"request_id": id, "timeout": self.remaining()}
        if self.has_key:
            own["on_disconnect"] = "detach"
        if request.messages is not None:
            own["messages"] = request.messages
        else:
            own["prompt"] = request.prompts[index]
        return {**request.options, **own}


class _Turns:
    """Turns of the runs of one call: `PROMPTS_AT_ONCE` at a time, and fewer if its tenant may have fewer.

    A run that the tenant's limit of running requests refuses is tried again when another run of this call has ended.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PROMPTS_AT_ONCE)
        self._has_ended = asyncio.Condition()
        self._num_open = 0
        self._last_end = -math.inf

    async def take(self, run: Callable[[], Awaitable[_T]]) -> _T:
        async with self._places:
            while True:
                self._num_open += 1
                try:
                    made = await run()
                    break
                except QuotaExceeded as error:
                    refusal = error
                finally:
                    self._num_open -= 1
                await self._wait_after(refusal)
        self._last_end = time.monotonic()
        async with self._has_ended:
            self._has_ended.notify()
        return made

    async def _wait_after(self, refusal: QuotaExceeded) -> None:
        """Wait until the run may be tried again. Raises `refusal` if the end of no run of this call can help."""
        if refusal.field != "in_flight":
            raise refusal
        if time.monotonic() < self._last_end + RELEASE_S:
            await asyncio.sleep(RELEASE_S / 10)
        elif self._num_open:
            async with self._has_ended:
                await self._has_ended.wait()
        else:
            raise refusal


async def answers(caller: Caller, request: GenerationRequest) -> list[Answer]:
    """The answer of each prompt. The first error cancels the other runs."""

    async def answer(index: int) -> Answer:
        return await caller.client.generate(**caller.options(request, index))

    count = max(1, len(request.prompts))
    if count == 1:
        return [await answer(0)]
    turns = _Turns()
    tasks = [asyncio.create_task(turns.take(partial(answer, index))) for index in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


@dataclass(frozen=True, slots=True)
class Piece:
    """A delta of the run `run`, or the end of the run with its stream."""

    run: int
    stream: AsyncStream
    delta: Delta | None


async def pieces(caller: Caller, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
    """Pieces of all runs as they come. Leaving it cancels the runs."""
    count = max(1, len(request.prompts))
    if count == 1:
        async with aclosing(_pieces_of(caller, request, 0)) as only:
            async for piece in only:
                yield piece
        return
    turns, waiting = _Turns(), asyncio.Queue[Piece](maxsize=1)

    async def run(index: int) -> None:
        async with aclosing(_pieces_of(caller, request, index)) as own:
            async for piece in own:
                await waiting.put(piece)

    tasks = [asyncio.create_task(turns.take(partial(run, index))) for index in range(count)]
    reading: asyncio.Task[Piece] | None = None
    running: set[asyncio.Task[Any]] = set(tasks)
    try:
        while running or not waiting.empty():
            reading = reading or asyncio.create_task(waiting.get())
            done, _ = await asyncio.wait({*running, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running:
                task.result()
            running -= done
            if reading in done:
                piece, reading = reading.result(), None
                yield piece
    finally:
        await _end([*tasks, *([reading] if reading else [])])


async def _pieces_of(caller: Caller, request: GenerationRequest, index: int) -> AsyncGenerator[Piece, None]:
    stream = caller.client.stream(**caller.options(request, index))
    async with aclosing(cast(AsyncGenerator[Delta, None], aiter(stream))) as deltas:
        async for delta in deltas:
            yield Piece(index, stream, delta)
    yield Piece(index, stream, None)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def finish_reason(finished: Finished | None, *, has_calls: bool = False) -> str:
    reason = finished.reason.value if finished else "stop"
    if reason != "stop":
        return "length"
    return "tool_calls" if has_calls else "stop"


def usage_object(usages: Iterable[Usage | None]) -> dict[str, Any]:
    """OpenAI's usage of all runs together."""
    known = [usage for usage in usages if usage is not None]
    made: dict[str, Any] = {
        "prompt_tokens": sum(usage.prompt_tokens for usage in known),
        "completion_tokens": sum(usage.completion_tokens for usage in known),
        "total_tokens": sum(usage.total_tokens for usage in known),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens or 0 for usage in known)},
    }
    if any(usage.reasoning_tokens is not None for usage in known):
        reasoning = sum(usage.reasoning_tokens or 0 for usage in known)
        made["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return made
