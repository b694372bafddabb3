"""An address in front of a worker: it forwards every call, and may tamper with the caches that the worker gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc

from protos import worker_pb2 as wire

FETCH = "/decant.internal.v1.KvSource/Fetch"

Tamper = Callable[[wire.FetchResponse], Iterable[wire.FetchResponse]]
"""What becomes of one message of a fetch: itself, another, none, or several."""

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Proxy(grpc.GenericRpcHandler):
    """Forwards bytes as they are. `target` and `tamper` may change at any time, for calls that begin later."""

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.tamper: Tamper | None = None
        self.is_mute = False  # fetches hear nothing at all, and no end either
        self.fetches = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            tamper = self.tamper if method == FETCH else None
            self.fetches += method == FETCH
            if self.is_mute and method == FETCH:
                await asyncio.Event().wait()
            async with grpc.aio.insecure_channel(self.target, OPTIONS) as channel:
                call: Any = channel.stream_stream(method)(cast(Any, requests))
                try:
                    async for answer in call:
                        for changed in _changed(tamper, answer):
                            yield changed
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
                finally:
                    call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)


def _changed(tamper: Tamper | None, answer: bytes) -> Iterable[bytes]:
    if tamper is None:
        return [answer]
    return [message.SerializeToString() for message in tamper(wire.FetchResponse.FromString(answer))]


@contextmanager
def proxy() -> Iterator[Proxy]:
    """A proxy on a thread and event loop of its own."""
    made, ready, loop = Proxy(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((made,))
        made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
