"""Runs of a decode worker under any order of messages, engine steps, breaks and timers.

Whatever the order: a router gets the tokens that an engine on its own generates, each run ends once for its owner, and
the worker keeps nothing of it afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.virtual_time import run, settle
from tests.worker.schedule_actions import Actions
from tests.worker.schedule_trial import Trial

UNSHRUNK = (Phase.reuse, Phase.generate, Phase.explicit)

COMMON = ("start", "fetch", "step", "deliver", "round", "round", "wait")
MESSAGES = ("cancel", "forget", "resend", "repeat", "adopt", "replace", "migrate", "receive", "receive")
FAULTS = ("leave", "open", "stall", "cut")
ENDS = ("drain", "crash")


@pytest.fixture(autouse=True, scope="module")
def quiet_log() -> Iterator[None]:
    """Thousands of schedules log thousands of breaks."""
    with capture_logs():
        yield


async def play(actions: list[tuple[str, int]]) -> None:
    trial = Trial()
    await trial.begin()
    perform = Actions(trial)
    for name, value in actions:
        result = getattr(perform, name)(value)
        if inspect.isawaitable(result):
            await result
        if value % 3:  # else the next action comes at the same instant
            await settle()
    await settle()
    await trial.finish()


def schedules(*names: str, size: int = 60) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 255)), min_size=size // 2, max_size=size)


@settings(max_examples=100, phases=UNSHRUNK, deadline=None)
@given(schedules(*COMMON, *COMMON, *MESSAGES))
def test_runs_end_once_and_leave_nothing_in_any_order_of_messages(actions: list[tuple[str, int]]) -> None:
    run(play(actions))


@settings(max_examples=100, phases=UNSHRUNK, deadline=None)
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS))
def test_runs_end_once_and_leave_nothing_whatever_breaks(actions: list[tuple[str, int]]) -> None:
    run(play(actions))


@settings(max_examples=100, phases=UNSHRUNK, deadline=None)
@given(schedules(*COMMON, *COMMON, *MESSAGES, *FAULTS, *ENDS))
def test_runs_end_once_and_leave_nothing_when_the_worker_drains_or_its_engine_crashes(
    actions: list[tuple[str, int]],
) -> None:
    run(play(actions))


@settings(max_examples=100, phases=UNSHRUNK, deadline=None)
@given(
    st.integers(0, 255), st.integers(0, 40), st.sampled_from([*MESSAGES, "leave", "cut", "stall"]), st.integers(0, 255)
)
def test_a_fetched_run_survives_one_event_at_any_instant(size: int, instant: int, event: str, value: int) -> None:
    """Every instant between the Start and the end, in half steps of each engine."""
    steps = [("deliver" if half % 2 else "step", half // 2) for half in range(60)]
    run(play([("fetch", size), *steps[:instant], (event, value), *steps[instant:]]))
