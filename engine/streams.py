"""One asynchronous stream per sequence on top of an ``EngineLoop``: what a program without frames of its own wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.engine import Ended, Engine, PromptLogprobs, StepOutput, Token
from engine.errors import EngineStopped, InvalidRequest
from engine.loop import EngineLoop
from engine.request import Request

Event = Token | PromptLogprobs | Ended


class Streams:
    """Gives every request its own events. ``async with Streams(engine) as streams`` starts and stops the thread."""

    def __init__(self, engine: Engine) -> None:
        self.loop = EngineLoop(engine, self._on_step, self._on_crash)
        self._queues: dict[str, asyncio.Queue[Event | EngineStopped]] = {}

    async def __aenter__(self) -> Streams:
        self.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.loop.stop()

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Events of one sequence, ``Ended`` last. Leaving the iteration early cancels the sequence.

        Raises InvalidRequest when it is not taken, EngineStopped when the engine's thread ends before it.
        """
        if request.id in self._queues:
            raise InvalidRequest("id", "not alive already", request.id)
        # Before the sequence exists: the answer to ``add`` and its first token may come in one hand-over.
        queue = self._queues[request.id] = asyncio.Queue()
        finished = False
        added = False
        try:
            await self.loop.call(lambda engine: engine.add(request), undo=lambda engine, _: engine.cancel(request.id))
            added = True
            while not finished:
                event = await queue.get()
                if isinstance(event, EngineStopped):
                    finished = True
                    raise event
                finished = isinstance(event, Ended)
                yield event
        finally:
            del self._queues[request.id]
            if added and not finished:
                self.loop.post(lambda engine: engine.cancel(request.id))

    def _on_step(self, output: StepOutput) -> None:
        events: list[Event] = [*output.prompt_logprobs, *output.tokens, *output.ended]
        for event in events:
            queue = self._queues.get(event.id)
            if queue is not None:
                queue.put_nowait(event)

    def _on_crash(self, stopped: EngineStopped) -> None:
        for queue in self._queues.values():
            queue.put_nowait(stopped)
