from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.worker.harness import Place, worker


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with worker() as place:
        yield place
