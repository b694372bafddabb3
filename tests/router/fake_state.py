from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime.connections.peer import new_peer
from decant.runtime.packed import unpack
from tests.router.fake_script import EOS, LAYOUT_HASH, MODEL, TOKENIZER, Script, token_at

Queue = asyncio.Queue[wire.WorkerMessage | None]


class FakeRun:
    def __init__(self, start: wire.Start, slot: int) -> None:
        self.start = start
        self.run = start.run
        self.engine_request = start.engine_request
        self.slot = slot
        self.prompt = start.engine_request.prompt
        self.base = len(start.engine_request.prompt) // 4
        self.tokens = list(unpack(start.engine_request.outputs[0].tokens))
        self.phase = wire.RunStatus.PHASE_WAITING
        self.end: wire.OutputEnd | None = None
        self.task: asyncio.Task[None] | None = None
        self.out: Queue | None = None  # of its session

    @property
    def held(self) -> wire.RunStatus:
        slots = [wire.Slot(slot=self.slot, output=0, position=self.base + len(self.tokens))]
        return wire.RunStatus(run=self.run, phase=self.phase, slots=slots, ended=[self.end] if self.end else [])


def key(run: wire.Run) -> tuple[str, int, int]:
    return run.request, run.epoch, run.attempt


@dataclass
class Cache:
    sender: WorkerState
    committed: asyncio.Future[list[int]]
    """Its tokens; cancelled if the prefill fails or nothing is left to decode."""
    nothing_left: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    def __init__(self) -> None:
        self.caches: dict[bytes, Cache] = {}


class WorkerState:
    def __init__(self, fleet: Fleet, name: str, role: wire.Role, layout_hash: int = LAYOUT_HASH) -> None:
        self.fleet = fleet
        self.script = Script()
        self.go = asyncio.Event()
        self.load = wire.Load(total_blocks=1000, free_blocks=1000, takes_prompts=True, role=role)
        self.registration = WorkerRegistration(
            peer=new_peer(name),
            role=role,
            model=MODEL,
            layout_hash=layout_hash,
            tokenizer=TOKENIZER,
            capacity=Capacity(total_blocks=1000, block_size=16, max_context_length=2048, max_running=64),
            equal_bits=True,
        )
        self.cache = wire.PrefixCacheUpdate()
        """Sent once, with the next heartbeat."""
        self.runs: dict[tuple[str, int, int], FakeRun] = {}
        self.prefills: list[wire.PrefillRequest] = []
        self.starts: list[wire.Start] = []
        self.cancels: list[wire.Cancel] = []
        self.adopts: list[wire.Adopt] = []
        self.forgotten: list[wire.Run] = []
        self.renewed: list[bytes] = []
        self.hellos: list[wire.Hello] = []
        self.resends = 0
        self.prefilling = 0
        self.changed = asyncio.Event()
        """Set at every message received; tests clear it."""
        self.credentials: grpc.ServerCredentials | None = None
        """Used from the next start on; None: plaintext."""
        self._server: grpc.aio.Server | None = None
        self._slots = 0
        self._out: Queue | None = None  # of the session that sent a message last
        self._outs: set[Queue] = set()
        self._routers: dict[int, wire.Peer] = {}  # by the id of their sessions' queues
        self._tasks: set[asyncio.Task[None]] = set()

    def next_token(self, work: wire.EngineRequest, k: int, base: int) -> tuple[int, wire.OutputEnd | None]:
        token = EOS if self.script.stops_at == k else token_at(work.prompt, k)
        reason = None
        if token == EOS:
            reason = wire.OutputEnd.REASON_STOP
        elif k + 1 >= work.stopping.max_tokens:
            reason = wire.OutputEnd.REASON_LENGTH
        return token, None if reason is None else wire.OutputEnd(output=0, reason=reason, end_position=base + k + 1)

    def refusal(self, run: wire.Run) -> wire.Refused:
        failure = wire.Failure(cause=self.script.refuse.pop(0), detail="scripted", violation=self.script.violation)
        return wire.Refused(run=run, failure=failure)

    def spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
