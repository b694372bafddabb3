"""Routers and workers between which outputs migrate: real connections, fake engines with real bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.packed import pack
from decant.state.store import Store
from decant.worker.decode.session import SessionLimits
from tests.e2e.proxy import Proxy, serving
from tests.router.harness import Core, core, make_request, until
from tests.worker.answer_kinds import END, PLAIN, AnswerKind, answer_kinds
from tests.worker.harness import MODEL, WorkerHarness, registered, run_alone, tokens, worker
from tests.worker.waiting import expire, expire_orphans

PROMPT = 21
WANTED = 60
STEP_S = 0.003
SLOW_STEP_S = 0.03
"""Of steps during which a drain becomes known, also on a busy machine."""
LEASE_MS = 300_000
"""Longer than a test waits: an unused lease that is not released fails the test."""


@dataclass
class Harness:
    core: Core
    workers: dict[str, WorkerHarness]
    proxies: dict[str, Proxy]
    _servers: dict[str, AsyncExitStack]
    _lost: set[str] = field(default_factory=set)

    async def lose(self, name: str) -> None:
        await self._servers[name].aclose()
        self._lost.add(name)

    async def hurry_away_from(self, stream: TokenStream, *left: str) -> None:
        """Wait until the request runs on a worker not in ``left``, whose steps take no time from then on."""
        await until(lambda: self.at(stream) in self.workers.keys() - {*left})
        self.workers[self.at(stream)].device.step_s = 0.0

    def drain(self, name: str) -> None:
        self.workers[name].host.draining = True

    def runs(self, name: str) -> int:
        return len(list(self.workers[name].decode.runs()))

    def is_decoding(self, name: str) -> bool:
        return any(phase == wire.RunStatus.PHASE_RUNNING for _, _, phase, _ in self.workers[name].decode.runs())

    async def emptied(self, name: str) -> None:
        await until(lambda: not self.runs(name))

    async def begin(self, number: int, **more: Any) -> tuple[TokenStream, list[int]]:
        request = valid_request(number, **more)
        return await self.core.requests.begin(request), run_alone(request.engine_request, eos=END)

    def at(self, stream: TokenStream) -> str:
        return stream.trace.decode_worker

    async def settled(self) -> None:
        for name, worker_harness in self.workers.items():
            if worker_harness.host.loop.is_healthy:
                if self._lost:  # only the end of a lease frees what was reserved for a lost worker
                    expire(worker_harness.host.sender.leases)
                if name in self._lost:  # its router does not come back
                    expire_orphans(worker_harness.decode.run_manager)
                seen = await worker_harness.emptied()
                assert seen.free_blocks + seen.cached_blocks == seen.total_blocks
                await worker_harness.until(lambda seen: not (seen.orphans or seen.ended_runs))


def valid_request(
    number: int, length: int = PROMPT, wanted: int = WANTED, kind: AnswerKind = PLAIN, **more: Any
) -> ValidRequest:
    work = wire.EngineRequest(
        model=MODEL,
        prompt=pack(tokens(length, number)),
        outputs=[wire.OutputPrefix(output=0)],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=number),
        stopping=wire.Stopping(max_tokens=wanted),
        salt=b"tenant",
    )
    more |= {"engine_request": kind.of(work), "eos_token_ids": kind.eos_token_ids}
    return make_request(f"r{number}", tuple(tokens(length, number)), wanted, **more)


KINDS = answer_kinds(WANTED)[1:]
LONG_KINDS = answer_kinds(150)[1:]
"""Each kind but the plain one, of outputs that are written for some time behind a drain."""

TIMINGS = RouterTimings(workers=WorkerTimings(forget_batch=1))


@asynccontextmanager
async def moving(store: Store, decode: str = "de", prefill: str = "", **overrides: Any) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        roles = dict.fromkeys(prefill, wire.ROLE_PREFILL) | dict.fromkeys(decode, wire.ROLE_DECODE)
        limits = SessionLimits(heartbeat_s=0.01)  # a drain becomes known at many instants of a short answer
        given: dict[str, Any] = {
            "blocks": 128,
            "budget": 8,
            "lease_ms": LEASE_MS,
            "step_s": STEP_S,
            "eos": END,
            **overrides,
        }
        workers, proxies, servers = {}, {}, {}
        for name, role in roles.items():
            servers[name] = await stack.enter_async_context(AsyncExitStack())
            between = proxies[name] = await servers[name].enter_async_context(serving())
            there = worker(name, role=role, advertise=between.address, session_limits=limits, **given)
            workers[name] = await stack.enter_async_context(there)
            between.target = workers[name].address
        made = await stack.enter_async_context(
            core(store, [registered(worker_harness) for worker_harness in workers.values()], timings=TIMINGS)
        )
        harness = Harness(made, workers, proxies, servers)
        yield harness
        await harness.settled()
