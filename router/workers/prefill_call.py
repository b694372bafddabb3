"""The call by which a worker reads a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.workers.stream_io import StreamBroken, read
from decant.runtime.peer import UnknownMessages


@dataclass(frozen=True, slots=True)
class PrefillOver:
    """The call has ended, well or not."""

    broken: StreamBroken | None


class PrefillCall:
    """``tell`` hears what the worker says, and PrefillOver at last; nothing after ``close``."""

    def __init__(self, stub: Any, request: wire.PrefillRequest, tell: Callable[[Any], None]) -> None:
        self.is_over = False
        self._tell = tell
        self._unknown = UnknownMessages(request.worker.id)
        self._call = stub.Prefill(request)
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        """End the call; its work ends there too, unless its cache is being fetched."""
        self._reading.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        broken = None
        try:
            while (message := await read(self._call)) is not None:
                event = message.WhichOneof("event")
                if event is None:
                    self._unknown.ignore()
                else:
                    self._tell(getattr(message, event))
        except StreamBroken as error:
            broken = error
        self.is_over = True
        self._tell(PrefillOver(broken))
