"""Scripted workers that speak protos/worker.proto over real gRPC, and compute nothing.

Output token k depends only on the prompt and k, so every attempt on any worker writes the same text. A ``Script`` sets
faults; ``Fleet`` holds what a handoff would move.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from tests.router.fake_prefill import FakePrefill
from tests.router.fake_session import FakeSession
from tests.router.fake_state import Fleet


class FakeWorker(FakePrefill, FakeSession):
    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server()
        services.add_PrefillServicer_to_server(self, server)
        services.add_DecodeServicer_to_server(self, server)
        address = f"127.0.0.1:{port}"
        if self.credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self.credentials)
        self.registration.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for cache in self.fleet.caches.values():
            if cache.sender is self:
                cache.committed.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Restart the server as after a network loss: streams broke, the incarnation is the same."""
        assert self._server is not None
        await self._server.stop(None)
        await self.start(int(self.registration.address.rpartition(":")[2]))

    def break_session(self) -> None:
        if self._out is not None:
            self._out.put_nowait(None)


@asynccontextmanager
async def fleet(*workers: tuple[str, wire.Role]) -> AsyncIterator[list[FakeWorker]]:
    together = Fleet()
    async with AsyncExitStack() as stack:
        started = []
        for name, role in workers:
            worker = FakeWorker(together, name, role)
            await worker.start()
            stack.push_async_callback(worker.stop)
            started.append(worker)
        yield started
