from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped, InvalidRequest
from decant.engine.loop import EngineLoop
from decant.engine.output import PromptLogprobs, SequenceFinished, StepOutput, Token
from decant.engine.request import Request

Event = Token | PromptLogprobs | SequenceFinished


class Streams:
    def __init__(self, engine: Engine) -> None:
        self.loop = EngineLoop(engine, self._on_step, self._fail)
        self._queues: dict[str, asyncio.Queue[Event | EngineStopped]] = {}

    async def __aenter__(self) -> Streams:
        self.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.loop.stop()
        self._fail(EngineStopped("the engine was stopped"))

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one sequence, ``SequenceFinished`` last.

        Raises InvalidRequest, or EngineStopped if the engine's thread ends first. Leaving early cancels the sequence;
        its id is free once that is done.
        """
        if request.id in self._queues:
            raise InvalidRequest("id", "not in use by a live sequence", request.id)
        # Before the sequence exists: the answer to ``add`` and its first token may arrive in one callback.
        queue = self._queues[request.id] = asyncio.Queue()
        over = False
        try:
            await self.loop.call(lambda engine: engine.add(request))
            while not over:
                event = await queue.get()
                if isinstance(event, EngineStopped):
                    raise event
                over = isinstance(event, SequenceFinished)
                yield event
        except (EngineStopped, InvalidRequest):
            over = True
            raise
        finally:
            self._leave(request.id, over)

    def _leave(self, id: str, over: bool) -> None:
        """Free the id at once after an end, else once it is cancelled: a later sequence must not get its end."""
        if over:
            del self._queues[id]
        else:
            self.loop.post(lambda engine: engine.cancel(id), then=lambda: self._queues.pop(id))

    def _on_step(self, output: StepOutput) -> None:
        events: list[Event] = [*output.prompt_logprobs, *output.tokens, *output.ended]
        for event in events:
            queue = self._queues.get(event.id)
            if queue is not None:
                queue.put_nowait(event)

    def _fail(self, stopped: EngineStopped) -> None:
        for queue in self._queues.values():
            queue.put_nowait(stopped)
