"""Each operation of the store once, as coroutines whose repetition has no further effect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from decant.protos.inference_pb2 import ResponseOptions
from decant.protos.worker_pb2 import Load
from decant.state.ids import Incarnation, RequestKey
from decant.state.quota import TenantLimits
from decant.state.store import Store
from tests.state.factories import (
    DECODING,
    FAILED,
    KEY,
    NOW,
    SUCCEEDED,
    continued,
    logprobs,
    make_request,
    packed,
    router,
    router_registration,
    worker_registration,
    write_request,
    written,
)


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[], Awaitable[object]]
    scripts: int  # number of script calls
    trips: int = 1  # round trips to Redis


class Writes:
    """Writes of requests whose repetition has no further effect."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.request = make_request()
        self.request.append(written(1, 2))
        self.shown = make_request(RequestKey("tenant", "shown"), shown=ResponseOptions(logprobs=1, prompt_logprobs=0))
        self.failing = make_request(RequestKey("tenant", "failing"))
        self.later = make_request(RequestKey("t}{", "later"))

    async def write(self) -> None:
        # as if the answer to the last write was lost
        self.request.synced_entries, self.request.synced_state = 0, (1, self.request.state)
        await write_request(self._store, self.request)

    async def go_on(self) -> None:
        if self.request.length == 2:
            self.request.transition(DECODING, NOW)
            self.request.append(written(3, 4))
        await self.write()

    async def write_logprobs(self) -> None:
        shown = self.shown
        if not shown.length:
            shown.record.prompt_tokens = 3
            shown.add_prompt_logprobs(packed([logprobs(1, 0), logprobs(2, 0)], 0))
            continued(shown, 1, 2)
        shown.synced_entries, shown.synced_state = 0, (1, shown.state)
        await write_request(self._store, shown)

    async def fail(self) -> None:
        if not self.failing.ended:
            self.failing.transition(FAILED, NOW)
        self.failing.synced_state = None
        await write_request(self._store, self.failing)

    async def end(self) -> None:
        if not self.request.ended:
            self.request.transition(SUCCEEDED, NOW)
        await self.write()

    async def write_whole(self) -> None:
        self.later.synced_state = None
        await write_request(self._store, self.later)


async def walk(store: Store) -> list[Step]:
    writes, adopted, other = Writes(store), make_request(RequestKey("tenant", "adopted")), RequestKey("t2", "other")
    failing, shown = writes.failing.key, writes.shown
    limits = TenantLimits(in_flight=10, tokens_per_minute=20)
    worker = await store.workers.register(worker_registration(Incarnation("w", 3)))
    me = await store.routers.register(router_registration(router(1)))
    return [
        Step("store instance", store.instance.current, 1),
        Step("register", lambda: store.workers.register(worker_registration(Incarnation("w", 3))), 1),
        Step("renew", lambda: worker.renew(Load(running=1)), 1),
        Step("renew router", me.renew, 1),
        Step("listing", store.workers.listing, 1),
        Step("is registered", lambda: store.routers.is_registered(router(1)), 1),
        Step("quota", lambda: store.quotas.acquire(KEY, 10, limits), 1),
        Step("quotas", lambda: store.quotas.renew([KEY, other]), 2),
        Step("accept", lambda: store.requests.accept(writes.request), 2),
        Step("accept another", lambda: store.requests.accept(adopted), 2),
        Step("write", writes.write, 1),
        Step("write on", writes.go_on, 1),
        Step("accept with logprobs", lambda: store.requests.accept(shown), 2),
        Step("write logprobs", writes.write_logprobs, 1),
        Step("read logprobs", lambda: store.requests.read(shown.key), 1),
        Step("fail", writes.fail, 3, trips=2),
        Step("accept anew", lambda: store.requests.accept(make_request(failing)), 2),
        Step("cancel", lambda: store.requests.cancel(failing, router(2)), 1, trips=2),
        Step("write whole", writes.write_whole, 2),
        Step("read", lambda: store.requests.read(KEY), 1),
        Step("adopt", lambda: store.requests.adopt(adopted.key, router(2), epoch=1), 2, trips=2),
        Step("adopt orphan", lambda: store.requests.adopt_orphan(adopted.key, router(2)), 2, trips=2),
        Step("orphaned", store.open.orphaned, 1),
        Step("take", lambda: store.open.take(router(2), router(3)), 1),
        Step("open", lambda: store.open.of(router(3)), 0),
        Step("remove", lambda: store.open.remove(router(3), [KEY]), 0),
        Step("end", writes.end, 2, trips=2),
        Step("trim", lambda: store.results.trim(1 << 40), 1),
        Step("memory", store.results.memory, 0),
        Step("discard", lambda: store.results.trim(0), 5, trips=3),
        Step("release", lambda: store.quotas.release(KEY, 5, limits), 1),
        Step("claim a move", lambda: store.pool_moves.claim("m", "workers", router(1), 30.0), 0),
        Step("leave", worker.remove, 1),
    ]
