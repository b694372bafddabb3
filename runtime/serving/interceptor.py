"""Conversion of handlers' exceptions into gRPC statuses.

    handler raises             client gets                              counted     logged
    a ServiceError             its status, details and trailers         by label    without message
    anything else              INTERNAL, "internal error"               internal    once, with stack
    cancelled, context.abort   nothing, that status                     no          no

A handler's async generator is closed in the call's task as soon as the client disconnects.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from decant.runtime.error_details import trailers
from decant.runtime.errors import FaultOwner, Internal, InvalidArgument, ServiceError
from decant.runtime.telemetry import logs

_log = logs.get(__name__)

_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

Gate = Callable[[str, grpc.aio.ServicerContext[Any, Any]], None]
"""Gets "/package.Service/Method" and the call; raises a ServiceError to refuse it."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that gives `count` every error that ends a call.

    Calls of `services` (full names) are active until their handlers have cleaned up.
    """

    def __init__(
        self, count: Callable[[ServiceError], None], *, gate: Gate | None = None, services: Iterable[str] = ()
    ) -> None:
        self.active = 0
        self._count = count
        self._gate = gate
        self._services = frozenset(services)
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            call = self._streaming(method, handler.stream_stream or handler.unary_stream)
        else:
            call = self._unary(method, handler.stream_unary or handler.unary_unary)
        return _REBUILD[handler.request_streaming, handler.response_streaming](
            call,
            request_deserializer=_lenient_deserializer(handler),
            response_serializer=handler.response_serializer,
        )

    def _unary(self, method: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async def work() -> Any:
                return await handle(_readable(request), context)

            return await self._answer(method, work, context)

        return call

    def _streaming(self, method: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async def work() -> None:
                answers = handle(_readable(request), context)
                if not inspect.isasyncgen(answers):
                    await answers  # the handler writes to the context itself
                    return
                async with aclosing(answers):
                    async for answer in answers:
                        await _write(context, answer)

            await self._answer(method, work, context)

        return call

    async def _answer(
        self, method: str, work: Callable[[], Awaitable[Any]], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        with logs.bound(method=method), self._counted(method):
            try:
                if self._gate is not None:
                    self._gate(method, context)
                return await work()
            except ServiceError as error:
                failure = error
            except ClientDisconnected:
                raise asyncio.CancelledError from None
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                if _cancelled():
                    raise
                # A task that the handler awaited was cancelled, not the call, which would hang without a status.
                _log.exception("unexpected cancellation")
                failure = Internal()
            except Exception:  # noqa: BLE001 - the one place; what it was is in the log
                _log.exception("unexpected exception")
                failure = Internal()
            return await self._refuse(failure, context)

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if method[1:].partition("/")[0] not in self._services:
            yield
            return
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self._idle.set()

    async def _refuse(self, error: ServiceError, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if _cancelled() and not isinstance(error, Internal):
            raise asyncio.CancelledError  # the client has disconnected
        self._count(error)
        if not isinstance(error, Internal):
            log = _log.warning if error.fault_owner is FaultOwner.SERVER else _log.debug
            log("call failed", code=error.code.name, reason=error.label)
        if _cancelled():
            raise asyncio.CancelledError
        try:
            await context.abort(error.code, error.detail.message, trailers(error.detail))
        except grpc.aio.InternalError:  # the client has just disconnected
            raise asyncio.CancelledError from None


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A request that cannot be decoded; gRPC itself would log a stack."""

    bytes: int


class _Readable:
    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> _Readable:
        return self

    async def __anext__(self) -> Any:
        return _checked(await anext(self._messages))


def _lenient_deserializer(handler: Any) -> Any:
    read = handler.request_deserializer
    if read is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _Unreadable(len(data))

    return deserialize


def _readable(request: Any) -> Any:
    return _Readable(request) if isinstance(request, AsyncIterator) else _checked(request)


def _checked(message: Any) -> Any:
    if isinstance(message, _Unreadable):
        raise InvalidArgument(
            "request", "a message of the method's own type, its texts in UTF-8", f"{message.bytes} bytes"
        )
    return message


async def _write(context: grpc.aio.ServicerContext[Any, Any], answer: Any) -> None:
    try:
        await context.write(answer)
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        raise ClientDisconnected from error


class ClientDisconnected(Exception):
    """A write to the context failed; the handler will be cancelled."""


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_REBUILD: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
