"""Transports of a fetch: they move the messages of ``KvSource`` and do not interpret them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import grpc

from decant.handoff.codec import Received, decode
from decant.handoff.shared_connections import IDLE_SECONDS, SharedConnections
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services

FETCH = f"/{wire.DESCRIPTOR.services_by_name['KvSource'].full_name}/Fetch"
"""The method's full name: its messages are not encoded by protobuf alone, see ``codec``."""


class KvSource(Protocol):
    def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
        """Yield responses until either side ends the call. Raises ConnectionError when it breaks.

        The caller closes it, which ends the call and releases what it uses.
        """
        ...

    def record_corruption(self, detail: str) -> None:
        """Note that fetched bytes do not match their checksum."""
        ...

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        """Release a ticket within ``seconds``. Raises ConnectionError."""
        ...


class Transport(Protocol):
    @property
    def memory(self) -> wire.BlockMemory | None:
        """Where receivers with the same transport can read this process's blocks; None if they can't."""
        ...

    def source(self, address: str) -> KvSource: ...


class GrpcSource:
    def __init__(self, borrow: Callable[[], AbstractContextManager[grpc.aio.Channel]]) -> None:
        self._borrow = borrow

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
        with self._borrow() as channel, _broken_call():
            opened: Any = channel.stream_stream(FETCH, wire.FetchRequest.SerializeToString, decode)
            call = opened(requests)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    def record_corruption(self, detail: str) -> None:
        pass

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        with self._borrow() as channel, _broken_call():
            await services.KvSourceStub(channel).Release(request, timeout=seconds)


@contextmanager
def _broken_call() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(f"{error.code().name}: {error.details()}") from error
    except Exception as error:  # whatever gRPC raises is a break of this call
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


class GrpcTransport:
    memory: wire.BlockMemory | None = None

    def __init__(self, connect: ChannelFactory, idle_seconds: float = IDLE_SECONDS) -> None:
        self.channels = SharedConnections(connect, lambda channel: channel.close(), idle_seconds)

    def source(self, address: str) -> GrpcSource:
        return GrpcSource(partial(self.channels.borrow, address))

    async def close(self) -> None:
        await self.channels.close()


class ChannelFactory(Protocol):
    def __call__(self, address: str, /) -> grpc.aio.Channel: ...
