from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.packed import unpack
from tests.router.fake_script import failed, output_logprobs, prompt_logprobs
from tests.router.fake_state import Cache, WorkerState


class FakePrefill(WorkerState, services.PrefillServicer):
    async def Prefill(self, request: wire.PrefillRequest, context: Any) -> AsyncIterator[wire.PrefillEvent]:  # noqa: N802
        self.prefills.append(request)
        self.changed.set()
        script, run = self.script, request.run
        assert same_incarnation(request.worker, self.registration.peer)
        if script.refuse:
            yield wire.PrefillEvent(refused=self.refusal(run))
            return
        self.prefilling += 1
        try:
            if script.prefill_pause:
                await self.go.wait()
            if script.prefill_fails_before_ticket:
                script.prefill_fails_before_ticket -= 1
                yield wire.PrefillEvent(failed=failed(run, wire.CAUSE_ENGINE))
                return
            async for event in self._prefilled(request, context):
                yield event
        finally:
            self.prefilling -= 1
            self.changed.set()

    async def _prefilled(self, request: wire.PrefillRequest, context: Any) -> AsyncIterator[wire.PrefillEvent]:
        script, run, work = self.script, request.run, request.engine_request
        written = list(unpack(work.outputs[0].tokens))
        base = len(work.prompt) // 4
        cache = Cache(self, asyncio.get_running_loop().create_future())
        if request.handoff:
            ticket = wire.Ticket(
                id=f"{self.registration.peer.id}:{run.request}:{run.attempt}".encode(),
                run=run,
                sender=self.registration.peer,
                layout_hash=self.registration.layout_hash,
                lease_ms=10_000,
                tokens=base + len(written),
                outputs=[0],
            )
            self.fleet.caches[ticket.id] = cache
            yield wire.PrefillEvent(ticket=ticket)
        if script.first_pause:
            await self.go.wait()
        token, end = self.next_token(work, len(written), base)
        if script.reports_late:
            cache.committed.set_result([*written, token])
            await self.go.wait()
        before, after = prompt_logprobs(run, work)
        for part in before:
            yield wire.PrefillEvent(prompt_logprobs=part)
        if script.prefill_fails_after_ticket:
            script.prefill_fails_after_ticket -= 1
            cache.committed.cancel()
            yield wire.PrefillEvent(failed=failed(run, wire.CAUSE_ENGINE))
            return
        if script.prefill_breaks_after_ticket:
            script.prefill_breaks_after_ticket -= 1
            cache.committed.cancel()
            await context.abort(grpc.StatusCode.INTERNAL, "broke")
        for part in after:
            yield wire.PrefillEvent(prompt_logprobs=part)
        if work.HasField("embedding") and not script.returns_no_embedding:
            values = struct.pack("<2f", len(work.prompt) // 4, work.embedding.dimensions)
            yield wire.PrefillEvent(embedding=wire.PromptEmbedding(run=run, values=values))
        first = wire.FirstTokens.First(output=0, token=token, finished=end, logprobs=output_logprobs(work, 0, token))
        first_tokens = wire.FirstTokens(tokens=[first], cached_tokens=3, queued_us=1000, prefill_us=2_000_000)
        if request.handoff and end is None:
            yield wire.PrefillEvent(first=first_tokens)
            if not cache.committed.done():
                cache.committed.set_result([*written, token])
            await cache.released.wait()
        else:
            cache.nothing_left = True
            cache.committed.cancel()
            if script.first_is_late:
                await asyncio.sleep(0.1)
            yield wire.PrefillEvent(first=first_tokens)
