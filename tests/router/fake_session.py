from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.error_details import Reason, trailers
from decant.runtime.errors import FailedPrecondition, ServiceError, Unavailable
from decant.runtime.packed import pack
from tests.router.fake_script import MODEL, failed, output_logprobs, prompt_logprobs
from tests.router.fake_state import FakeRun, Queue, WorkerState, key


class FakeSession(WorkerState, services.DecodeServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.WorkerMessage]:  # noqa: N802
        hello = (await anext(aiter(requests))).hello
        if not same_incarnation(hello.worker, self.registration.peer):
            error: ServiceError = FailedPrecondition(Reason.WRONG_PEER, "another incarnation")
            await context.abort(error.code, error.detail.message, trailers(error.detail))
        if self.script.is_starting:
            error = Unavailable(Reason.NO_WORKER, "this worker is starting", retry_after=1)
            await context.abort(error.code, error.detail.message, trailers(error.detail))
        if self.script.refuse_sessions:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.hellos.append(hello)
        if self.script.welcome_pause:
            await self.go.wait()
        out: Queue = asyncio.Queue()
        self._out = out
        self._outs.add(out)
        self._routers[id(out)] = hello.router
        out.put_nowait(wire.WorkerMessage(welcome=self._welcome(hello)))
        for owned in hello.owned:
            if (run := self.runs.get(key(owned.run))) is not None:
                run.out = out
                self._resend(run, owned.resume[0].position)
        self.changed.set()
        listening = self.spawn(self._listen(requests, out))
        heartbeats = self.spawn(self._send_heartbeats(out))
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
            heartbeats.cancel()

    def _welcome(self, hello: wire.Hello) -> wire.Welcome:
        named = {key(owned.run) for owned in hello.owned}
        return wire.Welcome(
            worker=self.registration.peer,
            role=self.registration.role,
            model=MODEL,
            layout_hash=self.registration.layout_hash,
            runs=[self.runs[each].held for each in named if each in self.runs],
            unknown_runs=[owned.run for owned in hello.owned if key(owned.run) not in self.runs],
            orphans=[run.run for each, run in self.runs.items() if each not in named and len(self._outs) == 1],
        )

    async def _send_heartbeats(self, out: Queue) -> None:
        while True:
            heartbeat = wire.Heartbeat(step=1, load=self.load, cache=self.cache, routers=self._routers.values())
            self.cache = wire.PrefixCacheUpdate()
            if self.script.stuck_ms is not None:
                heartbeat.step_age_ms = self.script.stuck_ms
            waiting = [run for run in self.runs.values() if run.phase == wire.RunStatus.PHASE_WAITING]
            heartbeat.renew.extend(run.start.ticket.id for run in waiting if run.start.HasField("ticket"))
            out.put_nowait(wire.WorkerMessage(heartbeat=heartbeat))
            await asyncio.sleep(0.25)

    async def _listen(self, requests: Any, out: Queue) -> None:
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
                        self.forgotten.append(run)
                        self.runs.pop(key(run), None)
                case "resend":
                    self.resends += 1
                    if (run := self.runs.get(key(message.resend.run))) is not None:
                        self._resend(run, message.resend.resume.position)
                case "heartbeat":
                    self.renewed.extend(message.heartbeat.renew)
            self.changed.set()
        if not self.script.stays:
            out.put_nowait(None)

    def _begin(self, start: wire.Start) -> None:
        self.starts.append(start)
        if (held := self.runs.get(key(start.run))) is not None:
            self._send(wire.WorkerMessage(run_status=held.held))
            return
        if self.script.refuse:
            self._send(wire.WorkerMessage(refused=self.refusal(start.run)))
            return
        self._slots += 1
        run = self.runs[key(start.run)] = FakeRun(start, self._slots)
        run.out = self._out
        run.task = self.spawn(self._decode(run))

    def _adopt(self, adopt: wire.Adopt) -> None:
        self.adopts.append(adopt)
        if (run := self._claimed(adopt.run)) is None:
            self._send(wire.WorkerMessage(failed=failed(adopt.run, wire.CAUSE_UNKNOWN_RUN)))
            return
        self._send(wire.WorkerMessage(run_status=run.held))
        self._resend(run, adopt.resume[0].position)

    def _claimed(self, named: wire.Run) -> FakeRun | None:
        """Find a run. A newer epoch moves it to the session that sent it; other sessions get `superseded`."""
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
            self._send(wire.WorkerMessage(ended=wire.Ended(run=run.run, end=run.end)), run)
        elif run is not None:
            if run.task is not None:
                run.task.cancel()
            self._release(run)
            self._finish(run, wire.OutputEnd.REASON_CANCELLED)

    def _release(self, run: FakeRun) -> None:
        if run.start.HasField("ticket"):
            self.fleet.caches[run.start.ticket.id].released.set()

    def _send(self, message: wire.WorkerMessage, run: FakeRun | None = None) -> None:
        out = self._out if run is None or run.out not in self._outs else run.out
        if out is not None:
            out.put_nowait(message)

    async def _decode(self, run: FakeRun) -> None:
        script = self.script
        base = run.base
        if script.has_no_free_blocks:
            await self.go.wait()
        if run.start.HasField("ticket"):
            committed = await self._fetch(run)
            if committed is None:
                return
        else:
            run.phase = wire.RunStatus.PHASE_RUNNING
            self._send(wire.WorkerMessage(scheduled=wire.Scheduled(run=run.run, cached_tokens=5)), run)
            decode_started = wire.DecodeStarted(
                run=run.run, from_tokens=wire.DecodeStarted.FromTokens(prefill_us=3_000_000)
            )
            self._join(run, decode_started)
            for parts in prompt_logprobs(run.run, run.engine_request):
                for part in parts:
                    self._send(wire.WorkerMessage(prompt_logprobs=part), run)
        while run.end is None:
            k = len(run.tokens)
            if script.pause_at == k:
                await self.go.wait()
            if k in script.fails_at:
                script.fails_at.remove(k)
                del self.runs[key(run.run)]
                self._send(wire.WorkerMessage(failed=failed(run.run, wire.CAUSE_ENGINE)), run)
                return
            token, end = self.next_token(run.engine_request, k, base)
            run.tokens.append(token)
            self._frame(run, base + k, [token])
            if script.wrong_token_at == k:
                script.wrong_token_at = None
                self._frame(run, base + k, [token + 1])
            if end is not None and script.fails_at_end:
                script.fails_at_end -= 1
                del self.runs[key(run.run)]
                self._send(wire.WorkerMessage(failed=failed(run.run, wire.CAUSE_ENGINE)))
                return
            if end is not None:
                self._finish(run, end.reason)
            await asyncio.sleep(0)

    async def _fetch(self, run: FakeRun) -> list[int] | None:
        cache = self.fleet.caches[run.start.ticket.id]
        run.phase = wire.RunStatus.PHASE_ARRIVING
        self._send(wire.WorkerMessage(scheduled=wire.Scheduled(run=run.run)), run)
        try:
            committed = await asyncio.shield(cache.committed)
        except asyncio.CancelledError:
            if not cache.committed.cancelled():
                raise
            del self.runs[key(run.run)]
            cause = wire.CAUSE_CANCELLED if cache.nothing_left else wire.CAUSE_PEER_LOST
            self._send(wire.WorkerMessage(failed=failed(run.run, cause, cache.sender.registration.peer)), run)
            return None
        if self.script.handoff_fails:
            del self.runs[key(run.run)]
            cause = self.script.handoff_fails.pop(0)
            cache.released.set()
            self._send(wire.WorkerMessage(failed=failed(run.run, cause, cache.sender.registration.peer)), run)
            return None
        cache.released.set()
        run.phase = wire.RunStatus.PHASE_RUNNING
        run.tokens = list(committed)
        moved = wire.DecodeStarted.Handoff(handoff_us=4_000_000, bytes=1234, decode_wait_us=5_000_000)
        self._join(run, wire.DecodeStarted(run=run.run, handoff=moved))
        self._frame(run, run.base, run.tokens)
        return run.tokens

    def _join(self, run: FakeRun, decode_started: wire.DecodeStarted) -> None:
        decode_started.slots.add(slot=run.slot, output=0, position=run.base)
        self._send(wire.WorkerMessage(decode_started=decode_started), run)

    def _frame(self, run: FakeRun, position: int, tokens: list[int]) -> None:
        if self.script.drop_frames:
            self.script.drop_frames -= 1
            return
        count = len(tokens)
        logprobs = [output_logprobs(run.engine_request, entry, token) for entry, token in enumerate(tokens)]
        frame = wire.Frame(
            logprobs=[one for one in logprobs if one is not None],
            slots=pack([run.slot] * count),
            positions=pack(list(range(position, position + count))),
            tokens=pack(tokens),
        )
        self._send(wire.WorkerMessage(frame=frame), run)

    def _resend(self, run: FakeRun, position: int) -> None:
        tokens = run.tokens[max(0, position - run.base) :]
        if tokens:
            self._frame(run, max(position, run.base), tokens)

    def _finish(self, run: FakeRun, reason: wire.OutputEnd.Reason) -> None:
        run.phase = wire.RunStatus.PHASE_ENDED
        run.end = wire.OutputEnd(output=0, reason=reason, end_position=run.base + len(run.tokens))
        self._send(wire.WorkerMessage(ended=wire.Ended(run=run.run, end=run.end)), run)
