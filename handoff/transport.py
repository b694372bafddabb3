"""Transports of a fetch: they move the messages of ``KvSource`` and do not interpret them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from decant.handoff.codec import Received, decode
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services

FETCH = f"/{wire.DESCRIPTOR.services_by_name['KvSource'].full_name}/Fetch"
"""Not encoded by protobuf alone, see ``codec``."""
IDLE_SECONDS = 60.0


class KvSource(Protocol):
    def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[Received]:
        """Ends when either side ends the call. Raises ConnectionError when it breaks."""
        ...

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        """Raises ConnectionError."""
        ...


class Transport(Protocol):
    def source(self, address: str) -> KvSource: ...


class GrpcSource:
    def __init__(self, borrow: Callable[[], AbstractContextManager[grpc.aio.Channel]]) -> None:
        self._borrow = borrow

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[Received]:
        with self._borrow() as channel:
            opened: Any = channel.stream_stream(FETCH, wire.FetchRequest.SerializeToString, decode)
            call = opened(requests)
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
            finally:
                call.cancel()

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        with self._borrow() as channel:
            try:
                await services.KvSourceStub(channel).Release(request, timeout=seconds)
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error


@dataclass(slots=True)
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0
    timer: asyncio.TimerHandle | None = None


class GrpcTransport:
    """Channels by address, closed ``idle_seconds`` after their last call."""

    def __init__(self, connect: ChannelFactory, idle_seconds: float = IDLE_SECONDS) -> None:
        self._connect = connect
        self._idle_seconds = idle_seconds
        self._channels: dict[str, _Shared] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._channels)

    def source(self, address: str) -> GrpcSource:
        return GrpcSource(partial(self._borrow, address))

    async def close(self) -> None:
        for address in list(self._channels):
            self._evict(address)
        if self._closing:
            await asyncio.wait(self._closing)

    @contextmanager
    def _borrow(self, address: str) -> Iterator[grpc.aio.Channel]:
        shared = self._channels.get(address)
        if shared is None:
            shared = self._channels[address] = _Shared(self._connect(address))
        if shared.timer is not None:
            shared.timer.cancel()
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            if not shared.users and self._channels.get(address) is shared:
                shared.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._evict, address)

    def _evict(self, address: str) -> None:
        shared = self._channels.pop(address)
        if shared.timer is not None:
            shared.timer.cancel()
        closing = asyncio.ensure_future(shared.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class ChannelFactory(Protocol):
    def __call__(self, address: str, /) -> grpc.aio.Channel: ...
