from __future__ import annotations

import pytest
import redis as sync_redis

from decant.state.private_redis import PrivateRedis
from tests.state.factories import make_store
from tests.state.state_machine import Writers

STEPS = 60
SEEDS = 100
"""The fault of a script that is found last, of those in test_mutations.py, is found by the first 25."""


@pytest.mark.rule("epoch-raised", "state/lua/request_adopt.lua", "state/lua/request_accept.lua")
@pytest.mark.rule("last-write-counts", "state/lua/request_write.lua")
@pytest.mark.slow
async def test_redis_keeps_the_greatest_of_what_owners_write(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, refill_s=0) as store:
        for seed in range(SEEDS):
            await Writers(store, bare, seed).play(STEPS)
