from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime.connections.peer import new_peer
from decant.state.private_redis import PrivateRedis
from tests.decant.fake_workers import run
from tests.state.factories import make_store


@pytest.fixture
def redis() -> Iterator[str]:
    with PrivateRedis() as redis:
        yield redis.url


def register(url: str, prefill_busy_share: float, running: int) -> Any:
    """Register two workers of each role; return a pause after which the prefill workers were busy for that share."""
    peers = {id: new_peer(id) for id in ("p1", "p2", "d1", "d2")}

    async def write(elapsed_s: float) -> None:
        async with make_store(url, registration_s=600.0) as store:
            for id, peer in peers.items():
                role = wire.ROLE_PREFILL if id[0] == "p" else wire.ROLE_DECODE
                registration = WorkerRegistration(
                    peer=peer, address="h:1", role=role, model="m", capacity=Capacity(max_running=10)
                )
                load = wire.Load(role=role, total_blocks=100, free_blocks=100)
                if role == wire.ROLE_PREFILL:
                    load.busy_us = round(elapsed_s * prefill_busy_share * 1e6)
                else:
                    load.running = running
                await store.workers.register(registration, load)

    asyncio.run(write(0.0))
    return lambda seconds: asyncio.run(write(seconds))


def test_an_advice_compares_both_pools_with_their_load(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = register(redis, prefill_busy_share=1.0, running=2)
    clock = [100.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds
        pause(seconds)

    monkeypatch.setattr("decant.command.scale_advice.sleep", wait)
    monkeypatch.setattr("decant.command.scale_advice.monotonic", lambda: clock[0])
    done = run("scale-advice", "--redis-url", redis, "--seconds", "60")
    assert done.exit_code == 0, done.output
    assert done.stdout == (
        "m: prefill 2 workers, 100% used: add 1; decode 2 workers, 20% used: 1 can go; or move a worker to prefill\n"
    )
    (model,) = json.loads(run("scale-advice", "--redis-url", redis, "--seconds", "60", "--json").stdout)["models"]
    assert model["decode"] == {"workers": 2, "demand": 0.4, "usage": 0.2, "wanted": 1}
    assert (model["prefill"]["wanted"], model["move_to"]) == (1, None), "nothing was computed since"


def test_an_advice_without_workers_fails(redis: str) -> None:
    done = run("scale-advice", "--redis-url", redis)
    assert (done.exit_code, done.stderr) == (2, "decant: no worker is registered: there is nothing to compare\n")
