"""Routers and workers in one process: fake engines, real connections, each worker behind a proxy.

router r ──┬──> proxy ──> prefill worker p
router s ──┴──> proxy ──> decode worker d ──> p's proxy: fetches, releases
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import Finish
from decant.router.request.valid_request import ValidRequest
from decant.router.timings import RouterTimings
from decant.runtime.packed import pack
from decant.state.owned import StoredRequest
from decant.state.store import Store
from tests.e2e.proxy import FETCH, PREFILL, RELEASE, SESSION, TO_CALLER, TO_WORKER, Cut, Direction, Proxy, serving
from tests.router.harness import Core, core, make_request
from tests.worker.harness import MODEL, WorkerScene, alone, registered, tokens, worker

LEASE_MS = 300
STEP_S = 0.001
PROMPT = 21
WANTED = 7
MOST = 100

SENDER, RECEIVER = "p", "d"


class Line(NamedTuple):
    """One direction of a method's calls at a worker."""

    worker: str
    method: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]} {self.direction} {self.worker}"


LINES = tuple(
    Line(worker, method, direction)
    for worker, method in (
        (RECEIVER, SESSION),
        (SENDER, SESSION),
        (SENDER, PREFILL),
        (SENDER, FETCH),
        (SENDER, RELEASE),
    )
    for direction in (TO_WORKER, TO_CALLER)
)


class Spot(NamedTuple):
    """A message of a line. Of two spots the second is counted from the moment of the first."""

    line: Line
    number: int
    arrives: bool = False
    instead: Callable[[], None] | None = None


@dataclass
class Cutting:
    """`one` and `other` share a store: each can take over the other's requests."""

    one: Core
    other: Core
    places: dict[str, WorkerScene]
    proxies: dict[str, Proxy]
    _numbers: Iterator[int] = field(default_factory=count)

    def request(self) -> tuple[ValidRequest, list[int]]:
        number = next(self._numbers)
        return _request(number), alone(_work(number))

    def arm(self, *spots: Spot) -> list[Cut]:
        """Replaces all earlier spots."""
        cuts: list[Cut] = []
        for proxy in self.proxies.values():
            proxy.cuts = ()
        for spot in spots:
            line, before = spot.line, cuts[-1] if cuts else None
            cut = Cut(line.method, line.direction, spot.number, spot.arrives, before, spot.instead)
            self.proxies[line.worker].cuts += (cut,)
            cuts.append(cut)
        return cuts

    async def answered(self, *spots: Spot) -> list[Cut]:
        """Send a request, cut calls at these spots, and check the output. Returns the cuts after the last message of
        the request except renewals of leases.
        """
        request, expected = self.request()
        cuts = self.arm(*spots)
        stream = await self.one.answer(request)
        assert isinstance(stream.end, Finish), (spots, stream.end)
        assert stream.tokens == expected, spots
        await self.quiet()
        return cuts

    async def quiet(self) -> None:
        """Wait until no request is active: later messages belong to the next."""
        await self.places[RECEIVER].until(
            lambda seen: not (seen.owners or seen.fetches or seen.orphans or seen.unforgotten)
        )
        await self.places[SENDER].until(lambda seen: not seen.fetches)

    async def settle(self) -> None:
        """Wait until both workers hold nothing; check that every block is accounted for."""
        self.arm()
        for place in self.places.values():
            seen = await place.emptied()
            assert seen.free_blocks + seen.cached_blocks == seen.total_blocks
            await place.until(lambda seen: not (seen.orphans or seen.unforgotten))


def _request(number: int) -> ValidRequest:
    return make_request(f"r{number}", tuple(tokens(PROMPT, number)), WANTED, engine_request=_work(number))


def _work(number: int) -> wire.EngineRequest:
    return wire.EngineRequest(
        model=MODEL,
        prompt=pack(tokens(PROMPT, number)),
        outputs=[wire.OutputPrefix(output=0)],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=number),
        stopping=wire.Stopping(max_tokens=WANTED),
        salt=b"tenant",
    )


async def _restore(found: StoredRequest) -> ValidRequest:
    return replace(_request(int(found.key.id[1:])), payload=found.payload)


@asynccontextmanager
async def cutting(store: Store, timings: RouterTimings = RouterTimings()) -> AsyncIterator[Cutting]:
    roles = {SENDER: wire.ROLE_PREFILL, RECEIVER: wire.ROLE_DECODE}
    async with AsyncExitStack() as stack:
        places, proxies = {}, {}
        for name, role in roles.items():
            between = proxies[name] = await stack.enter_async_context(serving())
            limits: dict[str, Any] = {"budget": 8, "lease_ms": LEASE_MS, "step_s": STEP_S}
            places[name] = place = await stack.enter_async_context(
                worker(name, role=role, advertise=between.address, **limits)
            )
            between.target = place.address
        known = [registered(place, equal_bits=False) for place in places.values()]
        one = await stack.enter_async_context(core(store, known, id="r", restore=_restore, timings=timings))
        other = await stack.enter_async_context(core(store, [], id="s", restore=_restore, timings=timings))
        made = Cutting(one, other, places, proxies)
        yield made
        await made.settle()
