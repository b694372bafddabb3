"""A router's end of a session in one process; records and checks each message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.runtime.errors import ServiceError, Unavailable
from decant.runtime.packed import unpack
from decant.runtime.protocol import PROTOCOL
from tests.router.virtual_time import settle
from tests.worker.stepped_worker import Node


@dataclass
class ExpectedOutput:
    index: int
    text: list[int]
    tokens: dict[int, int] = field(default_factory=dict)
    stop_position: int | None = None
    """Of a stop string that its router reported."""
    end_position: int | None = None
    """As the worker sent it; earlier tokens may still arrive."""
    is_cancelled: bool = False
    """Alone; the other outputs go on."""
    has_ended: bool = False

    def position(self, prompt: int) -> int:
        """Position of the first token that its router lacks."""
        while prompt in self.tokens:
            prompt += 1
        return prompt


@dataclass
class Expected:
    ref: wire.Run
    work: wire.EngineRequest
    outputs: dict[int, ExpectedOutput]
    owner: str = "a"
    end: str | None = None
    """For its owner: the name of the last message, "unknown", "migrated", or "dropped"."""
    offer: wire.Ticket | None = None
    is_migrating: bool = False
    is_forgotten: bool = False
    is_repeated: bool = False
    """Started twice: an accepted Start may follow a refused one."""

    @property
    def prompt(self) -> int:
        return len(self.work.prompt) // 4

    @property
    def resume(self) -> list[wire.ResumePosition]:
        return [
            wire.ResumePosition(output=each.index, position=each.position(self.prompt))
            for each in self.outputs.values()
            if not each.has_ended
        ]

    @property
    def has_tokens(self) -> bool:
        return any(each.tokens for each in self.outputs.values())

    def clear(self) -> None:
        """Have another router own the run, which knows no token and no end of it."""
        for each in self.outputs.values():
            each.tokens.clear()
            each.end_position, each.has_ended = None, False


class RouterClient:
    def __init__(self, name: str, node: Node, runs: dict[str, Expected]) -> None:
        self.name = name
        self.peer = wire.Peer(id=name, incarnation=1, protocol=PROTOCOL)
        self._node = node
        self._runs = runs
        self._requests = asyncio.Queue[wire.RouterMessage | None]()
        self._task: asyncio.Task[None] | None = None
        self._slots: dict[int, tuple[Expected, ExpectedOutput]] = {}
        self._has_welcome = False

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def open(self, runs: list[Expected]) -> None:
        """Open a session that names these runs, also in place of an open one."""
        older = self._task
        self._slots.clear()
        self._has_welcome = False
        requests = self._requests = asyncio.Queue[wire.RouterMessage | None]()

        async def incoming() -> AsyncIterator[wire.RouterMessage]:
            while (message := await requests.get()) is not None:
                yield message

        owned = [wire.Hello.Owned(run=run.ref, resume=run.resume) for run in runs]
        self.send(hello=wire.Hello(router=self.peer, worker=self._node.host.peer, owned=owned))
        context: Any = _Context(self, requests)
        self._task = asyncio.create_task(self._node.decode.Session(incoming(), context))
        await settle()
        if older is not None:
            with contextlib.suppress(ServiceError, asyncio.CancelledError):
                await older
        if self._task.done() and isinstance(self._task.exception(), Unavailable):
            assert not list(self._node.decode.run_manager.runs), "a drained worker has runs"
            for run in runs:
                run.end = run.end or "unknown"

    async def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(ServiceError, asyncio.CancelledError):
                await self._task
            self._task = None

    def send(self, **message: Any) -> None:
        self._requests.put_nowait(wire.RouterMessage(**message))

    def receive(self, message: wire.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        assert self._has_welcome == (kind != "welcome"), f"{kind} before the welcome, or a second welcome"
        if kind == "welcome":
            self._on_welcome(message.welcome)
        elif kind == "frame":
            self._on_frame(message.frame)
        elif kind != "heartbeat":
            body = getattr(message, kind)
            run = self._runs[body.run.request]
            self._assign(run, getattr(body, "slots", ()))
            if run.owner == self.name:
                getattr(self, f"_on_{kind}", lambda *_: None)(run, body)

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._has_welcome = True
        for status in welcome.runs:
            self._assign(self._runs[status.run.request], status.slots)
            self._on_run_status(self._runs[status.run.request], status)
        for ref in welcome.unknown_runs:
            self._end(self._runs[ref.request], "unknown")
        for ref in welcome.orphans:
            self.send(cancel=wire.Cancel(run=ref))

    def _assign(self, run: Expected, slots: Iterable[wire.Slot]) -> None:
        for slot in slots:
            self._slots[slot.slot] = run, run.outputs[slot.output]

    def _on_frame(self, frame: wire.Frame) -> None:
        rows = [unpack(packed) for packed in (frame.slots, frame.positions, frame.tokens)]
        for slot, position, token in zip(*rows, strict=True):
            assert slot in self._slots, f"slot {slot} is not assigned in this session"
            run, output = self._slots[slot]
            place = f"{position} of output {output.index} of {run.ref.request}"
            assert token == output.text[position - run.prompt], f"another token at {place}"
            if run.owner == self.name:
                output.tokens[position] = token
                self._end_when_complete(run)

    def _on_run_status(self, run: Expected, status: wire.RunStatus) -> None:
        assert sorted(slot.output for slot in status.slots) == sorted(run.outputs)
        for end in status.ended:
            run.outputs[end.output].end_position = end.end_position
        self._end_when_complete(run)

    def _end_when_complete(self, run: Expected) -> None:
        for output in run.outputs.values():
            if output.end_position is not None and output.end_position <= output.position(run.prompt):
                output.has_ended = True
        if all(output.has_ended for output in run.outputs.values()):
            self._end(run, "ended")

    def _on_decode_started(self, run: Expected, message: wire.DecodeStarted) -> None:
        assert run.end is None or run.is_forgotten or run.is_repeated, run.end

    def _on_ended(self, run: Expected, message: wire.Ended) -> None:
        output, end = run.outputs[message.end.output], message.end
        first = min(output.tokens, default=end.end_position)
        has_all = all(position in output.tokens for position in range(first, end.end_position))
        assert has_all or run.is_forgotten or run.is_repeated, "ended, with a gap"
        if end.reason == wire.OutputEnd.REASON_LENGTH:
            assert end.end_position in (run.prompt + len(output.text), output.stop_position)
        output.end_position, output.has_ended = end.end_position, True
        if all(each.has_ended for each in run.outputs.values()):
            self._end(run, "ended")

    def _on_failed(self, run: Expected, message: wire.Failed) -> None:
        is_unknown = message.failure.cause == wire.CAUSE_UNKNOWN_RUN
        may_follow = is_unknown or run.is_forgotten or run.is_migrating or run.is_repeated
        assert run.end is None or may_follow, run.end
        self._end(run, "failed")

    def _on_refused(self, run: Expected, message: wire.Refused) -> None:
        assert run.end is None or run.is_forgotten or run.is_repeated, run.end
        assert not run.has_tokens or run.is_forgotten
        self._end(run, "refused")

    def _on_superseded(self, run: Expected, message: wire.Superseded) -> None:
        assert message.run.epoch < run.ref.epoch, "superseded, and owns it"

    def _on_ticket(self, run: Expected, ticket: wire.Ticket) -> None:
        run.offer = ticket

    def _end(self, run: Expected, how: str) -> None:
        run.end = run.end or how


class _Context:
    def __init__(self, client: RouterClient, requests: asyncio.Queue[wire.RouterMessage | None]) -> None:
        self._client = client
        self._requests = requests

    async def write(self, message: wire.WorkerMessage) -> None:
        if self._client._requests is self._requests:  # else a newer session has taken its place
            self._client.receive(message)
