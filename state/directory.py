"""Directory of workers and routers. Registrations expire by the clock of Redis unless they are renewed.

The last incarnation of an id to register is the present one:

    incarnation A   register ---- renew ---------------------- renew: replaced     remove: no effect
    incarnation B                           register ---- renew ---------- renew ----------
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from decant.protos.state_pb2 import RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import Load
from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import IncarnationReplaced
from decant.state.ids import Incarnation
from decant.state.keys import DirectoryKind, Ttls

AnyRegistration = TypeVar("AnyRegistration", bound=WorkerRegistration | RouterRegistration)


@dataclass(frozen=True)
class DirectoryEntry(Generic[AnyRegistration]):
    registration: AnyRegistration
    load: Load
    renewed_ago_s: float = 0.0  # since its registration was last renewed

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation.of(self.registration.peer)


@dataclass(frozen=True)
class Listing(Generic[AnyRegistration]):
    version: bytes  # changes with registrations, not with load alone
    next_end_s: float | None  # until the first of these expires unless renewed; None: there are none
    present: tuple[DirectoryEntry[AnyRegistration], ...]


class Directory(Generic[AnyRegistration]):
    def __init__(self, client: Client, kind: DirectoryKind, message: type[AnyRegistration], ttls: Ttls) -> None:
        self._client = client
        self._kind: DirectoryKind = kind
        self._message = message
        self._lasts = (round(ttls.registration_s * 1000), round(ttls.directory_s * 1000))

    async def register(
        self, registration: AnyRegistration, load: Load | None = None
    ) -> RegistrationHandle[AnyRegistration]:
        """Become the present incarnation of the id; call it once per process."""
        since = await self._client.run(scripts.DIRECTORY_REGISTER.call(self._names, *self._args(registration, load)))
        return RegistrationHandle(self, registration, since)

    async def listing(self) -> Listing[AnyRegistration]:
        reply = await self._client.run(scripts.DIRECTORY_LIST.call(self._names))
        version, next_end_ms, *rest = reply
        parsed = map(self._parsed, rest[::3], rest[1::3], rest[2::3])
        present = tuple(one for one in parsed if one is not None)
        return Listing(version, next_end_ms / 1000 if next_end_ms >= 0 else None, present)

    async def wait_for_change(self, known: Listing[AnyRegistration], timeout_s: float) -> Listing[AnyRegistration]:
        """Wait at most `timeout_s` for a change since `known`. Raises StoreUnavailable at once."""
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout_s
        listing = known
        while listing.version == known.version and (left_s := ends - clock()) > 0:
            until_s = left_s if listing.next_end_s is None else min(left_s, listing.next_end_s + 0.001)
            await self._client.wait_for_entry(keys.changes(self._kind), known.version, until_s)
            listing = await self.listing()
        return listing

    async def is_registered(self, incarnation: Incarnation) -> bool:
        call = scripts.DIRECTORY_IS_REGISTERED.call(self._names[:2], incarnation.id, incarnation.hex)
        return bool(await self._client.run(call))

    async def renew(self, registration: AnyRegistration, load: Load | None, since: int) -> bool:
        args = self._args(registration, load)
        return bool(await self._client.run(scripts.DIRECTORY_RENEW.call(self._names, *args, since)))

    async def remove(self, incarnation: Incarnation) -> None:
        await self._client.run(scripts.DIRECTORY_REMOVE.call(self._names, incarnation.id, incarnation.hex))

    def _parsed(self, packed: bytes | None, load: bytes | None, ends_ms: int) -> DirectoryEntry[AnyRegistration] | None:
        registration = self._message()
        try:
            registration.ParseFromString(packed or b"")
            parsed_load = Load.FromString(load or b"")
        except DecodeError:
            return None
        if not registration.peer.id:
            return None
        return DirectoryEntry(registration, parsed_load, max(0, self._lasts[0] - ends_ms) / 1000)

    @property
    def _names(self) -> list[str]:
        return [keys.peers(self._kind), keys.expiry(self._kind), keys.changes(self._kind)]

    def _args(self, registration: AnyRegistration, load: Load | None) -> tuple[str | bytes | int, ...]:
        incarnation = Incarnation.of(registration.peer)
        packed = load.SerializeToString() if load else b""
        return (
            incarnation.id,
            incarnation.hex,
            registration.SerializeToString(deterministic=True),
            packed,
            *self._lasts,
        )


class RegistrationHandle(Generic[AnyRegistration]):
    def __init__(self, directory: Directory[AnyRegistration], registration: AnyRegistration, since: int) -> None:
        self.registration = registration  # the owner may replace it, except for the peer
        self._directory = directory
        self._since = since  # microseconds by the clock of Redis: orders the incarnations of one id

    async def renew(self, load: Load | None = None) -> None:
        """Renew, or write again what expired or was lost with Redis. Raises IncarnationReplaced."""
        if not await self._directory.renew(self.registration, load, self._since):
            raise IncarnationReplaced(Incarnation.of(self.registration.peer))

    async def remove(self) -> None:
        await self._directory.remove(Incarnation.of(self.registration.peer))


Workers: TypeAlias = Directory[WorkerRegistration]
Routers: TypeAlias = Directory[RouterRegistration]
