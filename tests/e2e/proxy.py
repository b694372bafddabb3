"""An address in front of a worker: forwards every call, may tamper with fetches, and may cut a call in two.

caller ──────┤ proxy ├────── worker          Cut(SESSION, TO_WORKER, 3): the fourth message that the caller sends
         <── ✂       ✂ ──>                   in a session from now on is its last, or does not arrive
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import grpc

from decant.protos import worker_pb2 as wire
from tests.loop_thread import on_a_thread

PREFILL = "/decant.internal.v1.Prefill/Prefill"
SESSION = "/decant.internal.v1.Decode/Session"
FETCH = "/decant.internal.v1.KvSource/Fetch"
RELEASE = "/decant.internal.v1.KvSource/Release"

Direction = Literal["to worker", "to caller"]
TO_WORKER: Direction = "to worker"
TO_CALLER: Direction = "to caller"

_HAS_HEARTBEATS: dict[tuple[str, Direction], Any] = {
    (SESSION, TO_WORKER): wire.RouterMessage,
    (SESSION, TO_CALLER): wire.WorkerMessage,
    (FETCH, TO_WORKER): wire.FetchRequest,
    (FETCH, TO_CALLER): wire.FetchResponse,
}

Tamper = Callable[[wire.FetchResponse], Iterable[wire.FetchResponse]]
"""Replaces one message of a fetch by none, itself, another or several."""

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(slots=True)
class Cut:
    """Loss of a call at both ends, at message `number` of one direction, counted from 0 and without heartbeats.

    ``arrives``: that message still arrives. ``after``: count from when that cut happened. ``instead``: call this and do
    not cut.
    """

    method: str
    direction: Direction
    number: int
    arrives: bool = False
    after: Cut | None = None
    instead: Callable[[], None] | None = None
    happened: bool = False

    def falls_on(self, method: str, direction: Direction, message: bytes) -> bool:
        """Count a message; return whether to cut at it. Call once per message."""
        if self.happened or (method, direction) != (self.method, self.direction):
            return False
        if (self.after is not None and not self.after.happened) or _is_heartbeat(method, direction, message):
            return False
        self.happened = self.number == 0
        self.number -= 1
        return self.happened


def _is_heartbeat(method: str, direction: Direction, message: bytes) -> bool:
    kind = _HAS_HEARTBEATS.get((method, direction))
    return kind is not None and kind.FromString(message).HasField("heartbeat")


class Proxy(grpc.GenericRpcHandler):
    """Proxy that forwards bytes. `target` and `tamper` apply to later calls, `cuts` also to open ones."""

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.tamper: Tamper | None = None
        self.is_mute = False  # fetches receive nothing, not even an end
        self.fetches = 0
        self.cuts: tuple[Cut, ...] = ()
        self._channels: dict[str, grpc.aio.Channel] = {}  # by target

    def _channel(self) -> grpc.aio.Channel:
        if self.target not in self._channels:
            self._channels[self.target] = grpc.aio.insecure_channel(self.target, OPTIONS)
        return self._channels[self.target]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            tamper = self.tamper if method == FETCH else None
            self.fetches += method == FETCH
            if self.is_mute and method == FETCH:
                await asyncio.Event().wait()
            broken = asyncio.Event()
            forwarded = self._uncut(method, TO_WORKER, requests, broken)
            call: Any = self._channel().stream_stream(method)(cast(Any, forwarded))
            breaking = asyncio.create_task(_break(call, broken))
            try:
                async for answer in self._uncut(method, TO_CALLER, call, broken):
                    for changed in _changed(tamper, answer):
                        yield changed
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            except asyncio.CancelledError:
                if not broken.is_set():
                    raise
            finally:
                breaking.cancel()
                call.cancel()
            if broken.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _uncut(
        self, method: str, direction: Direction, messages: AsyncIterator[bytes], broken: asyncio.Event
    ) -> AsyncIterator[bytes]:
        async for message in messages:
            cut = next((cut for cut in self.cuts if cut.falls_on(method, direction, message)), None)
            if cut is not None and cut.instead is not None:
                cut.instead()
                cut = None
            if cut is None or cut.arrives:
                yield message
            if cut is not None:
                broken.set()
                return


async def _break(call: Any, broken: asyncio.Event) -> None:
    await broken.wait()
    call.cancel()


def _changed(tamper: Tamper | None, answer: bytes) -> Iterable[bytes]:
    if tamper is None:
        return [answer]
    return [message.SerializeToString() for message in tamper(wire.FetchResponse.FromString(answer))]


@asynccontextmanager
async def serving() -> AsyncIterator[Proxy]:
    made = Proxy()
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((made,))
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)
        await made.close()


@contextmanager
def proxy() -> Iterator[Proxy]:
    with on_a_thread(serving()) as made:
        yield made
