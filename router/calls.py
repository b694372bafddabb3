"""Reading the streams of workers: one error for a stream that broke."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from runtime.errors import from_call
from runtime.fault import Reason


class Broken(Exception):
    """A stream ended with an error, or fell silent. ``reason`` is what a worker's own status says, if it does."""

    def __init__(self, words: str, reason: Reason = Reason.UNSPECIFIED) -> None:
        super().__init__(words)
        self.reason = reason


async def read(call: Any) -> Any:
    """The next message of a call, None at its end. Raises Broken."""
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise Broken(f"{error.code().name}: {error.details()}", from_call(error).reason) from None
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise Broken(str(error)) from None
    except asyncio.CancelledError:
        # gRPC raises it for a status CANCELLED too, as of a server that is being stopped.
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise Broken("CANCELLED by the worker") from None
    return None if message is grpc.aio.EOF else message


async def write(call: Any, message: Any) -> None:
    """Raises Broken."""
    try:
        await call.write(message)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise Broken(str(error)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise Broken("CANCELLED by the worker") from None
