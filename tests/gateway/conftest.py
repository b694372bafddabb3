from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from decant import AsyncClient
from decant.gateway.app import Gateway, Limits
from tests.decant.scripted import Script, serving


@pytest.fixture(scope="module")
def routing() -> Iterator[tuple[Script, str]]:
    script = Script()
    with serving(script) as address:
        yield script, address


@pytest.fixture
def script(routing: tuple[Script, str]) -> Script:
    """The router's script, as it is before its first call."""
    script, fresh = routing[0], Script()
    vars(script).update(vars(fresh))
    return script


@pytest.fixture
async def gateway(routing: tuple[Script, str], script: Script) -> AsyncIterator[Gateway]:
    async with AsyncClient(routing[1], resume_seconds=0) as client:
        yield Gateway(client, Limits(max_body_bytes=4096, max_requests=2))
