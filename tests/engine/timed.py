from __future__ import annotations

from decant.engine.costs import StepCostModel
from decant.engine.fake import FakeDevice
from decant.engine.plan import StepPlan, StepResult
from tests.engine.factories import BLOCK


class Timed(FakeDevice):
    """Device that records its plans; each step advances ``now`` by ``truth`` (default: its costs) times ``slower``."""

    def __init__(
        self, costs: StepCostModel, slower: float = 1.0, *, context_length: int = 2048, num_slots: int = 8192
    ) -> None:
        super().__init__(num_blocks=num_slots // BLOCK, block_size=BLOCK, context_length=context_length)
        self.costs = self.truth = costs
        self.slower = slower
        self.now = 0.0
        self.plans: list[StepPlan] = []

    def clock(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.now += self.slower * self.truth.seconds(plan.work)
        return super().run(plan)
