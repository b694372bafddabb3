from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, cast
from weakref import WeakSet

import grpc
from google.protobuf.message import Message

from decant.client.balancer import RouterSelector
from decant.client.channel import Tls, credentials_of, open_async, open_blocking
from decant.client.retry import RetryState
from decant.client.transport import is_lasting, with_advice
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.backoff import Backoff
from decant.runtime.errors import Cancelled, EndedCall, ServiceError, from_call
from decant.runtime.grpc_options import ACCEPTED
from decant.runtime.telemetry import tracing

CANCEL_SECONDS = 2.0
"""Timeout of a cancel, so that a lost router does not delay its client."""
WAIT_SECONDS = 0.2
"""Longest single wait in the main thread: a signal that comes just before it does not end it."""


OnWait = Callable[[ServiceError], None]
"""Receives the error after which a call waits for its next try; an error that it raises ends the call."""


def _ignore(error: ServiceError) -> None:
    pass


@contextlib.contextmanager
def typed_errors(retries: RetryState | None = None) -> Iterator[None]:
    """Raise a ServiceError for the error of a call, after its acceptance was noted in `retries`."""
    try:
        yield
    except grpc.RpcError as error:
        call = cast(Any, error)
        if retries is not None and any(key == ACCEPTED for key, _ in call.initial_metadata() or ()):
            retries.mark_accepted()
        raise from_call(cast(EndedCall, call)) from None


def closed_error() -> Cancelled:
    return Cancelled("closed by this client")


def call_span(method: str, request: Message, retries: RetryState) -> tracing.Span:
    if method not in ("Generate", "GenerateStream", "ResumeStream"):
        return tracing.Span()
    span = tracing.span(f"client.{method}", kind="client", request_id=request.request_id)  # type: ignore[attr-defined]
    retries.metadata = span.metadata
    return span


class CancelSignal:
    """Signal to end calls. `set` is safe in any thread and signal handler, also inside `wait`, unlike an Event's."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self.is_set = True
        self._wakeups.put(None)

    def wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not self.is_set and (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._wakeups.get(timeout=min(left, WAIT_SECONDS))


class Routers:
    """Blocking calls to several routers; thread-safe."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        tls: Tls | None,
        token: str | None,
        backoff: Backoff,
        resume_seconds: float,
    ) -> None:
        self.addresses = addresses
        self.on_wait: OnWait = _ignore
        self._resume_seconds = resume_seconds
        self._metadata = credentials_of(token)
        self._has_tls = tls is not None
        self.selector = RouterSelector(len(addresses), backoff=backoff)
        self._channels = [open_blocking(address, tls) for address in addresses]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._signals: WeakSet[CancelSignal] = WeakSet()
        self._closed = CancelSignal()
        self._lock = threading.RLock()  # reentrant: garbage collection may close a stream at any point

    def with_token(self, token: str | None) -> Self:
        """The same connections with other credentials; `close` of either closes both."""
        other = copy.copy(self)
        other._metadata = credentials_of(token)
        return other

    def cancel_signal(self) -> CancelSignal:
        signal = CancelSignal()
        with self._lock:
            if self._closed.is_set:
                signal.set()
            else:
                self._signals.add(signal)
        return signal

    def retries(self, seconds: float | None) -> RetryState:
        return RetryState(self.selector, seconds, self._resume_seconds)

    def call(self, method: str, request: Message, seconds: float | None) -> Any:
        return self._call(method, request, self.retries(seconds))

    def _call(self, method: str, request: Message, retries: RetryState) -> Any:
        signal = self.cancel_signal()
        with call_span(method, request, retries):
            while True:
                try:
                    with typed_errors(retries):
                        return self._call_once(method, request, retries)
                except ServiceError as error:
                    self.wait(retries, signal, error)

    def start_call(self, method: str, request: Message, retries: RetryState) -> Any:
        """Start a stream at the selected router. Raises Cancelled after `close`."""
        return self._start(getattr(self._stubs[retries.router], method), request, retries)

    def wait(self, retries: RetryState, signal: CancelSignal, error: ServiceError) -> None:
        """Wait for the next try. Raises `error` if there is none, Cancelled once `signal` is set."""
        if not signal.is_set:
            advised = self._with_advice(error, retries)
            pause = retries.pause_after(advised, is_lasting=is_lasting(error))
            if pause:
                self.on_wait(advised)
            signal.wait(pause)
        if signal.is_set:
            raise closed_error() from None

    def _with_advice(self, error: ServiceError, retries: RetryState) -> ServiceError:
        return with_advice(error, self.addresses[retries.router], tls=self._has_tls, seconds=retries.seconds)

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request with a few tries, ignoring errors: the end of its call cancels it later."""
        with contextlib.suppress(ServiceError):
            request = pb.CancelGenerationRequest(request_id=request_id)
            self._call("CancelGeneration", request, RetryState(self.selector, CANCEL_SECONDS))

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            for signal in self._signals:
                signal.set()
        for channel in self._channels:
            channel.close()

    def _call_once(self, method: str, request: Message, retries: RetryState) -> Any:
        call = self._start(getattr(self._stubs[retries.router], method).future, request, retries)
        try:
            response = call.result()
        finally:
            call.cancel()
        retries.mark_progress()
        return response

    def _start(self, method: Any, request: Message, retries: RetryState) -> Any:
        with self._lock:  # a channel that is being closed accepts no calls
            if self._closed.is_set:
                raise closed_error()
            return method(request, timeout=retries.remaining(), metadata=(*self._metadata, *retries.metadata))


class AsyncCancelSignal:
    def __init__(self) -> None:
        self._wakeups = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._wakeups.is_set()

    def set(self) -> None:
        self._wakeups.set()

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakeups.wait()


@contextlib.contextmanager
def typed_errors_until(signal: AsyncCancelSignal, retries: RetryState) -> Iterator[None]:
    """`typed_errors` that raises Cancelled, not CancelledError, for a call that `signal` ended."""
    try:
        with typed_errors(retries):
            yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if signal.is_set and task is not None and not task.cancelling():
            raise closed_error() from None
        raise


class AsyncRouters:
    """`Routers` for one event loop."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        tls: Tls | None,
        token: str | None,
        backoff: Backoff,
        resume_seconds: float,
    ) -> None:
        self.addresses = addresses
        self.on_wait: OnWait = _ignore
        self._resume_seconds = resume_seconds
        self._metadata = credentials_of(token)
        self._has_tls = tls is not None
        self.selector = RouterSelector(len(addresses), backoff=backoff)
        self._channels = [open_async(address, tls) for address in addresses]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        self._signals: WeakSet[AsyncCancelSignal] = WeakSet()
        self._closed = AsyncCancelSignal()

    def with_token(self, token: str | None) -> Self:
        """The same connections with other credentials; `close` of either closes both."""
        other = copy.copy(self)
        other._metadata = credentials_of(token)
        return other

    def cancel_signal(self) -> AsyncCancelSignal:
        signal = AsyncCancelSignal()
        if self._closed.is_set:
            signal.set()
        else:
            self._signals.add(signal)
        return signal

    def retries(self, seconds: float | None) -> RetryState:
        return RetryState(self.selector, seconds, self._resume_seconds)

    async def call(self, method: str, request: Message, seconds: float | None) -> Any:
        return await self._call(method, request, self.retries(seconds))

    async def _call(self, method: str, request: Message, retries: RetryState) -> Any:
        signal = self.cancel_signal()
        with call_span(method, request, retries):
            while True:
                try:
                    with typed_errors_until(signal, retries):
                        response = await self.start_call(method, request, retries)
                    retries.mark_progress()
                    return response
                except ServiceError as error:
                    await self.wait(retries, signal, error)

    def start_call(self, method: str, request: Message, retries: RetryState) -> Any:
        if self._closed.is_set:
            raise closed_error()
        call = getattr(self._stubs[retries.router], method)
        return call(request, timeout=retries.remaining(), metadata=(*self._metadata, *retries.metadata))

    async def wait(self, retries: RetryState, signal: AsyncCancelSignal, error: ServiceError) -> None:
        if not signal.is_set:
            advised = self._with_advice(error, retries)
            pause = retries.pause_after(advised, is_lasting=is_lasting(error))
            if pause:
                self.on_wait(advised)
            await signal.wait(pause)
        if signal.is_set:
            raise closed_error() from None

    def _with_advice(self, error: ServiceError, retries: RetryState) -> ServiceError:
        return with_advice(error, self.addresses[retries.router], tls=self._has_tls, seconds=retries.seconds)

    async def cancel_request(self, request_id: str) -> None:
        with contextlib.suppress(ServiceError):
            request = pb.CancelGenerationRequest(request_id=request_id)
            await self._call("CancelGeneration", request, RetryState(self.selector, CANCEL_SECONDS))

    async def close(self) -> None:
        self._closed.set()
        for signal in self._signals:
            signal.set()
        for channel in self._channels:
            await channel.close()
