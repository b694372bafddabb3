from __future__ import annotations

import asyncio
from collections.abc import Callable

from decant.engine.engine import Engine
from decant.engine.loop import EngineLoop
from decant.engine.output import StepOutput
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import StopParams
from tests.engine.factories import BLOCK, VOCABULARY, make_engine, make_request, run_alone
from tests.engine.overlap.harness import Overlapping


class Eager(Overlapping):
    """Device that computes on submission: the next submission delays what is delivered after it."""

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        wait = super().submit(plan)
        self._compute(len(self._submitted))
        return wait


def test_a_sequence_is_parked_behind_the_tokens_that_were_delivered() -> None:
    request = make_request("a", 5, stop=StopParams(60, ignore_eos=True))
    known: list[int] = []

    async def main() -> list[list[int]]:
        seconds = 0.05
        several, ended = asyncio.Event(), asyncio.Event()

        def on_step(output: StepOutput) -> None:
            known.extend(token.token for token in output.tokens)
            if len(known) >= 3:
                several.set()
            if output.ended:
                ended.set()

        def park(engine: Engine) -> list[int]:
            engine.park("a")
            return engine.sequences["a"].tokens[5:]

        device = Eager(num_blocks=64, block_size=BLOCK, vocab_size=VOCABULARY, cost=lambda _: seconds)
        loop = EngineLoop(make_engine(device=device), on_step)
        loop.start()
        try:
            await loop.call(lambda engine: engine.add(request))
            async with asyncio.timeout(30):
                await several.wait()
                parked = await loop.call(park)
                seen = list(known)
                seconds = 0.0
                await loop.call(lambda engine: engine.resume("a"))
                await ended.wait()
        finally:
            await loop.stop()
        return [parked, seen]

    parked, seen = asyncio.run(main())
    assert parked == seen
    assert known == run_alone(request).text
