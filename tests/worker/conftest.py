from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.worker.harness import WorkerScene, worker


@pytest.fixture
async def place() -> AsyncIterator[WorkerScene]:
    async with worker() as place:
        yield place
