"""What a call of an endpoint wants of the routers: a run for each prompt, and its answers and deltas in one order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from decant.client import Answer, AsyncClient, AsyncStream, Delta, Finished, Prompt, Usage

PROMPTS_AT_ONCE = 16
"""Prompts of one call that run at once."""


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
    """Client, id and deadline of one call."""

    client: AsyncClient
    id: str
    timeout: float | None

    def options(self, request: GenerationRequest, index: int) -> dict[str, Any]:
        """Options of the run of the prompt `index`."""
        id = self.id if len(request.prompts) < 2 else f"{self.id}-{index}"
        own: dict[str, Any] = {"request_id": id, "timeout": self.timeout}
        if request.messages is not None:
            own["messages"] = request.messages
        else:
            own["prompt"] = request.prompts[index]
        return {**request.options, **own}


async def answers(caller: Caller, request: GenerationRequest) -> list[Answer]:
    """The answer of each prompt. The first error cancels the other runs."""
    gate = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def answer(index: int) -> Answer:
        async with gate:
            return await caller.client.generate(**caller.options(request, index))

    count = max(1, len(request.prompts))
    if count == 1:
        return [await answer(0)]
    tasks = [asyncio.create_task(answer(index)) for index in range(count)]
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
    gate, waiting = asyncio.Semaphore(PROMPTS_AT_ONCE), asyncio.Queue[Piece](maxsize=1)

    async def run(index: int) -> None:
        async with gate, aclosing(_pieces_of(caller, request, index)) as own:
            async for piece in own:
                await waiting.put(piece)

    tasks = [asyncio.create_task(run(index)) for index in range(count)]
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
