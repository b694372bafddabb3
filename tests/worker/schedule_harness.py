"""A decode worker in virtual time: its engine steps, and its messages travel, only when a schedule says so.

routers a, b ── sessions ──> worker d ── fetches ──> worker p (prompts)
                                '─────── migrates ──> worker e (targets)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from decant.engine.engine import Engine
from decant.engine.errors import EngineError, EngineStopped
from decant.engine.loop import EngineLoop
from decant.engine.scheduler import Limits
from decant.handoff.codec import Received, decode
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.packing import checksum
from decant.protos import worker_pb2 as wire
from decant.runtime.errors import ServiceError, Unavailable
from decant.runtime.packed import unpack
from decant.worker.decode.service import DecodeService
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from decant.worker.wire_codec import to_request
from tests.router.virtual_time import settle
from tests.worker.decode_harness import BLOCK, Device, alone, make_work

LEASE_S = 2.0
ROUNDS = 400
"""Rounds of engine steps in which every request must end once no fault is left."""


class SteppedLoop(EngineLoop):
    """An engine loop without a thread: `turn` makes one step, `deliver` lets the event loop see its result."""

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._deliveries = deque[Callable[[], None]]()

    @property
    def healthy(self) -> bool:
        return self._stopped is None

    def turn(self) -> None:
        """Run the commands, then a step if there is work."""
        if self._stopped is not None or not (self._inbox or self._engine.has_work):
            return
        batch = self._take()
        try:
            for call in batch:
                call.run(self._engine)
            if self._engine.has_work:
                batch = self._answer(batch)
            output = self._engine.step()
        except ZeroDivisionError as error:
            stopped = EngineStopped(f"the engine crashed: {error}")
            stopped.__cause__ = error
            self._end(batch, stopped)
        else:
            self._deliver(batch, output)

    def deliver(self) -> None:
        if self._deliveries:
            self._deliveries.popleft()()

    def deliver_all(self) -> None:
        while self._deliveries:
            self.deliver()

    async def stop(self) -> None:
        if self._stopped is None:
            self._end([], EngineStopped("the engine was stopped"))
        self.deliver_all()

    def _post(self, callback: Callable[[], None]) -> None:
        self._deliveries.append(callback)


@dataclass
class Network:
    """Connections of fetches. ``flows``: messages pass; ``breaks``: the next message breaks its fetch."""

    flows: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: bool = False
    loses_releases: bool = False


class LocalSource:
    """The sender of another worker, without gRPC between them."""

    def __init__(self, node: Node, network: Network) -> None:
        self._node = node
        self._network = network

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[Received]:
        async with aclosing(self._node.host.sender.fetch(requests)) as responses:
            async for message in responses:
                await self._network.flows.wait()
                if self._network.breaks:
                    self._network.breaks = False
                    raise ConnectionError("broken by the schedule")
                yield decode(message)

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        if self._network.loses_releases:
            raise ConnectionError("lost by the schedule")
        await self._node.host.sender.release(request)


class Node:
    """A worker without a server."""

    def __init__(self, name: str, nodes: dict[str, Node], network: Network, blocks: int) -> None:
        self._nodes, self._network = nodes, network
        self.device = Device(blocks)
        limits = Limits(token_budget=8, max_running=3, context_length=blocks * BLOCK)
        self.engine = Engine(self.device, limits, checksum=checksum)
        peer = wire.Peer(id=name, incarnation=7, protocol=1)
        with patch("decant.worker.engine_host.EngineLoop", SteppedLoop):
            self.host = EngineHost(
                self.engine,
                Identity(peer, wire.ROLE_DECODE, "m", name),
                self,
                WorkerLimits(lease_ms=round(LEASE_S * 1000), max_waiting=4),
            )
        self.decode = DecodeService(self.host)
        self.host.connect(self.decode.run_manager)
        nodes[name] = self

    @property
    def loop(self) -> SteppedLoop:
        assert isinstance(self.host.loop, SteppedLoop)
        return self.host.loop

    def source(self, address: str) -> LocalSource:
        return LocalSource(self._nodes[address], self._network)

    def offer(self, run: wire.Run, work: wire.EngineRequest) -> wire.Ticket:
        """A ticket for a prompt that this worker begins to compute."""
        request = to_request(f"prefill/{run.request}", work, model="m", park_after=True)
        ticket = wire.Ticket(run=run, sender=self.host.peer, address=self.host.address, layout=self.host.layout)
        ticket.salt, ticket.tokens = work.salt, len(request.token_ids)
        issued = self.host.sender.issue(ticket, request.id, request.prompt_len)
        self.host.loop.post(lambda engine: engine.add(request))
        return issued

    def assert_empty(self) -> None:
        """Nothing is kept for any run."""
        decode = self.decode
        assert not list(decode.runs())
        assert (decode.sessions, decode.fetches_taking, decode.orphans, decode.unretired) == (0, 0, 0, 0)
        assert decode.cancel_marks == 0
        assert self.host.waiting_arrivals == 0
        assert not self.host.sender.leases.all()
        assert not self.host.epochs._live
        if self.host.loop.healthy:
            assert not self.engine.load().held_blocks, self.engine.pool.held_by()
            assert not self.engine.transfers.arrivals
            self.engine.check_integrity()


@dataclass
class Expected:
    """A run that a router started, and what its present owner received of it."""

    ref: wire.Run
    work: wire.EngineRequest
    text: list[int]
    owner: str = "a"
    tokens: dict[int, int] = field(default_factory=dict)
    end: str | None = None
    """How it ended for its owner: the name of the message, "unknown", "migrated", or "dropped"."""
    offer: wire.Ticket | None = None
    is_migrating: bool = False
    is_forgotten: bool = False
    stop_position: int | None = None
    """Of a stop string, which its router reported."""
    is_repeated: bool = False
    """Started twice: a refused Start may be followed by one that is accepted."""
    end_position: int | None = None
    """As the worker named it; tokens before it may still be on their way."""

    @property
    def prompt(self) -> int:
        return len(self.work.prompt) // 4

    @property
    def resume(self) -> wire.ResumePosition:
        position = self.prompt
        while position in self.tokens:
            position += 1
        return wire.ResumePosition(position=position)


class RouterClient:
    """A router's end of its session, which checks each message."""

    def __init__(self, name: str, trial: Trial) -> None:
        self.name = name
        self.peer = wire.Peer(id=name, incarnation=1, protocol=1)
        self._trial = trial
        self._requests = asyncio.Queue[wire.RouterMessage | None]()
        self._task: asyncio.Task[None] | None = None
        self._slots: dict[int, Expected] = {}
        self._has_welcome = False

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def open(self, runs: list[Expected]) -> None:
        """A new session that names these runs; also in place of an open one."""
        older = self._task
        self._slots.clear()
        self._has_welcome = False
        requests = self._requests = asyncio.Queue[wire.RouterMessage | None]()

        async def incoming() -> AsyncIterator[wire.RouterMessage]:
            while (message := await requests.get()) is not None:
                yield message

        owned = [wire.Hello.Owned(run=run.ref, resume=[run.resume]) for run in runs]
        self.send(hello=wire.Hello(router=self.peer, worker=self._trial.node.host.peer, owned=owned))
        context: Any = _Context(self, requests)
        self._task = asyncio.create_task(self._trial.node.decode.Session(incoming(), context))
        await settle()
        if older is not None:
            with contextlib.suppress(ServiceError, asyncio.CancelledError):
                await older
        if self._task.done() and isinstance(self._task.exception(), Unavailable):
            assert not list(self._trial.node.decode.runs()), "a drained worker has runs"
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
            run = self._trial.runs[body.run.request]
            for slot in getattr(body, "slots", ()):
                self._slots[slot.slot] = run
            if run.owner == self.name:
                getattr(self, f"_on_{kind}", lambda *_: None)(run, body)

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._has_welcome = True
        for status in welcome.runs:
            self._slots[status.slots[0].slot] = self._trial.runs[status.run.request]
            self._on_run_status(self._trial.runs[status.run.request], status)
        for ref in welcome.unknown_runs:
            self._end(self._trial.runs[ref.request], "unknown")
        for ref in welcome.orphans:
            self.send(cancel=wire.Cancel(run=ref))

    def _on_frame(self, frame: wire.Frame) -> None:
        rows = [unpack(packed) for packed in (frame.slots, frame.positions, frame.tokens)]
        for slot, position, token in zip(*rows, strict=True):
            assert slot in self._slots, f"slot {slot} is not assigned in this session"
            run = self._slots[slot]
            assert token == run.text[position - run.prompt], f"another token at {position} of {run.ref.request}"
            if run.owner == self.name:
                run.tokens[position] = token
                self._end_when_complete(run)

    def _on_run_status(self, run: Expected, status: wire.RunStatus) -> None:
        assert len(status.slots) == 1
        if status.ended:
            run.end_position = status.ended[0].end_position
        self._end_when_complete(run)

    def _end_when_complete(self, run: Expected) -> None:
        if run.end_position is not None and run.end_position <= run.resume.position:
            self._end(run, "ended")

    def _on_decode_started(self, run: Expected, message: wire.DecodeStarted) -> None:
        assert run.end is None or run.is_forgotten or run.is_repeated, run.end

    def _on_ended(self, run: Expected, message: wire.Ended) -> None:
        first = min(run.tokens, default=message.end.end_position)
        has_all = all(position in run.tokens for position in range(first, message.end.end_position))
        assert has_all or run.is_forgotten or run.is_repeated, "ended, with a gap"
        if message.end.reason == wire.OutputEnd.REASON_LENGTH:
            assert message.end.end_position in (run.prompt + len(run.text), run.stop_position)
        self._end(run, "ended")

    def _on_failed(self, run: Expected, message: wire.Failed) -> None:
        is_unknown = message.failure.cause == wire.CAUSE_UNKNOWN_RUN
        may_follow = is_unknown or run.is_forgotten or run.is_migrating or run.is_repeated
        assert run.end is None or may_follow, run.end
        self._end(run, "failed")

    def _on_refused(self, run: Expected, message: wire.Refused) -> None:
        assert run.end is None or run.is_forgotten or run.is_repeated, run.end
        assert not run.tokens or run.is_forgotten
        self._end(run, "refused")

    def _on_superseded(self, run: Expected, message: wire.Superseded) -> None:
        assert message.run.epoch < run.ref.epoch, "superseded, and owns it"

    def _on_ticket(self, run: Expected, ticket: wire.Ticket) -> None:
        run.offer = ticket

    def _end(self, run: Expected, how: str) -> None:
        run.end = run.end or how


class _Context:
    """The part of a servicer context that a session uses."""

    def __init__(self, client: RouterClient, requests: asyncio.Queue[wire.RouterMessage | None]) -> None:
        self._client = client
        self._requests = requests

    async def write(self, message: wire.WorkerMessage) -> None:
        if self._client._requests is self._requests:  # else a newer session has taken its place
            self._client.receive(message)


@cache
def reference_text(length: int, wanted: int, seed: int) -> list[int]:
    return alone(make_work(length, wanted, seed=seed))


class Trial:
    """Three workers, two routers, and the invariants of all that happens between them."""

    def __init__(self) -> None:
        self.network = Network()
        self.network.flows.set()
        self.nodes: dict[str, Node] = {}
        self.node = Node("d", self.nodes, self.network, 14)
        self.prefill = Node("p", self.nodes, self.network, 64)
        self.target = Node("e", self.nodes, self.network, 64)
        self.runs: dict[str, Expected] = {}
        self.routers = {name: RouterClient(name, self) for name in "ab"}
        self.moves: set[asyncio.Task[None]] = set()
        self.drain: asyncio.Task[None] | None = None
        self.complaints: list[dict[str, Any]] = []

    async def begin(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.complaints.append(context))
        for node in self.nodes.values():
            await node.host.__aenter__()
        for router in self.routers.values():
            await router.open([])

    def router_of(self, run: Expected) -> RouterClient:
        return self.routers[run.owner]

    def pick(self, value: int) -> Expected | None:
        runs = list(self.runs.values())
        return runs[value % len(runs)] if runs else None

    # -- what a schedule does -----------------------------------------------------------------------------------

    def start(self, value: int, *, has_ticket: bool) -> None:
        number = len(self.runs)
        length, wanted = 1 + value % 19, 1 + value // 19 % 9
        ref = wire.Run(request=f"t/{number}", epoch=1, attempt=1)
        work = make_work(length, wanted, seed=number)
        if value % 11 == 0:
            work.remaining_ms = 1 + 40 * (value % 7)
        work.priority = value % 3 - 1
        run = self.runs[ref.request] = Expected(ref, work, reference_text(length, wanted, number))
        router = self.router_of(run)
        if not router.is_open:
            run.end = "unknown"
            return
        router.send(start=self._start_message(run, self.prefill.offer(ref, work) if has_ticket else None))

    def _start_message(self, run: Expected, ticket: wire.Ticket | None = None) -> wire.Start:
        return wire.Start(run=run.ref, engine_request=run.work, ticket=ticket)

    def act_start(self, value: int) -> None:
        self.start(value, has_ticket=False)

    def act_fetch(self, value: int) -> None:
        self.start(value, has_ticket=True)

    def act_repeat(self, value: int) -> None:
        """A Start that is sent again."""
        run = self.pick(value)
        if run is not None and run.end is None and not run.is_forgotten:
            run.is_repeated = True
            self.router_of(run).send(start=self._start_message(run))

    def act_cancel(self, value: int) -> None:
        run = self.pick(value)
        if run is None:
            return
        cancel = wire.Cancel(run=run.ref, reason=[wire.Cancel.REASON_CLIENT, wire.Cancel.REASON_DEADLINE][value % 2])
        if value % 5 == 0 and run.tokens and run.stop_position is None:
            cancel.reason = wire.Cancel.REASON_STOP_TEXT
            cancel.end_position = run.stop_position = min(run.tokens) + value % len(run.tokens)
        self.router_of(run).send(cancel=cancel)

    def act_forget(self, value: int) -> None:
        run = self.pick(value)
        if run is not None:
            self.forget(run)

    def forget(self, run: Expected) -> None:
        if run.offer is not None and run.end is None:
            run.end = "dropped"  # it may have migrated: then no end is sent
        run.is_forgotten = True
        self.router_of(run).send(forget=wire.ForgetRuns(runs=[run.ref]))

    def act_resend(self, value: int) -> None:
        run = self.pick(value)
        if run is not None and run.end is None:
            self.router_of(run).send(resend=wire.Resend(run=run.ref, resume=wire.ResumePosition(position=run.prompt)))

    def act_adopt(self, value: int) -> None:
        """The other router takes the run over."""
        run = self.pick(value)
        if run is None or run.end is not None or run.is_migrating:
            return
        other = {"a": "b", "b": "a"}[run.owner]
        if self.routers[other].is_open:
            run.owner = other
            run.ref = wire.Run(request=run.ref.request, epoch=run.ref.epoch + 1, attempt=1)
            run.tokens.clear()
            self.routers[other].send(adopt=wire.Adopt(run=run.ref, resume=[run.resume]))

    def act_replace(self, value: int) -> None:
        """The owner starts another attempt at the request, after it cancelled this one."""
        run = self.pick(value)
        if run is None or run.end is not None or run.is_migrating or not self.router_of(run).is_open:
            return
        router = self.router_of(run)
        run.end = "dropped"
        router.send(cancel=wire.Cancel(run=run.ref, reason=wire.Cancel.REASON_ATTEMPT))
        self.forget(run)

    def act_migrate(self, value: int) -> None:
        run = self.pick(value)
        if run is not None and run.end is None and not run.is_migrating:
            self.router_of(run).send(migrate=wire.Migrate(run=run.ref, withdrawn=value % 4 == 0))

    def act_receive(self, value: int) -> None:
        """Another worker fetches a run that was offered."""
        run = self.pick(value)
        if run is not None and run.offer is not None and not run.is_migrating and run.end is None:
            run.is_migrating = True
            task = asyncio.create_task(self._move(run, run.offer))
            self.moves.add(task)

    async def _move(self, run: Expected, ticket: wire.Ticket) -> None:
        request = to_request(f"moved/{run.ref.request}", run.work, model="m")
        host = self.target.host
        try:
            arrival = await host.loop.call(
                lambda engine: engine.transfers.reserve(request), undo=lambda _, made: made.abort()
            )
            result = await host.receiver.receive(self.target.source("d"), ticket, arrival)
        except (HandoffFailed, SequenceAlreadyFinished, EngineError):
            self.router_of(run).send(migrate=wire.Migrate(run=run.ref, withdrawn=True))
        else:
            assert list(result.output) == run.text[: len(result.output)]
            run.end = run.end or "migrated"
            self.forget(run)
        finally:
            run.is_migrating, run.offer = False, None

    def act_step(self, value: int) -> None:
        [self.node, self.prefill, self.target, self.node][value % 4].loop.turn()

    def act_deliver(self, value: int) -> None:
        [self.node, self.prefill, self.target, self.node][value % 4].loop.deliver()

    def act_round(self, _: int) -> None:
        for node in self.nodes.values():
            node.loop.turn()
            node.loop.deliver_all()

    async def act_wait(self, value: int) -> None:
        await asyncio.sleep([0.01, 0.1, 0.3, 1.1, LEASE_S + 0.1][value % 5])

    async def act_break(self, value: int) -> None:
        await self.routers["ab"[value % 2]].leave()

    async def act_open(self, value: int) -> None:
        """A new session; its hello may leave runs out, which then belong to nobody."""
        router = self.routers["ab"[value % 2]]
        mine = [run for run in self.runs.values() if run.owner == router.name and run.end is None]
        named = mine if value % 3 else mine[::2]
        for run in mine:
            if run not in named:
                run.end, run.is_forgotten = "dropped", True
        await router.open(named)

    def act_stall(self, _: int) -> None:
        """Messages of fetches stop, or go on."""
        if self.network.flows.is_set():
            self.network.flows.clear()
        else:
            self.network.flows.set()

    def act_cut(self, value: int) -> None:
        self.network.breaks = True
        self.network.loses_releases = value % 2 == 0

    def act_drain(self, value: int) -> None:
        if value % 4 == 0 and self.drain is None:
            self.drain = asyncio.create_task(self.node.decode.drain())

    def act_crash(self, value: int) -> None:
        if value % 8 == 0:
            self.node.device.broken = True

    # -- the end ------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """No more faults: each run ends for its owner, and then nothing of it is left."""
        self.network.breaks = self.network.loses_releases = False
        self.network.flows.set()
        for router in self.routers.values():
            await router.open([run for run in self.runs.values() if run.owner == router.name and run.end is None])
        await self._until(lambda: all(run.end for run in self.runs.values()) and all(m.done() for m in self.moves))
        for router in self.routers.values():
            router.send(
                forget=wire.ForgetRuns(runs=[run.ref for run in self.runs.values() if run.owner == router.name])
            )
        await settle()
        for router in self.routers.values():
            await router.leave()
        for name in [*self.target.engine.sequences, *self.target.engine.transfers.arrivals]:
            self.target.host.loop.post(partial(Engine.cancel, id=name))
        await asyncio.sleep(2 * LEASE_S)
        await self._until(lambda: not (self.node.decode.orphans or self.node.decode.unretired))
        await asyncio.sleep(2 * LEASE_S)
        for _ in range(12):
            self.act_round(0)
            await settle()
        for node in self.nodes.values():
            node.assert_empty()
        await self.close()

    async def close(self) -> None:
        if self.drain is not None:
            async with asyncio.timeout(10):
                await self.drain
        closing = [asyncio.create_task(node.decode.close()) for node in self.nodes.values()]
        await settle()
        self.act_round(0)
        await asyncio.gather(*closing)
        for move in self.moves:
            move.result()
        for node in self.nodes.values():
            await node.host.__aexit__(None, None, None)
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not self.complaints

    async def _until(self, reached: Callable[[], bool]) -> None:
        for _ in range(ROUNDS):
            if reached():
                return
            self.act_round(0)
            await asyncio.sleep(0.05)
        unfinished = [name for name, run in self.runs.items() if not run.end]
        raise AssertionError(f"{unfinished} have no end; the worker has {list(self.node.decode.runs())}")
