from __future__ import annotations

import asyncio
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.workers.stream_io import finish, write
from decant.router.workers.subscription import RunKey, key_of


class Outgoing:
    """Messages to a worker between ``open`` and ``close``; a cancel at another time waits for the next ``open``."""

    def __init__(self, forget_batch: int) -> None:
        self.is_open = False
        self._forget_batch = forget_batch
        self._queue = asyncio.Queue[wire.RouterMessage | None]()  # None: nothing more is sent
        self._to_forget: list[wire.Run] = []
        self._cancels: dict[tuple[RunKey, int | None], wire.Cancel] = {}

    def begin(self) -> None:
        """Make a new queue, without runs to forget: a run that the hello does not name is an orphan at the worker."""
        self._queue = asyncio.Queue()
        self._to_forget.clear()

    def open(self, orphans: list[wire.Run]) -> None:
        self.is_open = True
        for run in orphans:
            cancel = wire.Cancel(run=run, reason=wire.Cancel.REASON_ATTEMPT)
            self._cancels.setdefault((key_of(run), None), cancel)
        cancels, self._cancels = self._cancels, {}
        for cancel in cancels.values():
            self.send(wire.RouterMessage(cancel=cancel))

    def close(self) -> None:
        self.is_open = False

    def finish(self) -> None:
        self._send_to_forget()
        self._queue.put_nowait(None)

    def send(self, message: wire.RouterMessage) -> None:
        self._queue.put_nowait(message)

    def cancel(self, cancel: wire.Cancel) -> None:
        if self.is_open:
            self.send(wire.RouterMessage(cancel=cancel))
        else:
            output = cancel.output if cancel.HasField("output") else None
            self._cancels[key_of(cancel.run), output] = cancel

    def forget(self, run: wire.Run) -> None:
        self._to_forget.append(run)
        if len(self._to_forget) >= self._forget_batch:
            self._send_to_forget()

    def heartbeat(self, message: wire.Heartbeat) -> None:
        self._send_to_forget()
        self.send(wire.RouterMessage(heartbeat=message))

    async def write(self, call: Any) -> None:
        """Write until ``finish``, then wait until the worker has ended the session. Raises StreamBroken."""
        queue = self._queue
        while (message := await queue.get()) is not None:
            await write(call, message)
        await finish(call)

    def _send_to_forget(self) -> None:
        if self._to_forget:
            runs, self._to_forget = self._to_forget, []
            self.send(wire.RouterMessage(forget=wire.ForgetRuns(runs=runs)))
