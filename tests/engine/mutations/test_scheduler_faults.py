from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decant.engine.blocks import BlockPool
from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.plan import Row, StepPlan
from decant.engine.scheduler import Limits, Scheduler, _Budget
from decant.engine.sequence import Sequence as EngineSequence
from tests.engine.mutations.harness import Patch, check_found

pytestmark = pytest.mark.slow


def publish_too_early(patch: Patch) -> None:
    def commit(engine: Engine, *step: Any) -> None:
        original(engine, *step)
        for sequence in engine.scheduler.running:
            size = engine.pool.block_size
            engine.scheduler.publish(sequence, range(sequence.num_computed // size, len(sequence.tokens) // size))

    original = Engine._commit
    patch.setattr(Engine, "_commit", commit)


def publish_an_output_block_too_early(patch: Patch) -> None:
    """Publish on release, when the slot of the last token is empty."""

    def release(scheduler: Scheduler, sequence: EngineSequence) -> None:
        computed, sequence.num_computed = sequence.num_computed, len(sequence.tokens)
        original(scheduler, sequence)
        sequence.num_computed = computed

    original = Scheduler.release
    patch.setattr(Scheduler, "release", release)


def spend_one_token_too_many(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        limits = scheduler.limits
        scheduler.limits = replace(limits, token_budget=limits.token_budget + 1)
        planned = original(scheduler, reserved_slots)
        scheduler.limits = limits
        return planned

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def fill_by_time_alone(patch: Patch) -> None:
    def spend(budget: _Budget, sequence: EngineSequence, slots: int) -> Row:
        limits = budget._limits
        if budget._predictor.costs != StepCostModel():
            budget._limits = replace(limits, token_budget=10**6)
        row = original(budget, sequence, slots)
        budget._limits = limits
        return row

    original = _Budget.spend
    patch.setattr(_Budget, "spend", spend)


def schedule_more_after_a_cut_prompt(patch: Patch) -> None:
    def spend(budget: _Budget, sequence: EngineSequence, slots: int) -> Row:
        row = original(budget, sequence, slots)
        budget._is_spent = False
        return row

    original = _Budget.spend
    patch.setattr(_Budget, "spend", spend)


def give_a_sequence_two_rows(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        (plan, sequences), limits = original(scheduler, reserved_slots), scheduler.limits
        first = plan.rows[0] if plan.rows else None
        total = plan.num_tokens + (first.end - first.start if first else 0)
        if first is None or total > limits.token_budget or len(plan.rows) == limits.max_running:
            return plan, sequences
        return plan._replace(rows=(first, *plan.rows), num_tokens=total), [sequences[0], *sequences]

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def run_one_sequence_too_many(patch: Patch) -> None:
    def init(scheduler: Scheduler, pool: BlockPool, limits: Limits, *args: Any) -> None:
        most = limits.max_running + 1
        limits = replace(limits, max_running=most, token_budget=max(most, limits.token_budget))
        original(scheduler, pool, limits, *args)

    original = Scheduler.__init__
    patch.setattr(Scheduler, "__init__", init)


def admit_the_shortest(patch: Patch) -> None:
    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        scheduler.waiting.sort(key=lambda sequence: sequence.num_remaining)
        return original(scheduler, reserved_slots)

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


def preempt_the_most_urgent(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, _: EngineSequence) -> None:
        original(scheduler, scheduler.running[0])

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def prompts_before_decodes(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        plan, sequences = original(scheduler, reserved_slots)
        return plan._replace(rows=tuple(reversed(plan.rows))), sequences[::-1]

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def lose_a_preempted_sequence(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, sequence: EngineSequence) -> None:
        original(scheduler, sequence)
        scheduler.waiting.remove(sequence)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def never_admit_a_low_priority(patch: Patch) -> None:
    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        if scheduler.waiting and scheduler.waiting[0].request.priority < 0:
            return None
        return original(scheduler, reserved_slots)

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


def skip_a_token_after_a_hit(patch: Patch) -> None:
    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        sequence = original(scheduler, reserved_slots)
        if sequence and sequence.num_computed and sequence.num_remaining > 1:
            sequence.num_computed += 1
        return sequence

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


FAULTS: dict[Callable[[Patch], None], str] = {
    publish_too_early: "published before it was filled",
    publish_an_output_block_too_early: "holds other bytes",
    spend_one_token_too_many: "exceed the budget",
    fill_by_time_alone: "exceed the budget",
    schedule_more_after_a_cut_prompt: "which was cut",
    give_a_sequence_two_rows: "two rows",
    run_one_sequence_too_many: "exceed|run, at most",
    admit_the_shortest: "overtook|more urgent",
    preempt_the_most_urgent: "more urgent",
    prompts_before_decodes: "mixed up|more urgent",
    lose_a_preempted_sequence: "in no state",
    never_admit_a_low_priority: "a sequence never finishes",
    skip_a_token_after_a_hit: "does not hold|wrote",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_detect(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_found(fault, FAULTS[fault], monkeypatch)
