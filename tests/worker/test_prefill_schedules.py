"""In any order of messages, engine steps, breaks and timers, a call's events come in the protocol's order, it ends
once, and the worker keeps nothing of it. A call that breaks, or loses the request to another owner, ends its run at
once unless a fetch is open.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.virtual_time import run
from tests.worker.prefill_actions import CallActions, WorkerActions
from tests.worker.prefill_scenario import PrefillScenario
from tests.worker.schedules import Schedule, in_many_orders, perform, quiet_log, schedules

__all__ = ["quiet_log"]

COMMON = ("call", "handoff", "handoff", "step", "step", "deliver", "deliver", "round", "round", "wait")
MESSAGES = ("receive", "receive", "receive", "renew", "invalid", "adopt", "stale", "break_off")
FAULTS = ("lose_router", "release", "stall", "cut")
ENDS = ("drain", "crash")


async def play(schedule: Schedule) -> None:
    scenario = PrefillScenario()
    await scenario.begin()
    await perform(schedule, CallActions(scenario), WorkerActions(scenario))
    await scenario.finish()


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES))
def test_calls_end_once_and_leave_nothing_in_any_order_of_messages(schedule: Schedule) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS))
def test_calls_end_once_and_leave_nothing_under_faults(schedule: Schedule) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS, *ENDS))
def test_calls_end_once_and_leave_nothing_when_the_worker_drains_or_its_engine_crashes(schedule: Schedule) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(
    st.integers(0, 255),
    st.integers(0, 30),
    st.sampled_from([*MESSAGES, *FAULTS, *ENDS, "wait"]),
    st.integers(0, 255),
)
def test_a_handoff_survives_one_event_at_any_instant(size: int, instant: int, event: str, value: int) -> None:
    steps = [("deliver" if half % 2 else "step", 2 * (half // 2 % 2)) for half in range(60)]
    fetch = [("receive", 0)] if size % 2 else []
    run(play([("handoff", size), *steps[:8], *fetch, *steps[8 : 8 + instant], (event, value), *steps[8 + instant :]]))
