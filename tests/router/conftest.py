from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis as sync_redis

from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.state.conftest import bare, server
from tests.state.factories import make_store

__all__ = ["bare", "server", "store"]


@pytest.fixture
async def store(server: PrivateRedis, bare: sync_redis.Redis) -> AsyncIterator[Store]:
    """Store whose registrations outlast the test: nothing renews those of scripted workers and routers."""
    async with make_store(server.url, registration_s=600.0) as store:
        yield store
