"""Open sets: the unfinished requests of each router, which other routers adopt if it is lost.

A router that takes entries over calls `Requests.adopt_orphan` for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import OwnerRegistered
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.scripts import Command

Name = TypeVar("Name", RequestKey, Incarnation)

BATCH = 1000  # members in one command: Lua's stack holds about 8,000


class OpenRequests:
    def __init__(self, client: Client, ttls: Ttls) -> None:
        self._client = client
        self._open_ms = round(ttls.open_s * 1000)

    def add_command(self, router: Incarnation, requests: Sequence[RequestKey]) -> Command:
        names = [keys.open_set(router), keys.OWNERS]
        return scripts.OPEN_ADD.call(names, str(router), self._open_ms, *map(str, requests))

    def add_commands(self, requests: Iterable[OwnedRequest]) -> list[Command]:
        return [self.add_command(router, batch) for router, batch in _batches(requests)]

    async def remove(self, router: Incarnation, requests: Sequence[RequestKey]) -> None:
        await self._client.run_all([_remove_command(router, batch) for batch in split_batches(requests)])

    def remove_commands(self, requests: Iterable[OwnedRequest]) -> list[Command]:
        return [_remove_command(router, batch) for router, batch in _batches(requests)]

    async def of(self, router: Incarnation) -> set[RequestKey]:
        return set(
            _readable(RequestKey.parse, await self._client.run(scripts.on_key("SMEMBERS", keys.open_set(router))))
        )

    async def orphaned(self) -> set[Incarnation]:
        """Return unregistered routers that have entries."""
        names = [keys.OWNERS, keys.expiry("routers"), keys.peers("routers")]
        return set(_readable(Incarnation.parse, await self._client.run(scripts.OPEN_ORPHANED.call(names))))

    async def take(self, dead: Incarnation, router: Incarnation, max_requests: int = BATCH) -> list[RequestKey]:
        """Move entries of a lost router to `router`; no two routers get the same one. Raises OwnerRegistered.

        If the reply is lost, they are in `of(router)`.
        """
        names = [keys.expiry("routers"), keys.peers("routers"), keys.OWNERS, keys.open_set(dead), keys.open_set(router)]
        reply = await self._client.run(
            scripts.OPEN_TAKE.call(
                names, dead.id, dead.hex, str(dead), str(router), min(max_requests, BATCH), self._open_ms
            )
        )
        if reply[0] == b"registered":
            raise OwnerRegistered(dead)
        return list(_readable(RequestKey.parse, reply[1:]))


def _readable(parse: Callable[[str], Name], members: Iterable[bytes]) -> Iterator[Name]:
    for member in members:
        with suppress(ValueError):
            yield parse(member.decode())


def _remove_command(router: Incarnation, requests: Sequence[RequestKey]) -> Command:
    return scripts.on_key("SREM", keys.open_set(router), *map(str, requests))


def split_batches(requests: Sequence[RequestKey]) -> Iterator[Sequence[RequestKey]]:
    for start in range(0, len(requests), BATCH):
        yield requests[start : start + BATCH]


def _batches(requests: Iterable[OwnedRequest]) -> Iterator[tuple[Incarnation, Sequence[RequestKey]]]:
    by_owner = defaultdict[Incarnation, list[RequestKey]](list)
    for request in requests:
        by_owner[request.owner].append(request.key)
    for router, own_requests in by_owner.items():
        for batch in split_batches(own_requests):
            yield router, batch
