"""A router's session with one decode worker; checks the order and content of the worker's messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.packed import unpack
from decant.runtime.protocol import PROTOCOL
from tests.worker.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from tests.worker.decode_harness import Node


@dataclass
class RunRecord:
    """Messages about a run; ``tokens`` and ``logprobs`` are by position."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, wire.TokenLogprobs] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str | None:
        kinds = ("ended", "failed", "refused", "superseded")
        return next((kind for kind in kinds if kind in self.last), None)

    def text(self, prompt: int) -> list[int]:
        positions = sorted(self.tokens)
        assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True
        assert not positions or positions[0] >= prompt
        return [self.tokens[position] for position in positions]


class ReceivedMessages:
    def __init__(self) -> None:
        self.records: dict[tuple[str, int], RunRecord] = {}
        self.scheduled: list[tuple[str, int]] = []
        """Runs in scheduling order."""
        self.heartbeats: list[wire.Heartbeat] = []
        self.frames: list[wire.Frame] = []
        self.welcome: wire.Welcome | None = None
        self._slots: dict[int, tuple[str, int]] = {}

    def record_of(self, run: wire.Run) -> RunRecord:
        return self.records.setdefault((run.request, run.attempt), RunRecord())

    def begin_session(self) -> None:
        self.welcome = None
        self._slots.clear()

    def receive(self, message: wire.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        assert (self.welcome is None) == (kind == "welcome"), f"{kind} came before the welcome, or it came twice"
        if kind == "welcome":
            self.welcome = message.welcome
            for status in message.welcome.runs:
                self._on_status(status)
        elif kind == "heartbeat":
            self.heartbeats.append(message.heartbeat)
        elif kind == "frame":
            self._on_frame(message.frame)
        else:
            self._on_run_message(kind, getattr(message, kind))

    def _on_run_message(self, kind: str, message: Any) -> None:
        record = self.record_of(message.run)
        record.kinds.append(kind)
        record.last[kind] = message
        if kind == "scheduled":
            self.scheduled.append((message.run.request, message.run.attempt))
        if kind == "decode_started":
            assert "ended" not in record.last
            self._assign(message.run, message.slots)
        elif kind == "run_status":
            self._on_status(message)
        elif kind == "ended" and message.end.reason != wire.OutputEnd.REASON_CANCELLED:
            assert all(position < message.end.end_position for position in record.tokens)

    def _on_status(self, status: wire.RunStatus) -> None:
        self.record_of(status.run).last["run_status"] = status
        self._assign(status.run, status.slots)

    def _assign(self, run: wire.Run, slots: Sequence[wire.Slot]) -> None:
        for slot in slots:
            self._slots[slot.slot] = (run.request, run.attempt)

    def _on_frame(self, frame: wire.Frame) -> None:
        self.frames.append(frame)
        rows = [unpack(packed) for packed in (frame.slots, frame.positions, frame.tokens)]
        logprobs = {each.entry: each for each in frame.logprobs}
        for entry, (slot, position, token) in enumerate(zip(*rows, strict=True)):
            assert slot in self._slots, f"no message assigned slot {slot}"
            record = self.records[self._slots[slot]]
            assert record.tokens.setdefault(position, token) == token, f"another token at {position}"
            if entry in logprobs:
                logprobs[entry].entry = 0
                record.logprobs[position] = logprobs[entry]


class Router(ReceivedMessages):
    """Router with one session. ``async with`` opens it, and raises what the worker sent against the protocol."""

    def __init__(self, node: Node, name: str = "router", incarnation: int = 1) -> None:
        super().__init__()
        self.node = node
        self.peer = wire.Peer(id=name, incarnation=incarnation, protocol=PROTOCOL)
        self.error: grpc.aio.AioRpcError | None = None
        self.violation: AssertionError | None = None
        self.closed = False
        self.sends_heartbeats = True
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    async def open(self, *owned: wire.Hello.Owned, worker: wire.Peer | None = None) -> wire.Welcome:
        self.channel = grpc.aio.insecure_channel(self.node.address, [("grpc.use_local_subchannel_pool", 1)])
        self.call = services.DecodeStub(self.channel).Session()
        self.begin_session()
        self.error, self.closed = None, False
        self._reading = asyncio.create_task(self._read())
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats()) if self.sends_heartbeats else None
        hello = wire.Hello(router=self.peer, worker=worker or self.node.peer, owned=owned)
        await self.send(hello=hello)
        await self.until(lambda: self.welcome is not None or self.closed)
        assert self.welcome is not None, self.error
        return self.welcome

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Break the session, and wait until the worker has noticed."""
        self.call.cancel()
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
        await asyncio.wait([self._reading])
        await self.channel.close()
        if self.violation is not None:
            raise self.violation
        name = self.peer.id
        await eventually(lambda: name not in self.node.decode._sessions or self.closed_by_newer())

    def closed_by_newer(self) -> bool:
        session = self.node.decode._sessions.get(self.peer.id)
        return session is not None and session.router.incarnation != self.peer.incarnation

    async def send(self, **message: Any) -> None:
        await self.write(wire.RouterMessage(**message))

    async def write(self, message: wire.RouterMessage) -> None:
        async with self._writing:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self.call.write(message)

    async def start(self, run: wire.Run, work: wire.EngineRequest, ticket: wire.Ticket | None = None) -> None:
        await self.send(start=wire.Start(run=run, engine_request=work, ticket=ticket))

    async def cancel(self, run: wire.Run, reason: wire.Cancel.Reason = wire.Cancel.REASON_CLIENT, **more: Any) -> None:
        await self.send(cancel=wire.Cancel(run=run, reason=reason, **more))

    async def forget(self, *runs: wire.Run) -> None:
        await self.send(forget=wire.ForgetRuns(runs=runs))

    async def until(self, reached: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not reached():
                if self.violation is not None:
                    raise self.violation
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, *runs: wire.Run) -> list[RunRecord]:
        await self.until(lambda: all(self.record_of(run).outcome for run in runs))
        return [self.record_of(run) for run in runs]

    async def until_message(self, run: wire.Run, kind: str) -> Any:
        await self.until(lambda: kind in self.record_of(run).last)
        return self.record_of(run).last[kind]

    async def until_tokens(self, run: wire.Run, tokens: int) -> None:
        await self.until(lambda: len(self.record_of(run).tokens) >= tokens)

    async def _send_heartbeats(self) -> None:
        while not self.closed:
            await asyncio.sleep(0.25)
            await self.send(heartbeat=wire.Heartbeat())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.receive(message)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        except AssertionError as error:
            self.violation = error
        finally:
            self.closed = True
            self._changed.set()
