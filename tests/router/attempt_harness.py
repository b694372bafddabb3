"""One request between scripted workers, driven step by step and checked after each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.admission.control import AdmissionControl
from decant.router.execution.execution import Execution
from decant.router.execution.services import RouterServices
from decant.router.request.output import Finish
from decant.router.request.valid_request import ValidRequest
from decant.router.settings import RouterSettings
from decant.router.workers.pool import WorkerPool
from decant.runtime.background import BackgroundTask
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.directory import DirectoryEntry, Listing
from decant.state.errors import StoreUnavailable
from decant.state.ids import Incarnation
from decant.state.owned import OwnedRequest, StoredRequest
from tests.router.fake_script import MODEL, TOKENIZER
from tests.router.harness import make_request
from tests.router.scripted_runs import EOS, PROMPT, token_at
from tests.router.scripted_workers import Channel, ScriptedWorker, World
from tests.router.virtual_time import settle

RunStatus = wire.RunStatus
FAULT = 256 - 8
"""Bytes of a schedule from here on are faults, while any are left."""
ROUNDS = 200
"""Heartbeats within which a request must end once faults stop."""


@dataclass(frozen=True)
class Case:
    schedule: bytes
    max_tokens: int = 4
    stops_at: int | None = None  # the end-of-sequence token is output token number so many
    stop_string_at: int | None = None  # a stop string is complete with that one
    has_prompt_logprobs: bool = False
    faults: int = 2
    full_rounds: int = 0  # heartbeats for which decode workers have no free blocks, once nothing goes wrong any more
    dies: str = ""  # a worker that dies with the first fault
    is_cancelled: bool = False  # with the last step
    outputs: int = 1


@dataclass
class Listener:
    """Stand-in for the registry, the store and the quotas; counts reports of the request's end."""

    is_unavailable: bool = False
    ends: int = 0
    persisted: int = 0

    def on_ended(self, execution: Execution) -> None:
        self.ends += 1

    def on_persisted(self, execution: Execution) -> None:
        self.persisted += 1

    async def acquire(self, *_: Any) -> None: ...

    def hold(self, *_: Any) -> None: ...

    def release(self, *_: Any) -> None: ...

    def begin(self, execution: Execution) -> None: ...

    def finish(self, execution: Execution) -> None:
        execution.mark_persisted()

    def forget(self, execution: Any) -> None:
        if isinstance(execution, Execution):
            execution.mark_persisted()

    async def accept(self, owned: OwnedRequest) -> None: ...

    async def read(self, *_: Any, **__: Any) -> StoredRequest:
        raise StoreUnavailable("not in this test")


class Directory:
    def __init__(self, world: World) -> None:
        self._present = tuple(DirectoryEntry(worker.registration, wire.Load()) for worker in world.workers.values())

    async def listing(self) -> Listing[Any]:
        return Listing(b"1", None, self._present)

    async def wait_for_change(self, listing: Listing[Any], seconds: float) -> Listing[Any]:
        await asyncio.Event().wait()
        raise AssertionError


class Connector:
    def __init__(self, world: World) -> None:
        self._world = world

    def open(self, address: str) -> Channel:
        return Channel(self._world.workers[address])

    def generation(self) -> int:
        return 0


class StopString:
    def __init__(self, at: int) -> None:
        self.stop: str | None = None
        self._left = at

    def add(self, tokens: tuple[int, ...]) -> None:
        self._left -= len(tokens)
        if self._left < 0:
            self.stop = "stop"


class Scenario:
    def __init__(self, case: Case, roles: dict[str, wire.Role]) -> None:
        self.case = case
        self.world = World(roles, case.max_tokens, case.stops_at)
        self.listener: Any = Listener()
        self.pool = WorkerPool(new_peer("router"), Directory(self.world), {MODEL: {TOKENIZER}}, PeerTls(), 0)  # type: ignore[arg-type]
        self.watching = BackgroundTask("pool", self.pool.membership.run)
        self.pool.membership._connector = Connector(self.world)  # type: ignore[assignment]
        checked = RouterSettings(models=(MODEL,), attempts=5, max_active=10, queue_limit=10)
        parts: Any = {
            "requests": self.listener,
            "journal_writer": self.listener,
            "quota_leases": self.listener,
            "restore": None,
            "metrics": RequestMetrics(Registry(process=False)),
        }
        peer = new_peer("router")
        admission = AdmissionControl(checked, (MODEL,), self.pool.capacity)
        self.router = RouterServices(peer, checked, admission, self.pool, ended_s=60.0, **parts)
        self.faults_left = case.faults
        self.faults_done = 0
        self.known: list[list[int]] = [[] for _ in range(case.outputs)]

    def request(self) -> ValidRequest:
        shown = pb.ResponseOptions(prompt_logprobs=0) if self.case.has_prompt_logprobs else pb.ResponseOptions()
        request = make_request(
            prompt=PROMPT, max_tokens=self.case.max_tokens, shown=shown, eos_token_ids=frozenset({EOS})
        )
        prefixes = [wire.OutputPrefix(output=index) for index in range(self.case.outputs)]
        del request.engine_request.outputs[:]
        request.engine_request.outputs.extend(prefixes)
        at = self.case.stop_string_at
        return request if at is None else replace(request, new_answer=lambda: StopString(at))  # type: ignore[arg-type,return-value]

    async def connect(self) -> None:
        self.watching.start()
        for _ in range(2):
            await settle()
            while steps := self.world.steps():
                steps[0]()
                await settle()
            self.world.send_heartbeat()

    def begin(self, adopted: StoredRequest | None = None) -> None:
        self.execution = Execution(self.request(), self.router, self.listener, adopted)
        self.stream = self.execution.stream
        self.execution.task = asyncio.create_task(self.execution.run())

    async def finish(self) -> None:
        for worker in self.world.workers.values():
            worker.is_reachable = True
        for number in range(ROUNDS):
            for worker in self.world.workers.values():
                worker.is_full = worker.registration.role == wire.ROLE_DECODE and number < self.case.full_rounds
            await self.round()
            if number < self.case.full_rounds and number % 8 == 7:
                self.check_tickets()
            if self.stream.end is not None and not any(worker.attached for worker in self.world.workers.values()):
                break
        for _ in range(10):
            await self.round()
        await asyncio.wait([self.execution.task] if self.execution.task else [])

    async def round(self) -> None:
        self.world.send_heartbeat()
        await self.drain_steps()
        await asyncio.sleep(0.25)
        await settle()
        self.check()

    async def drain_steps(self) -> None:
        while steps := self.world.steps():
            for step in steps:
                step()
                await settle()
                self.check()
                break

    async def act(self, number: int, choice: int) -> None:
        faults = self.world.faults() if choice >= FAULT and self.faults_left else []
        if faults:
            self.faults_left -= 1
            self.faults_done += 1
            if (dying := self.world.workers.get(self.case.dies)) is not None and dying.is_alive:
                dying.die()
            else:
                faults[(number + choice) % len(faults)]()
        elif choice % 11 == 10 or not (steps := self.world.steps()):
            self.world.send_heartbeat()
            await asyncio.sleep(0.25)
        else:
            steps[choice % len(steps)]()
        await settle()
        self.check()

    # ------------------------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        for output, known in zip(self.stream.outputs, self.known, strict=True):
            assert output.tokens[: len(known)] == known
            stop = self.world.stop_of(output.index)
            assert output.tokens == [token_at(k, stop) for k in range(len(output.tokens))]
            known[:] = output.tokens
        assert self.listener.ends == (self.stream.end is not None)
        assert self.listener.persisted <= 1
        self._check_migrations()

    def _check_migrations(self) -> None:
        delivered, self.world.delivered = self.world.delivered, []
        for worker, message in delivered:
            if message.HasField("decode_started") and worker in self.decode_workers and self.session(worker).is_busy:
                assert [each for each in self.decode_workers if self.session(each).is_busy] == [worker]

    @property
    def decode_workers(self) -> list[ScriptedWorker]:
        return [each for each in self.world.workers.values() if each.registration.role == wire.ROLE_DECODE]

    def session(self, worker: ScriptedWorker) -> Any:
        return self.pool.worker(Incarnation.of(worker.registration.peer)).session

    def check_tickets(self) -> None:
        for worker in self.decode_workers:
            for waiting in worker.runs.values():
                if waiting.phase == RunStatus.PHASE_WAITING and waiting.start.HasField("ticket"):
                    export = self.world.exports[waiting.start.ticket.id]
                    assert export.is_closed or self.world.now() - export.renewed_at < 1.0

    def check_end(self) -> None:
        end = self.stream.end
        assert end is not None
        assert self.listener.ends == self.listener.persisted == 1
        counted = None if self.case.stop_string_at is None else self.case.stop_string_at + 1
        if isinstance(end, Finish):
            expected = [self.world.answer(output.index)[:counted] for output in self.stream.outputs]
            assert [output.tokens for output in self.stream.outputs] == expected
        if not self.faults_done and not self.case.is_cancelled:
            assert isinstance(end, Finish), end
            assert self.stream.has_prompt_logprobs
            assert self.execution.owned.attempt == 1
        self._check_released()

    def _check_released(self) -> None:
        assert not any(self.pool.waiting_lines.values())
        for worker in self.world.workers.values():
            assert not any(prefill.connection.is_open for prefill in worker.prefills)
            if worker.is_alive:
                assert not worker.attached, "a run was neither cancelled nor forgotten"
                assert not worker.renewed, "a ticket is renewed though its request has ended"
            known = self.pool.worker(Incarnation.of(worker.registration.peer))
            assert not known.session.is_busy
            assert known.load.queued_tokens.own == known.load.sequences.own == 0
