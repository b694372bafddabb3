from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import redis as sync_redis

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import StoreFault
from decant.state.private_redis import PrivateRedis
from decant.state.scripts import Command, Script
from decant.state.store import Store
from tests.state.every_operation import walk
from tests.state.factories import DECODING, NOW, everything, make_request, make_store, write_request, written

Patch = pytest.MonkeyPatch


class CommandRecorder:
    def __init__(self, patch: Patch) -> None:
        self.trips: list[Sequence[Command]] = []
        original = Client._send

        async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
            self.trips.append(commands)
            return await original(client, commands)

        patch.setattr(Client, "_send", send)

    def take(self) -> list[Sequence[Command]]:
        trips, self.trips = self.trips, []
        return trips


async def test_repeated_operations_have_one_effect(store: Store, bare: sync_redis.Redis) -> None:
    for step in await walk(store):
        await step.run()
        once = everything(bare)
        await step.run()
        assert everything(bare) == once, step.name


async def test_each_operation_has_its_documented_round_trips(store: Store, monkeypatch: Patch) -> None:
    for step in await walk(store):  # loads what Redis lacks
        await step.run()
    await store._client.execute("FLUSHALL")
    recorder = CommandRecorder(monkeypatch)
    steps = await walk(store)
    recorder.take()
    used = set[str]()
    for step in steps:
        await step.run()
        trips = recorder.take()
        ran = [command.script.name for trip in trips for command in trip if command.script]
        assert (len(trips), len(ran)) == (step.trips, step.scripts), step.name
        used.update(ran)
    assert used == {value.name for value in vars(scripts).values() if isinstance(value, Script)}


def calls(bare: sync_redis.Redis) -> Counter[str]:
    stats: Any = bare.info("commandstats")
    counted = Counter({name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()})
    bare.config_resetstat()
    del counted["config|resetstat"], counted["config"], counted["info"]
    return counted


async def test_a_write_costs_the_same_late_in_a_request(store: Store, bare: sync_redis.Redis) -> None:
    request = make_request()
    await store.requests.accept(request)
    request.transition(DECODING, NOW)
    await write_request(store, request)
    costs = []
    for _ in range(20):
        request.append(written(*range(100)))
        calls(bare)
        await write_request(store, request)
        costs.append(calls(bare))
    assert costs[0]["evalsha"] == 1
    assert all(cost == costs[0] for cost in costs)


async def test_a_flush_of_many_is_one_trip(store: Store, monkeypatch: Patch) -> None:
    held = [make_request(key=make_request().key._replace(id=str(n))) for n in range(50)]
    for request in held:
        await store.requests.accept(request)
        request.append(written(1))
    recorder = CommandRecorder(monkeypatch)
    await store.requests.flush(held)
    (trip,) = recorder.take()
    assert len(trip) == 50


async def test_only_requests_with_logprobs_send_them(store: Store, bare: sync_redis.Redis, monkeypatch: Patch) -> None:
    recorder, request = CommandRecorder(monkeypatch), make_request()
    bare.script_load(scripts.REQUEST_WRITE.text)
    await store.requests.accept(request)
    request.append(written(1, 2))
    calls(bare)
    await write_request(store, request)
    assert calls(bare) == {"evalsha": 1, "hmget": 1, "strlen": 1, "append": 1, "hset": 1, "pexpire": 2}
    (write,) = recorder.take()[-1]
    record = request.record.SerializeToString()
    names = [2, keys.request(request.key), keys.journal(request.key)]
    values = [str(request.owner), 1, 1, request.state, 0, request.packed(0), record, 86_400_000, 3_600_000]
    assert list(write.args[2:]) == names + values
    assert not bare.exists(keys.logprobs(request.key))


RULES = "resetkeys ~decant:* resetchannels -@all +@read +@write +@scripting +@connection +info +time"
"""Of an access list; docs/guides/deploy.md has it."""


async def test_a_user_of_an_access_list_needs_its_categories_and_its_own_keys_alone(
    server: PrivateRedis, bare: sync_redis.Redis
) -> None:
    bare.execute_command("ACL", "SETUSER", "decant", "on", ">p@ss", *RULES.split())  # type: ignore[no-untyped-call]
    try:
        async with make_store(server.url.replace("unix://", "unix://decant:p%40ss@")) as store:
            for step in await walk(store):
                await step.run()
            await store.workers.wait_for_change(await store.workers.listing(), 0.01)
            with pytest.raises(StoreFault, match="permissions"):
                await store._client.execute("SET", "another", "1")
    finally:
        bare.execute_command("ACL", "DELUSER", "decant")  # type: ignore[no-untyped-call]


async def test_with_a_prefix_every_key_begins_with_it_and_deployments_do_not_meet(
    server: PrivateRedis, bare: sync_redis.Redis, store: Store
) -> None:
    async with make_store(f"{server.url}?key_prefix=team-a:") as prefixed:
        for step in await walk(prefixed):
            await step.run()
        await prefixed.workers.wait_for_change(await prefixed.workers.listing(), 0.01)
        stored: Any = bare.keys()
        assert {key.partition(b"decant:")[0] for key in stored} == {b"team-a:"}
        assert not (await store.routers.listing()).present
        assert len((await prefixed.routers.listing()).present) == 1
