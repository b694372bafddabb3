"""Scripted workers that speak protos/worker.proto over real gRPC, and compute nothing.

Token k of an output depends on its prompt and k alone, so every attempt on any worker writes the same text, as greedy
decoding does. A ``Script`` says what goes wrong; ``Fleet`` holds what a handoff would move from one to the other.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime.error_details import Reason, trailers
from decant.runtime.errors import FailedPrecondition, ServiceError, Unavailable
from decant.runtime.packed import pack, unpack
from decant.runtime.peer import new_peer, same_incarnation

LAYOUT = 7
TOKENIZER = 11
MODEL = "m"
EOS = 2


def token_at(prompt: bytes, k: int) -> int:
    return 10 + zlib.crc32(prompt + k.to_bytes(4, "little")) % 4_000  # tokens of tiny-python


def answer(prompt: list[int], count: int) -> list[int]:
    """What any worker writes for a prompt."""
    return [token_at(pack(prompt), k) for k in range(count)]


@dataclass
class Script:
    """What a worker does instead of its work. Counts are spent one by one."""

    refuse: list[wire.Cause] = field(default_factory=list)
    """Answers to the next runs, of either kind."""
    violation: wire.Violation | None = None
    prefill_fails_before_ticket: int = 0
    prefill_fails_after_ticket: int = 0
    prefill_breaks_after_ticket: int = 0
    handoff_fails: list[wire.Cause] = field(default_factory=list)
    """Said by the taker in place of Joined."""
    fails_at: list[int] = field(default_factory=list)
    """Decode fails when it has written so many tokens of a run, each once."""
    fails_at_end: int = 0
    """So many runs fail where they should say that they ended."""
    stops_at: int | None = None
    """EOS is output token number so many."""
    pause_at: int | None = None
    """Decode waits before that output token until `go` is set."""
    prefill_pause: bool = False
    """Prefill waits before its ticket until `go` is set."""
    first_pause: bool = False
    """Prefill waits before its first token until `go` is set."""
    tells_late: bool = False
    """Prefill gives its cache, and says what it has to say once `go` is set."""
    no_room: bool = False
    """Runs wait before they are taken up, until `go` is set."""
    first_is_late: bool = False
    """A first token that ends its output comes after its taker heard that nothing is left."""
    silent: bool = False
    """Beats no more, and says nothing."""
    stuck_ms: int | None = None
    drop_frames: int = 0
    """So many frames are not sent."""
    refuse_sessions: bool = False
    is_starting: bool = False
    """Sessions are refused as by a process that still loads its model."""
    welcome_pause: bool = False
    """A session waits before its welcome until `go` is set."""
    stays: bool = False
    """A session goes on when the router has said its last message."""
    wrong_token_at: int | None = None
    """Sends another token for that output token a second time."""


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
        self.out: Queue | None = None  # of the session whose it is

    @property
    def held(self) -> wire.RunStatus:
        slots = [wire.Slot(slot=self.slot, output=0, position=self.base + len(self.tokens))]
        return wire.RunStatus(run=self.run, phase=self.phase, slots=slots, ended=[self.end] if self.end else [])


def key(run: wire.Run) -> tuple[str, int, int]:
    return run.request, run.epoch, run.attempt


@dataclass
class Cache:
    """What a ticket opens."""

    giver: FakeWorker
    sealed: asyncio.Future[list[int]]
    """Cancelled where nothing comes of it."""
    nothing_left: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """All fake workers of a test."""

    def __init__(self) -> None:
        self.caches: dict[bytes, Cache] = {}


class FakeWorker(services.PrefillServicer, services.DecodeServicer):
    def __init__(self, fleet: Fleet, name: str, role: wire.Role, layout: int = LAYOUT) -> None:
        self.fleet = fleet
        self.script = Script()
        self.go = asyncio.Event()
        self.load = wire.Load(total_blocks=1000, free_blocks=1000, takes_prompts=True, role=role)
        self.facts = WorkerRegistration(
            peer=new_peer(name),
            role=role,
            model=MODEL,
            layout=layout,
            tokenizer=TOKENIZER,
            capacity=Capacity(total_blocks=1000, block_tokens=16, max_context_length=2048, max_running=64),
            equal_bits=True,
        )
        self.cache = wire.PrefixCacheUpdate()
        """Told by the next beat, once."""
        self.runs: dict[tuple[str, int, int], FakeRun] = {}
        self.prefills: list[wire.PrefillRequest] = []
        self.starts: list[wire.Start] = []
        self.cancels: list[wire.Cancel] = []
        self.adopts: list[wire.Adopt] = []
        self.retired: list[wire.Run] = []
        self.renewed: list[bytes] = []
        self.hellos: list[wire.Hello] = []
        self.resends = 0
        self.prefilling = 0
        self.news = asyncio.Event()
        """Set whenever something is heard; tests clear it."""
        self.credentials: grpc.ServerCredentials | None = None
        """With which it listens from the next start on; None: in plaintext."""
        self._server: grpc.aio.Server | None = None
        self._slots = 0
        self._out: asyncio.Queue[wire.WorkerMessage | None] | None = None  # of the session that spoke last
        self._outs: set[asyncio.Queue[wire.WorkerMessage | None]] = set()
        self._routers: dict[int, wire.Peer] = {}  # by the id of their sessions' queues
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------ its incarnation

    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server()
        services.add_PrefillServicer_to_server(self, server)
        services.add_DecodeServicer_to_server(self, server)
        address = f"127.0.0.1:{port}"
        if self.credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self.credentials)
        self.facts.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Dies at once: every stream breaks, fetches too."""
        for task in self._tasks:
            task.cancel()
        for cache in self.fleet.caches.values():
            if cache.giver is self:
                cache.sealed.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Streams broke, the incarnation is the same: as after a loss of the network."""
        assert self._server is not None
        await self._server.stop(None)
        await self.start(int(self.facts.address.rpartition(":")[2]))

    def break_session(self) -> None:
        if self._out is not None:
            self._out.put_nowait(None)

    # ------------------------------------------------------------------------------------------------- prefill

    async def Prefill(self, request: wire.PrefillRequest, context: Any) -> AsyncIterator[wire.PrefillEvent]:  # noqa: N802
        self.prefills.append(request)
        self.news.set()
        script, run = self.script, request.run
        assert same_incarnation(request.worker, self.facts.peer)
        if script.refuse:
            yield wire.PrefillEvent(refused=self._refusal(run))
            return
        self.prefilling += 1
        try:
            if script.prefill_pause:
                await self.go.wait()
            if script.prefill_fails_before_ticket:
                script.prefill_fails_before_ticket -= 1
                yield wire.PrefillEvent(failed=_failed(run, wire.CAUSE_ENGINE))
                return
            async for event in self._prefilled(request, context):
                yield event
        finally:
            self.prefilling -= 1
            self.news.set()

    async def _prefilled(self, request: wire.PrefillRequest, context: Any) -> AsyncIterator[wire.PrefillEvent]:
        script, run, work = self.script, request.run, request.engine_request
        written = list(unpack(work.outputs[0].tokens))
        base = len(work.prompt) // 4
        cache = Cache(self, asyncio.get_running_loop().create_future())
        if request.handoff:
            ticket = wire.Ticket(
                id=f"{self.facts.peer.id}:{run.request}:{run.attempt}".encode(),
                run=run,
                sender=self.facts.peer,
                layout=self.facts.layout,
                lease_ms=10_000,
                tokens=base + len(written),
                outputs=[0],
            )
            self.fleet.caches[ticket.id] = cache
            yield wire.PrefillEvent(ticket=ticket)
        if script.first_pause:
            await self.go.wait()
        token, end = self._next(work, len(written), base)
        if script.tells_late:
            cache.sealed.set_result([*written, token])
            await self.go.wait()
        before, after = _explained(run, work)
        for part in before:
            yield wire.PrefillEvent(prompt_logprobs=part)
        if script.prefill_fails_after_ticket:
            script.prefill_fails_after_ticket -= 1
            cache.sealed.cancel()
            yield wire.PrefillEvent(failed=_failed(run, wire.CAUSE_ENGINE))
            return
        if script.prefill_breaks_after_ticket:
            script.prefill_breaks_after_ticket -= 1
            cache.sealed.cancel()
            await context.abort(grpc.StatusCode.INTERNAL, "broke")
        for part in after:
            yield wire.PrefillEvent(prompt_logprobs=part)
        first = wire.FirstTokens.First(output=0, token=token, finished=end, logprobs=_logprobs(work, 0, token))
        first_tokens = wire.FirstTokens(tokens=[first], cached_tokens=3, queued_us=1000, prefill_us=2_000_000)
        if request.handoff and end is None:
            yield wire.PrefillEvent(first=first_tokens)
            if not cache.sealed.done():
                cache.sealed.set_result([*written, token])
            await cache.released.wait()
        else:
            cache.nothing_left = True
            cache.sealed.cancel()
            if script.first_is_late:
                await asyncio.sleep(0.1)
            yield wire.PrefillEvent(first=first_tokens)

    def _next(self, work: wire.EngineRequest, k: int, base: int) -> tuple[int, wire.OutputEnd | None]:
        token = EOS if self.script.stops_at == k else token_at(work.prompt, k)
        reason = None
        if token == EOS:
            reason = wire.OutputEnd.REASON_STOP
        elif k + 1 >= work.stopping.max_tokens:
            reason = wire.OutputEnd.REASON_LENGTH
        return token, None if reason is None else wire.OutputEnd(output=0, reason=reason, end_position=base + k + 1)

    def _refusal(self, run: wire.Run) -> wire.Refused:
        failure = wire.Failure(cause=self.script.refuse.pop(0), detail="scripted", violation=self.script.violation)
        return wire.Refused(run=run, failure=failure)

    # ------------------------------------------------------------------------------------------------- session

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.WorkerMessage]:  # noqa: N802
        hello = (await anext(aiter(requests))).hello
        if not same_incarnation(hello.worker, self.facts.peer):
            error: ServiceError = FailedPrecondition(Reason.WRONG_PEER, "another incarnation")
            await context.abort(error.code, error.fault.message, trailers(error.fault))
        if self.script.is_starting:
            error = Unavailable(Reason.NO_WORKER, "this worker is starting", retry_after=1)
            await context.abort(error.code, error.fault.message, trailers(error.fault))
        if self.script.refuse_sessions:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.hellos.append(hello)
        if self.script.welcome_pause:
            await self.go.wait()
        out: asyncio.Queue[wire.WorkerMessage | None] = asyncio.Queue()
        self._out = out
        self._outs.add(out)
        self._routers[id(out)] = hello.router
        out.put_nowait(wire.WorkerMessage(welcome=self._welcome(hello)))
        for owned in hello.owned:
            if (run := self.runs.get(key(owned.run))) is not None:
                run.out = out
                self._resend(run, owned.resume[0].position)
        self.news.set()
        listening = self._spawn(self._listen(requests, out))
        beating = self._spawn(self._beat(out))
        try:
            while (message := await out.get()) is not None:
                if not self.script.silent:
                    yield message
        finally:
            self._outs.discard(out)
            del self._routers[id(out)]
            if self._out is out:
                self._out = next(iter(self._outs), None)
            listening.cancel()
            beating.cancel()

    def _welcome(self, hello: wire.Hello) -> wire.Welcome:
        named = {key(owned.run) for owned in hello.owned}
        return wire.Welcome(
            worker=self.facts.peer,
            role=self.facts.role,
            model=MODEL,
            layout=self.facts.layout,
            runs=[self.runs[each].held for each in named if each in self.runs],
            unknown_runs=[owned.run for owned in hello.owned if key(owned.run) not in self.runs],
            orphans=[run.run for each, run in self.runs.items() if each not in named and len(self._outs) == 1],
        )

    async def _beat(self, out: asyncio.Queue[wire.WorkerMessage | None]) -> None:
        while True:
            beat = wire.Heartbeat(step=1, load=self.load, cache=self.cache, routers=self._routers.values())
            self.cache = wire.PrefixCacheUpdate()
            if self.script.stuck_ms is not None:
                beat.step_age_ms = self.script.stuck_ms
            waiting = [run for run in self.runs.values() if run.phase == wire.RunStatus.PHASE_WAITING]
            beat.renew.extend(run.start.ticket.id for run in waiting if run.start.HasField("ticket"))
            out.put_nowait(wire.WorkerMessage(heartbeat=beat))
            await asyncio.sleep(0.25)

    async def _listen(self, requests: Any, out: asyncio.Queue[wire.WorkerMessage | None]) -> None:
        async for message in requests:
            if not message.HasField("heartbeat"):
                self._out = out
            match message.WhichOneof("message"):
                case "start":
                    self._begin(message.start)
                case "cancel":
                    self._cancel(message.cancel)
                case "adopt":
                    self._adopt(message.adopt)
                case "forget":
                    for run in message.forget.runs:
                        self.retired.append(run)
                        self.runs.pop(key(run), None)
                case "resend":
                    self.resends += 1
                    if (run := self.runs.get(key(message.resend.run))) is not None:
                        self._resend(run, message.resend.resume.position)
                case "heartbeat":
                    self.renewed.extend(message.heartbeat.renew)
            self.news.set()
        if not self.script.stays:
            out.put_nowait(None)

    def _begin(self, start: wire.Start) -> None:
        self.starts.append(start)
        if (held := self.runs.get(key(start.run))) is not None:
            self._say(wire.WorkerMessage(run_status=held.held))
            return
        if self.script.refuse:
            self._say(wire.WorkerMessage(refused=self._refusal(start.run)))
            return
        self._slots += 1
        run = self.runs[key(start.run)] = FakeRun(start, self._slots)
        run.out = self._out
        run.task = self._spawn(self._decode(run))

    def _adopt(self, adopt: wire.Adopt) -> None:
        self.adopts.append(adopt)
        if (run := self._claimed(adopt.run)) is None:
            self._say(wire.WorkerMessage(failed=_failed(adopt.run, wire.CAUSE_UNKNOWN_RUN)))
            return
        self._say(wire.WorkerMessage(run_status=run.held))
        self._resend(run, adopt.resume[0].position)

    def _claimed(self, named: wire.Run) -> FakeRun | None:
        """The run; in a newer epoch it is the sender's from now on, and the others are told."""
        for epoch in range(1, named.epoch):
            if (run := self.runs.pop((named.request, epoch, named.attempt), None)) is not None:
                for out in self._outs - {self._out}:
                    out.put_nowait(wire.WorkerMessage(superseded=wire.Superseded(run=run.run, epoch=named.epoch)))
                run.run.epoch = named.epoch
                run.out = self._out
                self.runs[key(run.run)] = run
        return self.runs.get(key(named))

    def _cancel(self, cancel: wire.Cancel) -> None:
        self.cancels.append(cancel)
        run = self._claimed(cancel.run)
        if run is not None and run.end is not None:
            self._say(wire.WorkerMessage(ended=wire.Ended(run=run.run, end=run.end)), run)
        elif run is not None:
            if run.task is not None:
                run.task.cancel()
            self._release(run)
            self._finish(run, wire.OutputEnd.REASON_CANCELLED)

    def _release(self, run: FakeRun) -> None:
        if run.start.HasField("ticket"):
            self.fleet.caches[run.start.ticket.id].released.set()

    def _say(self, message: wire.WorkerMessage, run: FakeRun | None = None) -> None:
        """To the session whose run it is of, as long as that is open; else to the one that spoke last."""
        out = self._out if run is None or run.out not in self._outs else run.out
        if out is not None:
            out.put_nowait(message)

    async def _decode(self, run: FakeRun) -> None:
        script = self.script
        base = run.base
        if script.no_room:
            await self.go.wait()
        if run.start.HasField("ticket"):
            sealed = await self._fetch(run)
            if sealed is None:
                return
        else:
            run.phase = wire.RunStatus.PHASE_RUNNING
            self._say(wire.WorkerMessage(scheduled=wire.Scheduled(run=run.run, cached_tokens=5)), run)
            decode_started = wire.DecodeStarted(
                run=run.run, from_tokens=wire.DecodeStarted.FromTokens(prefill_us=3_000_000)
            )
            self._join(run, decode_started)
            for parts in _explained(run.run, run.engine_request):
                for part in parts:
                    self._say(wire.WorkerMessage(prompt_logprobs=part), run)
        while run.end is None:
            k = len(run.tokens)
            if script.pause_at == k:
                await self.go.wait()
            if k in script.fails_at:
                script.fails_at.remove(k)
                del self.runs[key(run.run)]
                self._say(wire.WorkerMessage(failed=_failed(run.run, wire.CAUSE_ENGINE)), run)
                return
            token, end = self._next(run.engine_request, k, base)
            run.tokens.append(token)
            self._frame(run, base + k, [token])
            if script.wrong_token_at == k:
                script.wrong_token_at = None
                self._frame(run, base + k, [token + 1])
            if end is not None and script.fails_at_end:
                script.fails_at_end -= 1
                del self.runs[key(run.run)]
                self._say(wire.WorkerMessage(failed=_failed(run.run, wire.CAUSE_ENGINE)))
                return
            if end is not None:
                self._finish(run, end.reason)
            await asyncio.sleep(0)

    async def _fetch(self, run: FakeRun) -> list[int] | None:
        """The sealed tokens; None when it came to nothing, which it has said then."""
        cache = self.fleet.caches[run.start.ticket.id]
        run.phase = wire.RunStatus.PHASE_ARRIVING
        self._say(wire.WorkerMessage(scheduled=wire.Scheduled(run=run.run)), run)
        try:
            sealed = await asyncio.shield(cache.sealed)
        except asyncio.CancelledError:
            if not cache.sealed.cancelled():
                raise
            del self.runs[key(run.run)]
            cause = wire.CAUSE_CANCELLED if cache.nothing_left else wire.CAUSE_PEER_LOST
            self._say(wire.WorkerMessage(failed=_failed(run.run, cause, cache.giver.facts.peer)), run)
            return None
        if self.script.handoff_fails:
            del self.runs[key(run.run)]
            cause = self.script.handoff_fails.pop(0)
            cache.released.set()
            self._say(wire.WorkerMessage(failed=_failed(run.run, cause, cache.giver.facts.peer)), run)
            return None
        cache.released.set()
        run.phase = wire.RunStatus.PHASE_RUNNING
        run.tokens = list(sealed)
        moved = wire.DecodeStarted.Handoff(handoff_us=4_000_000, bytes=1234, decode_wait_us=5_000_000)
        self._join(run, wire.DecodeStarted(run=run.run, handoff=moved))
        self._frame(run, run.base, run.tokens)
        return run.tokens

    def _join(self, run: FakeRun, decode_started: wire.DecodeStarted) -> None:
        decode_started.slots.add(slot=run.slot, output=0, position=run.base)
        self._say(wire.WorkerMessage(decode_started=decode_started), run)

    def _frame(self, run: FakeRun, position: int, tokens: list[int]) -> None:
        if self.script.drop_frames:
            self.script.drop_frames -= 1
            return
        count = len(tokens)
        logprobs = [_logprobs(run.engine_request, entry, token) for entry, token in enumerate(tokens)]
        frame = wire.Frame(
            logprobs=[one for one in logprobs if one is not None],
            slots=pack([run.slot] * count),
            positions=pack(list(range(position, position + count))),
            tokens=pack(tokens),
        )
        self._say(wire.WorkerMessage(frame=frame), run)

    def _resend(self, run: FakeRun, position: int) -> None:
        tokens = run.tokens[max(0, position - run.base) :]
        if tokens:
            self._frame(run, max(position, run.base), tokens)

    def _finish(self, run: FakeRun, reason: wire.OutputEnd.Reason) -> None:
        run.phase = wire.RunStatus.PHASE_ENDED
        run.end = wire.OutputEnd(output=0, reason=reason, end_position=run.base + len(run.tokens))
        self._say(wire.WorkerMessage(ended=wire.Ended(run=run.run, end=run.end)), run)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _failed(run: wire.Run, cause: wire.Cause, peer: wire.Peer | None = None) -> wire.Failed:
    return wire.Failed(run=run, failure=wire.Failure(cause=cause, detail="scripted", peer=peer))


def logprobs_from_wire(token: int, alternatives: int) -> wire.TokenLogprobs:
    """As any worker computes them."""
    top = range(token, token + alternatives)
    return wire.TokenLogprobs(logprob=-token, rank=1, top_ids=top, top_logprobs=[-id for id in top])


def _logprobs(work: wire.EngineRequest, entry: int, token: int) -> wire.TokenLogprobs | None:
    if not work.HasField("logprobs"):
        return None
    found = logprobs_from_wire(token, work.logprobs)
    found.entry = entry
    return found


def _explained(run: wire.Run, work: wire.EngineRequest) -> tuple[list[wire.PromptLogprobs], list[wire.PromptLogprobs]]:
    """The prompt's logprobs in two parts, where they are asked for: that of position n is -n."""
    if not work.HasField("prompt_logprobs"):
        return [], []
    positions = range(1, len(work.prompt) // 4)
    middle = len(positions) // 2

    def message(part: range) -> wire.PromptLogprobs:
        logprobs = [wire.TokenLogprobs(logprob=-position) for position in part]
        return wire.PromptLogprobs(run=run, first_position=part.start, logprobs=logprobs)

    return [message(positions[:middle])], [message(positions[middle:])]


@asynccontextmanager
async def fleet(*workers: tuple[str, wire.Role]) -> AsyncIterator[list[FakeWorker]]:
    """Started workers, which end with the block."""
    together = Fleet()
    async with AsyncExitStack() as stack:
        started = []
        for name, role in workers:
            worker = FakeWorker(together, name, role)
            await worker.start()
            stack.push_async_callback(worker.stop)
            started.append(worker)
        yield started
