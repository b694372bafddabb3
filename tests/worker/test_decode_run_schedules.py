"""In any order of messages, engine steps, breaks and timers, a router gets the tokens of an undisturbed engine, each
run ends once for its owner, and the worker keeps nothing of it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.virtual_time import run
from tests.worker.decode_actions import RouterActions, WorkerActions
from tests.worker.decode_scenario import DecodeScenario
from tests.worker.schedules import Schedule, in_many_orders, perform, quiet_log, schedules

__all__ = ["quiet_log"]

COMMON = ("start", "fetch", "step", "deliver", "round", "round", "wait")
MESSAGES = ("cancel", "forget", "resend", "repeat", "adopt", "replace", "migrate", "receive", "receive")
FAULTS = ("leave", "open", "stall", "cut")
ENDS = ("drain", "crash")


async def play(schedule: Schedule) -> None:
    scenario = DecodeScenario()
    await scenario.begin()
    await perform(schedule, RouterActions(scenario), WorkerActions(scenario))
    await scenario.finish()


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES))
def test_runs_end_once_and_leave_nothing_in_any_order_of_messages(schedule: Schedule) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS))
def test_runs_end_once_and_leave_nothing_under_faults(schedule: Schedule) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS, *ENDS))
def test_runs_end_once_and_leave_nothing_when_the_worker_drains_or_its_engine_crashes(
    schedule: Schedule,
) -> None:
    run(play(schedule))


@pytest.mark.slow
@in_many_orders
@given(
    st.integers(0, 255), st.integers(0, 40), st.sampled_from([*MESSAGES, "leave", "cut", "stall"]), st.integers(0, 255)
)
def test_a_fetched_run_survives_one_event_at_any_instant(size: int, instant: int, event: str, value: int) -> None:
    steps = [("deliver" if half % 2 else "step", half // 2) for half in range(60)]
    run(play([("fetch", size), *steps[:instant], (event, value), *steps[instant:]]))


@pytest.mark.slow
@in_many_orders
@given(
    st.integers(150, 255),
    st.integers(1, 8),
    st.integers(0, 30),
    st.sampled_from([*MESSAGES, *FAULTS]),
    st.integers(0, 255),
)
def test_a_migration_survives_one_event_at_any_instant(
    size: int, begins: int, instant: int, event: str, value: int
) -> None:
    steps = [("round", 1)] * begins
    steps += [("migrate", 1), ("round", 1), ("receive", 1)] + [
        (("step", "deliver")[half % 2], half // 2) for half in range(30)
    ]
    place = min(begins + instant, len(steps))
    run(play([("start", size), *steps[:place], (event, value), *steps[place:]]))
