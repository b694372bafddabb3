"""A session of a router with a scripted worker, and what it reports of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import TokenStream
from decant.router.timings import WorkerTimings
from decant.router.workers.session import WorkerSession
from decant.router.workers.subscription import RunSubscription
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from tests.router.factories import begin_writing
from tests.router.fake_worker import FakeWorker
from tests.router.harness import PATIENCE, make_request
from tests.router.run_recorder import RunRecorder

D = ("d", wire.ROLE_DECODE)


PROMPT = [1, 2, 3]


@dataclass
class Watcher:
    renewed: list[bytes] = field(default_factory=list)
    loads: int = 0

    def on_opened(self, session: WorkerSession) -> None:
        self.loads += 1

    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None:
        self.loads += 1
        self.renewed += heartbeat.renew


@dataclass
class Run:
    following: RunSubscription
    stream: TokenStream
    events: list[Any]

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


def make_run(max_tokens: int = 5, attempt: int = 1) -> Run:
    request = make_request(max_tokens=max_tokens)
    stream = TokenStream(request)
    recorder = RunRecorder()
    run = wire.Run(request="t/r", epoch=1, attempt=attempt)
    following = RunSubscription(
        wire.Start(run=run, engine_request=request.engine_request), [begin_writing(stream)], recorder
    )
    return Run(following, stream, recorder.events)


@asynccontextmanager
async def session(
    worker: FakeWorker, router: wire.Peer | None = None, **timings: Any
) -> AsyncIterator[tuple[WorkerSession, Watcher]]:
    watcher = Watcher()
    async with open_channel(worker.registration.address, PeerTls()) as channel:
        peer = router or new_peer("router")
        opened = WorkerSession(peer, worker.registration.peer, channel, watcher, WorkerTimings(**timings))
        task = asyncio.create_task(opened.run(lambda: True))
        try:
            async with asyncio.timeout(PATIENCE):
                await opened.attempted.wait()
            yield opened, watcher
        finally:
            task.cancel()
            await asyncio.wait([task])
