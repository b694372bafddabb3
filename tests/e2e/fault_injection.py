"""Routers and workers in one process: fake engines, real connections, each worker behind a proxy.

router r ──┬──> proxy ──> prefill worker p
router s ──┴──> proxy ──> decode worker d ──> p's proxy: fetches, releases
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import gcd
from typing import Any, NamedTuple

from decant.protos import worker_pb2 as wire
from decant.router.request.output import Finish
from decant.router.request.valid_request import ValidRequest
from decant.router.timings import RouterTimings
from decant.runtime.packed import pack
from decant.state.owned import StoredRequest
from decant.state.store import Store
from tests.e2e.proxy import FETCH, PREFILL, RELEASE, SESSION, TO_CALLER, TO_WORKER, Cut, Direction, Proxy, serving
from tests.router.harness import Core, core, make_request
from tests.worker.answer_kinds import END, AnswerKind, answer_kinds
from tests.worker.harness import ADAPTERS, MODEL, WorkerHarness, registered, run_alone, tokens, worker
from tests.worker.waiting import expire, expire_orphans

LEASE_MS = 600_000
"""Longer than a test waits: leases end by messages, or between requests by `quiet`."""
ROUTERS = 2
STEP_S = 0.001
PROMPT = 21
WANTED = 7
OUTPUTS = 1, 3
"""Of the requests in turn."""
MOST = 100

KINDS = answer_kinds(WANTED - 1)
"""Of the requests in turn, whose counts of outputs and adapters repeat after 10: each kind meets each of them."""
assert gcd(len(KINDS), 10) == 1

REQUEST_ADAPTERS = "", ADAPTERS[0].digest, "", ADAPTERS[1].digest, ADAPTERS[0].digest
"""Of the requests in turn."""

SENDER, RECEIVER = "p", "d"


class CallDirection(NamedTuple):
    worker: str
    method: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]} {self.direction} {self.worker}"


CALL_DIRECTIONS = tuple(
    CallDirection(worker, method, direction)
    for worker, method in (
        (RECEIVER, SESSION),
        (SENDER, SESSION),
        (SENDER, PREFILL),
        (SENDER, FETCH),
        (SENDER, RELEASE),
    )
    for direction in (TO_WORKER, TO_CALLER)
)


class CutPoint(NamedTuple):
    """Message at which a call is cut. The second of two points is counted from the moment of the first."""

    calls: CallDirection
    number: int
    arrives: bool = False
    instead: Callable[[], None] | None = None


@dataclass
class FaultInjection:
    """Two routers, `one` and `other`, that share a store: each can take over the other's requests."""

    one: Core
    other: Core
    workers: dict[str, WorkerHarness]
    proxies: dict[str, Proxy]
    _numbers: Iterator[int] = field(default_factory=count)

    def request(self) -> tuple[ValidRequest, list[list[int]]]:
        """Make a request for one output, then one for three, and so on; return it with the tokens of each output."""
        number = next(self._numbers)
        return _request(number), _expected(number)

    def leave_out_long_calls(self) -> None:
        """Have no more requests of kinds whose calls have several times the tokens of other outputs.

        For tests of each pair of messages: these kinds have most of the messages. Other tests cut them at each.
        """
        self._numbers = (number for number in self._numbers if not _is_long(number))

    def arm(self, *points: CutPoint) -> list[Cut]:
        cuts: list[Cut] = []
        for proxy in self.proxies.values():
            proxy.cuts = ()
        for point in points:
            calls, before = point.calls, cuts[-1] if cuts else None
            cut = Cut(calls.method, calls.direction, point.number, point.arrives, before, point.instead)
            self.proxies[calls.worker].cuts += (cut,)
            cuts.append(cut)
        return cuts

    async def answered(self, *points: CutPoint) -> list[Cut]:
        """Send a request, cut calls at these points, and check the output.

        Returns the cuts once no message of the request is left to send.
        """
        request, expected = self.request()
        cuts = self.arm(*points)
        stream = await self.one.answer(request)
        assert isinstance(stream.end, Finish), (points, stream.end)
        assert [output.tokens for output in stream.outputs] == expected, points
        await self.quiet()
        return cuts

    async def quiet(self, tasks: Sequence[asyncio.Task[object]] = ()) -> None:
        """Wait until no request is active: later messages belong to the next.

        Once its ``tasks`` are done and all sessions are open, what is left of a request ends with its lease: orphans,
        which no router claims any more, and tickets.
        """
        sender, receiver = self.workers[SENDER], self.workers[RECEIVER]

        def is_quiet(seen: wire.AuditResponse) -> bool:
            if seen.sessions == ROUTERS and all(task.done() for task in tasks):
                expire_orphans(receiver.decode.run_manager)
            return not (seen.owners or seen.fetches or seen.orphans or seen.ended_runs)

        await receiver.until(is_quiet)
        expire(sender.host.sender.leases)
        await sender.until(lambda seen: not seen.fetches)

    async def settle(self) -> None:
        self.arm()
        for worker_harness in self.workers.values():
            seen = await worker_harness.emptied()
            assert seen.free_blocks + seen.cached_blocks == seen.total_blocks
            await worker_harness.until(lambda seen: not (seen.orphans or seen.ended_runs))


def _request(number: int) -> ValidRequest:
    eos = _kind(number).eos_token_ids
    return make_request(
        f"r{number}", tuple(tokens(PROMPT, number)), WANTED, engine_request=_work(number), eos_token_ids=eos
    )


@cache
def _expected(number: int) -> list[list[int]]:
    return [run_alone(_work(number, [index]), eos=END) for index in range(OUTPUTS[number % 2])]


def _is_long(number: int) -> bool:
    return len(_expected(number % len(KINDS))[0]) > 2 * WANTED


def _work(number: int, outputs: Sequence[int] = ()) -> wire.EngineRequest:
    work = wire.EngineRequest(
        model=MODEL,
        prompt=pack(tokens(PROMPT, number)),
        outputs=[wire.OutputPrefix(output=index) for index in outputs or range(OUTPUTS[number % 2])],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=number),
        stopping=wire.Stopping(max_tokens=WANTED),
        salt=b"tenant",
        adapter=REQUEST_ADAPTERS[number % len(REQUEST_ADAPTERS)],
    )
    return _kind(number).of(work)


def _kind(number: int) -> AnswerKind:
    return KINDS[number % len(KINDS)]


async def _restore(found: StoredRequest) -> ValidRequest:
    request = replace(_request(int(found.key.id[1:])), payload=found.payload)
    assert request.engine_request.adapter == found.record.adapter
    return request


@asynccontextmanager
async def fault_injection(store: Store, timings: RouterTimings = RouterTimings()) -> AsyncIterator[FaultInjection]:
    roles = {SENDER: wire.ROLE_PREFILL, RECEIVER: wire.ROLE_DECODE}
    async with AsyncExitStack() as stack:
        workers, proxies = {}, {}
        for name, role in roles.items():
            between = proxies[name] = await stack.enter_async_context(serving())
            limits: dict[str, Any] = {"blocks": 128, "budget": 8, "lease_ms": LEASE_MS, "step_s": STEP_S, "eos": END}
            workers[name] = worker_harness = await stack.enter_async_context(
                worker(name, role=role, advertise=between.address, **limits)
            )
            between.target = worker_harness.address
        known = [registered(worker_harness, equal_bits=False) for worker_harness in workers.values()]
        one = await stack.enter_async_context(core(store, known, id="r", restore=_restore, timings=timings))
        other = await stack.enter_async_context(core(store, [], id="s", restore=_restore, timings=timings))
        made = FaultInjection(one, other, workers, proxies)
        yield made
        await made.settle()
