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
    """Draw two bytes for each action in one draw: a draw for each number takes as long as a third of the test."""

    def actions(drawn: bytes) -> list[tuple[str, int]]:
        return [(names[kind % len(names)], value) for kind, value in zip(drawn[::2], drawn[1::2], strict=False)]

    return st.binary(min_size=size, max_size=2 * size).map(actions)


async def perform(schedule: Schedule, *performers: object) -> None:
    for name, value in schedule:
        performer = next(each for each in performers if hasattr(each, name))
        result = getattr(performer, name)(value)
        if inspect.isawaitable(result):
            await result
        if value % 3:  # else the next action comes at the same instant
            await settle()
    await settle()
