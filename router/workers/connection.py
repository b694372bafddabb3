from __future__ import annotations

import asyncio
from typing import Any, Protocol

from decant.protos import worker_pb2 as wire
from decant.router.timings import WorkerTimings
from decant.router.workers.outgoing import Outgoing
from decant.router.workers.stream_io import StreamBroken, read, write
from decant.runtime.connections.heartbeat import HeartbeatMonitor, loop_timeout
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.error_details import Reason
from decant.runtime.serving.shutdown import race

STUCK_STEPS = 8


class StuckStepDetector:
    def __init__(self, timings: WorkerTimings) -> None:
        self._timings = timings
        self.is_stuck = False
        """New requests go elsewhere."""
        self.is_lost = False
        """Running requests go elsewhere too."""

    def update(self, heartbeat: wire.Heartbeat) -> None:
        self.is_stuck = self._is_older_than(self._timings.stuck_ms, heartbeat)
        self.is_lost = self._is_older_than(self._timings.lost_ms, heartbeat)

    def _is_older_than(self, ms: int, heartbeat: wire.Heartbeat) -> bool:
        limit_ms = max(ms, STUCK_STEPS * heartbeat.longest_step_ms)
        return heartbeat.HasField("step_age_ms") and heartbeat.step_age_ms > limit_ms


class ConnectionOwner(Protocol):
    def hello(self) -> wire.Hello: ...

    def on_welcome(self, hello: wire.Hello, welcome: wire.Welcome) -> None: ...

    def on_message(self, message: wire.WorkerMessage) -> None: ...

    def next_heartbeat(self) -> wire.Heartbeat: ...


class Connection:
    """One connection of a session; ``outgoing`` is open from the welcome to the break."""

    def __init__(self, call: Any, outgoing: Outgoing, owner: ConnectionOwner, timings: WorkerTimings) -> None:
        self.heartbeat_monitor = HeartbeatMonitor(timings.heartbeat_s)
        self.step_detector = StuckStepDetector(timings)
        self._call = call
        self._outgoing = outgoing
        self._owner = owner
        self._timings = timings

    @property
    def is_healthy(self) -> bool:
        return not (self.step_detector.is_stuck or self.heartbeat_monitor.is_suspect)

    async def run(self) -> None:
        """Run once, until the worker ends the session. Raises StreamBroken, TimeoutError; ValueError for a malformed
        message.
        """
        await self._open()
        await race(self._receive(), self._outgoing.write(self._call), self._send_heartbeats())

    def close(self) -> None:
        self._outgoing.close()
        self._call.cancel()

    async def _open(self) -> None:
        self._outgoing.begin()
        hello = self._owner.hello()
        async with loop_timeout(self._timings.welcome_s):
            await write(self._call, wire.RouterMessage(hello=hello))
            answer = await read(self._call)
        if answer is None or not answer.HasField("welcome"):
            raise StreamBroken("no welcome")
        welcome = answer.welcome
        if not same_incarnation(welcome.worker, hello.worker):
            raise StreamBroken("the welcome is of another incarnation", Reason.WRONG_PEER)
        self._outgoing.open(list(welcome.orphans))
        self._owner.on_welcome(hello, welcome)

    async def _receive(self) -> None:
        while (message := await read(self._call)) is not None:
            self.heartbeat_monitor.reset()
            if message.HasField("heartbeat"):
                self.step_detector.update(message.heartbeat)
            self._owner.on_message(message)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._timings.heartbeat_s)
            self.heartbeat_monitor.tick()
            if self.heartbeat_monitor.is_lost:
                raise StreamBroken("no message was received for too long")
            self._outgoing.heartbeat(self._owner.next_heartbeat())
