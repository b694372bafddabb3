"""What carries a fetch. gRPC streaming needs nothing but the worker's own port; others may be faster.

A transport moves the messages of ``KvSource`` and knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Protocol

import grpc

from handoff.codec import Received, decode
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc as services

FETCH = f"/{wire.DESCRIPTOR.services_by_name['KvSource'].full_name}/Fetch"
"""The method's full name: its messages are not encoded by protobuf alone, see ``codec``."""


class KvSource(Protocol):
    """The giving end, as a taker sees it."""

    def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[Received]:
        """Answers to what the taker says; ends when either side is through. Raises ConnectionError when it breaks."""
        ...

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        """Tell the giver that the taker is done, within ``seconds``. Raises ConnectionError."""
        ...


class Transport(Protocol):
    """Finds a giver by the address on its ticket."""

    def source(self, address: str) -> KvSource: ...


class GrpcSource:
    """``KvSource`` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = services.KvSourceStub(channel)
        self._open: Any = channel.stream_stream(FETCH, wire.FetchRequest.SerializeToString, decode)

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[Received]:
        call = self._open(requests)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        try:
            await self._stub.Release(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error


class GrpcTransport:
    """Channels by address, made by ``connect`` when first needed; ``close`` ends them all."""

    def __init__(self, connect: ChannelFactory) -> None:
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    def source(self, address: str) -> GrpcSource:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return GrpcSource(self._channels[address])

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


class ChannelFactory(Protocol):
    def __call__(self, address: str, /) -> grpc.aio.Channel: ...
