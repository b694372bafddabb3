from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.worker.harness import WorkerHarness, worker


@pytest.fixture
async def harness() -> AsyncIterator[WorkerHarness]:
    async with worker() as harness:
        yield harness
