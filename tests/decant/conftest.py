"""Routers that tests share; starting one costs a thread and a port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.decant.scripted import Script, serving
from tests.decant.two_routers import Two


@pytest.fixture
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decant.client.balancer.FIRST_REST_S", 0.001)
    monkeypatch.setattr("decant.client.balancer.LONGEST_REST_S", 0.01)


@pytest.fixture(scope="module")
def both() -> Iterator[Two]:
    with contextlib.ExitStack() as stack:
        routers = [Script(), Script()]
        yield Two(",".join([stack.enter_context(serving(script)) for script in routers]), routers)


@pytest.fixture
def two(both: Two) -> Two:
    both.reset([])
    return both


@pytest.fixture(params=[1, 2])
def some(two: Two, request: pytest.FixtureRequest) -> Two:
    """One router, or two."""
    return Two(",".join(two.address.split(",")[: request.param]), two.routers[: request.param])
