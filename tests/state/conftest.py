from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis as sync_redis

from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.state.factories import make_store


@pytest.fixture(scope="session")
def server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def bare(server: PrivateRedis) -> Iterator[sync_redis.Redis]:
    with sync_redis.Redis.from_url(server.url, protocol=2) as client:
        client.flushall()
        yield client


@pytest.fixture
async def store(server: PrivateRedis, bare: sync_redis.Redis) -> AsyncIterator[Store]:
    async with make_store(server.url) as store:
        yield store


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Folder for sockets: pytest's paths are too long."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)
