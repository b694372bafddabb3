from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc

from decant.runtime.error_details import Reason
from decant.runtime.errors import from_call


class StreamBroken(Exception):
    """Stream that ended with an error or was silent for too long; ``reason`` is that of the worker's status.

    ``is_of_dead_process``: its port refuses connections, or another process starts there.
    """

    def __init__(self, detail: str, reason: Reason = Reason.UNSPECIFIED, *, is_of_dead_process: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.is_of_dead_process = is_of_dead_process


async def read(call: Any) -> Any:
    """Read a message; None at the end. Raises StreamBroken."""
    with _broken_stream():
        message = await call.read()
    return None if message is grpc.aio.EOF else message


async def write(call: Any, message: Any) -> None:
    with _broken_stream():
        await call.write(message)


async def finish(call: Any) -> None:
    """Send nothing more, and wait until the worker has ended the call."""
    with _broken_stream():
        await call.done_writing()
        await call.code()


@contextlib.contextmanager
def _broken_stream() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _broken(error) from None
    except asyncio.CancelledError:
        # gRPC also raises it for a status CANCELLED, as a stopping server sends.
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise StreamBroken("CANCELLED by the worker") from None
    except Exception as error:  # whatever gRPC raises is a break of this stream
        raise StreamBroken(f"{type(error).__name__}: {error}") from error


def _broken(error: grpc.aio.AioRpcError) -> StreamBroken:
    details, reason = error.details() or "", from_call(error).reason
    # gRPC gives no errno: the system's own text is all that distinguishes a refusal from a host that does not answer.
    is_refused = error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" in details
    is_of_dead_process = is_refused or reason is Reason.NO_WORKER
    return StreamBroken(f"{error.code().name}: {details}", reason, is_of_dead_process=is_of_dead_process)
