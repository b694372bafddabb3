"""Workers without network or clock: a schedule chooses each one's next step, and which message is delivered.

    router --write--> inbox --handle--> ScriptedRun --steps--> outbox --deliver--> router

A `ScriptedWorker` follows protos/worker.proto. Nothing happens between steps; time passes only at heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime.connections.peer import new_peer
from tests.router.fake_script import LAYOUT_HASH, MODEL, TOKENIZER
from tests.router.scripted_prefill import ScriptedPrefill
from tests.router.scripted_runs import (
    EOS,
    PROMPT,
    Connection,
    Export,
    RunKey,
    RunStatus,
    ScriptedRun,
    Step,
    failure,
    key_of,
    rpc_error,
    token_at,
)


class Channel:
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    def stream_stream(self, *_: Any, **__: Any) -> Callable[[], Connection]:
        return self._worker.open_session

    def unary_stream(self, *_: Any, **__: Any) -> Callable[[wire.PrefillRequest], Connection]:
        return self._worker.open_prefill

    async def close(self) -> None:
        pass


class ScriptedWorker:
    def __init__(self, world: World, name: str, role: wire.Role) -> None:
        self.world = world
        self.is_alive = True
        self.is_reachable = True
        self.is_full = False
        self.is_draining = False
        self.registration = WorkerRegistration(
            peer=new_peer(name),
            address=name,
            role=role,
            model=MODEL,
            layout_hash=LAYOUT_HASH,
            tokenizer=TOKENIZER,
            capacity=Capacity(total_blocks=1000, block_size=16, max_context_length=2048, max_running=64),
            equal_bits=True,
        )
        self.runs: dict[RunKey, ScriptedRun] = {}
        self.prefills: list[ScriptedPrefill] = []
        self.marks: set[RunKey] = set()
        self.session: Connection | None = None
        self.renewed: set[bytes] = set()  # by the router's last heartbeat
        self._inbox = deque[wire.RouterMessage]()
        self._outbox = deque[wire.WorkerMessage]()
        self._slots = 0
        self.is_greeted = False  # the session's hello was handled: before that nothing is sent

    def open_session(self) -> Connection:
        connection = Connection(self._inbox.append, self.drop_messages)
        if not (self.is_alive and self.is_reachable):
            why = "not now" if self.is_alive else "Connection refused"
            connection.break_off(rpc_error(grpc.StatusCode.UNAVAILABLE, why))
            return connection
        self.drop_messages()
        self.session = connection
        return connection

    def open_prefill(self, request: wire.PrefillRequest) -> Connection:
        prefill = ScriptedPrefill(self, wire.PrefillRequest.FromString(request.SerializeToString()))
        if self.is_alive and self.is_reachable:
            self.prefills.append(prefill)
        else:
            prefill.break_off(grpc.StatusCode.UNAVAILABLE)
        return prefill.connection

    def drop_messages(self) -> None:
        self.is_greeted = False
        self._inbox.clear()
        self._outbox.clear()

    def steps(self) -> Iterator[Step]:
        if self._inbox:
            yield self.handle
        if self._outbox and self.session is not None:
            yield self.deliver
        for prefill in self.prefills:
            yield from prefill.steps()
        for run in self.runs.values():
            yield from run.steps()

    def faults(self) -> Iterator[Step]:
        if self.session is not None:
            yield self.break_session
        if self.is_reachable:
            yield self.disconnect
        for prefill in self.prefills:
            yield from prefill.faults()
        for run in self.runs.values():
            yield from run.faults()

    @property
    def attached(self) -> list[ScriptedRun]:
        return [run for run in self.runs.values() if run.is_attached]

    def send_heartbeat(self) -> None:
        waiting = [run for run in self.runs.values() if run.phase == RunStatus.PHASE_WAITING]
        renew = [run.start.ticket.id for run in waiting if run.start.HasField("ticket")]
        load = wire.Load(total_blocks=1000, free_blocks=1000, takes_prompts=True, role=self.registration.role)
        load.draining = self.is_draining
        self.send(heartbeat=wire.Heartbeat(step=1, load=load, renew=renew))

    def send(self, **message: Any) -> None:
        if self.session is not None and self.is_greeted:
            self._outbox.append(wire.WorkerMessage(**message))

    def handle(self) -> None:
        _Handler(self).handle(self._inbox.popleft())

    def deliver(self) -> None:
        assert self.session is not None
        message = self._outbox.popleft()
        self.session.deliver(message)
        self.world.delivered.append((self, message))

    def break_session(self) -> None:
        assert self.session is not None
        self.drop_messages()
        self.session.break_off(rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
        self.session = None

    def disconnect(self) -> None:
        self.is_reachable = False
        if self.session is not None:
            self.break_session()

    def die(self) -> None:
        self.disconnect()
        self.is_alive = False
        for prefill in self.prefills:
            if prefill.connection.is_open:
                prefill.break_off(grpc.StatusCode.UNAVAILABLE)
            prefill.lose()
        for run in self.runs.values():
            run.release(wire.CAUSE_PEER_LOST)
            if run.export is not None:
                run.export.fail(wire.CAUSE_PEER_LOST)
        self.runs.clear()

    def begin(self, start: wire.Start) -> ScriptedRun:
        run = self.runs[key_of(start.run)] = ScriptedRun(self, start, self._slots)
        self._slots += len(run.slots)
        return run

    def forget(self, run: ScriptedRun) -> None:
        del self.runs[key_of(run.run)]

    def offer(self, run: wire.Run, tokens: dict[int, list[int]]) -> Export:
        """Offer the KV cache of the first of these outputs."""
        length = len(PROMPT) + len(next(iter(tokens.values())))
        id = f"{self.registration.peer.id}-{len(self.world.exports)}".encode()
        ticket = wire.Ticket(
            id=id,
            run=run,
            sender=self.registration.peer,
            layout_hash=LAYOUT_HASH,
            lease_ms=3000,
            tokens=length,
            outputs=list(tokens),
        )
        export = self.world.exports[id] = Export(ticket, renewed_at=self.world.now())
        return export


class _Handler:
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    def handle(self, message: wire.RouterMessage) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        getattr(self, f"_on_{kind}")(getattr(message, kind))

    def _on_hello(self, hello: wire.Hello) -> None:
        self._worker.is_greeted = True
        owned = {key_of(each.run): each for each in hello.owned}
        welcome = wire.Welcome(
            worker=self._worker.registration.peer,
            role=self._worker.registration.role,
            model=MODEL,
            layout_hash=LAYOUT_HASH,
            runs=[self._worker.runs[key].held for key in owned if key in self._worker.runs],
            unknown_runs=[each.run for key, each in owned.items() if key not in self._worker.runs],
            orphans=[run.run for key, run in self._worker.runs.items() if run.is_attached and key not in owned],
        )
        self._worker.send(welcome=welcome)
        for key, each in owned.items():
            if key in self._worker.runs:
                self._worker.runs[key].catch_up(each.resume)

    def _on_start(self, start: wire.Start) -> None:
        key = key_of(start.run)
        if key in self._worker.runs:
            self._worker.send(run_status=self._worker.runs[key].held)
        elif key in self._worker.marks or self._worker.is_draining:
            cause = wire.CAUSE_CANCELLED if key in self._worker.marks else wire.CAUSE_DRAINING
            self._worker.send(refused=wire.Refused(run=start.run, failure=failure(cause)))
        else:
            self._worker.begin(start)

    def _on_cancel(self, cancel: wire.Cancel) -> None:
        run = self._claimed(cancel.run)
        if run is None:
            if not cancel.HasField("output"):
                self._worker.marks.add(key_of(cancel.run))
        elif cancel.HasField("output") and run.live != [cancel.output]:
            if run.is_decoding:
                run.finish_output(cancel.output, wire.OutputEnd.REASON_CANCELLED, cancel.end_position)
            else:
                run.stopped_early.add(cancel.output)
            run.send_ends()
        elif not run.has_ended:
            if run.export is not None:
                run.export.fail(wire.CAUSE_PEER_LOST)
            run.finish(wire.OutputEnd.REASON_CANCELLED)
        else:
            run.send_ends()

    def _on_adopt(self, adopt: wire.Adopt) -> None:
        run = self._claimed(adopt.run)
        if run is None:
            self._worker.send(failed=wire.Failed(run=adopt.run, failure=failure(wire.CAUSE_UNKNOWN_RUN)))
        else:
            self._worker.send(run_status=run.held)
            run.catch_up(adopt.resume)

    def _claimed(self, named: wire.Run) -> ScriptedRun | None:
        for epoch in range(1, named.epoch):
            if (run := self._worker.runs.pop((named.request, epoch, named.attempt), None)) is not None:
                run.run.epoch, run.is_attached = named.epoch, True
                self._worker.runs[key_of(named)] = run
        return self._worker.runs.get(key_of(named))

    def _on_migrate(self, migrate: wire.Migrate) -> None:
        run = self._worker.runs.get(key_of(migrate.run))
        if run is None or run.has_ended:
            return
        if migrate.withdrawn:
            run.is_to_migrate = False
            if run.is_committed:
                run.fail(wire.CAUSE_RECLAIMED)
            elif run.export is not None:
                run.export.fail(wire.CAUSE_PEER_LOST)
        elif run.phase == RunStatus.PHASE_WAITING:
            run.refuse(wire.CAUSE_DRAINING)
        elif run.is_decoding and not run.is_committed:
            run.offer()
        else:
            run.is_to_migrate = True

    def _on_forget(self, forget: wire.ForgetRuns) -> None:
        for named in forget.runs:
            run = self._worker.runs.get(key_of(named))
            if run is not None and (run.has_ended or run.is_committed):
                self._worker.forget(run)
            elif run is not None:
                run.finish(wire.OutputEnd.REASON_CANCELLED)

    def _on_resend(self, resend: wire.Resend) -> None:
        if (run := self._worker.runs.get(key_of(resend.run))) is not None:
            run.send_tokens(resend.resume.output, resend.resume.position - len(PROMPT))

    def _on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        self._worker.renewed = set(heartbeat.renew)
        for ticket in heartbeat.renew:
            self._worker.world.exports[ticket].renewed_at = self._worker.world.now()


class World:
    def __init__(self, roles: dict[str, wire.Role], max_tokens: int, stops_at: int | None) -> None:
        self.now = asyncio.get_running_loop().time
        self.max_tokens = max_tokens
        self.stops_at = stops_at
        self.exports: dict[bytes, Export] = {}
        self.delivered: list[tuple[ScriptedWorker, wire.WorkerMessage]] = []
        """Session messages given to the router, which it may not have handled yet."""
        self.workers = {name: ScriptedWorker(self, name, role) for name, role in roles.items()}

    def stop_of(self, index: int) -> int | None:
        """Number of the token with which an output ends; those of several outputs differ."""
        return None if self.stops_at is None else self.stops_at + index

    def answer(self, index: int = 0) -> list[int]:
        stop = self.stop_of(index)
        count = self.max_tokens if stop is None else min(self.max_tokens, stop + 1)
        return [token_at(k, stop) for k in range(count)]

    def next_token(self, index: int, k: int) -> tuple[int, wire.OutputEnd | None]:
        token, position = token_at(k, self.stop_of(index)), len(PROMPT) + k + 1
        if token == EOS:
            return token, wire.OutputEnd(output=index, reason=wire.OutputEnd.REASON_STOP, end_position=position)
        if k + 1 >= self.max_tokens:
            return token, wire.OutputEnd(output=index, reason=wire.OutputEnd.REASON_LENGTH, end_position=position)
        return token, None

    def prompt_logprobs(self, run: wire.Run) -> wire.PromptLogprobs:
        logprobs = [wire.TokenLogprobs(logprob=-position) for position in range(1, len(PROMPT))]
        return wire.PromptLogprobs(run=run, first_position=1, logprobs=logprobs)

    def steps(self) -> list[Step]:
        return [step for worker in self.workers.values() for step in worker.steps()]

    def faults(self) -> list[Step]:
        return [fault for worker in self.workers.values() for fault in worker.faults()]

    def send_heartbeat(self) -> None:
        for worker in self.workers.values():
            worker.send_heartbeat()
