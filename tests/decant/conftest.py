from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from decant import Client
from tests.decant.scripted import Script, serving
from tests.decant.two_routers import Two


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
    return Two(",".join(two.address.split(",")[: request.param]), two.routers[: request.param])


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client
