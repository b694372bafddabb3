"""What this router sends to one worker: one queue per session, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.workers.stream_io import write
from decant.router.workers.subscription import RunKey, key_of

RETIRED_AT_ONCE = 256
"""Retired runs that are sent before the next heartbeat does."""


class Outgoing:
    """``begin`` starts a session's queue, ``open`` and ``close`` say whether messages may be sent.

    A cancel is never lost: while no session is open it is kept, and the next one sends it after its welcome, for the
    worker may run what it was started with until then.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._queue = asyncio.Queue[wire.RouterMessage | None]()  # None: nothing more is sent
        self._retired: list[wire.Run] = []
        self._cancels: dict[RunKey, wire.Cancel] = {}

    def begin(self) -> None:
        """A new session says hello. Runs that it does not name are orphans there: none has to be retired."""
        self._queue = asyncio.Queue()
        self._retired.clear()

    def open(self, orphans: list[wire.Run]) -> None:
        """The worker's welcome was received. Cancel what ended meanwhile, and ``orphans``."""
        self.is_open = True
        for run in orphans:
            self._cancels.setdefault(key_of(run), wire.Cancel(run=run, reason=wire.Cancel.REASON_ATTEMPT))
        cancels, self._cancels = self._cancels, {}
        for cancel in cancels.values():
            self.send(wire.RouterMessage(cancel=cancel))

    def close(self) -> None:
        """The session broke."""
        self.is_open = False

    def finish(self) -> None:
        """Send what is queued, the retired runs too, and nothing more."""
        self._send_retired()
        self._queue.put_nowait(None)

    def send(self, message: wire.RouterMessage) -> None:
        self._queue.put_nowait(message)

    def cancel(self, cancel: wire.Cancel) -> None:
        """End a run at the worker, now or as soon as a session is open."""
        if self.is_open:
            self.send(wire.RouterMessage(cancel=cancel))
        else:
            self._cancels[key_of(cancel.run)] = cancel

    def forget(self, run: wire.Run) -> None:
        """Have the worker forget a run, with the next heartbeat or with many others."""
        self._retired.append(run)
        if len(self._retired) >= RETIRED_AT_ONCE:
            self._send_retired()

    def heartbeat(self, beat: wire.Heartbeat) -> None:
        self._send_retired()
        self.send(wire.RouterMessage(heartbeat=beat))

    async def write(self, call: Any) -> None:
        """Write the session's messages until cancelled, or until the worker has ended the session that `finish`
        half-closed. Raises Broken."""
        queue = self._queue
        while (message := await queue.get()) is not None:
            await write(call, message)
        await call.done_writing()
        await call.code()

    def _send_retired(self) -> None:
        if self._retired:
            retired, self._retired = self._retired, []
            self.send(wire.RouterMessage(forget=wire.ForgetRuns(runs=retired)))
