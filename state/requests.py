"""Requests: accepted by a router, written by their owner, read by any router, adopted when the owner is lost.

A write has (epoch, attempt, state, base length of the journal). Redis compares it in lua/request_write.lua:

    greater than stored   a new attempt continues the journal; a new epoch is written whole
    equal                 the later state is kept; missing entries are appended
    smaller               Superseded, nothing is written

A write includes all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from decant.state import keys, scripts
from decant.state.client import Client, Reply
from decant.state.directory import Routers
from decant.state.errors import (
    AlreadyExists,
    OwnerRegistered,
    StateError,
    StoreFault,
    StoreUnavailable,
    Superseded,
    UnreadableRequest,
)
from decant.state.ids import ENDED, Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.open_requests import OpenRequests, split_batches
from decant.state.owned import OwnedRequest, StoredRequest
from decant.state.results import Results
from decant.state.scripts import Command
from decant.state.store_instance import StoreInstance
from decant.state.stored import parse

BATCH_BYTES = 256 << 10
"""A larger write gets a longer deadline."""
BATCH_WRITES = 100

Displaced = Superseded | AlreadyExists
WriteFailure = Displaced | StoreFault
"""Displaced is final; after a StoreFault a later write may succeed."""


class Requests:
    """Requests and their journals in Redis: acceptance, writes of their owner, reads, adoption and cancellation.

    Each write names epoch and length, so that repeating it is safe, and one of a superseded owner fails. The router's
    executions and the journal writer call it; workers never do.
    """

    def __init__(
        self,
        client: Client,
        reads: Client,
        routers: Routers,
        open_requests: OpenRequests,
        instance: StoreInstance,
        ttls: Ttls,
    ) -> None:
        self._client = client
        self._reads = reads
        self._routers = routers
        self._open = open_requests
        self._instance = instance
        self.results = Results(client, ttls)
        self._open_ms = round(ttls.open_s * 1000)
        self._ended_ms = round(ttls.ended_s * 1000)

    async def accept(self, request: OwnedRequest) -> StoredRequest | None:
        """Store a new request. Returns None, or the stored request with this id and an equal payload.

        An equal request that failed without a token is replaced, in a greater epoch. Raises AlreadyExists.
        """
        record = request.record.SerializeToString()
        accept = scripts.REQUEST_ACCEPT.call(
            _own_names(request),
            str(request.owner),
            request.digest,
            record,
            request.payload,
            self._open_ms,
            request.epoch,
        )
        reply = await self._with_open_entry(request.key, request.owner, accept)
        if reply[0] == b"new":
            request.epoch, request.synced_state = reply[1], (request.attempt, request.state)
            return None
        if reply[0] == b"differs":
            await self._open.remove(request.owner, [request.key])
            raise AlreadyExists(request.key)
        return await self._keep_entry_if_owned(parse(request.key, reply[1]), request.owner)

    async def flush(self, requests: Sequence[OwnedRequest]) -> dict[OwnedRequest, WriteFailure]:
        """Write requests, entirely where Redis lost them; return the failures. Raises StoreUnavailable.

        After that, requests that were answered count as written.
        """
        failures: dict[OwnedRequest, WriteFailure] = {}
        to_rewrite = await self._write_batches(requests, failures)
        for request in to_rewrite:
            request.synced_entries, request.synced_state = 0, None
        await self._write_batches(to_rewrite, failures)
        elsewhere = [r for r, error in failures.items() if _is_elsewhere(r, error)]
        over = [*elsewhere, *(r for r in requests if r.ended and r.is_listed and not r.is_unsynced)]
        sizes = {request.key: request.result_bytes for request in over if request.result_bytes}
        await self.results.add(sizes, self._open.remove_commands(over))
        for request in over:
            request.is_listed = False
        return failures

    async def read(self, key: RequestKey, first: int = 0) -> StoredRequest:
        """Read a request with its entries from `first` on. Raises UnknownRequest, StoreRefilling."""
        reply = await self._reads.run(scripts.REQUEST_READ.call(keys.of_request(key), first))
        if reply[0] == b"unknown":
            raise await self._instance.unknown_error(key)
        return parse(key, reply[1])

    async def exists(self, key: RequestKey) -> bool:
        return bool(await self._reads.run(scripts.on_key("EXISTS", keys.request(key))))

    async def adopt(self, key: RequestKey, router: Incarnation, epoch: int | None = None) -> StoredRequest:
        """Make `router` the owner. Without `epoch`, because the client's newest stream is there.

        With `epoch`, only if it is the request's, so that one of several routers wins. No effect on an ended or own
        request. Raises Superseded, UnknownRequest, StoreRefilling.
        """
        reply = await self._with_open_entry(
            key, router, self._adopt_command(key, router, "" if epoch is None else epoch, "")
        )
        if reply[0] == b"exists":
            stored = parse(key, reply[1])
            await self._leave_open_set(stored, reply[2])
            return await self._keep_entry_if_owned(stored, router)
        await self._open.remove(router, [key])
        if reply[0] == b"unknown":
            raise await self._instance.unknown_error(key)
        raise _superseded_error(key, reply)

    async def cancel(self, key: RequestKey, router: Incarnation) -> StoredRequest:
        """Make `router` the owner and the request CANCELLED, in one step; return it with its state before.

        The new owner writes the record of the end. Raises UnknownRequest, StoreRefilling.
        """
        reply = await self._client.run(self._adopt_command(key, router, "", self._ended_ms))
        if reply[0] == b"unknown":
            raise await self._instance.unknown_error(key)
        stored = parse(key, reply[1])
        await self._leave_open_set(stored, reply[2])
        return stored

    async def stale_entries(self, router: Incarnation) -> set[RequestKey]:
        """Return open entries of requests that have ended, expired, or another owner.

        An entry is stale only if found twice: it may be written before its request.
        """
        stale = set[RequestKey]()
        for batch in split_batches(list(await self._open.of(router))):
            commands = [scripts.on_key("HMGET", keys.request(key), "state", "owner") for key in batch]
            for key, reply in zip(batch, await self._client.try_all(commands), strict=True):
                match reply:
                    case StoreUnavailable():
                        raise reply
                    case [bytes(state), bytes(owner)] if owner == str(router).encode() and _is_open(state):
                        pass
                    case _:
                        stale.add(key)
        return stale

    async def adopt_orphan(self, key: RequestKey, router: Incarnation) -> StoredRequest:
        """Adopt a request whose owner is not registered.

        Raises OwnerRegistered, and what `adopt` raises: Superseded when another router was faster.
        """
        epoch, owner = await self._client.run(scripts.on_key("HMGET", keys.request(key), "epoch", "owner"))
        if epoch is None:
            await self._open.remove(router, [key])
            raise await self._instance.unknown_error(key)
        incarnation = Incarnation.parse(owner.decode())
        if incarnation != router and await self._routers.is_registered(incarnation):
            await self._open.remove(router, [key])
            raise OwnerRegistered(incarnation)
        return await self.adopt(key, router, int(epoch))

    def _adopt_command(self, key: RequestKey, router: Incarnation, epoch: int | str, ended_ms: int | str) -> Command:
        return scripts.REQUEST_ADOPT.call(keys.of_request(key), str(router), self._open_ms, epoch, ended_ms)

    async def _with_open_entry(self, key: RequestKey, router: Incarnation, command: Command) -> Reply:
        """Write the open entry first: without one, a request is never found."""
        replies = await self._client.run_all([self._open.add_command(router, [key]), command])
        return replies[1]

    async def _leave_open_set(self, stored: StoredRequest, owner_before: bytes) -> None:
        before = Incarnation.parse(owner_before.decode())
        if before != stored.owner:
            with suppress(StateError):
                await self._open.remove(before, [stored.key])

    async def _keep_entry_if_owned(self, stored: StoredRequest, router: Incarnation) -> StoredRequest:
        if stored.ended or stored.owner != router:
            await self._open.remove(router, [stored.key])
        return stored

    async def _write_batches(
        self, requests: Iterable[OwnedRequest], failures: dict[OwnedRequest, WriteFailure]
    ) -> list[OwnedRequest]:
        """Write small requests first: a large one delays no other."""
        to_rewrite: list[OwnedRequest] = []
        for batch in _batches(sorted(requests, key=lambda request: request.write_bytes)):
            to_rewrite += await self._write_all(batch, failures)
        return to_rewrite

    async def _write_all(
        self, requests: Sequence[OwnedRequest], failures: dict[OwnedRequest, WriteFailure]
    ) -> list[OwnedRequest]:
        sent = [(request.attempt, request.state, request.prompt_logprobs_unsynced) for request in requests]
        adds = self._open.add_commands(each for each in requests if each.is_listed and not each.synced_state)
        size = sum(request.write_bytes for request in requests)
        commands = [*adds, *map(self._write_command, requests)]
        replies = await self._client.try_all(commands, max(1.0, size / BATCH_BYTES))
        to_rewrite = []
        for request, (attempt, state, has_prompt_logprobs), reply in zip(
            requests, sent, replies[len(adds) :], strict=True
        ):
            match reply:
                case [b"written", length, result_bytes]:
                    request.result_bytes = result_bytes
                    request.synced_entries, request.synced_state = max(request.synced_entries, length), (attempt, state)
                    request.prompt_logprobs_unsynced &= not has_prompt_logprobs
                case [b"superseded", *_]:
                    failures[request] = _superseded_error(request.key, reply)
                case [b"differs"]:
                    failures[request] = AlreadyExists(request.key)
                case StoreFault():
                    failures[request] = reply
                case StoreUnavailable():
                    pass  # raised below
                case _:
                    to_rewrite.append(request)
        for place, error in enumerate(replies):
            if isinstance(error, StoreUnavailable) or (place < len(adds) and isinstance(error, StoreFault)):
                raise error
        return to_rewrite

    def _write_command(self, request: OwnedRequest) -> Command:
        whole = [] if request.synced_state else [request.digest, request.payload]
        base = request.synced_entries if request.synced_state else 0
        logprobs = [
            request.logprobs_options.entry_bytes,
            request.packed_logprobs(base),
            request.packed_prompt_logprobs(),
        ]
        return scripts.REQUEST_WRITE.call(
            _own_names(request),
            str(request.owner),
            *(request.epoch, request.attempt, request.state),
            *(base, request.packed(base), request.record.SerializeToString()),
            *(self._open_ms, self._ended_ms),
            *(logprobs if request.logprobs_options.any else ()),
            *whole,
        )


def _batches(requests: Iterable[OwnedRequest]) -> Iterator[list[OwnedRequest]]:
    batch: list[OwnedRequest] = []
    size = 0
    for request in requests:
        if batch and (size + request.write_bytes > BATCH_BYTES or len(batch) == BATCH_WRITES):
            yield batch
            batch, size = [], 0
        batch.append(request)
        size += request.write_bytes
    if batch:
        yield batch


def _is_open(state: bytes) -> bool:
    return state.isdigit() and int(state) not in ENDED


def _own_names(request: OwnedRequest) -> list[str]:
    return keys.of_request(request.key)[: 3 if request.logprobs_options.any else 2]


def _is_elsewhere(request: OwnedRequest, error: WriteFailure) -> bool:
    return isinstance(error, AlreadyExists) or (isinstance(error, Superseded) and error.owner != request.owner)


def _superseded_error(key: RequestKey, reply: list[Reply]) -> Superseded | UnreadableRequest:
    try:
        return Superseded(key, reply[1], Incarnation.parse(reply[2].decode()), reply[3], reply[4])
    except (ValueError, AttributeError, IndexError) as error:
        return UnreadableRequest(key, str(error))
