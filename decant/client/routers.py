"""All routers that a client knows: who is asked, and again after what. The blocking and the awaiting kind differ in
how they wait, and in nothing else; what they decide stands in `decant.client.retry` and `decant.client.balancer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakSet

import grpc
from google.protobuf.message import Message

from decant.client.balancer import RouterSelector
from decant.client.channel import Tls, credentials_of, open_async, open_blocking
from decant.client.retry import RetryState
from decant.client.transport import clearer
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.errors import Cancelled, EndedCall, ServiceError, from_call

CANCEL_SECONDS = 2.0
"""For the cancel of a request that is being left: a router that is gone must not hold up its client."""


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """gRPC's error of a call becomes the service's own."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_call(cast(EndedCall, error)) from None


def closed_here() -> Cancelled:
    return Cancelled("closed by this client")


class CancelSignal:
    """Ends the waiting of one call or stream, for good. Rung from any thread and from a signal handler, also in the
    middle of `wait`: a SimpleQueue allows that, an Event does not."""

    def __init__(self) -> None:
        self.has_rung = False
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self.has_rung = True
        self._rings.put(None)

    def wait(self, seconds: float) -> None:
        """Until it rings, so long at most."""
        if seconds > 0 and not self.has_rung:
            with contextlib.suppress(queue.Empty):
                self._rings.get(timeout=seconds)


class Routers:
    """For threads, which may share one."""

    def __init__(self, addresses: tuple[str, ...], tls: Tls | None, token: str | None) -> None:
        """Connects when first asked. Raises OSError for a TLS file that can't be read, ValueError for a token that
        can't be sent."""
        self.addresses = addresses
        self._metadata = credentials_of(token)
        self._has_tls = tls is not None
        self.turns = RouterSelector(len(addresses))
        self._channels = [open_blocking(address, tls) for address in addresses]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._bells: WeakSet[CancelSignal] = WeakSet()
        self._is_closed = False
        self._lock = threading.RLock()  # a stream that is collected as garbage is left, at whatever point that is

    def bell(self) -> CancelSignal:
        """Rings when all is closed."""
        made = CancelSignal()
        with self._lock:
            if self._is_closed:
                made.ring()
            else:
                self._bells.add(made)
        return made

    def ask(self, method: str, request: Message, seconds: float | None) -> Any:
        """The response of a unary method, from whoever can give it. Raises ServiceError."""
        tries, bell = RetryState(self.turns, seconds), self.bell()
        while True:
            try:
                with typed_errors():
                    return self._asked_once(method, request, tries)
            except ServiceError as error:
                self.wait(tries, bell, error)

    def begin(self, method: str, request: Message, tries: RetryState) -> Any:
        """The call of a stream, where it is whose turn it is. Raises Cancelled when all is closed."""
        return self._start(getattr(self._stubs[tries.router], method), request, tries)

    def wait(self, tries: RetryState, bell: CancelSignal, error: ServiceError) -> None:
        """Until the next try. Raises `error` where there is none, Cancelled when the bell rings."""
        if not bell.has_rung:
            bell.wait(tries.after(self._clearer(error, tries)))
        if bell.has_rung:
            raise closed_here() from None

    def _clearer(self, error: ServiceError, tries: RetryState) -> ServiceError:
        return clearer(error, self.addresses[tries.router], tls=self._has_tls, seconds=tries.seconds)

    def leave(self, request_id: str) -> None:
        """Cancels what nobody waits for any more. The end of its call says the same, only later, so an error here is
        none."""
        with contextlib.suppress(ServiceError):
            self.ask("CancelGeneration", pb.CancelGenerationRequest(request_id=request_id), CANCEL_SECONDS)

    def close(self) -> None:
        """Ends every call and every wait."""
        with self._lock:
            self._is_closed = True
            for bell in self._bells:
                bell.ring()
        for channel in self._channels:
            channel.close()

    def _asked_once(self, method: str, request: Message, tries: RetryState) -> Any:
        call = self._start(getattr(self._stubs[tries.router], method).future, request, tries)
        try:
            response = call.result()
        finally:
            call.cancel()
        tries.heard()
        return response

    def _start(self, call: Any, request: Message, tries: RetryState) -> Any:
        with self._lock:  # a channel that is being closed takes no calls
            if self._is_closed:
                raise closed_here()
            return call(request, timeout=tries.remaining(), metadata=self._metadata)


class AsyncBell:
    """Ends the waiting of one call or stream, for good."""

    def __init__(self) -> None:
        self._rings = asyncio.Event()

    @property
    def has_rung(self) -> bool:
        return self._rings.is_set()

    def ring(self) -> None:
        self._rings.set()

    async def wait(self, seconds: float) -> None:
        """Until it rings, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rings.wait()


@contextlib.contextmanager
def typed_errors_until(bell: AsyncBell) -> Iterator[None]:
    """`typed_errors`; a call that ends because the bell rings is not its task's own cancel."""
    try:
        with typed_errors():
            yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if bell.has_rung and task is not None and not task.cancelling():
            raise closed_here() from None
        raise


class AsyncRouters:
    """For the tasks of one event loop."""

    def __init__(self, addresses: tuple[str, ...], tls: Tls | None, token: str | None) -> None:
        """Connects when first asked. Raises OSError for a TLS file that can't be read, ValueError for a token that
        can't be sent."""
        self.addresses = addresses
        self._metadata = credentials_of(token)
        self._has_tls = tls is not None
        self.turns = RouterSelector(len(addresses))
        self._channels = [open_async(address, tls) for address in addresses]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._bells: WeakSet[AsyncBell] = WeakSet()
        self._is_closed = False

    def bell(self) -> AsyncBell:
        """Rings when all is closed."""
        made = AsyncBell()
        if self._is_closed:
            made.ring()
        else:
            self._bells.add(made)
        return made

    async def ask(self, method: str, request: Message, seconds: float | None) -> Any:
        """The response of a unary method, from whoever can give it. Raises ServiceError."""
        tries, bell = RetryState(self.turns, seconds), self.bell()
        while True:
            try:
                with typed_errors_until(bell):
                    response = await self.begin(method, request, tries)
                tries.heard()
                return response
            except ServiceError as error:
                await self.wait(tries, bell, error)

    def begin(self, method: str, request: Message, tries: RetryState) -> Any:
        """The call, where it is whose turn it is. Raises Cancelled when all is closed."""
        if self._is_closed:
            raise closed_here()
        call = getattr(self._stubs[tries.router], method)
        return call(request, timeout=tries.remaining(), metadata=self._metadata)

    async def wait(self, tries: RetryState, bell: AsyncBell, error: ServiceError) -> None:
        """Until the next try. Raises `error` where there is none, Cancelled when the bell rings."""
        if not bell.has_rung:
            await bell.wait(tries.after(self._clearer(error, tries)))
        if bell.has_rung:
            raise closed_here() from None

    def _clearer(self, error: ServiceError, tries: RetryState) -> ServiceError:
        return clearer(error, self.addresses[tries.router], tls=self._has_tls, seconds=tries.seconds)

    async def leave(self, request_id: str) -> None:
        """Cancels what nobody waits for any more; see `Routers.leave`."""
        with contextlib.suppress(ServiceError):
            await self.ask("CancelGeneration", pb.CancelGenerationRequest(request_id=request_id), CANCEL_SECONDS)

    async def close(self) -> None:
        """Ends every call and every wait."""
        self._is_closed = True
        for bell in self._bells:
            bell.ring()
        for channel in self._channels:
            await channel.close()
