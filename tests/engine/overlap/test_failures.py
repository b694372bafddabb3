from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.loop import EngineLoop
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import FinishReason, StopParams
from tests.engine.factories import BLOCK, CONTEXT_LENGTH, VOCABULARY, make_engine, make_request, run
from tests.engine.overlap.harness import Overlapping
from tests.engine.properties import nothing_is_held


class Unreliable(Overlapping):
    bad: frozenset[str] = frozenset()
    error: Exception | None = None

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        wait = super().submit(plan)
        failed = {index: "bad" for index, row in enumerate(plan.rows) if row.request.id in self.bad}

        def result() -> StepResult:
            if (error := self.error) is not None:
                self.error = None
                raise error
            found = wait()
            tokens = [None if index in failed else token for index, token in enumerate(found.sampled)]
            return replace(found, sampled=tokens, failed=failed)

        return result


def make_unreliable(budget: int = 64, cost: Callable[[StepPlan], float] | None = None) -> tuple[Engine, Unreliable]:
    device = Unreliable(
        num_blocks=64, block_size=BLOCK, vocab_size=VOCABULARY, context_length=CONTEXT_LENGTH, cost=cost
    )
    return make_engine(device=device, budget=budget), device


def test_a_prompt_that_failed_is_not_found_while_its_next_chunk_is_computed() -> None:
    engine, device = make_unreliable(budget=8)
    device.bad = frozenset({"a"})
    engine.add(make_request("a", 24))
    assert [end.reason for end in engine.step().ended] == [FinishReason.FAILED]
    log = run(engine, make_request("b", 24))
    assert log["b"].started is not None
    assert log["b"].started.cached == 0, "it continued blocks of the failed prompt"
    nothing_is_held(engine)


def test_output_that_failed_is_not_cached_while_blocks_of_another_wait_for_a_step() -> None:
    engine, device = make_unreliable()
    engine.add(make_request("a", 5, max_tokens=12))
    engine.add(make_request("b", 6, stop=StopParams(None, ignore_eos=True)))
    while len(engine.sequences["a"].tokens) < 16:  # its last token is being drawn: it has no row in the next step
        engine.step()
    tokens = list(engine.sequences["a"].tokens)
    device.bad = frozenset({"a"})
    engine.cancel("b")
    result = engine.step_queue.finish
    engine.step_queue.finish = lambda: replace(result(), failed={0: "bad"}, sampled=[None, None])  # type: ignore[method-assign]
    engine.add(make_request("c", [*tokens[:13], 1]))
    engine.step()
    assert engine.pool.index.longest_prefix(engine.sequences["c"].hashes(range(3), BLOCK)).num_blocks == 0


def test_a_step_that_fails_in_a_command_ends_the_engine() -> None:
    async def main() -> EngineStopped:
        engine, device = make_unreliable(cost=lambda plan: 0.03)
        crashed: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()
        loop = EngineLoop(engine, lambda output: None, crashed.set_result)

        def park(engine: Engine) -> None:
            engine.step()
            device.error = RuntimeError("the result is lost")
            engine.park("a")

        loop.start()
        await loop.call(lambda engine: engine.add(make_request("a", 5, stop=StopParams(80, ignore_eos=True))))
        with pytest.raises(RuntimeError, match="the result is lost"):
            await loop.call(park)
        return await asyncio.wait_for(crashed, 30)

    assert "the result is lost" in str(asyncio.run(main()))
