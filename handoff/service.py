from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from decant.handoff.sender import KvSender
from decant.protos import worker_pb2 as wire

DESCRIPTOR = wire.DESCRIPTOR.services_by_name["KvSource"]


class KvSourceService:
    """The KvSource service, which sends encoded responses; generated code cannot."""

    def __init__(self, sender: KvSender) -> None:
        self._sender = sender

    def add_to(self, server: grpc.aio.Server) -> None:
        methods: dict[str, Any] = {
            "Fetch": grpc.stream_stream_rpc_method_handler(
                self._fetch, request_deserializer=wire.FetchRequest.FromString
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self._release,
                request_deserializer=wire.ReleaseRequest.FromString,
                response_serializer=wire.ReleaseResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DESCRIPTOR.full_name, methods),))

    async def _fetch(
        self, requests: AsyncIterator[wire.FetchRequest], _: grpc.aio.ServicerContext[wire.FetchRequest, bytes]
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._sender.fetch(requests)) as messages:
            async for message in messages:
                yield message

    async def _release(
        self,
        request: wire.ReleaseRequest,
        _: grpc.aio.ServicerContext[wire.ReleaseRequest, wire.ReleaseResponse],
    ) -> wire.ReleaseResponse:
        await self._sender.release(request)
        return wire.ReleaseResponse()
