"""Caches on their way here: what a ticket opens is fetched, or its giver is told that nobody comes."""

from __future__ import annotations

import asyncio

from decant.engine.transfer import IncomingSequence
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.receiver import TransferResult
from decant.protos import worker_pb2 as wire
from decant.worker.engine_host import EngineHost


class KvFetches:
    """What a worker has under way with givers."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[TransferResult]] = set()

    def fetch(self, ticket: wire.Ticket, arrival: IncomingSequence) -> asyncio.Task[TransferResult]:
        """Pull a cache into the room that is reserved for it. Cancelling the task may leave the room to be freed."""
        source = self._host.transport.source(ticket.address)
        task = asyncio.create_task(self._host.receiver.receive(source, ticket, arrival))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def decline(self, ticket: wire.Ticket) -> None:
        """Nobody comes for this cache."""
        self._host.receiver.decline(self._host.transport.source(ticket.address), ticket)

    async def close(self) -> None:
        """Wait for what is under way; fetches have to be cancelled before."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._host.receiver.close()


def failure_from(error: BaseException, sender: wire.Peer) -> wire.Failure:
    """What became of a fetch, for the router."""
    if isinstance(error, SequenceAlreadyFinished):
        return wire.Failure(
            cause=wire.CAUSE_CANCELLED, detail="nothing is left to fetch: it ended with its first token"
        )
    if not isinstance(error, HandoffFailed):
        return wire.Failure(cause=wire.CAUSE_ENGINE, detail=f"{type(error).__name__}: {error}")
    failure = error.message()
    if not failure.HasField("peer") and failure.cause != wire.CAUSE_ENGINE:
        failure.peer.CopyFrom(sender)
    return failure
