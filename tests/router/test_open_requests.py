from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis as sync_redis

from decant.protos import worker_pb2 as wire
from decant.router.recovery.open_requests import OpenEntries
from decant.router.request.output import Finish
from decant.state import keys
from decant.state.client import Client
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import OwnedRequest, StoredRequest
from decant.state.scripts import Command
from decant.state.store import Store
from tests.router.fake_worker import fleet
from tests.router.harness import core, until, until_ended
from tests.router.harness import make_request as valid_request
from tests.router.harness import until_written as entries_written
from tests.state.factories import (
    CANCELLED,
    FAILED,
    KEY,
    NOW,
    SUCCEEDED,
    list_open,
    make_request,
    router,
    write_request,
    written,
)

Patch = pytest.MonkeyPatch


def lose_removals(patch: Patch, lost: object) -> None:
    original = Client._send

    async def send(client: Client, commands: Sequence[Command]) -> list[object]:
        if lost and any(command.args[0] == "SREM" for command in commands):
            raise TimeoutError
        return await original(client, commands)

    patch.setattr(Client, "_send", send)


async def test_a_request_that_another_router_cancels_leaves_its_owners_open_set(store: Store) -> None:
    await store.requests.accept(make_request())
    taken = OwnedRequest.from_stored(await store.requests.cancel(KEY, router(2)))
    assert await store.open.of(router(1)) == set(), "its owner need not learn of it for that"
    taken.transition(CANCELLED, NOW)
    await write_request(store, taken)
    assert await store.open.of(router(2)) == set()


@pytest.mark.parametrize("epoch", [None, 1])
async def test_a_request_that_is_taken_over_is_in_its_new_owners_open_set_alone(
    store: Store, epoch: int | None
) -> None:
    await store.requests.accept(make_request())
    await store.requests.adopt(KEY, router(2), epoch)
    assert await store.open.of(router(1)) == set()
    assert await store.open.of(router(2)) == {KEY}


async def test_a_takeover_holds_though_the_former_entry_cannot_be_removed(store: Store, monkeypatch: Patch) -> None:
    await store.requests.accept(make_request())
    lose_removals(monkeypatch, lost=True)
    assert (await store.requests.adopt(KEY, router(2))).owner == router(2)


@pytest.mark.parametrize("ended_elsewhere", [True, False], ids=["ended elsewhere", "expired"])
async def test_an_entry_that_was_left_over_is_removed_by_the_second_sweep(
    store: Store, bare: sync_redis.Redis, ended_elsewhere: bool
) -> None:
    open_one, left = make_request(), RequestKey("t", "left")
    await store.requests.accept(open_one)
    if ended_elsewhere:
        await store.requests.accept(make_request(left, owner=router(2)))
    await list_open(store, router(1), [left])
    entries = OpenEntries(store, router(1))
    await entries.sweep()
    assert await store.open.of(router(1)) == {KEY, left}, "its request may come a moment later"
    await entries.sweep()
    assert await store.open.of(router(1)) == {KEY}


async def test_a_restarted_request_keeps_its_entry_when_the_removal_is_repeated(
    store: Store, monkeypatch: Patch
) -> None:
    losing = [True]
    lose_removals(monkeypatch, losing)
    pools = (("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE))
    async with fleet(*pools) as workers, core(store, workers, attempts=1) as harness:
        workers[0].script.prefill_fails_before_ticket = 1
        assert not isinstance((await harness.answer(valid_request())).end, Finish)
        await until(lambda: harness.router.journal_writer.is_unavailable)
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(valid_request())
        await entries_written(stream, 2)
        losing.clear()
        await until(lambda: not harness.router.journal_writer._ended and not harness.owned("r").needs_write)
        assert await store.open.of(Incarnation.of(harness.router.peer)) == {RequestKey("default", "r")}
        workers[1].go.set()
        assert isinstance((await until_ended(stream)).end, Finish)


async def test_a_late_write_of_a_failed_request_leaves_the_entry_of_its_restart(store: Store) -> None:
    failed = make_request()
    await store.requests.accept(failed)
    failed.transition(FAILED, NOW)
    failed.is_listed = False
    await store.requests.flush([failed])
    assert await store.open.of(router(1)) == {KEY}


class Routers:
    def __init__(self, store: Store, bare: sync_redis.Redis, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.bare: Any = bare
        self.keys = [RequestKey("t", str(number)) for number in range(4)]
        self.held: dict[Incarnation, dict[RequestKey, OwnedRequest]] = {router(number): {} for number in range(3)}
        self.losing: list[bool] = []

    async def play(self, steps: int) -> None:
        actions = [self.accept, self.adopt, self.cancel, self.write, self.write, self.end, self.expire]
        for action in self.random.choices(actions, k=steps):
            self.losing[:] = [True] if self.random.random() < 0.3 else []
            incarnation, key = self.random.choice(list(self.held)), self.random.choice(self.keys)
            with suppress(StateError):
                await action(incarnation, key)
            self.losing.clear()
            await self.each_open_request_is_found()

    async def accept(self, incarnation: Incarnation, key: RequestKey) -> None:
        if key not in self.held[incarnation]:
            request = make_request(key, owner=incarnation)
            if await self.store.requests.accept(request) is None:
                self.held[incarnation][key] = request

    async def adopt(self, incarnation: Incarnation, key: RequestKey) -> None:
        if key not in self.held[incarnation]:
            found = await self.store.requests.adopt(key, incarnation)
            if not found.ended:
                self.take(incarnation, found)

    async def cancel(self, incarnation: Incarnation, key: RequestKey) -> None:
        if key not in self.held[incarnation]:
            found = await self.store.requests.cancel(key, incarnation)
            if not found.ended:
                self.take(incarnation, found)
                self.held[incarnation][key].transition(CANCELLED, NOW)

    def take(self, incarnation: Incarnation, found: StoredRequest) -> None:
        self.held[incarnation][found.key] = OwnedRequest.from_stored(found)

    async def write(self, incarnation: Incarnation, key: RequestKey) -> None:
        for request in self.held[incarnation].values():
            if not request.ended:
                request.append(written(7))
        await self.flush(incarnation)

    async def end(self, incarnation: Incarnation, key: RequestKey) -> None:
        request = self.held[incarnation].get(key)
        if request is not None and not request.ended:
            request.transition(self.random.choice([SUCCEEDED, FAILED, CANCELLED]), NOW)
        await self.flush(incarnation)

    async def expire(self, incarnation: Incarnation, key: RequestKey) -> None:
        if not any(key in held for held in self.held.values()):
            self.bare.delete(keys.request(key), keys.journal(key))

    async def flush(self, incarnation: Incarnation) -> None:
        held = self.held[incarnation]
        lost = await self.store.requests.flush([request for request in held.values() if request.needs_write])
        for request in list(held.values()):
            if request in lost or (request.ended and not request.needs_write):
                del held[request.key]

    async def open_requests(self) -> dict[Incarnation, set[RequestKey]]:
        found: dict[Incarnation, set[RequestKey]] = {incarnation: set() for incarnation in self.held}
        for key in self.keys:
            state, owner = self.bare.hmget(keys.request(key), "state", "owner")
            if state is not None and int(state) < SUCCEEDED:
                found[Incarnation.parse(owner.decode())].add(key)
        return found

    async def each_open_request_is_found(self) -> None:
        for incarnation, owned in (await self.open_requests()).items():
            assert owned <= await self.store.open.of(incarnation), "if its owner were lost, no router would find it"

    async def open_sets_are_exact(self) -> None:
        for incarnation in self.held:
            await self.flush(incarnation)
            entries = OpenEntries(self.store, incarnation)
            await entries.sweep()
            await entries.sweep()
        for incarnation, owned in (await self.open_requests()).items():
            assert await self.store.open.of(incarnation) == owned


@pytest.mark.rule(
    "exact-open-set",
    "state/requests.py:Requests._with_open_entry",
    "state/requests.py:Requests.flush",
    "router/recovery/open_requests.py:OpenEntries.sweep",
)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
async def test_an_open_request_is_always_found_and_nothing_else_in_the_end(
    store: Store, bare: sync_redis.Redis, monkeypatch: Patch, seed: int
) -> None:
    routers = Routers(store, bare, seed)
    lose_removals(monkeypatch, routers.losing)
    await routers.play(60)
    await routers.open_sets_are_exact()
