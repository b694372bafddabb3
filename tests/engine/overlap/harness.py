from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from decant.engine.fake import FakeDevice
from decant.engine.plan import Row, StepPlan, StepResult
from tests.engine import properties
from tests.engine.factories import BLOCK, CONTEXT_LENGTH, VOCABULARY
from tests.engine.state_machine import Watched


class Overlapping(FakeDevice):
    """Device that computes a step when it is submitted, when its result is awaited, or in between.

    ``rng`` chooses. ``ahead`` counts the steps that were submitted before the last was awaited.
    """

    overlaps_steps = True

    def __init__(self, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self.rng = random.Random(0)
        self.ahead = 0
        self.steps = 0
        self._submitted: list[StepPlan] = []  # not computed yet
        self._results: list[StepResult] = []  # computed and not awaited
        self._drawn: list[int | None] = []  # by the last computed step
        self._unawaited = 0

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        assert self._unawaited < 2, "a third step was submitted"
        self.ahead += self._unawaited
        self.steps += 1
        self._unawaited += 1
        for index in plan.inputs:
            row = plan.rows[index]
            assert row.end == row.start + 1 == len(row.tokens) + 1, f"{row.request.id} has a token too many"
            assert row.state is None or not row.state.reads_tokens, f"{row.request.id} is drawn without its tokens"
        rows = tuple(
            row._replace(tokens=list(row.tokens), blocks=tuple(blocks[:] for blocks in row.blocks)) for row in plan.rows
        )
        self._submitted.append(plan._replace(rows=rows))
        self._compute(self.rng.randint(0, len(self._submitted)))
        return self._await

    def _compute(self, steps: int) -> None:
        for _ in range(steps):
            plan = self._submitted.pop(0)
            rows = [self._with_input(plan, index, row) for index, row in enumerate(plan.rows)]
            self._results.append(FakeDevice.run(self, plan._replace(rows=tuple(rows))))
            self._drawn = list(self._results[-1].sampled)

    def _with_input(self, plan: StepPlan, index: int, row: Row) -> Row:
        if index not in plan.inputs:
            return row
        token = self._drawn[plan.inputs[index]]
        assert token is not None, f"{row.request.id} continues a row that drew nothing"
        return row._replace(tokens=[*row.tokens, token])

    def _await(self) -> StepResult:
        if not self._results:
            self._compute(1)
        self._unawaited -= 1
        self._compute(self.rng.randint(0, len(self._submitted)))
        return self._results.pop(0)


class WatchedOverlapping(Overlapping, Watched):
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        properties.plan_keeps_the_limits(self.engine, plan)
        properties.no_prompt_follows_one_that_was_cut(plan, self.forked)
        return super().submit(plan)


def make_overlapping(num_blocks: int = 64, eos: Iterable[int] = (), seed: int = 0) -> Overlapping:
    device = Overlapping(
        num_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=VOCABULARY,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=frozenset(eos),
    )
    device.rng = random.Random(seed)
    return device
