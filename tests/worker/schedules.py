"""Schedules: lists of method names with one number each, drawn by hypothesis."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.virtual_time import settle

Schedule = Sequence[tuple[str, int]]

in_many_orders = settings(
    max_examples=100,
    phases=(Phase.reuse, Phase.generate, Phase.explicit),  # without Phase.shrink, which takes minutes
    deadline=None,
)


@pytest.fixture(autouse=True, scope="module")
def quiet_log() -> Iterator[None]:
    with capture_logs():
        yield


def schedules(*names: str, size: int = 60) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 255)), min_size=size // 2, max_size=size)


async def perform(schedule: Schedule, *performers: object) -> None:
    for name, value in schedule:
        performer = next(each for each in performers if hasattr(each, name))
        result = getattr(performer, name)(value)
        if inspect.isawaitable(result):
            await result
        if value % 3:  # else the next action comes at the same instant
            await settle()
    await settle()
