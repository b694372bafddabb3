"""``KvSource`` as a gRPC service: the giver's side of the wire, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from handoff.giver import Giver
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc as services


class KvSourceService(services.KvSourceServicer):
    """Serves the caches of one giver."""

    def __init__(self, giver: Giver) -> None:
        self._giver = giver

    async def Fetch(  # noqa: N802 - the name on the wire
        self,
        requests: AsyncIterator[wire.FetchRequest],
        _: grpc.aio.ServicerContext[wire.FetchRequest, wire.FetchResponse],
    ) -> AsyncIterator[wire.FetchResponse]:
        async for response in self._giver.fetch(requests):
            yield response

    async def Release(  # noqa: N802
        self,
        request: wire.ReleaseRequest,
        _: grpc.aio.ServicerContext[wire.ReleaseRequest, wire.ReleaseResponse],
    ) -> wire.ReleaseResponse:
        await self._giver.release(request)
        return wire.ReleaseResponse()
